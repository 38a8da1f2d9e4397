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
from lightning_gnn.ops.aggregate.numba_rows import Rows, execute, flat, huge_pages, loadable, rows_of
from lightning_gnn.ops.aggregate.reference import accumulator
from lightning_gnn.ops.intrinsics import MAX_WIDTHS, WIDTHS
from lightning_gnn.ops.library import library

_NO_DEGREES = np.empty(0, np.int64)
_SPARE = 2 * WIDTHS[0]
"""Numbers apart at which workers hold a block: no two share a line of the cache."""


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
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    x, added_in = loadable(x), accumulator(x.dtype)
    rows = rows_of(chunks, num_rows, x.size(0))
    heads = 0 if weight is None else weight.size(1)
    num_columns = x.size(1) * x.size(2)
    is_max, is_mean = reduce == "max", reduce == "mean"
    run = _Run(rows, slices, chunk_ranges, num_columns)
    shape = x.shape[1:]
    # What is rounded needs memory in float32 for the pieces of split rows, and a block of each worker, alone.
    rounds = dtype == torch.bfloat16 and not is_max
    result = huge_pages(torch.empty((num_rows, *shape), dtype=dtype)) if rounds else None
    kept_rows = rows.split.size if rounds else num_rows + rows.split.size
    spare = run.num_workers * _SPARE if rounds else 0
    memory = huge_pages(torch.empty(kept_rows * num_columns + spare, dtype=added_in))
    target, rounded = flat(memory), None if result is None else flat(result)
    ties = torch.empty(0, dtype=added_in)
    if is_max:
        ties = huge_pages(torch.empty((num_rows + rows.split.size, *shape), dtype=added_in))
    counts = flat(ties)
    weights = None if weight is None else flat(loadable(weight))
    divisors = rows.degrees if is_mean else _NO_DEGREES

    with run.gathered([x], x.size(2), heads, MAX_WIDTHS if is_max else WIDTHS) as (source,):
        given = source if weights is None else weights

        def share(worker: int, table: np.ndarray, first: int, last: int) -> None:
            if is_max:
                kernels.max_rows(
                    source, table, rows.indptr, rows.indices, given, heads, rows.places, first, last, target, counts,
                    num_columns,
                )  # fmt: skip
            else:
                kernels.sum_rows(
                    source, table, rows.indptr, rows.indices, given, heads, rows.places, divisors, first, last, target,
                    num_columns, *(() if rounded is None else (rounded, kept_rows * num_columns + worker * _SPARE)),
                )  # fmt: skip

        run.shares(share)
    if is_max:
        _join_max(rows, target, counts, num_columns)
        ties.resize_(num_rows, *shape)
    else:
        _join(rows, target, num_columns, rows.split_degrees if is_mean else _NO_DEGREES, rounded)
    if result is not None:
        return result, ties
    out = memory.resize_(num_rows, *shape)
    return (out if is_max else out.to(dtype)), ties


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
    rows = rows_of(chunks, num_rows, grad.size(0))
    heads = 0 if weight is None else weight.size(1)
    num_columns = x.size(1) * x.size(2)
    out = huge_pages(torch.empty((num_rows + rows.split.size, x.size(1), x.size(2)), dtype=best.dtype))
    target, own = flat(out), flat(x)
    weights = own if weight is None else flat(weight)
    run = _Run(rows, slices, chunk_ranges, num_columns)

    with run.gathered([grad, best], x.size(2), heads, MAX_WIDTHS) as (grads, bests):

        def share(_: int, table: np.ndarray, first: int, last: int) -> None:
            kernels.route_rows(
                grads, bests, table, rows.indptr, rows.indices, weights, heads, rows.vertices, rows.places, first,
                last, own, target, num_columns,
            )  # fmt: skip

        run.shares(share)
    _join(rows, target, num_columns, _NO_DEGREES)
    return out.resize_(num_rows, *x.shape[1:]).to(x.dtype)


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
    dtype = torch.promote_types(row_side.dtype, column_side.dtype)
    row_side, column_side = _alike(row_side, column_side)
    rows = rows_of(chunks, row_side.size(0), column_side.size(0))
    heads, channels = row_side.size(1), row_side.size(2)
    num_columns = heads * channels
    out = huge_pages(torch.empty((rows.indices.size, heads), dtype=accumulator(dtype)))
    side, target = flat(row_side), flat(out)
    run = _Run(rows, slices, chunk_ranges, num_columns)

    with run.gathered([column_side], channels, heads, WIDTHS, overlap=False) as (source,):

        def share(_: int, table: np.ndarray, first: int, last: int) -> None:
            kernels.dot_rows(
                source, table, rows.indptr, rows.indices, rows.vertices, first, last, side, target, heads,
                num_columns,
            )  # fmt: skip

        run.shares(share)
    return out.to(dtype)


class _Run:
    """One execution of a plan.

    Args:
        slices: Bounds of the columns of each group, ``[M + 1]``.
        chunk_ranges: Bounds of the chunks of each member, ``[G + 1]``.
    """

    def __init__(self, rows: Rows, slices: list[int], chunk_ranges: list[int], num_columns: int) -> None:
        self.rows = rows
        self.slices = tuple(slices)
        self.row_bounds = [int(rows.row_ptr[chunk]) for chunk in chunk_ranges]
        self.num_workers = (len(slices) - 1) * (len(chunk_ranges) - 1)
        self.num_columns = num_columns
        self.work = rows.indices.size * num_columns
        self.tables: tuple[np.ndarray, ...] = ()

    @contextmanager
    def gathered(
        self, arrays: list[Tensor], channels: int, heads: int, widths: tuple[int, ...], overlap: bool = True
    ) -> Iterator[list[np.ndarray]]:
        """Give the arrays as the entries' columns index them: packed into slices where that pays, else as they are."""
        rows, order = self.rows, self.rows.order
        packed_rows = 0 if order is None else order.size
        self.tables, count = kernels.blocks_of(self.slices, channels, heads, widths, overlap, packed_rows)
        sources = [flat(array) for array in arrays]
        if order is None:
            yield sources
            return
        table = np.concatenate(self.tables)
        bounds = np.linspace(0, packed_rows, self.num_workers + 1).astype(np.int64)
        buffers = [rows.take_scratch(count, array.dtype) for array in arrays]
        packed = [buffer.numpy().view(source.dtype)[:count] for buffer, source in zip(buffers, sources, strict=True)]
        execute(
            [
                partial(kernels.pack_rows, source, self.num_columns, order, first, last, table, target)
                for first, last in pairwise(bounds)
                for source, target in zip(sources, packed, strict=True)
            ],
            self.work,
        )
        yield packed
        rows.scratch.extend(buffers)

    def shares(self, share: Callable[[int, np.ndarray, int, int], None]) -> None:
        """Call ``share(worker, table of a slice, first row, one past the last)`` for every worker."""
        work = [
            (table, first, last) for first, last in pairwise(self.row_bounds) for table in self.tables if last > first
        ]
        execute([partial(share, worker, *what) for worker, what in enumerate(work)], self.work)


def _alike(row_side: Tensor, column_side: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers that the loops load, of dtypes that they multiply with one another."""
    row_side, column_side = loadable(row_side), loadable(column_side)
    if torch.float64 in (row_side.dtype, column_side.dtype):
        return row_side.to(torch.float64), column_side.to(torch.float64)
    return row_side, column_side


def _join(
    rows: Rows, out: np.ndarray, num_columns: int, degrees: np.ndarray, rounded: np.ndarray | None = None
) -> None:
    if rows.split.size:
        given = () if rounded is None else (rounded,)
        kernels.join_rows(rows.vertices, rows.places, rows.split, num_columns, degrees, out, *given)
    if rows.uncovered.size:
        kernels.clear_rows(rows.uncovered, num_columns, out if rounded is None else rounded)


def _join_max(rows: Rows, out: np.ndarray, ties: np.ndarray, num_columns: int) -> None:
    if rows.split.size:
        kernels.join_max_rows(rows.vertices, rows.places, rows.split, num_columns, out, ties)
    if rows.empty.size:
        kernels.clear_rows(rows.empty, num_columns, out)
        kernels.clear_rows(rows.empty, num_columns, ties)
