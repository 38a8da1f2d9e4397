"""Aggregation on the CPU: every worker takes a range of rows with about as many entries as the others'.

Rows that are read often are packed by 64 columns first, for the level-2 cache; one worker adds up a row, in order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate import numba_kernels as kernels
from lightning_gnn.ops.aggregate import reference
from lightning_gnn.ops.aggregate.matrix import Match, Matrix
from lightning_gnn.ops.aggregate.numba_rows import execute, flat, huge_pages, loadable, row_ranges, rows_of
from lightning_gnn.ops.aggregate.reference import accumulator
from lightning_gnn.ops.intrinsics import MAX_WIDTHS, WIDTHS
from lightning_gnn.ops.worker_threads import run_all

_NO_DEGREES = np.empty(0, np.int64)
_SPARE = 2 * WIDTHS[0]  # numbers apart at which workers hold a block: no two share a line of the cache


def aggregate(matrix: Matrix, x: Tensor, weight: Tensor | None, reduce: str) -> tuple[Tensor, Tensor]:
    """Do what the function of this name in ``reference.py`` does."""
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    x, added_in = loadable(x), accumulator(x.dtype)
    rows, heads = rows_of(matrix), 0 if weight is None else weight.size(1)
    num_columns, shape = x.size(1) * x.size(2), (matrix.num_rows, *x.shape[1:])
    work = matrix.num_edges * num_columns
    is_max = reduce == "max"
    # What is rounded needs a block of each worker in float32 alone.
    rounds = dtype == torch.bfloat16 and not is_max
    result = huge_pages(torch.empty(shape, dtype=dtype if rounds else added_in))
    spare = torch.empty(len(row_ranges(matrix, work)) * _SPARE if rounds else 0, dtype=added_in)
    ties = huge_pages(torch.empty(shape if is_max else 0, dtype=added_in))
    out, counts = flat(result), flat(ties)
    sums, rounded = (flat(spare), (out,)) if rounds else (out, ())
    divisors = rows.degrees if reduce == "mean" else _NO_DEGREES
    weights = None if weight is None else flat(loadable(weight))

    with _gathered(matrix, [x], x.size(2), heads, MAX_WIDTHS if is_max else WIDTHS) as (table, (source,)):
        given = source if weights is None else weights

        def share(worker: int, first: int, last: int) -> None:
            if is_max:
                kernels.max_rows(
                    source, table, rows.indptr, rows.indices, given, heads, first, last, out, counts, num_columns
                )
            else:
                kernels.sum_rows(
                    source, table, rows.indptr, rows.indices, given, heads, divisors, first, last, sums, num_columns,
                    worker * _SPARE, *rounded,
                )  # fmt: skip

        execute(matrix, work, share)
    if is_max and rows.empty.size:
        for written in (result, ties):
            written[torch.from_numpy(rows.empty)] = 0
    return (result if is_max else result.to(dtype)), ties


def aggregate_max_backward(matrix: Matrix, grad: Tensor, best: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    """Do what the function of this name in ``reference.py`` does."""
    rows, heads = rows_of(matrix), 0 if weight is None else weight.size(1)
    num_columns = x.size(1) * x.size(2)
    out = huge_pages(torch.empty(x.shape, dtype=best.dtype))
    target, own = flat(out), flat(x)
    weights = own if weight is None else flat(weight)

    with _gathered(matrix, [grad, best], x.size(2), heads, MAX_WIDTHS) as (table, (grads, bests)):

        def share(_: int, first: int, last: int) -> None:
            kernels.route_rows(
                grads, bests, table, rows.indptr, rows.indices, weights, heads, first, last, own, target, num_columns
            )

        execute(matrix, matrix.num_edges * num_columns, share)
    return out.to(x.dtype)


def edge_products(matrix: Matrix, row_side: Tensor, column_side: Tensor, match: Match | None = None) -> Tensor:
    """Do what the function of this name in ``reference.py`` does."""
    if match is not None:
        return reference.edge_products(matrix, row_side, column_side, match)
    dtype = torch.promote_types(row_side.dtype, column_side.dtype)
    row_side, column_side = loadable(row_side), loadable(column_side)
    if torch.float64 in (row_side.dtype, column_side.dtype):  # the loops multiply no other two dtypes
        row_side, column_side = row_side.double(), column_side.double()
    rows, heads, channels = rows_of(matrix), row_side.size(1), row_side.size(2)
    num_columns = heads * channels
    out = huge_pages(torch.empty((matrix.num_edges, heads), dtype=accumulator(dtype)))
    side, target = flat(row_side), flat(out)

    with _gathered(matrix, [column_side], channels, heads, WIDTHS, overlap=False) as (table, (source,)):

        def share(_: int, first: int, last: int) -> None:
            kernels.dot_rows(source, table, rows.indptr, rows.indices, first, last, side, target, heads, num_columns)

        execute(matrix, matrix.num_edges * num_columns, share)
    return out.to(dtype)


@contextmanager
def _gathered(
    matrix: Matrix, arrays: list[Tensor], channels: int, heads: int, widths: tuple[int, ...], overlap: bool = True
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Give a table of column blocks, and the arrays as the entries' columns index them: packed where that pays."""
    rows, num_columns = rows_of(matrix), arrays[0].size(1) * arrays[0].size(2)
    order = rows.order
    packed_rows = 0 if order is None else order.size
    table, count = kernels.blocks_of(num_columns, channels, heads, widths, overlap, packed_rows)
    sources = [flat(array) for array in arrays]
    if order is None:
        yield table, sources
        return
    parts = len(row_ranges(matrix, matrix.num_edges * num_columns))
    bounds = np.linspace(0, packed_rows, parts + 1).astype(np.int64)
    buffers = [rows.take_scratch(count, array.dtype) for array in arrays]
    packed = [buffer.numpy().view(source.dtype)[:count] for buffer, source in zip(buffers, sources, strict=True)]
    run_all(
        [
            partial(kernels.pack_rows, source, num_columns, order, first, last, table, target)
            for first, last in pairwise(bounds)
            for source, target in zip(sources, packed, strict=True)
        ]
    )
    yield table, packed
    rows.scratch.extend(buffers)
