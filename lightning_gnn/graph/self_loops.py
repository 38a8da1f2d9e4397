"""Self-loops and the symmetric normalisation of chunks, as PyG defines them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn.graph.chunks import Chunks, compress_columns, count_columns

_Array = npt.NDArray[Any]


class WithSelfLoops(NamedTuple):
    """A graph with exactly one self-loop per vertex.

    Args:
        forward: Rows are targets.
        backward: The transpose.
        edge_ids: The user's edge of each forward entry, ``[num_edges]``, -1 for a self-loop.
        weight_ids: The user's edge that gives each forward entry its weight, ``[num_edges]``: for a self-loop the last
            one that the vertex had (as in PyG's ``add_remaining_self_loops``), else -1.
    """

    forward: Chunks
    backward: Chunks
    edge_ids: Tensor
    weight_ids: Tensor


def add_self_loops(forward: Chunks, backward: Chunks, edge_ids: Tensor | None) -> WithSelfLoops:
    """Replace the self-loops of a graph by one per vertex, in the same partition.

    Args:
        forward: On the CPU, as many rows as columns.
        backward: The transpose; it may share its arrays with ``forward``.
        edge_ids: The user's edge of each forward entry, ``[num_edges]``; None: in order.
    """
    looped, kept = _with_loops(forward)
    back, back_kept = (looped, kept) if backward.local is forward.local else _with_loops(backward)
    assert backward.edge_ids is not None
    ids = np.arange(forward.num_edges) if edge_ids is None else edge_ids.numpy()
    rows, columns = forward.entry_rows().numpy(), forward.entry_columns().numpy()
    new_ids, weight_ids, back_ids = (
        torch.from_numpy(ids).to(looped.edge_dtype)
        for ids in _relink(kept, back_kept, ids, backward.edge_ids.numpy(), rows, columns, forward.num_rows)
    )
    return WithSelfLoops(looped, replace(back, edge_ids=back_ids), new_ids, weight_ids)


def symmetric_norm(chunks: Chunks, values: Tensor) -> Tensor:
    """Scale values ``[num_edges]`` of a square graph's entries by one over the root of both vertices' sums."""
    rows, columns = chunks.entry_rows(), chunks.entry_columns()
    degrees = values.new_zeros(chunks.num_rows).index_add(0, rows, values)
    scale = degrees.pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0.0)
    return scale[columns] * values * scale[rows]


def pick(values: Tensor, ids: Tensor, fill: float) -> Tensor:
    """Return ``values[ids]``, and ``fill`` where an id is negative.

    Args:
        values: ``[n, …]``, differentiable.
        ids: int32 or int64 ``[m]``, below n.
        fill: The other value.
    """
    missing = ids < 0
    if not bool(missing.any()):
        return values[ids]
    out = values.new_full((ids.numel(), *values.shape[1:]), fill)
    present = (~missing).nonzero().view(-1)
    return out.index_copy(0, present, values[ids[present]])


def _with_loops(chunks: Chunks) -> tuple[Chunks, _Array]:
    """Return the chunks, and for each entry its place before, or -1 - v for the self-loop of vertex v."""
    rows, row_ptr, indptr = chunks.rows.numpy(), chunks.row_ptr.numpy(), chunks.indptr.numpy()
    columns, first, last, kept = _replace_loops(rows, indptr, chunks.entry_columns().numpy(), chunks.num_rows)
    column_ptr = count_columns(columns, first, last, row_ptr, chunks.num_columns)
    out, _ = compress_columns(columns, rows, first, last, row_ptr, column_ptr, chunks.num_rows, chunks.num_columns)
    return out, kept


@numba.njit(nogil=True, cache=True)
def _replace_loops(
    rows: _Array, indptr: _Array, columns: _Array, num_rows: int
) -> tuple[_Array, _Array, _Array, _Array]:
    """Drop the self-loops, and put a new one behind the entries of each vertex (of its last part)."""
    loops = 0
    for row in range(rows.size):
        for e in range(indptr[row], indptr[row + 1]):
            loops += columns[e] == rows[row]
    size = columns.size - loops + num_rows
    out = np.empty(size, np.int32)
    kept = np.empty(size, np.int64)
    first = np.empty(rows.size, np.int64)
    last = np.empty(rows.size, np.int64)
    at = 0
    for row in range(rows.size):
        vertex = rows[row]
        first[row] = at
        for e in range(indptr[row], indptr[row + 1]):
            if columns[e] != vertex:
                out[at] = columns[e]
                kept[at] = e
                at += 1
        if row + 1 == rows.size or rows[row + 1] != vertex:
            out[at] = vertex
            kept[at] = -1 - vertex
            at += 1
        last[row] = at
    return out, first, last, kept


@numba.njit(nogil=True, cache=True)
def _relink(
    kept: _Array,
    back_kept: _Array,
    places: _Array,
    old_back_ids: _Array,
    rows: _Array,
    columns: _Array,
    num_vertices: int,
) -> tuple[_Array, _Array, _Array]:
    """Return the new ``edge_ids``, where weights come from, and the new ``edge_ids`` of the transpose."""
    new_place = np.empty(places.size, np.int64)
    loop_place = np.empty(num_vertices, np.int64)
    edge_ids = np.empty(kept.size, np.int64)
    for at in range(kept.size):
        if kept[at] >= 0:
            new_place[kept[at]] = at
            edge_ids[at] = places[kept[at]]
        else:
            loop_place[-1 - kept[at]] = at
            edge_ids[at] = -1
    weight_ids = edge_ids.copy()
    for e in range(places.size):
        if rows[e] == columns[e]:
            at = loop_place[rows[e]]
            weight_ids[at] = max(weight_ids[at], places[e])
    back_ids = np.empty(kept.size, np.int64)
    for at in range(kept.size):
        # A self-loop is its own mate, whose place its vertex tells; the others are where their edge went.
        if back_kept[at] >= 0:
            back_ids[at] = new_place[old_back_ids[back_kept[at]]]
        else:
            back_ids[at] = loop_place[-1 - back_kept[at]]
    return edge_ids, weight_ids, back_ids
