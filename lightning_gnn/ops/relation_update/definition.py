"""A layer of a graph with types in one operator: all relations of all types, without the way through memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_gnn.ops.aggregate_update.reference import ReluDropout, activated
from lightning_gnn.ops.dropout import mixed_key
from lightning_gnn.ops.relation_update import (
    edge_order,  # noqa: F401  defines the operator
    reference,
)
from lightning_gnn.ops.relation_update import numba as relation_update_numba  # noqa: F401  registers the backends
from lightning_gnn.ops.relation_update import triton as relation_update_triton  # noqa: F401  registers the backends


class Relation(NamedTuple):
    """The edges of one type in a mini-batch.

    Args:
        source: The number of the type that they come from.
        target: The number of the type that they reach.
        edge_index: int64 ``[2, E]``, counted within the types.
    """

    source: int
    target: int
    edge_index: Tensor


def relation_update(
    x: Tensor,
    num_sources: Sequence[int],
    num_targets: Sequence[int],
    relations: Sequence[Relation],
    weight: Tensor,
    self_weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: bool = True,
    then: ReluDropout | None = None,
) -> Tensor:
    """Return ``sum_r (A_r x) W_r + x_t S_t + b_t`` for the targets of all types, as in R-GCN (arXiv:1703.06103, eq. 2).

    A tile of targets is aggregated by relation while it is in the cache, and what its relations bring is multiplied in
    one product. Differentiable with respect to x, weights and bias, any number of times; a second derivative is
    computed by torch's own operators.

    Args:
        x: Features of the nodes of all types, one type after the other, floating ``[sum(num_sources), in]``.
        num_targets: How many of them, the first ones, are targets; of a type without sources any number, which then
            have no term of their own.
        relations: The edges, sorted by type of target.
        weight: W, of each relation, of the dtype of ``x``, ``[R, in, out]``.
        self_weight: S, of each type, ``[types, in, out]``, or None.
        bias: b, of each type, ``[types, out]``, or None.

    Returns:
        ``[sum(num_targets), out]``, one type after the other, of the dtype of ``x`` (under autocast, of that dtype).
    """
    _check(x, num_sources, num_targets, relations, weight, self_weight, bias)
    edges, count = sort_relations(num_sources, num_targets, relations)
    first_source = _starts(num_sources)
    own = [first if sources else -1 for first, sources in zip(first_source, num_sources, strict=True)]
    return _update(x, edges, weight, self_weight, bias, _Layout(list(num_targets), count, own), mean, then)


def sort_relations(
    num_sources: Sequence[int], num_targets: Sequence[int], relations: Sequence[Relation]
) -> tuple[list[Tensor], list[int]]:
    """Sort the edges of all relations by target and relation: a row of edges is a target and a relation.

    Args:
        relations: The edges, sorted by type of target.

    Returns:
        ``indptr`` int64 ``[num_rows + 1]`` and ``indices`` int32 ``[E]``, rows of the table of all types' nodes; and
        how many relations reach each type, which is how many rows its targets have.
    """
    count = [0] * len(num_targets)
    for relation in relations:
        count[relation.target] += 1
    first_row, row = [], 0
    for targets, rows in zip(num_targets, count, strict=True):
        first_row.append(row)
        row += targets * rows
    slots, rows_of = [0] * len(count), []
    for relation in relations:
        rows_of.append(first_row[relation.target] + slots[relation.target])
        slots[relation.target] += 1
    first_source = _starts(num_sources)
    edges = torch.ops.lightning_gnn.relation_edges(
        [relation.edge_index for relation in relations],
        [num_sources[relation.source] for relation in relations],
        [num_targets[relation.target] for relation in relations],
        [first_source[relation.source] for relation in relations],
        rows_of,
        [count[relation.target] for relation in relations],
        row,
    )
    return edges, count


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:kind]) for kind in range(len(sizes))]


class _Layout(NamedTuple):
    """The last arguments of the operator: targets, relations and first own row by type."""

    targets: list[int]
    relations: list[int]
    own: list[int]


def _update(
    x: Tensor,
    edges: list[Tensor],
    weight: Tensor,
    self_weight: Tensor | None,
    bias: Tensor | None,
    layout: _Layout,
    mean: bool,
    then: ReluDropout | None,
) -> Tensor:
    device = x.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        self_weight = None if self_weight is None else self_weight.to(low)
        bias = None if bias is None else bias.to(low)
        with torch.autocast(device, enabled=False):
            return _update(x.to(low), edges, weight.to(low), self_weight, bias, layout, mean, then)
    # Forward mode and torch.func go through torch's own operators.
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if transformed or x.numel() == 0 or sum(layout.targets) * weight.size(2) == 0:
        out, _ = reference.relation_update(edges, x, weight, self_weight, bias, *layout, mean)
        return activated(out, then)
    return _with_autograd(x, weight, self_weight, bias, edges, layout, mean, then)


class _RelationUpdate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        self_weight: Tensor | None,
        bias: Tensor | None,
        edges: list[Tensor],
        layout: _Layout,
        mean: bool,
        then: ReluDropout | None,
    ) -> Tensor:
        keep = ctx.needs_input_grad[1]
        p, key = (None, 0) if then is None else (then.p, mixed_key(then.key))
        out, aggregated = torch.ops.lightning_gnn.relation_update(
            edges, x, weight, self_weight, bias, *layout, mean, keep, p, key
        )
        ctx.layout, ctx.mean, ctx.then = layout, mean, then
        kept = (aggregated if keep else None, out if then is not None else None)
        ctx.save_for_backward(x, weight, self_weight, bias, *kept, *edges)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, self_weight, bias, aggregated, result, *edges = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:4])
        if torch.is_grad_enabled():  # create_graph=True
            # Views, so that a tensor that is two of the inputs gets the gradient of each of them apart.
            given: list[Any] = [None if t is None else t.view_as(t) for t in (x, weight, self_weight, bias)]
            targets, relations, own = ctx.layout
            out, _ = reference.relation_update(
                edges, given[0], given[1], given[2], given[3], targets, relations, own, ctx.mean
            )
            some = [tensor for tensor, want in zip(given, wanted, strict=True) if want]
            grads = iter(torch.autograd.grad(activated(out, ctx.then), some, grad, create_graph=True))
            return *(next(grads) if want else None for want in wanted), None, None, None, None
        p = 0.0 if ctx.then is None else ctx.then.p
        found = torch.ops.lightning_gnn.relation_update_backward(
            edges, grad.contiguous(), x, weight, self_weight, aggregated, *ctx.layout, ctx.mean, wanted, result, p
        )
        return *(g if want else None for g, want in zip(found, wanted, strict=True)), None, None, None, None


_with_autograd: Callable[..., Tensor] = _RelationUpdate.apply


def _check(
    x: Tensor,
    num_sources: Sequence[int],
    num_targets: Sequence[int],
    relations: Sequence[Relation],
    weight: Tensor,
    self_weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    if x.dim() != 2 or x.size(0) != sum(num_sources):
        raise ValueError(f"x must be [{sum(num_sources)}, in], a row per node, but is {list(x.shape)}")
    if weight.dim() != 3 or list(weight.shape[:2]) != [len(relations), x.size(1)]:
        raise ValueError(f"weight must be [{len(relations)}, {x.size(1)}, out], but is {list(weight.shape)}")
    width, kinds = weight.size(2), len(num_targets)
    if self_weight is not None and list(self_weight.shape) != [kinds, x.size(1), width]:
        raise ValueError(f"self_weight must be [{kinds}, {x.size(1)}, {width}], but is {list(self_weight.shape)}")
    if bias is not None and list(bias.shape) != [kinds, width]:
        raise ValueError(f"bias must be [{kinds}, {width}], but is {list(bias.shape)}")
    if any(one.target > other.target for one, other in pairwise(relations)):
        raise ValueError("relations must be sorted by the type of their targets")
    if self_weight is not None:
        for sources, targets in zip(num_sources, num_targets, strict=True):
            if 0 < sources < targets:
                raise ValueError(f"self_weight reads the rows of {targets} targets, but there are {sources}")
