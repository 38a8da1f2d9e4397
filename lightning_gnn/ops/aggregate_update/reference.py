"""Aggregate and update with torch's own operators; the aggregation is an argument, which backends replace."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate_update import edge_order  # noqa: F401  defines the operators that sort edges
from lightning_gnn.ops.dropout import row_dropout, row_dropout_torch
from lightning_gnn.ops.library import define, library, runs_triton

Sums = Callable[[list[Tensor], Tensor, bool], Tensor]  # (edges, x, mean) to the aggregated rows of x


class ReluDropout(NamedTuple):
    """ReLU, then dropout by row and column (:func:`lightning_gnn.ops.dropout.row_dropout`)."""

    p: float = 0.0  # probability in [0, 1)
    key: int = 0  # 64-bit integer


def activated(out: Tensor, then: ReluDropout | None) -> Tensor:
    """Apply ``then`` unless it is None; differentiable."""
    if then is None or then.p == 0.0:
        return out if then is None else out.relu()
    return row_dropout(out.relu(), then.p, then.key)


class Group(NamedTuple):
    """The targets of one node type, and the relations that end in it."""

    node_type: int  # index of the node type
    first_target: int  # row of the result for the first target
    num_targets: int
    first_row: int  # row of the sorted edges for the first target and relation
    first_relation: int
    num_relations: int  # also the number of rows per target
    own: int  # row of x with the features of the first target, or -1 for no self term

    @property
    def targets(self) -> slice:
        """The targets' rows of the result."""
        return slice(self.first_target, self.first_target + self.num_targets)

    @property
    def relations(self) -> slice:
        """The relations that end in the node type."""
        return slice(self.first_relation, self.first_relation + self.num_relations)

    def rows(self, targets: slice) -> slice:
        """Return the rows of the sorted edges that belong to ``targets``."""
        first = self.first_row - self.first_target * self.num_relations
        return slice(first + targets.start * self.num_relations, first + targets.stop * self.num_relations)

    def own_rows(self, targets: slice) -> slice:
        """Return the rows of x that hold the features of ``targets``."""
        return slice(self.own + targets.start - self.first_target, self.own + targets.stop - self.first_target)

    def concatenate_weights(self, weight: Tensor) -> Tensor:
        """Concatenate the relations' weights ``[R, out, in]`` to ``[out, relations * in]``."""
        if self.num_relations == 1:
            return weight[self.first_relation]
        return weight[self.relations].transpose(0, 1).reshape(weight.size(1), self.num_relations * weight.size(2))


def split_relations(groups: list[Group], gradients: list[Tensor], weight: Tensor) -> Tensor:
    """Split gradients of :meth:`Group.concatenate_weights` by relation, contiguous ``[R, out, in]`` as ``weight``."""
    by_group = [
        gradient.unsqueeze(0)
        if group.num_relations == 1
        else gradient.view(weight.size(1), group.num_relations, weight.size(2)).transpose(0, 1)
        for group, gradient in zip(groups, gradients, strict=True)
    ]
    return by_group[0].contiguous() if len(by_group) == 1 else torch.cat(by_group)


def iterate_groups(targets: list[int], relations: list[int], own: list[int]) -> Iterator[Group]:
    """Yield one group per node type."""
    target = row = relation = 0
    for node_type, (count, rows, first) in enumerate(zip(targets, relations, own, strict=True)):
        yield Group(node_type, target, count, row, relation, rows, first)
        target, row, relation = target + count, row + count * rows, relation + rows


class Update(NamedTuple):
    """Inputs of the operator, in the order of its schema; a homogeneous layer is one relation of one node type."""

    edges: list[Tensor]  # sorted by target and relation
    x: Tensor  # [N, in]; the other floating tensors have its dtype and device
    weight: Tensor  # [R, out, in]
    self_weight: Tensor | None  # [types, out, in], or None
    bias: Tensor | None  # [types, out], or None
    targets: list[int]  # number of targets of each node type
    relations: list[int]  # number of relations that end in each node type
    own: list[int]  # row of x with the first target of each node type, or -1
    mean: bool  # divide sums by the number of edges
    aggregate_first: bool  # aggregate x instead of products; False requires a single relation
    p: float | None = None  # probability of dropout, which follows a ReLU, or None for neither
    key: int = 0  # mixed key of the dropout

    @property
    def groups(self) -> list[Group]:
        """The targets of each node type."""
        return list(iterate_groups(self.targets, self.relations, self.own))

    @property
    def has_own(self) -> bool:
        """Whether own rows may be copied beside the aggregated ones, so that one product takes both."""
        return self.relations == [1] and self.self_weight is not None and self.own[0] >= 0


def sums(edges: list[Tensor], x: Tensor, mean: bool) -> Tensor:
    """Sum ``weight[e] * x[indices[e]]`` over the edges of each row, in float32 or wider; differentiable."""
    indptr, indices, *weight = edges
    wide = torch.promote_types(x.dtype, torch.float32)
    degrees = indptr.diff()
    rows = torch.repeat_interleave(degrees, output_size=indices.numel())
    messages = x.to(wide).index_select(0, indices)
    if weight:
        messages = messages * weight[0].to(wide).unsqueeze(1)
    out = messages.new_zeros(degrees.numel(), x.size(1)).index_add(0, rows, messages)
    return divide_by_degree(edges, out, mean).to(x.dtype)


def update(sums: Sums, call: Update, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the result and, if ``keep``, the aggregated rows of x; as differentiable as ``sums`` is."""
    x = call.x
    rows = sums(call.edges, x if call.aggregate_first else x @ call.weight[0].t(), call.mean)
    results = []
    for group in call.groups:
        result = rows[group.rows(group.targets)]
        if call.aggregate_first:
            result = result.reshape(group.num_targets, group.num_relations * x.size(1))
            result = result @ group.concatenate_weights(call.weight).t()
        if call.self_weight is not None and group.own >= 0:
            result = result + x[group.own_rows(group.targets)] @ call.self_weight[group.node_type].t()
        results.append(result if call.bias is None else result + call.bias[group.node_type])
    out = torch.cat(results)
    if call.p is not None:
        out = out.relu()
    if call.p:
        out = row_dropout_torch(out, call.p, call.key, None)
    return out, rows if keep else x.new_empty(0)


def update_backward(
    sums: Sums, call: Update, grad: Tensor, aggregated: Tensor | None, result: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    """Return the gradients of x, weight, self_weight and bias, empty if not wanted; ``result`` is None without ReLU."""
    x, weight, self_weight = call.x, call.weight, call.self_weight
    # Differentiate the activation.
    if result is not None:
        grad = relu_dropout_backward(grad, result, call.p or 0.0)
    # Allocate the requested gradients.
    wants_x, wants_weight, wants_self, wants_bias = wanted
    empty = x.new_empty(0)
    grad_x, group_grads = empty, []
    grad_self = torch.zeros_like(self_weight) if wants_self and self_weight is not None else empty
    grad_bias = weight.new_zeros(len(call.targets), weight.size(1)) if wants_bias else empty
    # The backward sums read `table`: gradients multiplied by the weight, or the gradients if the product came first.
    table = x.new_empty(call.edges[0].numel() - 1, x.size(1)) if call.aggregate_first and wants_x else grad
    # The gradients of the parameters are one product per group, with concatenated relations.
    for group in call.groups:
        group_grad, rows = grad[group.targets], group.rows(group.targets)
        if call.aggregate_first and wants_x:
            table[rows] = (group_grad @ group.concatenate_weights(weight)).view(-1, x.size(1))
        if call.aggregate_first and wants_weight:
            assert aggregated is not None
            sides = aggregated[rows].reshape(group.num_targets, group.num_relations * x.size(1))
            group_grads.append(group_grad.t() @ sides)
        if grad_self.numel() and group.own >= 0:
            grad_self[group.node_type] = group_grad.t() @ x[group.own_rows(group.targets)]
        if wants_bias:
            grad_bias[group.node_type] = group_grad.sum(0)
    grad_weight = split_relations(call.groups, group_grads, weight) if group_grads else empty
    # Sum over the out-edges of each source; if the product came first, its gradients follow from these sums.
    if wants_x or (wants_weight and not call.aggregate_first):
        by_source = torch.ops.lightning_gnn.edges_by_source(call.edges, x.size(0))
        grad_x = sums(by_source, divide_by_degree(call.edges, table, call.mean), False)
        if not call.aggregate_first:
            grad_weight = (grad_x.t() @ x).unsqueeze(0) if wants_weight else empty
            grad_x = grad_x @ weight[0] if wants_x else empty
    # Add the gradient of the targets' own rows of x.
    if wants_x and self_weight is not None:
        for group in call.groups:
            if group.own >= 0:
                grad_x[group.own_rows(group.targets)] += grad[group.targets] @ self_weight[group.node_type]
    return [grad_x, grad_weight, grad_self, grad_bias]


def relu_dropout_backward(grad: Tensor, result: Tensor, p: float) -> Tensor:
    """Return the gradient of the input of ReLU and dropout."""
    before: Tensor = torch.ops.aten.threshold_backward(grad, result, 0)
    return before.mul_(1.0 / (1.0 - p)) if p else before


def divide_by_degree(edges: list[Tensor], rows: Tensor, mean: bool) -> Tensor:
    """Divide rows by their number of edges, if ``mean``."""
    return rows / edges[0].diff().clamp(min=1).to(rows.dtype).unsqueeze(1) if mean else rows


def register(device: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Register a device's functions, which take an :class:`Update` and each operator's remaining arguments."""
    for name, function in (("aggregate_update", forward), ("aggregate_update_backward", backward)):
        library.impl(name, _from_arguments(function), device)  # type: ignore[no-untyped-call]


def _from_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    size = len(Update._fields)
    return lambda *given: function(Update(*given[:size]), *given[size:])


def _shapes(call: Update, keep: bool) -> tuple[Tensor, Tensor]:
    x, out = call.x, call.x.new_empty(sum(call.targets), call.weight.size(1))
    beside = call.has_own and (x.dtype == torch.bfloat16 if x.is_cpu else runs_triton(x.device))
    return out, x.new_empty((call.edges[0].numel() - 1, x.size(1) * (1 + beside)) if keep else 0)


def _backward_shapes(call: Update, *others: Any) -> list[Tensor]:
    # A CPU sums the gradients of bfloat16 parameters in float32.
    narrow = call.x.is_cpu and call.x.dtype == torch.bfloat16
    wanted = zip(call[1:5], others[-1], strict=True)
    grads = [call.x.new_empty(0 if one is None or not want else one.shape) for one, want in wanted]
    return [grads[0], *(grad.float() if narrow and grad.numel() else grad for grad in grads[1:])]


aggregate_update = partial(update, sums)
aggregate_update_backward = partial(update_backward, sums)
_UPDATE = (
    "Tensor[] edges, Tensor x, Tensor weight, Tensor? self_weight, Tensor? bias, SymInt[] targets, int[] relations,"
    " SymInt[] own, bool mean, bool aggregate_first, float? p, int key"
)
define(f"aggregate_update({_UPDATE}, bool keep) -> (Tensor, Tensor)", None, _from_arguments(_shapes))
define(
    f"aggregate_update_backward({_UPDATE}, Tensor grad, Tensor? aggregated, Tensor? result, bool[] wanted) -> Tensor[]",
    None,
    _from_arguments(_backward_shapes),
)
register("CompositeExplicitAutograd", aggregate_update, aggregate_update_backward)
