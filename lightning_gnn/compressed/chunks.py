"""One direction of a graph for Ascend chips: rows split into chunks, each with its own compressed columns."""

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
    """Sparse matrix ``[num_rows, num_columns]``, split into chunks of rows with columns numbered per chunk.

    Entry ``e`` of row ``i`` of chunk ``c`` (``indptr[i] <= e < indptr[i + 1]``, ``row_ptr[c] <= i < row_ptr[c + 1]``)
    is the edge from vertex ``columns[column_ptr[c] + local[e]]`` to vertex ``rows[i]``. A vertex with too many edges
    for one chunk has several consecutive rows, whose results are added up.

    Args:
        rows: Vertex of each row, int32 ``[R]``, chunk by chunk; ``R > num_rows`` if hubs are split, otherwise equal.
        row_ptr: First row of each chunk, int64 ``[num_chunks + 1]``.
        indptr: First entry of each row, int64 ``[R + 1]``.
        local: Column of each entry in its chunk, int32 ``[num_edges]``.
        columns: Vertex of each column, int32 ``[L]``, chunk by chunk, ascending within a chunk.
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
        """Number of entries of each chunk, int64 ``[num_chunks]``: its execution cost."""
        return self.indptr[self.row_ptr].diff()

    def entry_columns(self) -> Tensor:
        """Return the vertex on the column side of each entry, int32 ``[num_edges]``."""
        of_chunk = torch.repeat_interleave(self.column_ptr[:-1], self.loads, output_size=self.num_edges)
        return self.columns[of_chunk.add_(self.local)]

    def recut(self, height: int) -> Chunks:
        """Split the same rows, in the same order, into chunks of ``height`` rows; the last chunk may have fewer."""
        row_ptr: _Array = np.append(np.arange(0, self.rows.numel(), height), self.rows.numel())
        offsets, columns = self.indptr.cpu().numpy(), self.entry_columns().cpu().numpy()
        spans = offsets[:-1], offsets[1:], row_ptr
        column_ptr = count_columns(columns, *spans, self.num_columns)
        rows = self.rows.cpu().numpy()
        chunks, _ = compress_columns(columns, rows, *spans, column_ptr, self.num_rows, self.num_columns)
        return chunks.to(self.local.device)

    def tensors(self) -> list[Tensor]:
        """Return the arrays in the order of the chip's operators."""
        return [self.rows, self.row_ptr, self.indptr, self.local, self.columns, self.column_ptr]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Chunks:
        """Return a copy on a device, or ``self`` if it is already there."""
        if self.local.device == torch.device(device):
            return self
        moved = [tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors()]
        fields: Any = (*moved, self.num_rows, self.num_columns)
        return Chunks(*fields)


@numba.njit(nogil=True, cache=True)
def count_columns(
    indices: _Array, first: _Array, last: _Array, row_ptr: _Array, num_columns: int
) -> npt.NDArray[np.int64]:
    """Count the distinct columns of each chunk; return ``column_ptr``, int64 ``[k + 1]`` (see :func:`cut_rows`)."""
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
    """Return the array, with doubled size if ``count`` entries fill it."""
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
    last: _Array,  # last entry of each row, exclusive, int64 [R]
    num_columns: int,
    max_vertices: int,  # at least 3
    max_entries: int,  # at least 1
) -> tuple[_Array, _Array, _Array, _Array]:
    """Split rows, in order, into chunks with at most ``max_vertices`` rows plus columns and ``max_entries`` entries."""
    # A row that does not fit into any chunk is split into consecutive rows. A row's own vertex counts as a column, so
    # that a self-loop can be added later.
    stamps = np.zeros(num_columns, np.int64)  # stamp of the last chunk that contains each column
    size = rows.size + 16  # enough unless rows are split
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
            # Each iteration adds the part of the row that fits; most rows need one, or two if they start a chunk.
            added = 1  # the row itself, and its columns that are new in the chunk
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
            # The row, or its remaining part, starts a chunk. The new stamp invalidates those of a row that did not fit.
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
    stamps = np.full(num_columns, -1, np.int32)  # last chunk that contains each column
    slots = np.empty(num_columns, np.int32)  # number of the column in that chunk
    num_entries = (last - first).sum()
    indptr = np.empty(first.size + 1, np.int64)
    local = np.empty(num_entries, np.int32)
    columns = np.empty(column_ptr[-1], np.int32)
    places = np.empty(num_entries, np.int64)
    entry = 0
    for chunk in range(row_ptr.size - 1):
        # Collect the distinct columns, and number them in ascending order, so that feature rows are read in order.
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
        # Write the entries with these numbers.
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
    """Number the columns that each chunk uses (section 6.2); also return each entry's position in ``indices``."""
    indptr, local, columns, places = _compress(indices, first, last, row_ptr, column_ptr, num_columns)
    arrays = rows, row_ptr, indptr, local, columns, column_ptr
    fields: Any = (*map(torch.from_numpy, arrays), num_rows, num_columns)
    return Chunks(*fields), places
