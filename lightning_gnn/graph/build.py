"""The layout of a graph for an Ascend chip: an order of its rows, cut into chunks, and how many rows these load."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.graph.chunks import Chunks, compress_columns, count_columns, cut_rows
from lightning_gnn.graph.csr import CSR
from lightning_gnn.graph.partition import Progress, even_bounds, partition_rows

Order = Literal["locality", "natural"]

_Array = npt.NDArray[Any]
LOCAL_BYTES = 1 << 20
"""Local memory of a core that chunks are sized for by default."""
_CHUNKS_FOR_BALANCE = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How rows in order are cut into chunks.

    Args:
        num_chunks: Chunks of equally many vertices, or None: as few as fit.
        max_vertices: Rows and columns of a chunk together, at least 3, or None for no limit. With a limit, a chunk also
            takes at most twice as many edges, or a 1024th of all if that is more, so that ranges can be balanced.
    """

    num_chunks: int | None
    max_vertices: int | None


@dataclass(frozen=True, eq=False)
class ChipLayout:
    """One direction of a graph in chunks.

    Args:
        chunks: The chunks.
        places: Which entry of the rows each entry of the chunks is, int64 ``[num_edges]``; None: the same one.
        order: ``"locality"`` where the rows are in the order of algorithm 2; ``"natural"`` where they are in the order
            of their ids, be it that this was asked for or that it loads fewer rows.
        limits: How the rows were cut into chunks.
    """

    chunks: Chunks
    places: Tensor | None
    order: Order
    limits: Limits

    def redundancy(self) -> Redundancy:
        """Count the rows that an aggregation loads, against the natural order and a random one; prints as a table."""
        return measure_redundancy(self.chunks, self.limits, self.order)


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
        """Distinct columns of each chunk, summed."""
        return int(self.column_ptr[-1])


def choose_limits(
    num_chunks: int | Literal["auto"] = "auto",
    num_columns_hint: int = 64,
    element_size: int = 4,
    local_bytes: int | None = None,
) -> Limits:
    """Size chunks for a local memory, of which each takes half (double buffer); see
    :meth:`CompressedGraph.chunked`.
    """
    automatic = num_chunks == "auto"
    wanted = num_chunks if isinstance(num_chunks, int) and not isinstance(num_chunks, bool) else None
    if not automatic and (wanted is None or wanted < 1):
        raise ValueError(f"num_chunks must be 'auto' or a number of at least 1, but is {num_chunks!r}")
    if num_columns_hint < 1 or element_size < 1:
        raise ValueError(f"num_columns_hint={num_columns_hint} and element_size={element_size} must be at least 1")
    if local_bytes is None and not automatic:
        return Limits(wanted, None)
    row_bytes = num_columns_hint * element_size
    local_bytes = LOCAL_BYTES if local_bytes is None else local_bytes
    if (max_vertices := local_bytes // 2 // row_bytes) < 3:
        raise ValueError(
            f"local_bytes={local_bytes} is too small: half of it must hold 3 rows of {num_columns_hint} columns, so "
            f"give at least {6 * row_bytes} or a smaller num_columns_hint"
        )
    return Limits(wanted, max_vertices)


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
    return ChunkedRows(rows, first, last, row_ptr, count_columns(indices, first, last, row_ptr, num_columns))


_layouts: MutableMapping[Tensor, ChipLayout] = WeakIdKeyDictionary()
"""By ``indices``; what is kept holds none of the arrays that it was made of."""


def layout_of(matrix: CSR) -> ChipLayout:
    """Return the layout that NPUs read; made at the first call and kept as long as the rows."""
    known = _layouts.get(matrix.indices)
    if known is None:
        with torch.inference_mode(False), torch.no_grad():
            known = _layouts[matrix.indices] = build_layout(matrix)
    return known


def build_layout(
    matrix: CSR, order: Order = "locality", limits: Limits | None = None, progress: Progress | None = None
) -> ChipLayout:
    """Choose an order of the rows, cut them into chunks, and compress their columns.

    Args:
        order: Wanted order.
        limits: What a chunk may hold; by default as many vertices as half the local memory has room for.
        progress: Called with the name of a step and the fraction that is done.
    """
    if order not in ("locality", "natural"):
        raise ValueError(f"order must be 'locality' or 'natural', but is {order!r}")
    limits = limits or choose_limits()
    report = progress or (lambda step, fraction: None)
    here = matrix.to("cpu")
    indptr, indices, num_columns = here.indptr.numpy(), here.indices.numpy(), here.num_columns
    rows = np.arange(indptr.size - 1, dtype=np.int32)
    chosen, chosen_order = chunk_rows(rows, indptr[:-1], indptr[1:], indices, num_columns, limits), "natural"
    parts = 1
    if order == "locality":
        parts = min(chosen.row_ptr.size - 1 if limits.num_chunks is None else limits.num_chunks, rows.size)
    if parts > 1:
        by_column = here.transposed()
        offsets, targets = by_column.indptr.numpy(), by_column.indices.numpy()
        rows = partition_rows(indptr, indices, offsets, targets, even_bounds(rows.size, parts), report)
        local = chunk_rows(rows, indptr[rows], indptr[rows + 1], indices, num_columns, limits)
        if local.rows_loaded < chosen.rows_loaded:
            chosen, chosen_order = local, "locality"
        _log.info(
            "the chunks of the graph are in %s order, which loads %d rows per aggregation",
            chosen_order,
            chosen.rows_loaded,
        )
    report("compress", 0.0)
    chunks, places = compress_columns(indices, *chosen, here.num_rows, num_columns)
    report("compress", 1.0)
    device = matrix.indices.device
    moved = None if chosen_order == "natural" else torch.from_numpy(places).to(device)
    return ChipLayout(chunks.to(device), moved, chosen_order, limits)  # type: ignore[arg-type]


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
