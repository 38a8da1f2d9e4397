"""The layout of a graph for an Ascend chip: an order of its rows, cut into chunks that fit the memory of a core."""

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
from lightning_gnn.compressed.locality_partition import even_bounds, partition_rows
from lightning_gnn.graph.csr import CSR

_Array = npt.NDArray[Any]
MAX_VERTICES = 2048
"""Rows and columns of a chunk together: as many rows of 64 float32 as half of 1 MiB holds (double buffer)."""
_CHUNKS_FOR_BALANCE = 1024  # a chunk takes no more than twice as many edges as vertices, or this part of all
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ChipLayout:
    """One direction of a graph in chunks."""

    chunks: Chunks
    places: Tensor | None
    """Which entry of the rows each entry of the chunks is, int64 ``[num_edges]``; None: the same one."""
    order: Literal["locality", "natural"]  # of the rows: that of algorithm 2, or that of ids where it loads fewer rows


class ChunkedRows(NamedTuple):
    """Rows in order and where their chunks begin, before the columns of a chunk are numbered."""

    rows: _Array  # vertex of each row, int32 [R]
    first: _Array  # first entry of each row, int64 [R]
    last: _Array  # the entry after the last one of each row, int64 [R]
    row_ptr: _Array  # first row of each chunk, int64 [k + 1]
    column_ptr: _Array  # first column of each chunk, int64 [k + 1]

    @property
    def rows_loaded(self) -> int:
        """Distinct columns of each chunk, summed."""
        return int(self.column_ptr[-1])


def chunk_rows(
    rows: _Array, first: _Array, last: _Array, indices: _Array, num_columns: int, max_vertices: int
) -> ChunkedRows:
    """Cut rows into chunks; the arrays are those of :func:`~lightning_gnn.compressed.chunks.cut_rows`."""
    max_entries = max(2 * max_vertices, -(-indices.size // _CHUNKS_FOR_BALANCE))
    rows, first, last, row_ptr = cut_rows(indices, rows, first, last, num_columns, max_vertices, max_entries)
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


def build_layout(matrix: CSR, max_vertices: int | None = None) -> ChipLayout:
    """Order the rows by algorithm 2 unless that loads more of them, cut them into chunks, compress their columns."""
    max_vertices = MAX_VERTICES if max_vertices is None else max_vertices
    here = matrix.to("cpu")
    indptr, indices, num_columns = here.indptr.numpy(), here.indices.numpy(), here.num_columns
    rows = np.arange(indptr.size - 1, dtype=np.int32)
    chosen, order = chunk_rows(rows, indptr[:-1], indptr[1:], indices, num_columns, max_vertices), "natural"
    if (parts := min(chosen.row_ptr.size - 1, rows.size)) > 1:
        by_column = here.transposed()
        offsets, targets = by_column.indptr.numpy(), by_column.indices.numpy()
        rows = partition_rows(indptr, indices, offsets, targets, even_bounds(rows.size, parts))
        local = chunk_rows(rows, indptr[rows], indptr[rows + 1], indices, num_columns, max_vertices)
        if local.rows_loaded < chosen.rows_loaded:
            chosen, order = local, "locality"
        _log.info("the chunks of the graph are in %s order, which loads %d rows per sum", order, chosen.rows_loaded)
    chunks, places = compress_columns(indices, *chosen, here.num_rows, num_columns)
    device = matrix.indices.device
    moved = None if order == "natural" else torch.from_numpy(places).to(device)
    return ChipLayout(chunks.to(device), moved, order)  # type: ignore[arg-type]
