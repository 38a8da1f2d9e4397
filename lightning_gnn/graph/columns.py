"""Cut rows in a given order into chunks that fit, and number the columns of each chunk on their own."""

from __future__ import annotations

import numba
import numpy as np
import torch

from lightning_gnn.graph.chunks import Chunks


@numba.njit(nogil=True, cache=True)
def transpose(indptr, indices, num_columns):
    """Sort the entries of a sparse matrix by column, in two passes over them.

    Args:
        indptr: First entry of each row, int64 ``[R + 1]``.
        indices: Column of each entry, ``[E]``.
        num_columns: Number of columns ``C``.

    Returns:
        ``indptr`` int64 ``[C + 1]``, the rows, int32 ``[E]`` ascending in each column, and the entries they come from,
        int64 ``[E]``.
    """
    offsets = np.zeros(num_columns + 1, np.int64)
    for e in range(indices.size):
        offsets[indices[e] + 1] += 1
    for column in range(num_columns):
        offsets[column + 1] += offsets[column]
    place = offsets[:-1].copy()
    rows = np.empty(indices.size, np.int32)
    entries = np.empty(indices.size, np.int64)
    for row in range(indptr.size - 1):
        for e in range(indptr[row], indptr[row + 1]):
            at = place[indices[e]]
            place[indices[e]] = at + 1
            rows[at] = row
            entries[at] = e
    return offsets, rows, entries


@numba.njit(nogil=True, cache=True)
def count_columns(indices, first, last, row_ptr, num_columns):
    """Count the distinct columns of each chunk: ``column_ptr``, int64 ``[k + 1]``.

    Args:
        indices: Column of each entry, ``[E]``.
        first: First entry of each row, int64 ``[R]``.
        last: The entry after the last one of each row, int64 ``[R]``.
        row_ptr: First row of each chunk, int64 ``[k + 1]``.
        num_columns: Number of columns.
    """
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
def _grown(array, count):
    if count + 1 < array.size:
        return array
    larger = np.empty(2 * array.size, array.dtype)
    larger[: array.size] = array
    return larger


@numba.njit(nogil=True, cache=True)
def cut_rows(indices, rows, first, last, bounds, num_columns, max_vertices, max_entries):
    """Cut rows into chunks of at most ``max_vertices`` rows and columns together and at most ``max_entries`` entries.

    Rows are taken in order for as long as they fit. One that fits no chunk is split over its columns, and its parts
    are rows that follow each other. A row's own vertex counts as a column: a self-loop that is added later has room.

    Args:
        indices: Column of each entry, ``[E]``.
        rows: Vertex of each row, int32 ``[R]``.
        first: First entry of each row, int64 ``[R]``.
        last: The entry after the last one of each row, int64 ``[R]``.
        bounds: Rows where a chunk must begin, int64 ``[k + 1]``, from 0 to ``R``.
        num_columns: Number of columns.
        max_vertices: At least 3.
        max_entries: At least 1.

    Returns:
        ``rows``, ``first``, ``last``, with more rows where some were split, and ``row_ptr`` int64 ``[K + 1]``.
    """
    stamps = np.zeros(num_columns, np.int64)
    size = rows.size + bounds.size + 16
    cut = np.empty(size, np.int32)
    begins = np.empty(size, np.int64)
    ends = np.empty(size, np.int64)
    row_ptr = np.zeros(size, np.int64)
    count = chunks = 0
    stamp = 1
    for bound in range(bounds.size - 1):
        vertices = entries = 0
        for row in range(bounds[bound], bounds[bound + 1]):
            vertex = rows[row]
            e = first[row]
            while True:
                # Each turn takes what fits of the row: most rows need one turn, or two where they open a chunk.
                added = 1
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
                    cut, begins, ends = _grown(cut, count), _grown(begins, count), _grown(ends, count)
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
                row_ptr = _grown(row_ptr, chunks + 1)
                chunks += 1
                row_ptr[chunks] = count
                stamp += 1
                vertices = entries = 0
        if count > row_ptr[chunks] or bounds[bound] == bounds[bound + 1]:
            row_ptr = _grown(row_ptr, chunks + 1)
            chunks += 1
            row_ptr[chunks] = count
        stamp += 1
    return cut[:count].copy(), begins[:count].copy(), ends[:count].copy(), row_ptr[: chunks + 1].copy()


@numba.njit(nogil=True, cache=True)
def _compress(indices, first, last, row_ptr, column_ptr, num_columns, indptr, local, columns, places):
    stamps = np.full(num_columns, -1, np.int32)
    slots = np.empty(num_columns, np.int32)
    entry = 0
    for chunk in range(row_ptr.size - 1):
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
        for row in range(row_ptr[chunk], row_ptr[chunk + 1]):
            indptr[row] = entry
            for e in range(first[row], last[row]):
                local[entry] = slots[indices[e]]
                places[entry] = e
                entry += 1
    indptr[row_ptr[-1]] = entry


def compress_columns(
    indices: np.ndarray,
    rows: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    row_ptr: np.ndarray,
    column_ptr: np.ndarray,
    num_rows: int,
    num_columns: int,
) -> tuple[Chunks, np.ndarray]:
    """Keep, of each chunk, only the columns that it uses (section 6.2), in two passes over the entries.

    Args:
        indices: Column of each entry, ``[E]``.
        rows: Vertex of each row, int32 ``[R]``.
        first: First entry of each row, int64 ``[R]``.
        last: The entry after the last one of each row, int64 ``[R]``.
        row_ptr: First row of each chunk, int64 ``[k + 1]``.
        column_ptr: First column of each chunk, int64 ``[k + 1]``, from :func:`count_columns`.
        num_rows: Number of vertices on the row side.
        num_columns: Number of vertices on the column side.

    Returns:
        The chunks, without ``edge_ids``, and for each of their entries its place in ``indices``, int64 ``[E]``.
    """
    num_entries = int((last - first).sum())
    indptr = np.empty(rows.size + 1, np.int64)
    local = np.empty(num_entries, np.int32)
    columns = np.empty(int(column_ptr[-1]), np.int32)
    places = np.empty(num_entries, np.int64)
    _compress(indices, first, last, row_ptr, column_ptr, num_columns, indptr, local, columns, places)
    chunks = Chunks(
        rows=torch.from_numpy(rows),
        row_ptr=torch.from_numpy(row_ptr),
        indptr=torch.from_numpy(indptr),
        local=torch.from_numpy(local),
        columns=torch.from_numpy(columns),
        column_ptr=torch.from_numpy(column_ptr),
        edge_ids=None,
        num_rows=num_rows,
        num_columns=num_columns,
    )
    return chunks, places
