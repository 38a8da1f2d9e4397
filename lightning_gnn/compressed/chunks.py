"""One direction of a graph for an Ascend chip: rows cut into chunks that fit, each with the columns that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Chunks:
    """A sparse matrix ``[num_rows, num_columns]``, cut into chunks of rows whose columns are numbered per chunk.

    Entry ``e`` of row ``i`` of chunk ``c`` (``indptr[i] <= e < indptr[i + 1]``, ``row_ptr[c] <= i < row_ptr[c + 1]``)
    stands for the edge from vertex ``columns[column_ptr[c] + local[e]]`` to vertex ``rows[i]``. A vertex with more
    edges than a chunk may hold has several rows, side by side, which add up.

    Args:
        rows: Vertex of each row, int32 ``[R]``, chunk by chunk; ``R >= num_rows`` where hubs are split, else equal.
        row_ptr: First row of each chunk, int64 ``[num_chunks + 1]``.
        indptr: First entry of each row, int64 ``[R + 1]``.
        local: Column of each entry inside its chunk, int32 ``[num_edges]``.
        columns: Vertex of each column, int32 ``[L]``, chunk by chunk, ascending inside a chunk.
        column_ptr: First column of each chunk, int64 ``[num_chunks + 1]``.
        num_rows: Number of vertices on the row side (targets forward, sources backward).
        num_columns: Number of vertices on the column side.
    """

    rows: Tensor
    row_ptr: Tensor
    indptr: Tensor
    local: Tensor
    columns: Tensor
    column_ptr: Tensor
    num_rows: int
    num_columns: int

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return self.row_ptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of entries."""
        return self.local.numel()

    @property
    def loads(self) -> Tensor:
        """Entries of each chunk, int64 ``[num_chunks]``: what its execution costs."""
        return self.indptr[self.row_ptr].diff()

    def entry_columns(self) -> Tensor:
        """Return the vertex on the column side of each entry, int32 ``[num_edges]``."""
        of_chunk = torch.repeat_interleave(self.column_ptr[:-1], self.loads, output_size=self.num_edges)
        return self.columns[of_chunk.add_(self.local)]

    def recut(self, height: int) -> Chunks:
        """Return the same rows and entries in the same order, in chunks of ``height`` rows, the last of the rest."""
        row_ptr: _Array = np.append(np.arange(0, self.rows.numel(), height), self.rows.numel())
        offsets, columns = self.indptr.cpu().numpy(), self.entry_columns().cpu().numpy()
        spans = offsets[:-1], offsets[1:], row_ptr
        counted = count_columns(columns, *spans, self.num_columns)
        rows = self.rows.cpu().numpy()
        cut, _ = compress_columns(columns, rows, *spans, counted, self.num_rows, self.num_columns)
        return cut.to(self.local.device)

    def tensors(self) -> list[Tensor]:
        """Return the arrays as the operators of a chip take them."""
        return [self.rows, self.row_ptr, self.indptr, self.local, self.columns, self.column_ptr]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Chunks:
        """Return a copy on a device, or this where it is there already."""
        if self.local.device == torch.device(device):
            return self
        moved = [tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors()]
        fields: Any = (*moved, self.num_rows, self.num_columns)
        return Chunks(*fields)


@numba.njit(nogil=True, cache=True)
def count_columns(
    indices: _Array, first: _Array, last: _Array, row_ptr: _Array, num_columns: int
) -> npt.NDArray[np.int64]:
    """Count the distinct columns of each chunk: ``column_ptr``, int64 ``[k + 1]``; for arrays see :func:`cut_rows`."""
    stamps = np.full(num_columns, -1, np.int32)
    column_ptr = np.zeros(row_ptr.size, np.int64)
    for chunk in range(row_ptr.size - 1):
        count = 0
        for row in range(row_ptr[chunk], row_ptr[chunk + 1]):
            for e in range(first[row], last[row]):
                if stamps[indices[e]] != chunk:
                    stamps[indices[e]] = chunk
                    count += 1
        column_ptr[chunk + 1] = column_ptr[chunk] + count
    return column_ptr


@numba.njit(nogil=True, cache=True)
def _grow(array: _Array, count: int) -> _Array:
    """Return an array of twice the size where ``count`` entries fill this one."""
    if count + 1 < array.size:
        return array
    larger = np.empty(2 * array.size, array.dtype)
    larger[: array.size] = array
    return larger


@numba.njit(nogil=True, cache=True)
def cut_rows(
    indices: _Array,  # column of each entry, [E]
    rows: _Array,  # vertex of each row, int32 [R]
    first: _Array,  # first entry of each row, int64 [R]
    last: _Array,  # the entry after the last one of each row, int64 [R]
    num_columns: int,
    max_vertices: int,  # at least 3
    max_entries: int,  # at least 1
) -> tuple[_Array, _Array, _Array, _Array]:
    """Cut rows, in order, into chunks of at most so many rows and columns together, and so many entries."""
    # A row that fits no chunk is split over its columns into rows that follow each other. A row's own vertex counts as
    # a column, so that a self-loop that is added later has room.
    stamps = np.zeros(num_columns, np.int64)  # a column is in the chunk where this is the chunk's stamp
    size = rows.size + 16  # without splits nothing has to grow
    cut = np.empty(size, np.int32)
    begins = np.empty(size, np.int64)
    ends = np.empty(size, np.int64)
    row_ptr = np.zeros(size, np.int64)
    count = chunks = 0
    stamp = 1
    vertices = entries = 0
    for row in range(rows.size):
        vertex = rows[row]
        e = first[row]
        while True:
            # Each turn takes what fits of the row: most rows need one turn, or two where they open a chunk.
            added = 1  # the row itself, then its columns that the chunk does not have yet
            if vertex < num_columns and stamps[vertex] != stamp:
                stamps[vertex] = stamp
                added += 1
            room = min(last[row], e + max_entries - entries)
            at = e
            while at < room:
                column = indices[at]
                if stamps[column] != stamp:
                    if vertices + added == max_vertices:
                        break
                    stamps[column] = stamp
                    added += 1
                at += 1
            whole = at == last[row] and vertices + added <= max_vertices
            if whole or count == row_ptr[chunks]:
                cut, begins, ends = _grow(cut, count), _grow(begins, count), _grow(ends, count)
                cut[count] = vertex
                begins[count] = e
                ends[count] = at
                count += 1
                vertices += added
                entries += at - e
                e = at
                if whole:
                    break
            # The row, or what is left of it, opens a chunk. The stamps of a row that did not fit become void.
            row_ptr = _grow(row_ptr, chunks + 1)
            chunks += 1
            row_ptr[chunks] = count
            stamp += 1
            vertices = entries = 0
    if count > row_ptr[chunks] or not rows.size:
        row_ptr = _grow(row_ptr, chunks + 1)
        chunks += 1
        row_ptr[chunks] = count
    return cut[:count].copy(), begins[:count].copy(), ends[:count].copy(), row_ptr[: chunks + 1].copy()


@numba.njit(nogil=True, cache=True)
def _compress(
    indices: _Array, first: _Array, last: _Array, row_ptr: _Array, column_ptr: _Array, num_columns: int
) -> tuple[_Array, _Array, _Array, _Array]:
    stamps = np.full(num_columns, -1, np.int32)  # the chunk that met the column last
    slots = np.empty(num_columns, np.int32)  # its number in that chunk
    num_entries = (last - first).sum()
    indptr = np.empty(first.size + 1, np.int64)
    local = np.empty(num_entries, np.int32)
    columns = np.empty(column_ptr[-1], np.int32)
    places = np.empty(num_entries, np.int64)
    entry = 0
    for chunk in range(row_ptr.size - 1):
        # Collect the distinct columns, and number them in ascending order, so that their rows are read in order.
        begin = end = column_ptr[chunk]
        for row in range(row_ptr[chunk], row_ptr[chunk + 1]):
            for e in range(first[row], last[row]):
                column = indices[e]
                if stamps[column] != chunk:
                    stamps[column] = chunk
                    columns[end] = column
                    end += 1
        columns[begin:end].sort()
        for at in range(begin, end):
            slots[columns[at]] = at - begin
        # Write the entries by these numbers.
        for row in range(row_ptr[chunk], row_ptr[chunk + 1]):
            indptr[row] = entry
            for e in range(first[row], last[row]):
                local[entry] = slots[indices[e]]
                places[entry] = e
                entry += 1
    indptr[row_ptr[-1]] = entry
    return indptr, local, columns, places


def compress_columns(
    indices: _Array,
    rows: _Array,
    first: _Array,
    last: _Array,
    row_ptr: _Array,
    column_ptr: _Array,  # first column of each chunk, int64 [k + 1], from count_columns
    num_rows: int,
    num_columns: int,
) -> tuple[Chunks, _Array]:
    """Keep only the columns that each chunk uses (section 6.2); also return each entry's place in ``indices``."""
    indptr, local, columns, places = _compress(indices, first, last, row_ptr, column_ptr, num_columns)
    arrays = rows, row_ptr, indptr, local, columns, column_ptr
    fields: Any = (*map(torch.from_numpy, arrays), num_rows, num_columns)
    return Chunks(*fields), places
