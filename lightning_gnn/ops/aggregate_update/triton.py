"""Aggregate and update on a GPU: kernels for the sums and maxima, torch's BLAS for the products."""

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate_update import (
    reference,
    rows,  # noqa: F401  defines the operators of layers without update
)
from lightning_gnn.ops.aggregate_update.reference import Group, Update, relu_dropout_backward, split_relations
from lightning_gnn.ops.dropout import relu_dropout_cuda
from lightning_gnn.ops.library import library, runs_triton


def aggregate_update(call: Update, keep: bool) -> tuple[Tensor, Tensor]:
    """Run :func:`reference.update` on a GPU; a layer with own rows keeps them beside the aggregated ones."""
    x, weight = _pack(call.x), call.weight
    if not runs_triton(x.device):
        return reference.aggregate_update(call, keep)
    out = x.new_empty(sum(call.targets), weight.size(1))
    if not call.aggregate_first:
        # The sums start from the targets' own products, or from the bias.
        [group], own = call.groups, None if call.bias is None else call.bias[0]
        if call.self_weight is not None and group.own >= 0:
            own = _multiply(call.bias, x[group.own_rows(group.targets)], call.self_weight[0])
        _sum(call.edges, x @ weight[0].t(), out, call.mean, own)
        return _activate(call, out), x.new_empty(0)
    # One launch sums the edges of all relations.
    beside = call.has_own
    aggregated = x.new_empty(call.edges[0].numel() - 1, x.size(1) * (1 + beside))
    _sum(call.edges, x, aggregated, call.mean, x[call.own[0] :] if beside else None, beside)
    for group in call.groups:
        bias = None if call.bias is None else call.bias[group.node_type]
        is_last = beside or call.self_weight is None or group.own < 0
        relu = call.p == 0.0 and is_last and len(call.targets) == 1
        result = _multiply(bias, _sides(group, aggregated), _weights(call, group), out[group.targets], relu)
        if not is_last and call.self_weight is not None:
            result.addmm_(x[group.own_rows(group.targets)], call.self_weight[group.node_type].t())
        if relu:
            return out, aggregated if keep else x.new_empty(0)
    return _activate(call, out), aggregated if keep else x.new_empty(0)


def aggregate_update_backward(
    call: Update, grad: Tensor, aggregated: Tensor | None, result: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    """Run :func:`reference.update_backward` on a GPU."""
    x, weight, self_weight = _pack(call.x), call.weight, call.self_weight
    if not runs_triton(x.device):
        return reference.aggregate_update_backward(call, grad, aggregated, result, wanted)
    wants_x, wants_weight, wants_self, wants_bias = wanted
    if result is not None:
        grad = relu_dropout_backward(grad, result, call.p or 0.0)
    empty, columns, beside = x.new_empty(0), x.size(1), call.aggregate_first and call.has_own
    grad_x, grad_weight = empty, empty
    grad_self = torch.zeros_like(self_weight) if wants_self and self_weight is not None else empty
    grad_bias = weight.new_empty(len(call.targets), weight.size(1)) if wants_bias else empty
    # Products with the gradients of each node type: one for the weights of all relations and the own one.
    table, by_group = grad, []
    if call.aggregate_first and wants_x:
        table = x.new_empty(call.edges[0].numel() - 1, columns * (1 + beside))
    for group in call.groups:
        group_grad = grad[group.targets]
        if call.aggregate_first and wants_x:
            torch.mm(group_grad, _weights(call, group), out=_sides(group, table))
        if call.aggregate_first and wants_weight and aggregated is not None:
            by_group.append(group_grad.t() @ _sides(group, aggregated))
        if wants_self and group.own >= 0 and not (beside and by_group):
            torch.mm(group_grad.t(), x[group.own_rows(group.targets)], out=grad_self[group.node_type])
        if wants_bias:
            torch.sum(group_grad, 0, out=grad_bias[group.node_type])
    if beside and by_group:
        both = by_group.pop()
        by_group.append(both[:, :columns])
        grad_self = both[:, columns:].contiguous().unsqueeze(0) if wants_self else grad_self
    if by_group:
        grad_weight = split_relations(call.groups, by_group, weight)
    # Sum over the out-edges of each source.
    if wants_x or (wants_weight and not call.aggregate_first):
        by_source = torch.ops.lightning_gnn.edges_by_source(call.edges, x.size(0))
        own, table = (table[:, columns:], table[:, :columns]) if beside else (None, table)
        grad_x = x.new_empty(x.size(0), table.size(1))
        _sum(by_source, table, grad_x, False, own, over=call.edges[0] if call.mean else None)
        if not call.aggregate_first:
            grad_weight = (grad_x.t() @ x).unsqueeze(0) if wants_weight else empty
            grad_x = grad_x @ weight[0] if wants_x else empty
    if wants_x and self_weight is not None and not beside:
        for group in call.groups:
            if group.own >= 0:
                grad_x[group.own_rows(group.targets)].addmm_(grad[group.targets], self_weight[group.node_type])
    return [grad_x, grad_weight, grad_self, grad_bias]


reference.register("CUDA", aggregate_update, aggregate_update_backward)


@torch.library.impl(library, "aggregate_rows", "CUDA")
def aggregate_rows(edges: list[Tensor], x: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """Aggregate the rows of ``x`` ``[N, C]`` on a GPU; ties are int32."""
    x = x.contiguous()
    out = x.new_empty(edges[0].numel() - 1, x.size(1))
    if reduce != "max":
        _sum(edges, x, out, reduce == "mean")
        return out, x.new_empty(0)
    from lightning_gnn.triton_kernels import edge_sums as kernels

    ties = torch.empty_like(out, dtype=torch.int32)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.max_rows(edges, x, out, ties)
    return out, ties


@torch.library.impl(library, "aggregate_rows_backward", "CUDA")
def aggregate_rows_backward(
    edges: list[Tensor], grad: Tensor, x: Tensor, out: Tensor | None, ties: Tensor | None, reduce: str
) -> Tensor:
    """Return the gradient of ``x``."""
    grad, by_source = grad.contiguous(), torch.ops.lightning_gnn.edges_by_source(edges, x.size(0))
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out is None or ties is None:
        _sum(by_source, grad, grad_x, False, over=edges[0] if reduce == "mean" else None)
        return grad_x
    from lightning_gnn.triton_kernels import edge_sums as kernels

    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.route_rows(by_source, grad, x.contiguous(), out, ties, grad_x)
    return grad_x


def _sum(
    edges: list[Tensor],
    x: Tensor,
    out: Tensor,
    mean: bool,
    own: Tensor | None = None,
    beside: bool = False,
    over: Tensor | None = None,
) -> None:
    from lightning_gnn.triton_kernels import edge_sums as kernels

    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.sum_rows(edges, x, out, mean=mean, over=over, own=own, beside=beside)


def _pack(x: Tensor) -> Tensor:
    """Return rows whose columns are adjacent."""
    return x if x.stride(1) == 1 else x.contiguous()


def _sides(group: Group, aggregated: Tensor) -> Tensor:
    """View the aggregated rows of a node type as the left side of its product, ``[targets, relations * columns]``."""
    return aggregated[group.rows(group.targets)].view(group.num_targets, group.num_relations * aggregated.size(1))


def _weights(call: Update, group: Group) -> Tensor:
    """Concatenate a node type's weights, ``[out, relations * in]``, and its own ones if own rows are beside sums."""
    weights = group.concatenate_weights(call.weight)
    if call.self_weight is None or not call.has_own:
        return weights
    return torch.cat([weights, call.self_weight[0]], 1)


def _multiply(bias: Tensor | None, x: Tensor, weight: Tensor, out: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return ``x W^T + b``, perhaps with a ReLU; cuBLASLt adds and activates in the product's epilogue."""
    if bias is None:
        product = torch.mm(x, weight.t(), out=out)
        return product.relu_() if relu else product
    bias = bias.view(-1)
    if relu:
        return torch.ops.aten._addmm_activation.out(bias, x, weight.t(), out=out)  # type: ignore[no-any-return]
    return torch.addmm(bias, x, weight.t(), out=out)


def _activate(call: Update, out: Tensor) -> Tensor:
    return out if call.p is None else relu_dropout_cuda(out, call.p, call.key)
