"""Extracts a range of forward rows from a graph, without copying the rest.

The graph may be memory-mapped: only the edges of the range are loaded, plus arrays with one entry per vertex.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.compressed.self_loops import loop_rows, pick
from lightning_gnn.graph.csc import INT32_MAX
from lightning_gnn.graph.csr import CSR

_Array = npt.NDArray[Any]
_EDGES_PER_BLOCK = 1 << 20


def count_self_loops(rows: CSR) -> Tensor:
    """Count the self-loops of each vertex of a square matrix on the CPU, int32 ``[num_rows]``."""
    counts = torch.zeros(rows.num_rows, dtype=torch.int32)
    for first, last in iter_row_blocks(rows, _EDGES_PER_BLOCK):
        start, stop = int(rows.indptr[first]), int(rows.indptr[last])
        vertices = torch.arange(first, last, dtype=torch.int32)
        row = torch.repeat_interleave(vertices, rows.indptr[first : last + 1].diff())
        counts.index_add_(0, row, (rows.indices[start:stop] == row).to(torch.int32))
    return counts


@dataclass(frozen=True, eq=False)
class UserEdges:
    """Maps the entries of a range of forward rows to the user's edges."""

    before: tuple[int, int]  # start and stop of the range in the graph without added self-loops
    edge_ids: Tensor | None  # index of the user's edge, [n], -1 for an added self-loop; None: consecutive
    weight_ids: Tensor | None  # index of the user's edge that determines the weight; see ``LoopedRows``

    def values(self, values: Tensor, fill: float, weights: bool = False) -> Tensor:
        """Gather values of the user's edges, ``[num_user_edges, …]``, for each entry; differentiable."""
        ids = self.weight_ids if weights else self.edge_ids
        return values[slice(*self.before)] if ids is None else pick(values, ids, fill)


@dataclass(frozen=True, eq=False)
class RowEntries:
    """The entries of a range of consecutive forward rows, in order."""

    first: int  # vertex of the first row
    indptr: _Array  # row pointers, starting at 0, int64 [R + 1]
    columns: _Array  # column vertex of each entry, int32 [n]
    user: UserEdges  # the user's edge of each entry

    @classmethod
    def of(cls, graph: CompressedGraph, rows: tuple[int, int], looped: bool) -> RowEntries:
        """Read the rows from start to stop."""
        forward, (first, last) = graph.forward, rows
        indptr = forward.indptr[first : last + 1].numpy()
        before = start, stop = int(indptr[0]), int(indptr[-1])
        ids = None if graph.edge_ids is None else graph.edge_ids[start:stop]
        indptr, columns = indptr - start, forward.indices[start:stop].numpy()
        if not looped:
            return cls(first, indptr, columns, UserEdges(before, ids, ids))
        user_edges = np.arange(start, stop) if ids is None else ids.numpy()
        found = loop_rows(first, indptr, columns, user_edges)
        dtype = torch.int32 if graph.num_user_edges <= INT32_MAX else torch.int64
        new, weights = (torch.from_numpy(ids).to(dtype) for ids in (found.edge_ids, found.weight_ids))
        return cls(first, found.indptr, found.columns, UserEdges(before, new, weights))

    def entry_rows(self) -> _Array:
        """Return the row vertex of each entry, int64 ``[n]``."""
        return self.first + np.repeat(np.arange(self.indptr.size - 1), np.diff(self.indptr))


@dataclass(frozen=True, eq=False)
class RowRangeGraph:
    """A range of forward rows as a separate bipartite graph."""

    graph: CompressedGraph  # its forward order equals that part of the whole graph's
    targets: _Array  # positions of its targets in owner order, ascending, int32
    row_of: Tensor  # row in ``graph``, which is in vertex order, of each of ``targets``, int64
    sources: _Array  # positions of its sources in owner order, ascending, int32; all vertices if requested


def extract_row_range(
    graph: CompressedGraph,
    position: _Array,  # position of each vertex in owner order, int64 [V]
    rows: tuple[int, int],
    looped: bool,
    all_sources: bool,
    settings: PlanSettings,
) -> RowRangeGraph:
    """Extract the rows from start to stop; with ``all_sources``, the sources include unused vertices."""
    entries = RowEntries.of(graph, rows, looped)
    used: _Array = np.full(position.size, all_sources)
    used[position[entries.columns]] = True
    sources = np.flatnonzero(used).astype(np.int32)
    number = np.cumsum(used, dtype=np.int32) - 1
    indices = torch.from_numpy(number[position[entries.columns]])
    forward = CSR(torch.from_numpy(entries.indptr), indices, sources.size)
    row_positions = position[slice(*rows)]
    row_of = np.argsort(row_positions)
    return RowRangeGraph(
        CompressedGraph(forward, settings=settings),
        row_positions[row_of].astype(np.int32),
        torch.from_numpy(row_of),
        sources,
    )


def sum_in_weights(graph: CompressedGraph, edge_weight: Tensor, looped: bool, weights: bool, fill: float) -> Tensor:
    """Return the sum of each vertex's incoming edge weights, ``[V]``; differentiable."""
    degrees = edge_weight.new_zeros(graph.num_targets)
    # With gradients, use a single block: autograd saves tensors as large as the graph in any case.
    for rows in iter_row_blocks(graph.forward, graph.num_edges if edge_weight.requires_grad else _EDGES_PER_BLOCK):
        entries = RowEntries.of(graph, rows, looped)
        index = torch.from_numpy(entries.entry_rows())
        degrees = degrees.index_add(0, index, entries.user.values(edge_weight, fill, weights))
    return degrees


def iter_row_blocks(rows: CSR, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with at most ``size`` entries, or with a single larger row."""
    indptr = rows.indptr.numpy()
    start = 0
    while start < rows.num_rows:
        stop = max(int(np.searchsorted(indptr, indptr[start] + size, side="right")) - 1, start + 1)
        yield start, stop
        start = stop
