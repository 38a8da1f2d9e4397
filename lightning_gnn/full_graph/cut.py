"""What a rank needs of a compressed graph: a range of its forward rows, cut out without a copy of the rest.

The whole graph may lie on disk, mapped. Of its edges, those of the range are brought to memory, and no others; beside
them, there are arrays with an entry per vertex. The places of all edges in the transposed order are read once, one
after the other, to find those of the range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn.graph.chunks import Chunks, compress_columns, count_columns
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.csc import INT32_MAX
from lightning_gnn.graph.hybrid_plan import PlanSettings
from lightning_gnn.graph.self_loops import loop_rows, pick

_Array = npt.NDArray[Any]
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Where the forward rows of a graph may be cut: in front of a vertex, never between the parts of a hub.

    Args:
        starts: First row of each vertex's run, and the number of rows, int64 ``[V + 1]``.
        loads: Edges of each run, int64 ``[V]``.
    """

    starts: _Array
    loads: _Array

    @classmethod
    def of(cls, chunks: Chunks, loops: Tensor | None = None) -> RowRuns:
        """Find the runs.

        Args:
            loops: Self-loops of each vertex, ``[V]``, for which exactly one is counted; None leaves them as they are.
        """
        rows, indptr = chunks.rows.numpy(), chunks.indptr.numpy()
        starts = np.flatnonzero(np.concatenate([rows[:1] >= 0, rows[1:] != rows[:-1], [True]]))
        loads = np.diff(indptr[starts])
        return cls(starts, loads if loops is None else loads + 1 - loops.numpy()[rows[starts[:-1]]])


@dataclass(frozen=True, eq=False)
class UserEdges:
    """Which of the user's edges the entries of a range of forward rows are.

    Args:
        before: First entry and the one after the last among those of the graph as it is.
        edge_ids: The user's edge of each entry, ``[n]``, -1 for a self-loop that was added; None: ``before``.
        weight_ids: The user's edge that gives each entry its weight; see
            :class:`~lightning_gnn.graph.self_loops.WithSelfLoops`.
    """

    before: tuple[int, int]
    edge_ids: Tensor | None
    weight_ids: Tensor | None

    def values(self, values: Tensor, fill: float, weights: bool = False) -> Tensor:
        """Return values of the user's edges, ``[num_user_edges, …]``, for each entry; differentiable."""
        ids = self.weight_ids if weights else self.edge_ids
        return values[slice(*self.before)] if ids is None else pick(values, ids, fill)


@dataclass(frozen=True, eq=False)
class RowEntries:
    """The entries of a range of forward rows, in order.

    Args:
        rows: Vertex of each row, int32 ``[R]``.
        indptr: First entry of each row, from 0, int64 ``[R + 1]``.
        columns: Vertex of each entry on the column side, int32 ``[n]``.
        user: Which of the user's edges they are.
        place_of: Where the graph's own entries have come to lie, int64, -1 for a self-loop; None: where they were.
        loop_of: Where the self-loop of each vertex lies, int64 ``[V]``, -1 for a vertex without a row here, or None.
    """

    rows: _Array
    indptr: _Array
    columns: _Array
    user: UserEdges
    place_of: _Array | None = None
    loop_of: _Array | None = None

    @classmethod
    def of(cls, graph: CompressedGraph, rows: tuple[int, int], looped: bool) -> RowEntries:
        """Read a range.

        Args:
            rows: First forward row and the one after the last, all rows of each vertex among them.
        """
        chunks, (first, last) = graph.forward, rows
        vertices, indptr = chunks.rows[first:last].numpy(), chunks.indptr[first : last + 1].numpy()
        before = start, stop = int(indptr[0]), int(indptr[-1])
        ids = None if graph.edge_ids is None else graph.edge_ids[start:stop]
        indptr, columns = indptr - start, chunks.row_columns(first, last).numpy()
        if not looped:
            return cls(vertices, indptr, columns, UserEdges(before, ids, ids))
        user_edges = np.arange(start, stop) if ids is None else ids.numpy()
        found = loop_rows(vertices, indptr, columns, user_edges, chunks.num_rows)
        dtype = torch.int32 if graph.num_user_edges <= INT32_MAX else torch.int64
        new, weights = (torch.from_numpy(ids).to(dtype) for ids in (found.edge_ids, found.weight_ids))
        user = UserEdges(before, new, weights)
        return cls(vertices, found.indptr, found.columns, user, found.place_of, found.loop_of)


@dataclass(frozen=True, eq=False)
class Part:
    """A range of forward rows as a graph of its own.

    Args:
        graph: Bipartite. Its forward order is that part of the whole graph's, and its chunks are those of the whole
            graph, without what lies outside the range.
        targets: Positions of its targets in the order of the owners, ascending, int32.
        sources: The same of its sources; all vertices where they are so wanted.
    """

    graph: CompressedGraph
    targets: _Array
    sources: _Array


def cut_out(
    graph: CompressedGraph,
    position: _Array,
    rows: tuple[int, int],
    looped: bool,
    all_sources: bool,
    settings: PlanSettings,
) -> Part:
    """Cut a range out of a graph.

    Args:
        position: Position of each vertex in the order of the owners, int64 ``[V]``.
        rows: First forward row and the one after the last, all rows of each vertex among them.
        all_sources: Take all vertices for sources, used or not.
    """
    entries = RowEntries.of(graph, rows, looped)
    targets, target_of = _numbered(position, entries.rows, False)
    sources, source_of = _numbered(position, entries.columns, all_sources)
    row_targets = target_of[entries.rows]
    whole = graph.forward
    forward = _rebuilt(
        source_of[entries.columns],
        row_targets,
        entries.indptr,
        np.clip(whole.row_ptr.numpy(), *rows) - rows[0],
        targets.size,
        sources.size,
    )
    whole = graph.backward
    assert whole.edge_ids is not None
    size = int(entries.indptr[-1])
    places: _Array = np.empty(size, np.int32 if size <= INT32_MAX else np.int64)
    nothing: _Array = np.empty(0, np.int64)
    indptr = _find_places(
        whole.edge_ids.numpy(),
        whole.rows.numpy(),
        whole.indptr.numpy(),
        *entries.user.before,
        nothing if entries.place_of is None else entries.place_of,
        nothing if entries.loop_of is None else entries.loop_of,
        places,
    )
    back_rows = source_of[whole.rows.numpy()]
    present = _rows_left(back_rows, np.diff(indptr), sources.size)
    left: _Array = np.concatenate([[0], np.cumsum(present)])
    backward = _rebuilt(
        np.repeat(row_targets, np.diff(entries.indptr))[places],
        back_rows[present],
        np.concatenate([indptr[:-1][present], indptr[-1:]]),
        left[whole.row_ptr.numpy()],
        sources.size,
        targets.size,
    )
    backward = replace(backward, edge_ids=torch.from_numpy(places))
    return Part(CompressedGraph(forward, backward, settings=settings), targets, sources)


def in_weights(graph: CompressedGraph, edge_weight: Tensor, looped: bool, weights: bool, fill: float) -> Tensor:
    """Return the sum of the weights of each vertex's edges, ``[V]``; differentiable.

    Args:
        edge_weight: ``[num_user_edges]``.
    """
    degrees = edge_weight.new_zeros(graph.num_targets)
    # What autograd needs to keep is as large as the graph in any case.
    for rows in row_blocks(graph.forward, graph.num_edges if edge_weight.requires_grad else _BLOCK):
        entries = RowEntries.of(graph, rows, looped)
        index = torch.from_numpy(np.repeat(entries.rows, np.diff(entries.indptr)))
        degrees = degrees.index_add(0, index, entries.user.values(edge_weight, fill, weights))
    return degrees


def row_blocks(chunks: Chunks, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, all rows of each vertex in one, of about ``size`` entries or of one vertex."""
    starts, indptr = RowRuns.of(chunks).starts, chunks.indptr.numpy()
    ends = indptr[starts]
    at = 0
    while at < starts.size - 1:
        after = max(int(np.searchsorted(ends, ends[at] + size, side="right")) - 1, at + 1)
        yield int(starts[at]), int(starts[after])
        at = after


def _numbered(position: _Array, vertices: _Array, every: bool) -> tuple[_Array, _Array]:
    """Return the positions of some vertices, ascending, int32, and the number of each vertex there, -1 for none."""
    used: _Array = np.full(position.size, every)
    used[position[vertices]] = True
    positions = np.flatnonzero(used).astype(np.int32)
    number = np.cumsum(used, dtype=np.int32) - 1
    number[~used] = -1
    return positions, number[position]


@numba.njit(nogil=True, cache=True)
def _find_places(
    places: _Array,
    rows: _Array,
    indptr: _Array,
    start: int,
    stop: int,
    place_of: _Array,
    loop_of: _Array,
    found: _Array,
) -> npt.NDArray[np.int64]:
    """Write the places, counted from ``start``, of those entries of the transpose that lie in a range of the forward
    order; return the first of each row, int64 ``[R + 1]``.

    Args:
        places: Place of each entry in the forward order, ``[E]``.
        rows: Vertex of each row of the transpose, ``[R]``.
        indptr: First entry of each, ``[R + 1]``.
        place_of: Where the range's entries have come to lie, -1 for those that are left out; empty: where they were.
        loop_of: Where the self-loop of each vertex lies, -1 for none, or empty. It comes last of its vertex.
    """
    first = np.empty(rows.size + 1, np.int64)
    first[0] = count = 0
    for row in range(rows.size):
        for e in range(indptr[row], indptr[row + 1]):
            place = places[e]
            if start <= place < stop:
                place = place - start
                if place_of.size:
                    place = place_of[place]
                if place >= 0:
                    found[count] = place
                    count += 1
        ends = row + 1 == rows.size or rows[row + 1] != rows[row]
        if loop_of.size and ends and loop_of[rows[row]] >= 0:
            found[count] = loop_of[rows[row]]
            count += 1
        first[row + 1] = count
    return first


def _rows_left(rows: _Array, lengths: _Array, num_rows: int) -> _Array:
    """Say which rows stay: those with entries, and one of a vertex that has none but is there; -1 is no vertex."""
    present = (rows >= 0) & (lengths > 0)
    missing: _Array = np.ones(num_rows, bool)
    missing[rows[present]] = False
    candidates = np.flatnonzero((rows >= 0) & ~present)
    candidates = candidates[missing[rows[candidates]]]
    _, once = np.unique(rows[candidates], return_index=True)
    present[candidates[once]] = True
    return present


def _rebuilt(columns: _Array, rows: _Array, indptr: _Array, row_ptr: _Array, num_rows: int, num_columns: int) -> Chunks:
    """Number the columns of each chunk anew; the entries keep their order."""
    row_ptr = np.unique(row_ptr)
    if row_ptr.size == 1:
        row_ptr = np.array([0, 0])
    first, last = indptr[:-1], indptr[1:]
    row_ptr = row_ptr.astype(np.int64)
    column_ptr = count_columns(columns, first, last, row_ptr, num_columns)
    chunks, _ = compress_columns(columns, rows, first, last, row_ptr, column_ptr, num_rows, num_columns)
    return chunks
