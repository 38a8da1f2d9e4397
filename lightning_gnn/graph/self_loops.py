"""Self-loops and the symmetric normalisation of chunks, as PyG defines them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn.graph.chunks import Chunks, compress_columns, count_columns

_Array = npt.NDArray[Any]


class WithSelfLoops(NamedTuple):
    """A graph with exactly one self-loop per vertex.

    Args:
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
    rows, columns = forward.rows.numpy(), forward.entry_columns().numpy()
    user_edges = np.arange(forward.num_edges) if edge_ids is None else edge_ids.numpy()
    found = loop_rows(rows, forward.indptr.numpy(), columns, user_edges, forward.num_rows)
    looped = _compressed(forward, found.indptr, found.columns)
    assert backward.edge_ids is not None
    if backward.local is forward.local:
        back, kept = looped, found.kept
    else:
        arrays = backward.rows.numpy(), backward.indptr.numpy(), backward.entry_columns().numpy()
        indptr, columns, kept = _insert_loops(*arrays)
        back = _compressed(backward, indptr, columns)
    # A self-loop is its own mate, whose place its vertex tells; the others are where their edge went.
    is_loop = kept < 0
    back_ids: _Array = np.empty(kept.size, np.int64)
    back_ids[is_loop] = found.loop_of[-1 - kept[is_loop]]
    back_ids[~is_loop] = found.place_of[backward.edge_ids.numpy()[kept[~is_loop]]]
    ids = (found.edge_ids, found.weight_ids, back_ids)
    new, weights, back_places = (torch.from_numpy(each).to(looped.edge_dtype) for each in ids)
    return WithSelfLoops(looped, replace(back, edge_ids=back_places), new, weights)


class LoopedRows(NamedTuple):
    """Rows with exactly one self-loop per vertex, which lies behind the other entries of its vertex (its last part).

    Args:
        indptr: First entry of each row, int64 ``[R + 1]``.
        columns: Vertex of each entry on the column side, int32 ``[n]``.
        kept: The place before of each entry, int64 ``[n]``, or -1 - v for the self-loop of vertex v.
        place_of: Where each entry of before has come to lie, int64, -1 for a self-loop.
        loop_of: Where the self-loop of each vertex lies, int64 ``[V]``, -1 for a vertex that has no row here.
        edge_ids: As :class:`WithSelfLoops` has them, int64.
    """

    indptr: _Array
    columns: _Array
    kept: _Array
    place_of: _Array
    loop_of: _Array
    edge_ids: _Array
    weight_ids: _Array


def loop_rows(rows: _Array, indptr: _Array, columns: _Array, user_edges: _Array, num_vertices: int) -> LoopedRows:
    """Replace the self-loops of rows by one per vertex.

    Args:
        rows: Vertex of each row, int32 ``[R]``; all rows of a vertex, side by side.
        indptr: First entry of each row, from 0, ``[R + 1]``.
        columns: Vertex of each entry on the column side, int32 ``[n]``.
        user_edges: The user's edge of each entry, ``[n]``, -1 for none.
    """
    offsets, looped, kept = _insert_loops(rows, indptr, columns)
    is_loop = kept < 0
    place_of: _Array = np.full(columns.size, -1, np.int64)
    place_of[kept[~is_loop]] = np.flatnonzero(~is_loop)
    loop_of: _Array = np.full(num_vertices, -1, np.int64)
    loop_of[-1 - kept[is_loop]] = np.flatnonzero(is_loop)
    edge_ids: _Array = np.full(kept.size, -1, np.int64)
    edge_ids[~is_loop] = user_edges[kept[~is_loop]]
    weight_ids = edge_ids.copy()
    entry_rows = np.repeat(rows, np.diff(indptr))
    old_loops = entry_rows == columns
    np.maximum.at(weight_ids, loop_of[entry_rows[old_loops]], user_edges[old_loops])
    return LoopedRows(offsets, looped, kept, place_of, loop_of, edge_ids, weight_ids)


def symmetric_norm(chunks: Chunks, degrees: Tensor, values: Tensor | None = None) -> Tensor:
    """Scale values of a square graph's entries by one over the root of both vertices' sums.

    Args:
        degrees: Sum of each vertex's values, float ``[V]``.
        values: ``[num_edges]``, or None for ones.
    """
    scale = inverse_root(degrees)
    from_column, to_row = scale[chunks.entry_columns()], scale[chunks.entry_rows()]
    return from_column * to_row if values is None else from_column * values * to_row


def inverse_root(degrees: Tensor) -> Tensor:
    """Return one over the root of each, and 0 for 0; float ``[n]``."""
    scale = degrees.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0.0)


def pick(values: Tensor, ids: Tensor, fill: float) -> Tensor:
    """Return ``values[ids]``, and ``fill`` where an id is negative.

    Args:
        values: ``[n, …]``, differentiable.
        ids: int32 or int64 ``[m]``, below n.
    """
    missing = ids < 0
    if not bool(missing.any()):
        return values[ids]
    out = values.new_full((ids.numel(), *values.shape[1:]), fill)
    present = (~missing).nonzero().view(-1)
    return out.index_copy(0, present, values[ids[present]])


def _insert_loops(rows: _Array, indptr: _Array, columns: _Array) -> tuple[_Array, _Array, _Array]:
    """Return offsets and columns of the rows, and for each entry its place before, or -1 - v for v's self-loop."""
    row_of = np.repeat(np.arange(rows.size), np.diff(indptr))
    stays = columns != rows[row_of]
    ends_vertex = np.append(rows[1:] != rows[:-1], rows[:1] >= 0)
    lengths = np.bincount(row_of[stays], minlength=rows.size) + ends_vertex
    offsets: _Array = np.concatenate([[0], np.cumsum(lengths)])
    kept: _Array = np.empty(offsets[-1], np.int64)
    is_loop = np.zeros(kept.size, bool)
    is_loop[offsets[1:][ends_vertex] - 1] = True
    kept[is_loop] = -1 - rows[ends_vertex].astype(np.int64)
    kept[~is_loop] = np.flatnonzero(stays)
    looped: _Array = np.empty(kept.size, np.int32)
    looped[is_loop] = rows[ends_vertex]
    looped[~is_loop] = columns[stays]
    return offsets, looped, kept


def _compressed(chunks: Chunks, indptr: _Array, columns: _Array) -> Chunks:
    """Return chunks of the same rows with other entries."""
    rows, row_ptr = chunks.rows.numpy(), chunks.row_ptr.numpy()
    spans = indptr[:-1], indptr[1:], row_ptr
    column_ptr = count_columns(columns, *spans, chunks.num_columns)
    out, _ = compress_columns(columns, rows, *spans, column_ptr, chunks.num_rows, chunks.num_columns)
    return out
