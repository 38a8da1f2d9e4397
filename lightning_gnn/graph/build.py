"""Choose the order and the chunks of both directions of a graph, and count the rows that they load."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_gnn.graph.cache_model import GAIN, least_cost, order_cost
from lightning_gnn.graph.chunks import Chunks, compress_columns, count_columns, cut_rows
from lightning_gnn.graph.csc import index_dtype, transpose
from lightning_gnn.graph.hybrid_plan import PlanSettings
from lightning_gnn.graph.partition import Progress, even_bounds, partition_rows

Order = Literal["locality", "natural"]
Wanted = Literal["auto", "locality", "natural"]

NATURAL: Order = "natural"
_Array = npt.NDArray[Any]
_Transpose = tuple[_Array, _Array, _Array]
LOCAL_BYTES = 1 << 20
"""Local memory of a worker that chunks are sized for by default: the level-2 cache of a core."""
_CHUNKS_FOR_BALANCE = 1024
_ROWS_ON_CPU = 2048
"""Rows of a chunk that is made for a CPU, on which only the order of the rows counts."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How rows in order are cut into chunks.

    Args:
        num_chunks: Chunks of equally many vertices, or None: as few as fit.
        max_vertices: Rows and columns of a chunk together, at least 3, or None for no limit. With a limit, a chunk also
            takes at most twice as many edges, or a 1024th of all if that is more, so that ranges can be balanced.
        multiple: Number that the number of chunks is to be a multiple of, where there are enough rows.
    """

    num_chunks: int | None
    max_vertices: int | None
    multiple: int = 1


class ChunkedRows(NamedTuple):
    """Rows in order and where their chunks begin, before the columns of a chunk are numbered.

    Args:
        rows: Vertex of each row, int32 ``[R]``.
        first: First entry of each row, int64 ``[R]``.
        last: The entry after the last one of each row, int64 ``[R]``.
        row_ptr: First row of each chunk, int64 ``[k + 1]``.
        column_ptr: First column of each chunk, int64 ``[k + 1]``.
    """

    rows: _Array
    first: _Array
    last: _Array
    row_ptr: _Array
    column_ptr: _Array

    @property
    def rows_loaded(self) -> int:
        """Distinct columns, summed over the chunks."""
        return int(self.column_ptr[-1])


class Direction(NamedTuple):
    """One direction of a graph, and for each entry its place in the arrays that it was built from."""

    chunks: Chunks
    places: _Array
    order: Order


def choose_limits(
    num_chunks: int | Literal["auto"],
    num_columns_hint: int,
    element_size: int,
    local_bytes: int | None,
    settings: PlanSettings | None,
) -> Limits:
    """Size chunks for a local memory, of which each takes half (double buffer); see
    :meth:`CompressedGraph.from_graph`.
    """
    automatic = num_chunks == "auto"
    wanted = num_chunks if isinstance(num_chunks, int) and not isinstance(num_chunks, bool) else None
    if not automatic and (wanted is None or wanted < 1):
        raise ValueError(f"num_chunks must be 'auto' or a number of at least 1, but is {num_chunks!r}")
    if num_columns_hint < 1 or element_size < 1:
        raise ValueError(f"num_columns_hint={num_columns_hint} and element_size={element_size} must be at least 1")
    multiple = settings.num_workers or 1 if settings is not None and automatic else 1
    if local_bytes is None and not automatic:
        return Limits(wanted, None, multiple)
    row_bytes = num_columns_hint * element_size
    local_bytes = LOCAL_BYTES if local_bytes is None else local_bytes
    if (max_vertices := local_bytes // 2 // row_bytes) < 3:
        raise ValueError(
            f"local_bytes={local_bytes} is too small: half of it must hold 3 rows of {num_columns_hint} columns, so "
            f"give at least {6 * row_bytes} or a smaller num_columns_hint"
        )
    return Limits(wanted, max_vertices, multiple)


def chunk_rows(
    rows: _Array, first: _Array, last: _Array, indices: _Array, num_columns: int, limits: Limits
) -> ChunkedRows:
    """Cut rows into chunks.

    Args:
        rows: Vertices in order, int32 ``[V]``.
        first: First entry of each, int64 ``[V]``.
        last: The entry after the last one of each, int64 ``[V]``.
        indices: Column of each entry, ``[E]``.
        num_columns: Number of columns.
        limits: What a chunk may hold.
    """
    parts = 1 if limits.num_chunks is None else max(1, min(limits.num_chunks, rows.size))
    row_ptr = even_bounds(rows.size, parts)
    if limits.max_vertices is not None:
        max_entries = max(2 * limits.max_vertices, -(-indices.size // _CHUNKS_FOR_BALANCE))
        rows, first, last, row_ptr = cut_rows(
            indices, rows, first, last, row_ptr, num_columns, limits.max_vertices, max_entries
        )
    if limits.multiple > 1:
        row_ptr = _cut_to_multiple(first, last, row_ptr, limits.multiple)
    return ChunkedRows(rows, first, last, row_ptr, count_columns(indices, first, last, row_ptr, num_columns))


def _cut_to_multiple(first: _Array, last: _Array, row_ptr: _Array, multiple: int) -> _Array:
    """Halve the chunks with the most entries, so that each worker can have equally many; a small graph stays as is."""
    missing = -(row_ptr.size - 1) % multiple
    entries = np.concatenate([[0], np.cumsum(last - first)])
    loads = np.where(np.diff(row_ptr) > 1, np.diff(entries[row_ptr]), -1)
    heaviest = np.argsort(-loads, kind="stable")[:missing]
    if not missing or heaviest.size < missing or loads[heaviest[-1]] < 0:
        return row_ptr
    begin, end = row_ptr[heaviest], row_ptr[heaviest + 1]
    middle = np.searchsorted(entries, (entries[begin] + entries[end]) // 2)
    return np.sort(np.concatenate([row_ptr, np.clip(middle, begin + 1, end - 1)]))


def build_directions(
    indptr: _Array,
    indices: _Array,
    num_columns: int,
    order: Wanted,
    limits: Limits,
    progress: Progress | None = None,
) -> tuple[Direction, Direction]:
    """Build both directions of a graph in CSC form; the second one's ``edge_ids`` name places in the first one.

    A symmetric graph has one set of chunks for both, as the transpose of a partition would be the partition again.

    Args:
        indptr: First entry of each target, int64 ``[V + 1]``.
        indices: Source of each entry, ``[E]``.
        order: Wanted order; ``"auto"``: what the model of a CPU's caches says.
        limits: What a chunk may hold.
        progress: Called with the name of a step and the fraction that is done.
    """
    report = progress or (lambda step, fraction: None)
    report("transpose", 0.0)
    by_source: _Transpose = transpose(indptr, indices, num_columns)
    offsets, targets, entries = by_source
    by_target: _Transpose = transpose(offsets, targets, indptr.size - 1)  # as given, but sorted
    reverse = _reverse_edges(indptr, by_source, by_target)
    report("transpose", 1.0)
    if reverse is not None:
        forward = backward = _direction(indptr, indices, by_source, "both directions", order, limits, report)
        back = reverse[forward.places]
    else:
        forward = _direction(indptr, indices, by_source, "the forward direction", order, limits, report)
        backward = _direction(offsets, targets, by_target, "the backward direction", order, limits, report)
        back = entries[backward.places]
    dtype = index_dtype(indices.size)
    place_of: _Array = np.empty(indices.size, dtype)
    place_of[forward.places] = np.arange(indices.size, dtype=dtype)
    edge_ids = torch.from_numpy(place_of[back])
    return forward, backward._replace(chunks=replace(backward.chunks, edge_ids=edge_ids))


def _direction(
    indptr: _Array,
    indices: _Array,
    by_column: _Transpose,
    name: str,
    order: Wanted,
    limits: Limits,
    report: Progress,
) -> Direction:
    num_columns = by_column[0].size - 1
    rows = np.arange(indptr.size - 1, dtype=np.int32)
    chosen, chosen_order = chunk_rows(rows, indptr[:-1], indptr[1:], indices, num_columns, limits), NATURAL
    parts, before = 1, 0.0
    if order == "locality":
        parts = min(chosen.row_ptr.size - 1 if limits.num_chunks is None else limits.num_chunks, rows.size)
    elif order == "auto" and rows.size >= 2 * _ROWS_ON_CPU:
        before = order_cost(rows, indptr, indices, by_column[0])
        if least_cost(by_column[0], rows.size) <= GAIN * before:
            parts = rows.size // _ROWS_ON_CPU
    if parts > 1:
        rows = partition_rows(
            indptr,
            indices,
            by_column[0],
            by_column[1],
            even_bounds(rows.size, parts),
            lambda step, done: report(f"{step} {name}", done),
        )
        local = chunk_rows(rows, indptr[rows], indptr[rows + 1], indices, num_columns, limits)
        after = order_cost(rows, indptr, indices, by_column[0]) if order == "auto" else 0.0
        if after <= GAIN * before if order == "auto" else local.rows_loaded < chosen.rows_loaded:
            chosen, chosen_order = local, "locality"
        if order == "auto":
            _log.info(
                "compressed graph, %s: %s order of the vertices, for a CPU: 64 columns are predicted to take %.3g ms "
                "of a core in the natural order, %.3g ms in the locality-aware one",
                *(name, chosen_order, before, after),
            )
        elif chosen_order == NATURAL:
            _log.log(
                logging.WARNING if local.rows_loaded > chosen.rows_loaded else logging.INFO,
                "compressed graph, %s: keeps the natural order of the vertices, which loads %d rows per aggregation; "
                "the locality-aware order would load %d",
                name,
                chosen.rows_loaded,
                local.rows_loaded,
            )
    report(f"compress {name}", 0.0)
    chunks, places = compress_columns(indices, *chosen, indptr.size - 1, num_columns)
    report(f"compress {name}", 1.0)
    return Direction(chunks, places, chosen_order)


def _reverse_edges(indptr: _Array, by_source: _Transpose, by_target: _Transpose) -> _Array | None:
    """Return, for each edge (u, v) in CSC order, the place of (v, u), or None if the graph is not symmetric.

    Both sorted forms of a symmetric graph hold the same numbers, so an edge and its reverse have the same place there.
    """
    offsets, targets, entries = by_source
    if not (np.array_equal(offsets, indptr) and np.array_equal(targets, by_target[1])):
        return None
    reverse = np.empty_like(entries)
    reverse[entries[by_target[2]]] = entries
    return reverse


@dataclass(frozen=True)
class Redundancy:
    """Rows that one aggregation loads: the distinct in-neighbours of each chunk, summed; prints as a table.

    The other orders are cut by the same rule: into as many chunks of as many vertices or, with ``num_chunks="auto"``,
    into as many as fit the same memory.

    Args:
        order: ``"locality"`` or ``"natural"``: the order that was chosen.
        num_edges: Edges: the rows loaded without any reuse.
        num_vertices: Vertices with an edge out: the rows loaded if everything fitted into one chunk.
        rows_loaded: In the chosen order.
        natural_rows_loaded: In the order of the ids.
        random_rows_loaded: In a random order.
        num_chunks: Chunks in the chosen order.
        natural_num_chunks: Chunks in the order of the ids.
        random_num_chunks: Chunks in the random order.
    """

    order: str
    num_edges: int
    num_vertices: int
    rows_loaded: int
    natural_rows_loaded: int
    random_rows_loaded: int
    num_chunks: int
    natural_num_chunks: int
    random_num_chunks: int

    def __str__(self) -> str:
        lines = [f"{'rows loaded per aggregation':<34}{'rows':>14}{'chunks':>9}{'of natural':>12}{'per edge':>10}"]
        for name, rows, chunks in (
            (f"this graph ({self.order} order)", self.rows_loaded, self.num_chunks),
            ("natural order", self.natural_rows_loaded, self.natural_num_chunks),
            ("random order", self.random_rows_loaded, self.random_num_chunks),
            ("least: each row once", self.num_vertices, 1),
        ):
            natural = rows / max(self.natural_rows_loaded, 1)
            lines.append(f"{name:<34}{rows:>14,}{chunks:>9,}{natural:>12.3f}{rows / max(self.num_edges, 1):>10.3f}")
        return "\n".join(lines)


def measure_redundancy(chunks: Chunks, limits: Limits, order: str, seed: int = 0) -> Redundancy:
    """Count the rows loaded by chunks, and by those of the same matrix in natural and in random order."""
    rows, indptr, columns = chunks.rows.numpy(), chunks.indptr.numpy(), chunks.entry_columns().numpy()
    # The parts of a vertex are neighbours, so the first one's begin and the last one's end are the whole vertex's.
    first, last = (np.empty(chunks.num_rows, np.int64) for _ in range(2))
    first[rows[::-1]] = indptr[:-1][::-1]
    last[rows] = indptr[1:]

    def reordered(vertices: _Array) -> ChunkedRows:
        return chunk_rows(vertices, first[vertices], last[vertices], columns, chunks.num_columns, limits)

    natural = reordered(np.arange(chunks.num_rows, dtype=np.int32))
    random = reordered(np.random.default_rng(seed).permutation(chunks.num_rows).astype(np.int32))
    return Redundancy(
        order=order,
        num_edges=chunks.num_edges,
        num_vertices=int(np.unique(chunks.columns.numpy()).size),
        rows_loaded=chunks.columns.numel(),
        natural_rows_loaded=natural.rows_loaded,
        random_rows_loaded=random.rows_loaded,
        num_chunks=chunks.num_chunks,
        natural_num_chunks=natural.row_ptr.size - 1,
        random_num_chunks=random.row_ptr.size - 1,
    )
