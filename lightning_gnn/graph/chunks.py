"""One direction of a compressed graph: chunks of rows, each with the columns that it uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ARRAYS = ("rows", "row_ptr", "indptr", "local", "columns", "column_ptr", "edge_ids")
_INT32_MAX = 2**31 - 1


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

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return self.row_ptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of entries."""
        return self.local.numel()

    @property
    def edge_dtype(self) -> torch.dtype:
        """The dtype of places of edges: int32 where they fit."""
        return torch.int32 if self.num_edges <= _INT32_MAX else torch.int64

    @property
    def loads(self) -> Tensor:
        """Entries of each chunk, int64 ``[num_chunks]``: what its execution costs."""
        return self.indptr[self.row_ptr].diff()

    def degrees(self) -> Tensor:
        """Return the number of entries of each vertex of the row side, over all its parts, int64 ``[num_rows]``."""
        degrees = torch.zeros(self.num_rows, dtype=torch.int64, device=self.indptr.device)
        return degrees.index_add_(0, self.rows, self.indptr.diff())

    def entry_rows(self) -> Tensor:
        """Return the vertex on the row side of each entry, int32 ``[num_edges]``."""
        return torch.repeat_interleave(self.rows, self.indptr.diff(), output_size=self.num_edges)

    def entry_columns(self) -> Tensor:
        """Return the vertex on the column side of each entry, int32 ``[num_edges]``."""
        begin = torch.repeat_interleave(self.column_ptr[:-1], self.loads, output_size=self.num_edges)
        return self.columns[begin.add_(self.local)]

    def tensors(self) -> dict[str, Tensor | None]:
        """Return the arrays by name."""
        return {name: getattr(self, name) for name in ARRAYS}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Chunks:
        """Return a copy on a device, or this where it is there already."""
        if self.local.device == torch.device(device):
            return self
        moved: dict[str, Any] = {
            name: None if tensor is None else tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self.tensors().items()
        }
        return replace(self, **moved)
