"""Aggregate and update with torch's own operators; how rows are added up is an argument, which a backend replaces."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate_update import edge_order  # noqa: F401  defines the operators that sort edges
from lightning_gnn.ops.dropout import row_dropout, row_dropout_torch
from lightning_gnn.ops.library import define, library

Sums = Callable[[list[Tensor], Tensor, bool], Tensor]
"""Edges, x and whether to divide by the number of edges, to the aggregated rows of x."""


class ReluDropout(NamedTuple):
    """ReLU, then dropout by row and column (:func:`lightning_gnn.ops.dropout.row_dropout`)."""

    p: float = 0.0  # probability in [0, 1)
    key: int = 0  # 64-bit integer


def activated(out: Tensor, then: ReluDropout | None) -> Tensor:
    """Apply what comes then, if anything; differentiable."""
    return out if then is None else row_dropout(out.relu(), then.p, then.key)


class Group(NamedTuple):
    """The targets of one node type."""

    kind: int  # which type that is
    first_target: int  # row of the result that holds the first
    num_targets: int  # how many there are
    first_row: int  # row of the edges that holds the first relation of the first
    first_relation: int  # the first of the relations that reach them
    num_relations: int  # how many relations reach them: rows per target
    own: int  # row of x that holds the features of the first, or -1: they have no term of their own

    @property
    def targets(self) -> slice:
        """The rows of the result."""
        return slice(self.first_target, self.first_target + self.num_targets)

    @property
    def relations(self) -> slice:
        """The relations that reach them."""
        return slice(self.first_relation, self.first_relation + self.num_relations)

    def rows(self, targets: slice) -> slice:
        """Return the rows of the edges that belong to some of the targets."""
        first = self.first_row - self.first_target * self.num_relations
        return slice(first + targets.start * self.num_relations, first + targets.stop * self.num_relations)

    def own_rows(self, targets: slice) -> slice:
        """Return the rows of x that are some of the targets themselves."""
        return slice(self.own + targets.start - self.first_target, self.own + targets.stop - self.first_target)

    def side_by_side(self, weight: Tensor) -> Tensor:
        """Return the weights ``[R, out, in]`` of the relations that reach them as one, ``[out, relations * in]``."""
        if self.num_relations == 1:
            return weight[self.first_relation]
        return weight[self.relations].transpose(0, 1).reshape(weight.size(1), self.num_relations * weight.size(2))


def apart(groups: list[Group], gradients: list[Tensor], weight: Tensor) -> Tensor:
    """Return gradients of what :meth:`Group.side_by_side` gave, by relation: as ``weight``, ``[R, out, in]``."""
    parts = [
        gradient.unsqueeze(0)
        if group.num_relations == 1
        else gradient.view(weight.size(1), group.num_relations, weight.size(2)).transpose(0, 1)
        for group, gradient in zip(groups, gradients, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def groups(targets: list[int], relations: list[int], own: list[int]) -> Iterator[Group]:
    """Yield a group per type."""
    target = row = relation = 0
    for kind, (count, rows, first) in enumerate(zip(targets, relations, own, strict=True)):
        yield Group(kind, target, count, row, relation, rows, first)
        target, row, relation = target + count, row + count * rows, relation + rows


class Update(NamedTuple):
    """What the operator is given, in the order of its schema; a layer without types is one relation of one type."""

    edges: list[Tensor]  # sorted by target and relation
    x: Tensor  # [N, in]; the other floating tensors are of its dtype and device
    weight: Tensor  # [R, out, in], of each relation
    self_weight: Tensor | None  # [types, out, in], or None
    bias: Tensor | None  # [types, out], or None
    targets: list[int]  # how many of each type
    relations: list[int]  # how many reach each type
    own: list[int]  # the row of x with the first target of each type, or -1
    mean: bool  # divide sums by the number of edges
    aggregate_first: bool  # aggregate x, and not the products; else there is one relation
    p: float | None = None  # probability of dropping a number of the result after a ReLU, or None: neither
    key: int = 0  # of the dropout, mixed

    @property
    def groups(self) -> list[Group]:
        """The targets of each type."""
        return list(groups(self.targets, self.relations, self.own))


def sums(edges: list[Tensor], x: Tensor, mean: bool) -> Tensor:
    """Add up ``weight[e] * x[indices[e]]`` over the edges of each row, in float32 at least; differentiable."""
    indptr, indices, *weight = edges
    wide = torch.promote_types(x.dtype, torch.float32)
    degrees = indptr.diff()
    rows = torch.repeat_interleave(degrees, output_size=indices.numel())
    messages = x.to(wide).index_select(0, indices)
    if weight:
        messages = messages * weight[0].to(wide).unsqueeze(1)
    out = messages.new_zeros(degrees.numel(), x.size(1)).index_add(0, rows, messages)
    return divided(edges, out, mean).to(x.dtype)


def update(sums: Sums, call: Update, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the result and, if ``keep``, the aggregated rows of x; differentiable as far as ``sums`` is."""
    x = call.x
    rows = sums(call.edges, x if call.aggregate_first else x @ call.weight[0].t(), call.mean)
    parts = []
    for group in call.groups:
        part = rows[group.rows(group.targets)]
        if call.aggregate_first:
            part = (
                part.reshape(group.num_targets, group.num_relations * x.size(1)) @ group.side_by_side(call.weight).t()
            )
        if call.self_weight is not None and group.own >= 0:
            part = part + x[group.own_rows(group.targets)] @ call.self_weight[group.kind].t()
        parts.append(part if call.bias is None else part + call.bias[group.kind])
    out = torch.cat(parts)
    if call.p is not None:
        out = row_dropout_torch(out.relu(), call.p, call.key, None)
    return out, rows if keep else x.new_empty(0)


def update_backward(
    sums: Sums, call: Update, grad: Tensor, aggregated: Tensor | None, result: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    """Return the gradients of x, weight, self_weight and bias, empty where not wanted; ``result``: after a ReLU."""
    x, weight, self_weight = call.x, call.weight, call.self_weight
    # Go back through the activation.
    if result is not None:
        grad = through_relu_dropout(grad, result, call.p or 0.0)
    # Allocate the gradients that are wanted.
    wants_x, wants_weight, wants_self, wants_bias = wanted
    none = x.new_empty(0)
    grad_x, of_groups = none, []
    grad_self = torch.zeros_like(self_weight) if wants_self and self_weight is not None else none
    grad_bias = weight.new_zeros(len(call.targets), weight.size(1)) if wants_bias else none
    # The backward sums read `table`: gradients multiplied by the weight, or the plain ones if the product came first.
    table = x.new_empty(call.edges[0].numel() - 1, x.size(1)) if call.aggregate_first and wants_x else grad
    # Gradients of the parameters are products by group, whose relations lie side by side.
    for group in call.groups:
        part, rows = grad[group.targets], group.rows(group.targets)
        if call.aggregate_first and wants_x:
            table[rows] = (part @ group.side_by_side(weight)).view(-1, x.size(1))
        if call.aggregate_first and wants_weight:
            assert aggregated is not None
            sides = aggregated[rows].reshape(group.num_targets, group.num_relations * x.size(1))
            of_groups.append(part.t() @ sides)
        if grad_self.numel() and group.own >= 0:
            grad_self[group.kind] = part.t() @ x[group.own_rows(group.targets)]
        if wants_bias:
            grad_bias[group.kind] = part.sum(0)
    grad_weight = apart(call.groups, of_groups, weight) if of_groups else none
    # Sum over the out-edges of each source; with the product first, its gradients follow from these sums.
    if wants_x or (wants_weight and not call.aggregate_first):
        by_source = torch.ops.lightning_gnn.edges_by_source(call.edges, x.size(0))
        grad_x = sums(by_source, divided(call.edges, table, call.mean), False)
        if not call.aggregate_first:
            grad_weight = (grad_x.t() @ x).unsqueeze(0) if wants_weight else none
            grad_x = grad_x @ weight[0] if wants_x else none
    # Targets have read their own rows of x as well.
    if wants_x and self_weight is not None:
        for group in call.groups:
            if group.own >= 0:
                grad_x[group.own_rows(group.targets)] += grad[group.targets] @ self_weight[group.kind]
    return [grad_x, grad_weight, grad_self, grad_bias]


def through_relu_dropout(grad: Tensor, result: Tensor, p: float) -> Tensor:
    """Return the gradient before ReLU and dropout."""
    return torch.where(result <= 0, 0, grad * (1.0 / (1.0 - p))).to(grad.dtype)


def divided(edges: list[Tensor], rows: Tensor, mean: bool) -> Tensor:
    """Divide rows by the number of their edges, if ``mean``."""
    return rows / edges[0].diff().clamp(min=1).to(rows.dtype).unsqueeze(1) if mean else rows


def register(device: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Let a device execute the operators by functions of an :class:`Update` and what each takes besides."""
    size = len(Update._fields)
    for name, function in (("aggregate_update", forward), ("aggregate_update_backward", backward)):
        library.impl(name, lambda *given, run=function: run(Update(*given[:size]), *given[size:]), device)  # type: ignore[no-untyped-call]


aggregate_update = partial(update, sums)
aggregate_update_backward = partial(update_backward, sums)
_UPDATE = (
    "Tensor[] edges, Tensor x, Tensor weight, Tensor? self_weight, Tensor? bias, int[] targets, int[] relations,"
    " int[] own, bool mean, bool aggregate_first, float? p, int key"
)
define(f"aggregate_update({_UPDATE}, bool keep) -> (Tensor, Tensor)", None)
define(
    f"aggregate_update_backward({_UPDATE}, Tensor grad, Tensor? aggregated, Tensor? result, bool[] wanted) -> Tensor[]",
    None,
)
register("CompositeExplicitAutograd", aggregate_update, aggregate_update_backward)
