"""What a rank needs of a whole graph: a range of its forward rows, cut out without a copy of the rest.

The whole graph may lie on disk, mapped. Of its edges, those of the range are brought to memory, and no others; beside
them, there are arrays with an entry per vertex.
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
_BLOCK = 1 << 20


def count_self_loops(rows: CSR) -> Tensor:
    """Return how many self-loops each vertex has, int32 ``[num_rows]``; for a square matrix, on the CPU."""
    counts = torch.zeros(rows.num_rows, dtype=torch.int32)
    for first, last in row_blocks(rows, _BLOCK):
        start, stop = int(rows.indptr[first]), int(rows.indptr[last])
        vertices = torch.arange(first, last, dtype=torch.int32)
        row = torch.repeat_interleave(vertices, rows.indptr[first : last + 1].diff())
        counts.index_add_(0, row, (rows.indices[start:stop] == row).to(torch.int32))
    return counts


@dataclass(frozen=True, eq=False)
class UserEdges:
    """Which of the user's edges the entries of a range of forward rows are."""

    before: tuple[int, int]  # first entry and the one after the last among those of the graph as it is
    edge_ids: Tensor | None  # the user's edge of each entry, [n], -1 for a self-loop that was added; None: before
    weight_ids: Tensor | None
    """The user's edge that gives each entry its weight; see ``LoopedRows``."""

    def values(self, values: Tensor, fill: float, weights: bool = False) -> Tensor:
        """Return values of the user's edges, ``[num_user_edges, …]``, for each entry; differentiable."""
        ids = self.weight_ids if weights else self.edge_ids
        return values[slice(*self.before)] if ids is None else pick(values, ids, fill)


@dataclass(frozen=True, eq=False)
class RowEntries:
    """The entries of a range of forward rows, in order."""

    first: int  # vertex of the first row; the others follow it
    indptr: _Array  # first entry of each row, from 0, int64 [R + 1]
    columns: _Array  # vertex of each entry on the column side, int32 [n]
    user: UserEdges  # which of the user's edges they are

    @classmethod
    def of(cls, graph: CompressedGraph, rows: tuple[int, int], looped: bool) -> RowEntries:
        """Read a range of rows, from the first one to the one after the last."""
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
        """Return the vertex of the row of each entry, int64 ``[n]``."""
        return self.first + np.repeat(np.arange(self.indptr.size - 1), np.diff(self.indptr))


@dataclass(frozen=True, eq=False)
class RowRangeGraph:
    """A range of forward rows as a graph of its own."""

    graph: CompressedGraph  # bipartite. Its forward order is that part of the whole graph's
    targets: _Array  # positions of its targets in the order of the owners, ascending, int32
    row_of: Tensor  # the row of each of them in the graph, whose rows are in the order of the vertices, int64
    sources: _Array  # positions of its sources, ascending, int32; all vertices where they are so wanted


def extract_row_range(
    graph: CompressedGraph,
    position: _Array,  # position of each vertex in the order of the owners, int64 [V]
    rows: tuple[int, int],
    looped: bool,
    all_sources: bool,
    settings: PlanSettings,
) -> RowRangeGraph:
    """Cut rows, from the first one to the one after the last, out of a graph; all vertices are sources if wanted."""
    entries = RowEntries.of(graph, rows, looped)
    used: _Array = np.full(position.size, all_sources)
    used[position[entries.columns]] = True
    sources = np.flatnonzero(used).astype(np.int32)
    number = np.cumsum(used, dtype=np.int32) - 1
    indices = torch.from_numpy(number[position[entries.columns]])
    forward = CSR(torch.from_numpy(entries.indptr), indices, sources.size)
    of_rows = position[slice(*rows)]
    row_of = np.argsort(of_rows)
    return RowRangeGraph(
        CompressedGraph(forward, settings=settings),
        of_rows[row_of].astype(np.int32),
        torch.from_numpy(row_of),
        sources,
    )


def in_weights(graph: CompressedGraph, edge_weight: Tensor, looped: bool, weights: bool, fill: float) -> Tensor:
    """Return the sum of the weights of each vertex's edges, ``[V]``; differentiable."""
    degrees = edge_weight.new_zeros(graph.num_targets)
    # What autograd needs to keep is as large as the graph in any case.
    for rows in row_blocks(graph.forward, graph.num_edges if edge_weight.requires_grad else _BLOCK):
        entries = RowEntries.of(graph, rows, looped)
        index = torch.from_numpy(entries.entry_rows())
        degrees = degrees.index_add(0, index, entries.user.values(edge_weight, fill, weights))
    return degrees


def row_blocks(rows: CSR, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of about ``size`` entries or of one row."""
    indptr = rows.indptr.numpy()
    at = 0
    while at < rows.num_rows:
        after = max(int(np.searchsorted(indptr, indptr[at] + size, side="right")) - 1, at + 1)
        yield at, after
        at = after
