"""What the CPU backend derives from a graph's chunks and from a plan: global columns, split rows, column blocks."""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass, field
from itertools import pairwise

import numba
import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

WIDTHS = (64, 32, 16, 8, 4, 2, 1)
MAX_WIDTHS = (64, 16, 4, 1)
HEAD_WIDTHS = (8, 16, 32)
PACK_FROM = 4096
"""Columns from which on feature rows are packed into contiguous slices: as many 256-byte pieces fill half a level-2
cache of 2 MB."""
PACK_DEGREE = 12
"""Edges per column from which on packing, which reads and writes every row once, pays."""
HUGE_PAGE = 1 << 21
_INT32_MAX = 2**31 - 1


@dataclass
class Layout:
    """One direction of a graph, as the compiled loops read it.

    Args:
        indptr: int64 ``[R + 1]``.
        indices: Column of each entry, in the order of ``order`` if that is given, int32 ``[num_edges]``.
        rows: Vertex of each row, int32 ``[R]``.
        row_ptr: First row of each chunk, int64 ``[num_chunks + 1]``.
        places: Where the result of each row goes, int64 ``[R]``: its vertex, or, for a piece of a split row, a row of
            its own behind those of the vertices.
        split: The rows that are pieces, int64 ``[S]``; ``places`` counts them.
        degrees: Entries of each row, at least 1, and 1 for pieces, int64 ``[R]``.
        split_degrees: Entries of the whole vertex for each row, int64 ``[R]``.
        empty: Vertices without entries, int64.
        uncovered: Those among them that no row names, int64.
        order: Columns by falling degree, int64 ``[num_columns]``, where feature rows are packed: what is read most
            then lies together; else None.
        scratch: Packed features of earlier calls, to be used again.
    """

    indptr: np.ndarray
    indices: np.ndarray
    rows: np.ndarray
    row_ptr: np.ndarray
    places: np.ndarray
    split: np.ndarray
    degrees: np.ndarray
    split_degrees: np.ndarray
    empty: np.ndarray
    uncovered: np.ndarray
    order: np.ndarray | None
    scratch: list[Tensor] = field(default_factory=list)

    def take_scratch(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return memory for packed features; give it back by appending it to ``scratch``."""
        size = count * dtype.itemsize
        try:
            buffer = self.scratch.pop()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < size:
            buffer = huge_pages(torch.empty(size, dtype=torch.uint8))
        return buffer


_layouts = WeakIdKeyDictionary()


def layout_of(chunks: list[Tensor], num_rows: int, num_columns: int) -> Layout:
    """Return the layout of one direction, derived at its first use and kept as long as its tensors."""
    layout = _layouts.get(chunks[3])
    if layout is None:
        layout = _layouts[chunks[3]] = _derive(chunks, num_rows, num_columns)
    return layout


def _derive(chunks: list[Tensor], num_rows: int, num_columns: int) -> Layout:
    rows, row_ptr, indptr, local, columns, column_ptr = (tensor.detach().numpy() for tensor in chunks)
    degrees = np.zeros(num_rows, np.int64)
    counts = np.diff(indptr)
    np.add.at(degrees, rows, counts)
    rows_per_vertex = np.bincount(rows, minlength=num_rows)
    pieces = rows_per_vertex[rows] > 1
    places = rows.astype(np.int64)
    split = np.flatnonzero(pieces)
    places[split] = num_rows + np.arange(split.size)
    order, rank = None, np.empty(0, np.int32)
    if num_columns >= PACK_FROM and local.size >= PACK_DEGREE * num_columns:
        # Which columns are read most is known from the chunks' lists and entries alone.
        popularity = np.zeros(num_columns, np.int64)
        _count_columns(indptr, row_ptr, local, columns, column_ptr, popularity)
        order = np.argsort(-popularity, kind="stable")
        rank = np.empty(num_columns, np.int32)
        rank[order] = np.arange(num_columns, dtype=np.int32)
    indices = np.empty(local.size, np.int32)
    _global_columns(indptr, row_ptr, local, columns, column_ptr, rank, indices)
    total = degrees[rows]
    return Layout(
        indptr=indptr,
        indices=indices,
        rows=rows,
        row_ptr=row_ptr,
        places=places,
        split=split,
        degrees=np.where(pieces, 1, np.maximum(total, 1)),
        split_degrees=np.maximum(total, 1),
        empty=np.flatnonzero(degrees == 0),
        uncovered=np.flatnonzero(rows_per_vertex == 0),
        order=order,
    )


@numba.njit(nogil=True, cache=True)
def _count_columns(indptr, row_ptr, local, columns, column_ptr, popularity):
    for c in range(row_ptr.size - 1):
        for e in range(indptr[row_ptr[c]], indptr[row_ptr[c + 1]]):
            popularity[columns[column_ptr[c] + local[e]]] += 1


@numba.njit(nogil=True, cache=True)
def _global_columns(indptr, row_ptr, local, columns, column_ptr, rank, indices):
    for c in range(row_ptr.size - 1):
        for e in range(indptr[row_ptr[c]], indptr[row_ptr[c + 1]]):
            column = columns[column_ptr[c] + local[e]]
            indices[e] = rank[column] if rank.size else column


@functools.lru_cache(maxsize=256)
def blocks_of(
    slices: tuple[int, ...], channels: int, heads: int, widths: tuple[int, ...], overlap: bool, packed_rows: int
) -> tuple[tuple[np.ndarray, ...], int]:
    """Cut the columns of each slice into blocks, and lay these out in the gathered array.

    Args:
        slices: Bounds of the slices.
        channels: C, columns per weight.
        heads: H, weights per entry, or 0.
        widths: Which widths a block may have, falling; ``HEAD_WIDTHS`` fuses narrow heads besides.
        overlap: Whether the last block may overlap the one before.
        packed_rows: Rows of the packed array, or 0 where it is not packed.

    Returns:
        The table of each slice (see ``numba_kernels.py``), and the elements of the packed array.
    """
    num_columns, total, tables = slices[-1], 0, []
    for start, stop in pairwise(slices):
        table: list[tuple[int, ...]] = []
        for column, width, head, count in _blocks(start, stop, channels, heads, widths, overlap):
            base, stride = (total, width) if packed_rows else (column, num_columns)
            total += width * packed_rows
            fresh = head not in {row[4] for row in table}
            table.append((column, width, base, stride, head, count, 0 if fresh else 1))
        tables.append(np.array(table, np.int64).reshape(-1, 7))
    return tuple(tables), total


def _blocks(start, stop, channels, heads, widths, overlap):
    """Yield first column, width, first head and number of heads (0: no weights) of each block."""
    if heads <= 1:
        yield from ((at, width, 0, heads) for at, width in _cut(start, stop, widths, overlap))
        return
    if channels in HEAD_WIDTHS and widths is WIDTHS and start % channels == 0 and stop % channels == 0:
        for at, width in _cut(start, stop, tuple(w for w in WIDTHS if w >= channels), False):
            yield at, width, at // channels, width // channels
        return
    for head in range(start // channels, -(-stop // channels)):
        first, last = max(start, head * channels), min(stop, (head + 1) * channels)
        yield from ((at, width, head, 1) for at, width in _cut(first, last, widths, overlap))


def _cut(start, stop, widths, overlap):
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


def huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages for a new tensor, which is not touched yet: a fresh 4 KB page costs more than filling it."""
    madvise = _madvise()
    if madvise is not None and tensor.nbytes >= 2 * HUGE_PAGE:
        begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        length = (tensor.data_ptr() + tensor.nbytes - begin) // HUGE_PAGE * HUGE_PAGE
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), 14)  # MADV_HUGEPAGE; refused, it does no harm
    return tensor


@functools.cache
def _madvise():
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
