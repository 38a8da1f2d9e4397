"""Aggregation on the CPU, executed by the plan: worker i takes slice i % M of the columns and chunk range i // M.

Feature rows that are read often are first packed into contiguous slices of 64 columns, the most popular rows first, so
that the level-2 cache holds as many of them as it can. One worker then adds up a row of the chunks in the order of its
entries; the pieces of a split row are added up in their order when all workers are done. So the result is the same to
the last bit for any plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate import numba_kernels as kernels
from lightning_gnn.ops.aggregate import reference as aggregate_reference
from lightning_gnn.ops.aggregate.numba_layout import MAX_WIDTHS, WIDTHS, Layout, blocks_of, huge_pages, layout_of
from lightning_gnn.ops.edge_softmax import numba_kernels as attention_kernels
from lightning_gnn.ops.library import library
from lightning_gnn.ops.worker_threads import run_all

SMALL = 1 << 19
"""Edges times columns up to which threads would take longer to wake up than one takes to finish."""
_NO_DEGREES = np.empty(0, np.int64)


@torch.library.impl(library, "aggregate_chunks", "CPU")
def aggregate_chunks(
    chunks: list[Tensor],
    num_rows: int,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    slices: list[int],
    chunk_ranges: list[int],
) -> tuple[Tensor, Tensor]:
    """Do what the function of this name in ``reference.py`` does."""
    dtype, x = x.dtype, _wide(x)
    layout = layout_of(chunks, num_rows, x.size(0))
    heads = 0 if weight is None else weight.size(1)
    num_columns = x.size(1) * x.size(2)
    is_max, is_mean = reduce == "max", reduce == "mean"
    out = huge_pages(torch.empty((num_rows + layout.split.size, x.size(1), x.size(2)), dtype=x.dtype))
    ties = huge_pages(torch.empty_like(out)) if is_max else x.new_empty(0)
    target, counts = _flat(out), _flat(ties)
    weights = None if weight is None else _flat(_wide(weight))
    divisors = layout.degrees if is_mean else _NO_DEGREES
    run = _Run(layout, slices, chunk_ranges, num_columns)

    with run.gathered([x], x.size(2), heads, MAX_WIDTHS if is_max else WIDTHS) as (source,):

        def share(table: np.ndarray, first: int, last: int) -> None:
            if is_max:
                kernels.max_rows(
                    source, table, layout.indptr, layout.indices, source if weights is None else weights, heads,
                    layout.places, first, last, target, counts, num_columns,
                )  # fmt: skip
            elif weights is None:
                kernels.sum_rows(
                    source, table, layout.indptr, layout.indices, layout.places, divisors, first, last, target,
                    num_columns,
                )  # fmt: skip
            else:
                # Blocks of several heads and blocks of one are two compiled loops.
                several = table[:, kernels.HEADS] > 1 if heads > 1 else None
                single = table if several is None else table[~several]
                for blocks, function in (
                    (single, kernels.weighted_sum_rows),
                    (table[:0] if several is None else table[several], kernels.heads_sum_rows),
                ):
                    if blocks.size:
                        function(
                            source, blocks, layout.indptr, layout.indices, weights, heads, layout.places, divisors,
                            first, last, target, num_columns,
                        )  # fmt: skip

        run.shares(share)
    if is_max:
        _join_max(layout, target, counts, num_columns)
        ties.resize_(num_rows, *x.shape[1:])
    else:
        _join(layout, target, num_columns, layout.split_degrees if is_mean else _NO_DEGREES)
    out.resize_(num_rows, *x.shape[1:])
    return out.to(dtype), ties


@torch.library.impl(library, "aggregate_max_backward", "CPU")
def aggregate_max_backward(
    chunks: list[Tensor],
    num_rows: int,
    grad: Tensor,
    best: Tensor,
    x: Tensor,
    weight: Tensor | None,
    slices: list[int],
    chunk_ranges: list[int],
) -> Tensor:
    """Do what the function of this name in ``reference.py`` does."""
    layout = layout_of(chunks, num_rows, grad.size(0))
    heads = 0 if weight is None else weight.size(1)
    num_columns = x.size(1) * x.size(2)
    out = huge_pages(torch.empty((num_rows + layout.split.size, x.size(1), x.size(2)), dtype=x.dtype))
    target, own = _flat(out), _flat(x)
    weights = own if weight is None else _flat(weight)
    run = _Run(layout, slices, chunk_ranges, num_columns)

    with run.gathered([grad, best], x.size(2), heads, MAX_WIDTHS) as (grads, bests):

        def share(table: np.ndarray, first: int, last: int) -> None:
            kernels.route_rows(
                grads, bests, table, layout.indptr, layout.indices, weights, heads, layout.rows, layout.places, first,
                last, own, target, num_columns,
            )  # fmt: skip

        run.shares(share)
    _join(layout, target, num_columns, _NO_DEGREES)
    return out.resize_(num_rows, *x.shape[1:])


@torch.library.impl(library, "edge_products", "CPU")
def edge_products(
    chunks: list[Tensor],
    row_side: Tensor,
    column_side: Tensor,
    best: Tensor | None,
    weight: Tensor | None,
    slices: list[int],
    chunk_ranges: list[int],
) -> Tensor:
    """Do what the function of this name in ``reference.py`` does."""
    if best is not None:
        return aggregate_reference.edge_products(chunks, row_side, column_side, best, weight, slices, chunk_ranges)
    dtype, row_side, column_side = column_side.dtype, _wide(row_side), _wide(column_side)
    layout = layout_of(chunks, row_side.size(0), column_side.size(0))
    heads, channels = row_side.size(1), row_side.size(2)
    num_columns = heads * channels
    out = huge_pages(torch.empty((layout.indices.size, heads), dtype=row_side.dtype))
    side, target = _flat(row_side), _flat(out)
    run = _Run(layout, slices, chunk_ranges, num_columns)

    with run.gathered([column_side], channels, heads, WIDTHS, overlap=False) as (source,):

        def share(table: np.ndarray, first: int, last: int) -> None:
            kernels.dot_rows(
                source, table, layout.indptr, layout.indices, layout.rows, first, last, side, target, heads,
                num_columns,
            )  # fmt: skip

        run.shares(share)
    return out.to(dtype)


@torch.library.impl(library, "edge_softmax", "CPU")
def edge_softmax(
    chunks: list[Tensor], row_scores: Tensor, column_scores: Tensor, negative_slope: float, chunk_ranges: list[int]
) -> Tensor:
    """Do what the function of this name in ``reference.py`` does."""
    dtype, row_scores, column_scores = row_scores.dtype, _wide(row_scores), _wide(column_scores)
    layout = layout_of(chunks, row_scores.size(0), column_scores.size(0))
    heads = row_scores.size(1)
    out = huge_pages(torch.empty((layout.indices.size, heads), dtype=row_scores.dtype))
    source, target, result = _flat(_ordered(layout, column_scores)), _flat(row_scores), _flat(out)
    slope = result.dtype.type(negative_slope)

    def share(first: int, last: int) -> None:
        attention_kernels.softmax_rows(
            source, target, slope, layout.rows, layout.indptr, layout.indices, first, last, heads, result
        )

    _by_vertex(layout, chunk_ranges, heads, share)
    return out.to(dtype)


@torch.library.impl(library, "edge_softmax_backward", "CPU")
def edge_softmax_backward(
    chunks: list[Tensor],
    row_scores: Tensor,
    column_scores: Tensor,
    negative_slope: float,
    attention: Tensor,
    grad: Tensor,
    chunk_ranges: list[int],
) -> Tensor:
    """Do what the function of this name in ``reference.py`` does."""
    dtype, row_scores, column_scores = row_scores.dtype, _wide(row_scores), _wide(column_scores)
    layout = layout_of(chunks, row_scores.size(0), column_scores.size(0))
    heads = row_scores.size(1)
    out = huge_pages(torch.empty((layout.indices.size, heads), dtype=row_scores.dtype))
    source, target, result = _flat(_ordered(layout, column_scores)), _flat(row_scores), _flat(out)
    weights, grads = _flat(_wide(attention)), _flat(_wide(grad))
    slope = result.dtype.type(negative_slope)

    def share(first: int, last: int) -> None:
        attention_kernels.softmax_backward_rows(
            source, target, slope, weights, grads, layout.rows, layout.indptr, layout.indices, first, last, heads,
            result,
        )  # fmt: skip

    _by_vertex(layout, chunk_ranges, heads, share)
    return out.to(dtype)


@torch.library.impl(library, "edge_sums", "CPU")
def edge_sums(
    chunks: list[Tensor], num_rows: int, edge_ids: Tensor | None, values: Tensor, chunk_ranges: list[int]
) -> Tensor:
    """Do what the function of this name in ``reference.py`` does."""
    dtype, values = values.dtype, _wide(values)
    heads = values.size(1)
    rows, indptr = chunks[0].numpy(), chunks[2].numpy()
    out = torch.zeros((num_rows, heads), dtype=values.dtype)
    ids = np.empty(0, np.int32) if edge_ids is None else edge_ids.numpy()
    given, result = _flat(values), _flat(out)

    def share(first: int, last: int) -> None:
        attention_kernels.sum_rows(given, ids, rows, indptr, first, last, heads, result)

    _run_rows(rows, chunks[1].numpy(), chunk_ranges, values.numel(), share)
    return out.to(dtype)


class _Run:
    """One execution of a plan.

    Args:
        layout: The direction.
        slices: Bounds of the columns of each group, ``[M + 1]``.
        chunk_ranges: Bounds of the chunks of each member, ``[G + 1]``.
        num_columns: D.
    """

    def __init__(self, layout: Layout, slices: list[int], chunk_ranges: list[int], num_columns: int) -> None:
        self.layout = layout
        self.slices = tuple(slices)
        self.row_bounds = [int(layout.row_ptr[chunk]) for chunk in chunk_ranges]
        self.num_workers = (len(slices) - 1) * (len(chunk_ranges) - 1)
        self.num_columns = num_columns
        self.small = layout.indices.size * num_columns <= SMALL
        self.tables: tuple[np.ndarray, ...] = ()

    @contextmanager
    def gathered(
        self, arrays: list[Tensor], channels: int, heads: int, widths: tuple[int, ...], overlap: bool = True
    ) -> Iterator[list[np.ndarray]]:
        """Give the arrays as the entries' columns index them: packed into slices where that pays, else as they are."""
        layout, order = self.layout, self.layout.order
        packed_rows = 0 if order is None else order.size
        self.tables, count = blocks_of(self.slices, channels, heads, widths, overlap, packed_rows)
        sources = [_flat(array) for array in arrays]
        if order is None:
            yield sources
            return
        table = np.concatenate(self.tables)
        bounds = np.linspace(0, packed_rows, self.num_workers + 1).astype(np.int64)
        buffers = [layout.take_scratch(count, array.dtype) for array in arrays]
        packed = [buffer.numpy().view(source.dtype)[:count] for buffer, source in zip(buffers, sources, strict=True)]
        _execute(
            [
                partial(kernels.pack_rows, source, self.num_columns, order, first, last, table, target)
                for first, last in pairwise(bounds)
                for source, target in zip(sources, packed, strict=True)
            ],
            self.small,
        )
        yield packed
        layout.scratch.extend(buffers)

    def shares(self, share: Callable[[np.ndarray, int, int], None]) -> None:
        """Call ``share(table of a slice, first row, one past the last)`` for every worker."""
        _execute(
            [
                partial(share, table, first, last)
                for first, last in pairwise(self.row_bounds)
                for table in self.tables
                if last > first
            ],
            self.small,
        )


def _execute(shares: list[Callable[[], object]], small: bool) -> None:
    if small:
        for share in shares:
            share()
    elif shares:
        run_all(shares)


def _by_vertex(layout: Layout, chunk_ranges: list[int], heads: int, share: Callable[[int, int], None]) -> None:
    _run_rows(layout.rows, layout.row_ptr, chunk_ranges, layout.indices.size * heads, share)


def _run_rows(
    rows: np.ndarray, row_ptr: np.ndarray, chunk_ranges: list[int], work: int, share: Callable[[int, int], None]
) -> None:
    """Call ``share(first row, one past the last)`` for ranges of chunks, moved so that no vertex is in two of them."""
    bounds = []
    for chunk in chunk_ranges:
        row = int(row_ptr[chunk])
        while 0 < row < rows.size and rows[row] == rows[row - 1]:
            row += 1
        bounds.append(row)
    _execute(
        [partial(share, first, last) for first, last in pairwise(bounds) if last > first],
        work <= SMALL // 8,
    )


def _join(layout: Layout, out: np.ndarray, num_columns: int, degrees: np.ndarray) -> None:
    if layout.split.size:
        kernels.join_rows(layout.rows, layout.places, layout.split, num_columns, degrees, out)
    if layout.uncovered.size:
        kernels.clear_rows(layout.uncovered, num_columns, out)


def _join_max(layout: Layout, out: np.ndarray, ties: np.ndarray, num_columns: int) -> None:
    if layout.split.size:
        kernels.join_max_rows(layout.rows, layout.places, layout.split, num_columns, out, ties)
    if layout.empty.size:
        kernels.clear_rows(layout.empty, num_columns, out)
        kernels.clear_rows(layout.empty, num_columns, ties)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


def _flat(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).numpy()


def _ordered(layout: Layout, scores: Tensor) -> Tensor:
    return scores if layout.order is None else scores[torch.from_numpy(layout.order)]
