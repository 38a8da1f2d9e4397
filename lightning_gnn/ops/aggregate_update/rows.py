"""The aggregation of a mini-batch alone, for layers whose update is a network of the user's, and for maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.backends import backend_name, chip_executor, runs_on_chip
from lightning_gnn.ops.aggregate.numba_rows import huge_pages, wide
from lightning_gnn.ops.aggregate_update import reference
from lightning_gnn.ops.aggregate_update.numba import _share_out, _SortedEdges, _tiles
from lightning_gnn.ops.library import Context, define, differentiable_gradients, library

if TYPE_CHECKING:
    from lightning_gnn.ops.aggregate_update.ascend import Chip


def aggregate_rows(x: Tensor, edges: list[Tensor], reduce: Literal["sum", "mean", "max"]) -> Tensor:
    """Aggregate the in-neighbors of each target, 0 of none; those that attain a maximum share its gradient."""
    if x.is_cpu and x.dtype.itemsize < 4:  # as CPUs add up
        return aggregate_rows(x.float(), edges, reduce).to(x.dtype)
    no_kernel = not x.is_cpu and _chip(x, reduce) is None
    if no_kernel or edges[1].numel() == 0 or x.numel() == 0:
        return _by_torch(edges, x, reduce)
    return _with_autograd(x, edges, reduce)


class _AggregateRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, edges: list[Tensor], reduce: str) -> Tensor:
        ctx.reduce, ctx.chip, ties = reduce, _chip(x, reduce), None
        if ctx.chip is None:
            out, ties = torch.ops.lightning_gnn.aggregate_rows(edges, x, reduce)
        elif reduce == "max":
            out, ties = ctx.chip.maxima(edges, x)
        else:
            out = ctx.chip.sums(edges, x, reduce == "mean")
        out = out.to(x.dtype)
        ctx.save_for_backward(x, *((out, ties) if reduce == "max" else (None, None)), *edges)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, out, ties, *edges = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            again = differentiable_gradients(lambda x: (_by_torch(edges, x, ctx.reduce),), [x], [True], [grad])
            return again[0], None, None
        if ctx.chip is None:
            return torch.ops.lightning_gnn.aggregate_rows_backward(edges, grad, x, out, ties, ctx.reduce), None, None
        if ctx.reduce == "max":
            grad_x = ctx.chip.maxima_backward(edges, grad / ties.clamp(min=1), out, x)
        else:
            grad_x = ctx.chip.sums_backward(edges, grad, x.size(0), ctx.reduce == "mean")
        return grad_x.to(x.dtype), None, None


_with_autograd: Callable[..., Tensor] = _AggregateRows.apply


def chip_of(device: torch.device) -> Chip | None:
    """Return what executes the operators on an NPU or in its simulation, or None: then torch's dispatcher finds it."""
    backend = backend_name(None)
    if not runs_on_chip(device, backend):
        return None
    from lightning_gnn.ops.aggregate_update.ascend import Chip

    executor, cores = chip_executor(device, backend)
    return Chip(executor.launch, cores)


def _chip(x: Tensor, reduce: str) -> Chip | None:
    """Return what reduces rows in place of the dispatcher's operator, or None; no chip compares float64."""
    return None if reduce == "max" and x.dtype == torch.float64 else chip_of(x.device)


def _by_torch(edges: list[Tensor], x: Tensor, reduce: str) -> Tensor:
    if reduce != "max":
        return reference.sums(edges, x, reduce == "mean")
    indptr, indices = edges
    rows = torch.repeat_interleave(indptr.diff(), output_size=indices.numel())
    # The values that it begins with are left out, but share the gradient of maxima that equal them: NaN equals none.
    out = x.new_full((indptr.numel() - 1, x.size(1)), torch.nan)
    index = rows.unsqueeze(1).expand(-1, x.size(1))
    out = out.scatter_reduce(0, index, x.index_select(0, indices), "amax", include_self=False)
    return out.masked_fill((indptr.diff() == 0).unsqueeze(1), 0)


define("aggregate_rows(Tensor[] edges, Tensor x, str reduce) -> (Tensor, Tensor)", None)
define(
    "aggregate_rows_backward(Tensor[] edges, Tensor grad, Tensor x, Tensor? out, Tensor? ties, str reduce) -> Tensor",
    None,
)


@torch.library.impl(library, "aggregate_rows", "CPU")
def _aggregate_rows_cpu(edges: list[Tensor], x: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    x = wide(x)
    rows = _SortedEdges(edges, x.dtype, reduce == "mean")
    out = huge_pages(x.new_empty((rows.count, x.size(1))))
    ties = huge_pages(torch.empty_like(out)) if reduce == "max" else out.new_empty(0)

    def share(first: int, last: int) -> None:
        for start, stop in _tiles(first, last, x):
            if reduce == "max":
                rows.maxima(x, start, stop, out[start:stop], ties[start:stop])
            else:
                rows.sums(x, start, stop, out[start:stop])

    _share_out(share, rows.work, x)
    if reduce == "max":
        out[edges[0].diff() == 0] = 0
    return out, ties


@torch.library.impl(library, "aggregate_rows_backward", "CPU")
def _aggregate_rows_backward_cpu(
    edges: list[Tensor], grad: Tensor, x: Tensor, out: Tensor | None, ties: Tensor | None, reduce: str
) -> Tensor:
    x, grad = wide(x), wide(grad)
    if reduce == "mean":
        grad = grad / edges[0].diff().clamp_(min=1).to(grad.dtype).unsqueeze(1)
    elif out is not None and ties is not None:
        grad = grad / ties
    by_source = torch.ops.lightning_gnn.edges_by_source(edges, x.size(0))
    rows = _SortedEdges(by_source, x.dtype, False)
    grad_x = huge_pages(torch.empty_like(x))

    def share(first: int, last: int) -> None:
        for start, stop in _tiles(first, last, x):
            if out is not None:
                rows.routed(grad, out, x, start, stop, grad_x[start:stop])
            else:
                rows.sums(grad, start, stop, grad_x[start:stop])

    _share_out(share, rows.work, x)
    return grad_x
