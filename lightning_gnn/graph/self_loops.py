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
    user_edge = np.arange(forward.num_edges) if edge_ids is None else edge_ids.numpy()
    rows, columns = forward.entry_rows().numpy(), forward.entry_columns().numpy()
    is_loop = kept < 0
    place_of: _Array = np.empty(forward.num_edges, np.int64)  # where an entry that stays has come to lie
    place_of[kept[~is_loop]] = np.flatnonzero(~is_loop)
    loop_of: _Array = np.empty(forward.num_rows, np.int64)  # where the self-loop of a vertex lies
    loop_of[-1 - kept[is_loop]] = np.flatnonzero(is_loop)

    new_ids: _Array = np.full(kept.size, -1)
    new_ids[~is_loop] = user_edge[kept[~is_loop]]
    weight_ids = new_ids.copy()
    old_loops = rows == columns
    np.maximum.at(weight_ids, loop_of[rows[old_loops]], user_edge[old_loops])
    # A self-loop is its own mate, whose place its vertex tells; the others are where their edge went.
    is_loop = back_kept < 0
    back_ids: _Array = np.empty(back_kept.size, np.int64)
    back_ids[is_loop] = loop_of[-1 - back_kept[is_loop]]
    back_ids[~is_loop] = place_of[backward.edge_ids.numpy()[back_kept[~is_loop]]]
    new, weights, back_places = (torch.from_numpy(ids).to(looped.edge_dtype) for ids in (new_ids, weight_ids, back_ids))
    return WithSelfLoops(looped, replace(back, edge_ids=back_places), new, weights)


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
    """Return the chunks, and for each entry its place before, or -1 - v for the self-loop of vertex v.

    The new self-loop lies behind the other entries of its vertex (of its last part).
    """
    rows, row_ptr, indptr = chunks.rows.numpy(), chunks.row_ptr.numpy(), chunks.indptr.numpy()
    columns = chunks.entry_columns().numpy()
    row_of = np.repeat(np.arange(rows.size), np.diff(indptr))
    stays = columns != rows[row_of]
    ends_vertex = np.append(rows[1:] != rows[:-1], rows[:1] >= 0)
    lengths = np.bincount(row_of[stays], minlength=rows.size) + ends_vertex
    last = np.cumsum(lengths)
    kept: _Array = np.empty(lengths.sum(), np.int64)
    is_loop = np.zeros(kept.size, bool)
    is_loop[last[ends_vertex] - 1] = True
    kept[is_loop] = -1 - rows[ends_vertex].astype(np.int64)
    kept[~is_loop] = np.flatnonzero(stays)
    looped: _Array = np.empty(kept.size, np.int32)
    looped[is_loop] = rows[ends_vertex]
    looped[~is_loop] = columns[stays]
    first = last - lengths
    column_ptr = count_columns(looped, first, last, row_ptr, chunks.num_columns)
    out, _ = compress_columns(looped, rows, first, last, row_ptr, column_ptr, chunks.num_rows, chunks.num_columns)
    return out, kept
