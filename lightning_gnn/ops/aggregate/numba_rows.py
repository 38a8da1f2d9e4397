"""What compiled loops on the CPU read and run on: the rows of a graph's chunks, large pages, shares of a plan."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numba
import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.ops.worker_threads import run_all

SMALL = 1 << 19
"""Edges times columns up to which threads would take longer to wake up than one takes to finish."""
PACK_FROM = 4096
"""Columns from which on feature rows are packed into contiguous slices: as many 256-byte pieces fill half a level-2
cache of 2 MB."""
PACK_DEGREE = 12
"""Edges per column from which on packing, which reads and writes every row once, pays."""
HUGE_PAGE = 1 << 21


@dataclass
class Rows:
    """One direction of a graph, as the compiled loops read it: rows of entries, several for a vertex that is split.

    Args:
        indptr: First entry of each row, int64 ``[R + 1]``.
        indices: Column of each entry, in the order of ``order`` if that is given, int32 ``[num_edges]``.
        vertices: Vertex of each row, int32 ``[R]``.
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
    vertices: np.ndarray
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


_rows: MutableMapping[Tensor, Rows] = WeakIdKeyDictionary()


def rows_of(chunks: list[Tensor], num_rows: int, num_columns: int) -> Rows:
    """Return the rows of one direction, derived at its first use and kept as long as its tensors.

    Args:
        num_rows: Vertices on the row side.
        num_columns: Vertices on the column side.
    """
    rows = _rows.get(chunks[3])
    if rows is None:
        rows = _rows[chunks[3]] = _derive(chunks, num_rows, num_columns)
    return rows


def _derive(chunks: list[Tensor], num_rows: int, num_columns: int) -> Rows:
    vertices, row_ptr, indptr, local, columns, column_ptr = (tensor.detach().numpy() for tensor in chunks)
    degrees = np.zeros(num_rows, np.int64)
    np.add.at(degrees, vertices, np.diff(indptr))
    rows_per_vertex = np.bincount(vertices, minlength=num_rows)
    pieces = rows_per_vertex[vertices] > 1
    places = vertices.astype(np.int64)
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
    total = degrees[vertices]
    return Rows(
        indptr=indptr,
        indices=indices,
        vertices=vertices,
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
def _count_columns(
    indptr: np.ndarray, row_ptr: np.ndarray, local: np.ndarray, columns: np.ndarray, column_ptr: np.ndarray,
    popularity: np.ndarray,
) -> None:  # fmt: skip
    for c in range(row_ptr.size - 1):
        for e in range(indptr[row_ptr[c]], indptr[row_ptr[c + 1]]):
            popularity[columns[column_ptr[c] + local[e]]] += 1


@numba.njit(nogil=True, cache=True)
def _global_columns(
    indptr: np.ndarray, row_ptr: np.ndarray, local: np.ndarray, columns: np.ndarray, column_ptr: np.ndarray,
    rank: np.ndarray, indices: np.ndarray,
) -> None:  # fmt: skip
    for c in range(row_ptr.size - 1):
        for e in range(indptr[row_ptr[c]], indptr[row_ptr[c + 1]]):
            # From the chunk's list of columns to the graph's, and on to where packed features lie.
            column = columns[column_ptr[c] + local[e]]
            indices[e] = rank[column] if rank.size else column


def execute(shares: list[Callable[[], object]], work: int) -> None:
    """Run every share, side by side unless ``work``, edges times columns, is little."""
    if work <= SMALL:
        for share in shares:
            share()
    elif shares:
        run_all(shares)


def execute_by_vertex(
    vertices: np.ndarray, row_ptr: np.ndarray, chunk_ranges: list[int], work: int, share: Callable[[int, int], None]
) -> None:
    """Call ``share(first row, one past the last)`` for ranges of chunks, moved so that no vertex is in two of them.

    Args:
        vertices: Vertex of each row; equal ones are adjacent.
        row_ptr: First row of each chunk.
    """
    bounds = []
    for chunk in chunk_ranges:
        row = int(row_ptr[chunk])
        while 0 < row < vertices.size and vertices[row] == vertices[row - 1]:
            row += 1
        bounds.append(row)
    execute([partial(share, first, last) for first, last in pairwise(bounds) if last > first], work)


def wide(tensor: Tensor) -> Tensor:
    """Return contiguous numbers of the dtype in which they are added up: float32 at least."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


def loadable(tensor: Tensor) -> Tensor:
    """Return contiguous numbers that the loops load: bfloat16, which they widen themselves, or :func:`wide` ones."""
    return tensor.detach().contiguous() if tensor.dtype == torch.bfloat16 else wide(tensor)


def flat(tensor: Tensor) -> np.ndarray:
    """Return the numbers as an array of one dimension, of the same memory if they lie together; bfloat16 as uint16."""
    tensor = tensor.contiguous().view(-1)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages for a new tensor, which is not touched yet: a fresh 4 KB page costs more than filling it."""
    madvise = _madvise()
    if madvise is not None and tensor.nbytes >= 2 * HUGE_PAGE:
        begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        length = (tensor.data_ptr() + tensor.nbytes - begin) // HUGE_PAGE * HUGE_PAGE
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), 14)  # MADV_HUGEPAGE; refused, it does no harm
    return tensor


@functools.cache
def _madvise() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform.startswith("linux") else None
