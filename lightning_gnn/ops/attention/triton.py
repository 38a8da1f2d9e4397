"""Attention over the edges of a mini-batch on a GPU: kernels for scores, softmax and sums, torch's BLAS for products.

Nothing waits for the device. Edges that end with unused entries, as those with self-loops do, are supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.triton import _current_device
from lightning_gnn.ops.aggregate_update.edge_order import kept
from lightning_gnn.ops.aggregate_update.reference import Group
from lightning_gnn.ops.attention.reference import Attend, Layout

if TYPE_CHECKING:
    from lightning_gnn.triton_kernels.attention import Inputs

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def with_self_loops(edges: list[Tensor], num_loops: int) -> list[Tensor]:
    """Replace all self-loops by one, the last edge, for each of the first ``num_loops`` targets.

    The number of edges stays on the device: ``indices`` has an unused entry, -1, for each self-loop that was there.
    Layers on the same tensors share the result.
    """
    return kept(edges[1], ("loops", num_loops), lambda: _with_self_loops(edges, num_loops), edges[0])


def _with_self_loops(edges: list[Tensor], num_loops: int) -> list[Tensor]:
    indptr, indices = edges
    num_edges, num_rows = indices.numel(), indptr.numel() - 1
    rows = _row_of(indptr, torch.arange(num_edges, device=indptr.device))
    kept = indices != rows
    before = torch.cat([indptr.new_zeros(1), kept.cumsum(0)])  # number of edges that stay before each edge
    pointers = before[indptr] + torch.arange(num_rows + 1, device=indptr.device).clamp(max=num_loops)
    # Self-loops that were there go to an entry behind all others, which is cut off.
    size = num_edges + num_loops
    at = torch.where(kept, before[:-1] + rows.clamp(max=num_loops), size)
    looped = indices.new_full((size + 1,), -1).scatter_(0, at, indices)
    loops = torch.arange(num_loops, device=indptr.device)
    return [pointers, looped.scatter_(0, pointers[1 : num_loops + 1] - 1, loops.to(indices.dtype))[:size]]


def attend(call: Attend, keep: bool, with_mass: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of ``reference.attend``, the sums, the mass, and the logarithms of the denominators."""
    from lightning_gnn.triton_kernels import attention as kernels

    values, weight, layout = call.values, call.weight, call.layout
    _, heads, channels = call.side.shape
    wide = torch.promote_types(values.dtype, torch.float32)
    sums = values.new_empty((layout.num_rows, heads * channels))
    mass = values.new_empty((layout.num_rows, heads) if with_mass else 0)
    lse = values.new_empty((layout.num_rows, heads), dtype=wide)
    with _current_device(values.device):
        kernels.attend(_inputs(call), call.edges, sums, mass, lse)
    if _spans_rows(layout):
        # The kernel's softmax covers a row: scale its results to the softmax of all rows of a target.
        whole = _over_rows(layout, lse, lambda part: part.logsumexp(1, keepdim=True))
        scale = (lse - whole.clamp(min=torch.finfo(wide).min)).exp()  # without entries 0, not NaN
        sums = (sums.view(-1, heads, channels) * scale.unsqueeze(2)).to(sums.dtype).view_as(sums)
        mass, lse = (mass * scale).to(mass.dtype) if with_mass else mass, whole
    if weight is None:
        return sums, mass, sums, mass, lse
    out = [
        torch.einsum("nrhc,rhoc->nho", _by_relation(sums, group, heads), weight[group.relations]).flatten(1)
        for group in layout.groups
    ]
    return torch.cat(out), mass, sums, mass, lse


def attend_backward(
    call: Attend,
    grad: Tensor,  # gradient of the result, contiguous
    grad_mass: Tensor,  # gradient of the sum of attention of each row, contiguous, or empty
    saved: tuple[Tensor, Tensor, Tensor],  # the last three results of attend
    wanted: list[bool],
) -> list[Tensor | None]:
    """Return the gradients of values, side, shift, weight and keys, or None if not requested."""
    from lightning_gnn.triton_kernels import attention as kernels

    (sums, mass, lse), weight, layout = saved, call.weight, call.layout
    _, heads, channels = call.side.shape
    grad_weight = None
    if weight is not None:
        by_head = grad.view(grad.size(0), heads, weight.size(2))
        if wanted[3]:
            parts = [(by_head[group.targets], _by_relation(sums, group, heads)) for group in layout.groups]
            grad_weight = torch.cat([torch.einsum("nho,nrhc->rhoc", *part) for part in parts])
        products = [
            torch.einsum("nho,rhoc->nrhc", by_head[group.targets], weight[group.relations]).reshape(-1, sums.size(1))
            for group in layout.groups
        ]
        grad = torch.cat(products)
    if not any((*wanted[:3], wanted[4])):
        return [None, None, None, grad_weight, None]
    delta = (grad.to(lse.dtype) * sums.to(lse.dtype)).view(-1, heads, channels).sum(2)
    if grad_mass.numel():
        delta += grad_mass.to(lse.dtype) * mass
    if _spans_rows(layout):
        delta = _over_rows(layout, delta, lambda part: part.sum(1, keepdim=True))
    inputs = _inputs(call)
    grad_scores = lse.new_empty((call.edges[1].numel(), heads))
    with _current_device(grad.device):
        by_source = _by_source(call.edges, call.values.size(0))
        grads = grad, grad_mass, delta, lse
        grad_values, grad_keys, grad_side = kernels.source_gradients(inputs, by_source, grads, grad_scores)
        grad_shift, row_sides = kernels.row_gradients(inputs, call.edges, grad_scores)
    if row_sides is not None and layout.across:
        grad_side = row_sides
    elif row_sides is not None:
        by_group = [_by_relation(row_sides.flatten(1), group, heads).sum(0) for group in layout.groups]
        grad_side = torch.cat(by_group)
    assert grad_side is not None
    found = grad_values, grad_side.to(call.side.dtype), grad_shift, grad_weight, grad_keys
    return [part if want else None for part, want in zip(found, wanted, strict=True)]


def _inputs(call: Attend) -> Inputs:
    from lightning_gnn.triton_kernels.attention import Inputs

    sides, device = None, call.values.device
    if call.layout.across:  # also for a single row, as only several sides may have keys
        sides = torch.arange(call.layout.num_rows, dtype=torch.int32, device=device)
    elif call.side.size(0) > 1:
        numbers = [
            torch.arange(*group.relations.indices(2**31), dtype=torch.int32, device=device).repeat(group.num_targets)
            for group in call.layout.groups
        ]
        sides = torch.cat(numbers)
    values, side, shift = (tensor.detach().contiguous() for tensor in (call.values, call.side, call.shift))
    keys, factor = (None if tensor is None else tensor.detach().contiguous() for tensor in (call.keys, call.factor))
    return Inputs(values, keys, side, sides, shift, factor, call.weight is not None, call.slope, call.dynamic)


def _spans_rows(layout: Layout) -> bool:
    """Return whether a softmax covers several rows."""
    return layout.across and max(layout.relations, default=0) > 1


def _over_rows(layout: Layout, rows: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce ``[num_rows, heads]`` over the rows of each target, and return each row's result."""
    parts = [rows[group.rows(group.targets)].view(group.num_targets, group.num_relations, rows.size(1))
             for group in layout.groups]  # fmt: skip
    return torch.cat([reduce(part).expand_as(part).flatten(0, 1) for part in parts])


def _by_relation(rows: Tensor, group: Group, heads: int) -> Tensor:
    """View a group's rows as ``[num_targets, num_relations, heads, channels]``."""
    return rows[group.rows(group.targets)].view(group.num_targets, group.num_relations, heads, rows.size(1) // heads)


def _row_of(indptr: Tensor, entries: Tensor) -> Tensor:
    """Return the row that each entry belongs to; unused ones are in none."""
    return torch.searchsorted(indptr, entries, right=True) - 1


def _by_source(edges: list[Tensor], num_sources: int) -> list[Tensor]:
    """Return ``indptr`` of the edges sorted by source, and each entry's row and edge; unused entries come first."""

    def compute() -> list[Tensor]:
        keys, order = torch.sort(edges[1], stable=True)
        sources = torch.arange(num_sources + 1, dtype=keys.dtype, device=keys.device)
        return [torch.searchsorted(keys, sources), _row_of(edges[0], order), order]

    return kept(edges[1], ("entries by source", num_sources), compute, edges[0])
