"""Compiled loops of aggregation on the CPU: each call processes the rows of one worker, outside the GIL.

The columns are divided into blocks, a table int64 ``[num_blocks, 7]``: first column, width, first element in the
gathered array, stride between rows of that array, first weight of an entry, weights per entry (0: none), and whether
results per entry are added to those of an earlier block. Block shapes are those of the loops in ``intrinsics.py``. The
last block may overlap the previous one, and then writes the same values again.

Common arguments:

- ``x`` (``grad``, ``best``): features as indexed by the entries' columns, flat: float32, float64, or bfloat16 as
  uint16, which is accumulated in float32; results (``out``, ``ties``) have the dtype of accumulation;
- ``indptr`` int64 ``[R + 1]``, ``indices`` int32 ``[E]``: entries of each row, and the column of each entry;
- ``weight`` ``[E * weight_stride]``: weights of each entry; without weights, pass ``x`` and a stride of 0;
- ``first``, ``last``: the range of rows; ``num_columns``: D, elements of a row of ``out``.

Numba's disk cache tracks changes of this file only: touch it after a change in ``intrinsics.py``.
"""

import functools
from collections.abc import Iterator

import numba
import numpy as np

from lightning_gnn.ops.intrinsics import (
    HEAD_WIDTHS,
    WIDTHS,
    add_entries,
    copy_block,
    dot_entries,
    max_entries,
    round_span,
    route_entries,
)

COLUMN, WIDTH, BASE, STRIDE, WEIGHT, HEADS, ADD = range(7)


@functools.lru_cache(maxsize=256)
def blocks_of(
    num_columns: int, channels: int, heads: int, widths: tuple[int, ...], overlap: bool, packed_rows: int
) -> tuple[np.ndarray, int]:
    """Divide the columns into blocks; return the table of blocks and the size of the packed array, 0 if not packed."""
    total = 0
    table: list[tuple[int, ...]] = []
    for column, width, head, count in _cut_by_head(num_columns, channels, heads, widths, overlap):
        base, stride = (total, width) if packed_rows else (column, num_columns)
        total += width * packed_rows
        is_first = head not in {row[WEIGHT] for row in table}
        table.append((column, width, base, stride, head, count, 0 if is_first else 1))
    return np.array(table, np.int64).reshape(-1, 7), total


def _cut_by_head(
    num_columns: int, channels: int, heads: int, widths: tuple[int, ...], overlap: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the first column, width, first head and number of heads (0: no weights) of each block."""
    if heads <= 1:
        yield from ((at, width, 0, heads) for at, width in _cut(0, num_columns, widths, overlap))
    elif channels in HEAD_WIDTHS and widths is WIDTHS:
        for at, width in _cut(0, num_columns, tuple(w for w in WIDTHS if w >= channels), False):
            yield at, width, at // channels, width // channels
    else:
        for head in range(heads):
            blocks = _cut(head * channels, (head + 1) * channels, widths, overlap)
            yield from ((at, width, head, 1) for at, width in blocks)


def _cut(start: int, stop: int, widths: tuple[int, ...], overlap: bool) -> Iterator[tuple[int, int]]:
    """Yield the first column and width of each block: the widest that fits, or a last one that overlaps another."""
    at = start
    while at < stop:
        left = stop - at
        above = [width for width in widths if width >= left]
        if overlap and above and stop - above[-1] >= start:
            yield stop - above[-1], above[-1]
            return
        width = next(width for width in widths if width <= left)
        yield at, width
        at += width


@numba.njit(nogil=True, cache=True)
def pack_rows(x: np.ndarray, num_columns: int, first: int, last: int, blocks: np.ndarray, packed: np.ndarray) -> None:
    """Copy rows ``[first, last)`` of ``x`` ``[V * D]`` into contiguous blocks."""
    for k in range(first, last):
        row = k * num_columns
        # A row is read once, sequentially, and one piece is written to each block.
        for b in range(blocks.shape[0]):
            at = blocks[b, BASE] + k * blocks[b, STRIDE]
            copy_block(x, row + blocks[b, COLUMN], packed, at, blocks[b, WIDTH])


@numba.njit(nogil=True, cache=True)
def sum_rows(
    x: np.ndarray, blocks: np.ndarray, indptr: np.ndarray, indices: np.ndarray, weight: np.ndarray, weight_stride: int,
    degrees: np.ndarray, first: int, last: int, out: np.ndarray, num_columns: int, spare: int,
    rounded: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Sum weighted rows, divided by ``degrees`` if not empty; ``rounded`` gets bfloat16 by way of ``out[spare:]``."""
    end = indices.size - 1
    one = out.dtype.type(1)
    # The outer loop is over blocks, so that the gathered pieces of one block stay in the L2 cache.
    for b in range(blocks.shape[0]):
        column, width, base, stride = blocks[b, COLUMN], blocks[b, WIDTH], blocks[b, BASE], blocks[b, STRIDE]
        head, heads = blocks[b, WEIGHT], blocks[b, HEADS]
        for r in range(first, last):
            p, q, own = indptr[r], indptr[r + 1], r * num_columns + column
            at = own if rounded is None else spare
            by = out.dtype.type(degrees[r]) if degrees.size else one
            add_entries(
                x, base, stride, indices, weight, weight_stride, head, p, q, end, by, out, at, width, heads
            )  # fmt: skip
            if rounded is not None:  # noqa: SIM102  Numba prunes the branch only if this test stands alone
                if width:
                    round_span(out, spare, rounded, own, width)


@numba.njit(nogil=True, cache=True)
def max_rows(
    x: np.ndarray, blocks: np.ndarray, indptr: np.ndarray, indices: np.ndarray, weight: np.ndarray, weight_stride: int,
    first: int, last: int, out: np.ndarray, ties: np.ndarray, num_columns: int,
) -> None:  # fmt: skip
    """Write the maximum of the messages and the number of ties."""
    end = indices.size - 1
    for b in range(blocks.shape[0]):
        column, width, base, stride = blocks[b, COLUMN], blocks[b, WIDTH], blocks[b, BASE], blocks[b, STRIDE]
        head, heads = blocks[b, WEIGHT], blocks[b, HEADS]
        for r in range(first, last):
            p, q, at = indptr[r], indptr[r + 1], r * num_columns + column
            max_entries(x, base, stride, indices, weight, weight_stride, head, p, q, end, out, ties, at, width, heads)


@numba.njit(nogil=True, cache=True)
def route_rows(
    grad: np.ndarray, best: np.ndarray, blocks: np.ndarray, indptr: np.ndarray, indices: np.ndarray,
    weight: np.ndarray, weight_stride: int, first: int, last: int, x: np.ndarray, out: np.ndarray, num_columns: int,
) -> None:  # fmt: skip
    """Write the gradient of the maxima; rows are sources, that is, targets of the transposed graph."""
    end = indices.size - 1
    for b in range(blocks.shape[0]):
        column, width, base, stride = blocks[b, COLUMN], blocks[b, WIDTH], blocks[b, BASE], blocks[b, STRIDE]
        head, heads = blocks[b, WEIGHT], blocks[b, HEADS]
        for r in range(first, last):
            p, q, at = indptr[r], indptr[r + 1], r * num_columns + column
            route_entries(
                grad, best, base, stride, indices, weight, weight_stride, head, p, q, end, x, at, out, at, width, heads
            )


@numba.njit(nogil=True, cache=True)
def dot_rows(
    x: np.ndarray, blocks: np.ndarray, indptr: np.ndarray, indices: np.ndarray, first: int, last: int,
    side: np.ndarray, out: np.ndarray, num_heads: int, num_columns: int,
) -> None:  # fmt: skip
    """Write the dot products of each row's own features and the gathered ones to ``out`` ``[E * num_heads]``."""
    end = indices.size - 1
    for b in range(blocks.shape[0]):
        column, width, base, stride = blocks[b, COLUMN], blocks[b, WIDTH], blocks[b, BASE], blocks[b, STRIDE]
        head, heads, add = blocks[b, WEIGHT], blocks[b, HEADS], blocks[b, ADD] != 0
        for r in range(first, last):
            p, q, own = indptr[r], indptr[r + 1], r * num_columns + column
            dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, width, heads)
