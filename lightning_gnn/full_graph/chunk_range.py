"""A range of a compressed graph's rows as a bipartite graph of its own, numbered in the order of the owners."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from lightning_gnn.graph.chunks import Chunks, compress_columns, count_columns
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.hybrid_plan import PlanSettings


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Where the forward rows of a graph may be cut: in front of a vertex, never between the parts of a hub.

    Args:
        starts: First row of each vertex's run, and the number of rows, int64 ``[V + 1]``.
        loads: Edges of each run, int64 ``[V]``.
    """

    starts: np.ndarray
    loads: np.ndarray

    @classmethod
    def of(cls, chunks: Chunks) -> RowRuns:
        """Find the runs."""
        rows, indptr = chunks.rows.numpy(), chunks.indptr.numpy()
        starts = np.flatnonzero(np.concatenate([rows[:1] >= 0, rows[1:] != rows[:-1], [True]]))
        return cls(starts, np.diff(indptr[starts]))


@dataclass(frozen=True, eq=False)
class ChunkRange:
    """The targets of a range of forward rows, and the sources of their edges.

    Args:
        targets: Positions in the order of the owners, ascending, int64.
        sources: Likewise; all vertices where they are so wanted.
        edges: First edge and the one after the last, in the whole graph's forward order.
    """

    targets: np.ndarray
    sources: np.ndarray
    edges: tuple[int, int]


def chunk_range(graph: CompressedGraph, position: np.ndarray, rows: tuple[int, int], all_sources: bool) -> ChunkRange:
    """Find the vertices of a range.

    Args:
        graph: The whole graph, on the CPU.
        position: Position of each vertex in the order of the owners, int64 ``[V]``.
        rows: First forward row and the one after the last.
        all_sources: Take all vertices for sources, used or not.
    """
    chunks = graph.forward
    edges = (int(chunks.indptr[rows[0]]), int(chunks.indptr[rows[1]]))
    targets = np.unique(position[chunks.rows.numpy()[rows[0] : rows[1]]])
    if all_sources:
        return ChunkRange(targets, np.arange(position.size), edges)
    used: np.ndarray = np.zeros(position.size, bool)
    used[position[chunks.entry_columns().numpy()[edges[0] : edges[1]]]] = True
    return ChunkRange(targets, np.flatnonzero(used), edges)


def cut_out(
    graph: CompressedGraph,
    position: np.ndarray,
    rows: tuple[int, int],
    cut: ChunkRange,
    settings: PlanSettings,
) -> CompressedGraph:
    """Build the bipartite graph of a range, whose forward order is that part of the whole graph's.

    Its chunks are those of the whole graph, without what lies outside the range.

    Args:
        graph: The whole graph, on the CPU.
        position: As for :func:`chunk_range`.
        rows: As for :func:`chunk_range`.
        cut: The result of :func:`chunk_range`.
        settings: Who executes its aggregations.
    """
    start, stop = cut.edges
    target_of: np.ndarray = np.full(position.size, -1, np.int32)
    target_of[cut.targets] = np.arange(cut.targets.size)
    source_of: np.ndarray = np.full(position.size, -1, np.int32)
    source_of[cut.sources] = np.arange(cut.sources.size)

    whole = graph.forward
    first_row, last_row = rows
    forward = _rebuilt(
        source_of[position[whole.entry_columns().numpy()[start:stop]]],
        target_of[position[whole.rows.numpy()[first_row:last_row]]],
        whole.indptr.numpy()[first_row : last_row + 1] - start,
        np.clip(whole.row_ptr.numpy(), first_row, last_row) - first_row,
        cut.targets.size,
        cut.sources.size,
    )
    whole = graph.backward
    assert whole.edge_ids is not None
    places = whole.edge_ids.numpy()
    kept = (places >= start) & (places < stop)
    before: np.ndarray = np.concatenate([[0], np.cumsum(kept)])
    indptr = before[whole.indptr.numpy()]
    back_rows = source_of[position[whole.rows.numpy()]]
    # Rows of sources that the range does not need go, and of split hubs the parts that are left empty, but for one.
    present = (back_rows >= 0) & (np.diff(indptr) > 0)
    if not present.all():
        missing: np.ndarray = np.ones(cut.sources.size, bool)
        missing[back_rows[present]] = False
        candidates = np.flatnonzero((back_rows >= 0) & ~present)
        candidates = candidates[missing[back_rows[candidates]]]
        _, once = np.unique(back_rows[candidates], return_index=True)
        present[candidates[once]] = True
    left: np.ndarray = np.concatenate([[0], np.cumsum(present)])
    backward = _rebuilt(
        target_of[position[whole.entry_columns().numpy()[kept]]],
        back_rows[present],
        np.concatenate([indptr[:-1][present], indptr[-1:]]),
        left[whole.row_ptr.numpy()],
        cut.sources.size,
        cut.targets.size,
    )
    edge_ids = torch.from_numpy((places[kept] - start).astype(np.int32 if stop - start < 2**31 else np.int64))
    return CompressedGraph(forward, replace(backward, edge_ids=edge_ids), settings=settings)


def _rebuilt(
    columns: np.ndarray, rows: np.ndarray, indptr: np.ndarray, row_ptr: np.ndarray, num_rows: int, num_columns: int
) -> Chunks:
    """Number the columns of each chunk anew; the entries keep their order."""
    row_ptr = np.unique(row_ptr)
    if row_ptr.size == 1:
        row_ptr = np.array([0, 0])
    first, last = indptr[:-1], indptr[1:]
    row_ptr = row_ptr.astype(np.int64)
    column_ptr = count_columns(columns, first, last, row_ptr, num_columns)
    chunks, _ = compress_columns(columns, rows, first, last, row_ptr, column_ptr, num_rows, num_columns)
    return chunks
