"""Builds the layout of a graph for Ascend chips: ordered rows, split into chunks that fit the memory of a core."""

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.compressed.chunks import Chunks, compress_columns, count_columns, cut_rows
from lightning_gnn.compressed.locality_partition import even_bounds, partition_rows, partition_rows_as_published
from lightning_gnn.graph.csr import CSR

_Array = npt.NDArray[Any]
MAX_VERTICES = 2048
"""Maximum rows plus columns of a chunk: rows of 64 float32 that fill half of 1 MiB (double buffering)."""
_CHUNKS_FOR_BALANCE = 1024  # a chunk has at most 2 * max_vertices edges, or 1/1024 of all if that is more
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ChipLayout:
    """One direction of a graph, split into chunks."""

    chunks: Chunks
    places: Tensor | None
    """Position in the CSR of each entry of the chunks, int64 ``[num_edges]``; None: the orders are equal."""
    order: Literal["locality", "natural", "paper"]
    """Row order: that of algorithm 2, that of ids if it loads fewer rows, or that of algorithm 2 to the letter."""


class ChunkedRows(NamedTuple):
    """Ordered rows and the start of each chunk, before the columns of a chunk are numbered."""

    rows: _Array  # vertex of each row, int32 [R]
    first: _Array  # first entry of each row, int64 [R]
    last: _Array  # last entry of each row, exclusive, int64 [R]
    row_ptr: _Array  # first row of each chunk, int64 [k + 1]
    column_ptr: _Array  # first column of each chunk, int64 [k + 1]

    @property
    def rows_loaded(self) -> int:
        """Sum of the distinct columns of each chunk."""
        return int(self.column_ptr[-1])


def chunk_rows(
    rows: _Array, first: _Array, last: _Array, indices: _Array, num_columns: int, max_vertices: int
) -> ChunkedRows:
    """Split rows into chunks; for the arrays, see :func:`~lightning_gnn.compressed.chunks.cut_rows`."""
    max_entries = max(2 * max_vertices, -(-indices.size // _CHUNKS_FOR_BALANCE))
    rows, first, last, row_ptr = cut_rows(indices, rows, first, last, num_columns, max_vertices, max_entries)
    return ChunkedRows(rows, first, last, row_ptr, count_columns(indices, first, last, row_ptr, num_columns))


_layouts: MutableMapping[Tensor, dict[str, ChipLayout]] = WeakIdKeyDictionary()
"""Cache by ``indices`` and kind of chunks; its values do not reference the arrays of the graph."""


def layout_of(matrix: CSR, kind: Literal["balanced", "paper"] = "balanced") -> ChipLayout:
    """Return the layout for NPUs, which is built at the first call and cached as long as ``matrix.indices`` exists."""
    layouts = _layouts.setdefault(matrix.indices, {})
    if kind not in layouts:
        with torch.inference_mode(False), torch.no_grad():
            layouts[kind] = build_layout(matrix, kind=kind)
    return layouts[kind]


def build_layout(
    matrix: CSR, max_vertices: int | None = None, kind: Literal["balanced", "paper"] = "balanced"
) -> ChipLayout:
    """Split the rows into chunks, in the order of algorithm 2 or of ids, whichever loads fewer rows."""
    max_vertices = MAX_VERTICES if max_vertices is None else max_vertices
    on_cpu = matrix.to("cpu")
    indptr, indices, num_columns = on_cpu.indptr.numpy(), on_cpu.indices.numpy(), on_cpu.num_columns
    rows = np.arange(indptr.size - 1, dtype=np.int32)
    chosen, order = chunk_rows(rows, indptr[:-1], indptr[1:], indices, num_columns, max_vertices), "natural"
    parts = min(chosen.row_ptr.size - 1, rows.size)
    if kind == "paper" and rows.size:
        rows, _ = partition_rows_as_published(indptr, indices, num_columns, parts)
        chosen = chunk_rows(rows, indptr[rows], indptr[rows + 1], indices, num_columns, max_vertices)
        order = "paper"
    elif parts > 1:
        by_column = on_cpu.transposed()
        offsets, targets = by_column.indptr.numpy(), by_column.indices.numpy()
        rows = partition_rows(indptr, indices, offsets, targets, even_bounds(rows.size, parts))
        local = chunk_rows(rows, indptr[rows], indptr[rows + 1], indices, num_columns, max_vertices)
        if local.rows_loaded < chosen.rows_loaded:
            chosen, order = local, "locality"
        _log.info("chunks of the graph in %s order load %d rows per aggregation", order, chosen.rows_loaded)
    chunks, places = compress_columns(indices, *chosen, on_cpu.num_rows, num_columns)
    device = matrix.indices.device
    positions = None if order == "natural" else torch.from_numpy(places).to(device)
    return ChipLayout(chunks.to(device), positions, order)  # type: ignore[arg-type]
