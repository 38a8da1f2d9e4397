"""Aggregation on the CPU: every worker processes a range of rows with about the same number of entries.

Frequently read rows are first packed in blocks of 64 columns, for the L2 cache. One worker sums a row, in order.
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
from lightning_gnn.ops.aggregate.numba_rows import flatten, get_rows, row_ranges, run_rows, to_loadable, use_huge_pages
from lightning_gnn.ops.aggregate.numba_softmax import edge_softmax, edge_softmax_backward, edge_sums
from lightning_gnn.ops.aggregate.reference import accumulation_dtype
from lightning_gnn.ops.intrinsics import MAX_WIDTHS, WIDTHS
from lightning_gnn.ops.worker_threads import run_all

__all__ = ["aggregate", "aggregate_max_backward", "edge_products", "edge_softmax", "edge_softmax_backward", "edge_sums"]

_NO_DEGREES = np.empty(0, np.int64)
_BLOCK_STRIDE = 2 * WIDTHS[0]  # elements between the workers' scratch blocks, so that none share a cache line


def aggregate(matrix: Matrix, x: Tensor, weight: Tensor | None, reduce: str) -> tuple[Tensor, Tensor]:
    """Compiled version of the function of the same name in ``reference.py``."""
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    x, wide_dtype = to_loadable(x), accumulation_dtype(x.dtype)
    rows, heads = get_rows(matrix), 0 if weight is None else weight.size(1)
    num_columns, shape = x.size(1) * x.size(2), (matrix.num_rows, *x.shape[1:])
    work = matrix.num_edges * num_columns
    is_max = reduce == "max"
    # A rounded result needs only one float32 block per worker, instead of a float32 copy of the result.
    rounds = dtype == torch.bfloat16 and not is_max
    result = use_huge_pages(torch.empty(shape, dtype=dtype if rounds else wide_dtype))
    scratch = torch.empty(len(row_ranges(matrix, work)) * _BLOCK_STRIDE if rounds else 0, dtype=wide_dtype)
    ties = use_huge_pages(torch.empty(shape if is_max else 0, dtype=wide_dtype))
    out, counts = flatten(result), flatten(ties)
    sums, rounded = (flatten(scratch), (out,)) if rounds else (out, ())
    divisors = rows.degrees if reduce == "mean" else _NO_DEGREES
    weights = None if weight is None else flatten(to_loadable(weight))

    with _prepare_sources(matrix, [x], x.size(2), heads, MAX_WIDTHS if is_max else WIDTHS) as (table, (source,)):
        factors = source if weights is None else weights

        def reduce_rows(worker: int, first: int, last: int) -> None:
            if is_max:
                kernels.max_rows(
                    source, table, rows.indptr, rows.indices, factors, heads, first, last, out, counts, num_columns
                )
            else:
                kernels.sum_rows(
                    source, table, rows.indptr, rows.indices, factors, heads, divisors, first, last, sums, num_columns,
                    worker * _BLOCK_STRIDE, *rounded,
                )  # fmt: skip

        run_rows(matrix, work, reduce_rows)
    if is_max and rows.empty.size:
        for tensor in (result, ties):
            tensor[torch.from_numpy(rows.empty)] = 0
    return (result if is_max else result.to(dtype)), ties


def aggregate_max_backward(matrix: Matrix, grad: Tensor, best: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    """Compiled version of the function of the same name in ``reference.py``."""
    rows, heads = get_rows(matrix), 0 if weight is None else weight.size(1)
    num_columns = x.size(1) * x.size(2)
    out = use_huge_pages(torch.empty(x.shape, dtype=best.dtype))
    target, own = flatten(out), flatten(x)
    weights = own if weight is None else flatten(weight)

    with _prepare_sources(matrix, [grad, best], x.size(2), heads, MAX_WIDTHS) as (table, (grads, bests)):

        def route_gradients(_: int, first: int, last: int) -> None:
            kernels.route_rows(
                grads, bests, table, rows.indptr, rows.indices, weights, heads, first, last, own, target, num_columns
            )

        run_rows(matrix, matrix.num_edges * num_columns, route_gradients)
    return out.to(x.dtype)


def edge_products(matrix: Matrix, row_side: Tensor, column_side: Tensor, match: Match | None = None) -> Tensor:
    """Compiled version of the function of the same name in ``reference.py``."""
    if match is not None:
        return reference.edge_products(matrix, row_side, column_side, match)
    dtype = torch.promote_types(row_side.dtype, column_side.dtype)
    row_side, column_side = to_loadable(row_side), to_loadable(column_side)
    if torch.float64 in (row_side.dtype, column_side.dtype):  # the loops do not mix float64 with other dtypes
        row_side, column_side = row_side.double(), column_side.double()
    rows, heads, channels = get_rows(matrix), row_side.size(1), row_side.size(2)
    num_columns = heads * channels
    out = use_huge_pages(torch.empty((matrix.num_edges, heads), dtype=accumulation_dtype(dtype)))
    side, target = flatten(row_side), flatten(out)

    with _prepare_sources(matrix, [column_side], channels, heads, WIDTHS, overlap=False) as (table, (source,)):

        def multiply(_: int, first: int, last: int) -> None:
            kernels.dot_rows(source, table, rows.indptr, rows.indices, first, last, side, target, heads, num_columns)

        run_rows(matrix, matrix.num_edges * num_columns, multiply)
    return out.to(dtype)


@contextmanager
def _prepare_sources(
    matrix: Matrix, arrays: list[Tensor], channels: int, heads: int, widths: tuple[int, ...], overlap: bool = True
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yield the table of column blocks and the gathered arrays, packed into blocks if that pays."""
    rows, num_columns = get_rows(matrix), arrays[0].size(1) * arrays[0].size(2)
    packed_rows = matrix.num_columns if rows.packed else 0
    table, count = kernels.blocks_of(num_columns, channels, heads, widths, overlap, packed_rows)
    sources = [flatten(array) for array in arrays]
    if not packed_rows:
        yield table, sources
        return
    workers = len(row_ranges(matrix, matrix.num_edges * num_columns))
    bounds = np.linspace(0, packed_rows, workers + 1).astype(np.int64)
    buffers = [rows.take_scratch(count, array.dtype) for array in arrays]
    packed = [buffer.numpy().view(source.dtype)[:count] for buffer, source in zip(buffers, sources, strict=True)]
    run_all(
        [
            partial(kernels.pack_rows, source, num_columns, first, last, table, target)
            for first, last in pairwise(bounds)
            for source, target in zip(sources, packed, strict=True)
        ]
    )
    yield table, packed
    rows.scratch.extend(buffers)
