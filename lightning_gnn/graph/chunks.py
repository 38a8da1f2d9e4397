"""One direction of a compressed graph: chunks of rows, each with the columns that it uses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
        edge_ids: Place of each entry in the order of the forward direction, int32 or int64 ``[num_edges]``, or None
            where this is the forward direction.
        num_rows: Number of vertices on the row side (targets forward, sources backward).
        num_columns: Number of vertices on the column side.
    """

    rows: Tensor
    row_ptr: Tensor
    indptr: Tensor
    local: Tensor
    columns: Tensor
    column_ptr: Tensor
    edge_ids: Tensor | None
    num_rows: int
    num_columns: int
