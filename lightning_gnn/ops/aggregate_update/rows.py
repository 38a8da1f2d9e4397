"""Aggregation of a mini-batch without update, for layers with a user-defined update network, and for maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.backends import backend_name, chip_executor
from lightning_gnn.ops.aggregate.numba_rows import to_loadable, use_huge_pages
from lightning_gnn.ops.aggregate_update import reference
from lightning_gnn.ops.aggregate_update.numba import _run_ranges, _SortedEdges, _tiles
from lightning_gnn.ops.library import Context, define, differentiable_gradients, library, runs_triton

if TYPE_CHECKING:
    from lightning_gnn.ops.aggregate_update.ascend import Chip


def aggregate_rows(x: Tensor, edges: list[Tensor], reduce: Literal["sum", "mean", "max"]) -> Tensor:
    """Aggregate the in-neighbors of each target, 0 without any; tied maxima share the gradient."""
    # The CPU's loops read and write bfloat16, but not maxima; they accumulate in float32.
    if x.is_cpu and x.dtype.itemsize < 4 and (x.dtype == torch.float16 or reduce == "max"):
        return aggregate_rows(x.float(), edges, reduce).to(x.dtype)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):  # half the bytes to read
        x = x.to(torch.get_autocast_dtype("cuda"))
    no_kernel = not x.is_cpu and not runs_triton(x.device) and _get_reduce_chip(x, reduce) is None
    if no_kernel or edges[1].numel() == 0 or x.numel() == 0:
        return _aggregate_torch(edges, x, reduce)
    return _with_autograd(x, edges, reduce)


class _AggregateRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, edges: list[Tensor], reduce: str) -> Tensor:
        ctx.reduce, ctx.chip, ties = reduce, _get_reduce_chip(x, reduce), None
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
            grads = differentiable_gradients(lambda x: (_aggregate_torch(edges, x, ctx.reduce),), [x], [True], [grad])
            return grads[0], None, None
        if ctx.chip is None:
            return torch.ops.lightning_gnn.aggregate_rows_backward(edges, grad, x, out, ties, ctx.reduce), None, None
        if ctx.reduce == "max":
            grad_x = ctx.chip.maxima_backward(edges, grad / ties.clamp(min=1), out, x)
        else:
            grad_x = ctx.chip.sums_backward(edges, grad, x.size(0), ctx.reduce == "mean")
        return grad_x.to(x.dtype), None, None


_with_autograd: Callable[..., Tensor] = _AggregateRows.apply


def get_chip(device: torch.device) -> Chip | None:
    """Return the executor on an NPU or its simulation, or None if torch's dispatcher selects the kernel."""
    executor = chip_executor(device, backend_name(None))
    if executor is None:
        return None
    from lightning_gnn.ops.aggregate_update.ascend import Chip

    return Chip(executor[0].launch, executor[1])


def _get_reduce_chip(x: Tensor, reduce: str) -> Chip | None:
    """Return the executor of a reduction, or None for the dispatcher's operator; chips lack float64 maxima."""
    return None if reduce == "max" and x.dtype == torch.float64 else get_chip(x.device)


def _aggregate_torch(edges: list[Tensor], x: Tensor, reduce: str) -> Tensor:
    if reduce != "max":
        return reference.sums(edges, x, reduce == "mean")
    indptr, indices = edges
    rows = torch.repeat_interleave(indptr.diff(), output_size=indices.numel())
    # Initial values are excluded, but would share the gradient of maxima equal to them; NaN never compares equal.
    out = x.new_full((indptr.numel() - 1, x.size(1)), torch.nan)
    index = rows.unsqueeze(1).expand(-1, x.size(1))
    out = out.scatter_reduce(0, index, x.index_select(0, indices), "amax", include_self=False)
    return out.masked_fill((indptr.diff() == 0).unsqueeze(1), 0)


def _shapes(edges: list[Tensor], x: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    out = x.new_empty(edges[0].numel() - 1, x.size(1))
    dtype = x.dtype if x.is_cpu else torch.int32
    return out, torch.empty_like(out, dtype=dtype) if reduce == "max" else out.new_empty(0)


define("aggregate_rows(Tensor[] edges, Tensor x, str reduce) -> (Tensor, Tensor)", None, _shapes)
define(
    "aggregate_rows_backward(Tensor[] edges, Tensor grad, Tensor x, Tensor? out, Tensor? ties, str reduce) -> Tensor",
    None,
    lambda edges, grad, x, *_: x.new_empty(x.shape),
)


@torch.library.impl(library, "aggregate_rows", "CPU")
def _aggregate_rows_cpu(edges: list[Tensor], x: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    x = to_loadable(x)
    rows = _SortedEdges(edges, x.dtype, reduce == "mean")
    out = use_huge_pages(x.new_empty((rows.count, x.size(1))))
    ties = use_huge_pages(torch.empty_like(out)) if reduce == "max" else out.new_empty(0)

    def reduce_rows(first: int, last: int) -> None:
        for start, stop in _tiles(first, last, x):
            if reduce == "max":
                rows.write_maxima(x, start, stop, out[start:stop], ties[start:stop])
            else:
                rows.write_sums(x, start, stop, out[start:stop])

    _run_ranges(reduce_rows, rows.work, x)
    if reduce == "max":
        out[edges[0].diff() == 0] = 0
    return out, ties


@torch.library.impl(library, "aggregate_rows_backward", "CPU")
def _aggregate_rows_backward_cpu(
    edges: list[Tensor], grad: Tensor, x: Tensor, out: Tensor | None, ties: Tensor | None, reduce: str
) -> Tensor:
    x, grad = to_loadable(x), to_loadable(grad)
    if reduce == "mean":
        degrees = edges[0].diff().clamp_(min=1).to(torch.promote_types(grad.dtype, torch.float32))
        grad = (grad / degrees.unsqueeze(1)).to(grad.dtype)
    elif out is not None and ties is not None:
        grad = grad / ties
    by_source = torch.ops.lightning_gnn.edges_by_source(edges, x.size(0))
    rows = _SortedEdges(by_source, x.dtype, False)
    grad_x = use_huge_pages(torch.empty_like(x))

    def backward_rows(first: int, last: int) -> None:
        for start, stop in _tiles(first, last, x):
            if out is not None:
                rows.route_gradients(grad, out, x, start, stop, grad_x[start:stop])
            else:
                rows.write_sums(grad, start, stop, grad_x[start:stop])

    _run_ranges(backward_rows, rows.work, x)
    return grad_x
