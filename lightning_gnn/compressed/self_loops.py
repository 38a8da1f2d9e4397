"""Self-loops and symmetric normalization of whole graphs, with the semantics of PyG."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_gnn.graph.csr import CSR

_Array = npt.NDArray[Any]


class LoopedRows(NamedTuple):
    """Rows of a square matrix with exactly one self-loop each, in last position."""

    indptr: _Array  # first entry of each row, int64 [R + 1]
    columns: _Array  # column of each entry, int32 [n]
    edge_ids: _Array  # user's edge of each entry, int64 [n], -1 for a self-loop
    weight_ids: _Array
    """User's edge with the weight of each entry, int64 ``[n]``; for a self-loop, the vertex's last original self-loop
    (as in PyG's ``add_remaining_self_loops``) or -1."""


def loop_rows(first: int, indptr: _Array, columns: _Array, user_edges: _Array) -> LoopedRows:
    """Replace the self-loops of each row by a single one; rows are the vertices starting at ``first``."""
    num_rows = indptr.size - 1
    row_of = np.repeat(np.arange(num_rows), np.diff(indptr))
    is_edge = columns != first + row_of
    lengths = np.bincount(row_of[is_edge], minlength=num_rows) + 1
    offsets: _Array = np.concatenate([[0], np.cumsum(lengths)])
    loops = offsets[1:] - 1
    is_loop = np.zeros(offsets[-1], bool)
    is_loop[loops] = True
    looped: _Array = np.empty(is_loop.size, np.int32)
    looped[loops] = np.arange(first, first + num_rows)
    looped[~is_loop] = columns[is_edge]
    edge_ids: _Array = np.full(is_loop.size, -1, np.int64)
    edge_ids[~is_loop] = user_edges[is_edge]
    weight_ids = edge_ids.copy()
    np.maximum.at(weight_ids, loops[row_of[~is_edge]], user_edges[~is_edge])
    return LoopedRows(offsets, looped, edge_ids, weight_ids)


def symmetric_norm(rows: CSR, degrees: Tensor, values: Tensor | None = None) -> Tensor:
    """Scale values ``[num_edges]``, by default ones, by the inverse square roots of both endpoints' degrees."""
    scale = inverse_root(degrees)
    from_column, to_row = scale[rows.indices], scale[rows.entry_rows()]
    return from_column * to_row if values is None else from_column * values * to_row


def inverse_root(degrees: Tensor) -> Tensor:
    """Return the inverse square root of each degree, float ``[n]``; 0 for 0."""
    scale = degrees.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0.0)


def pick(values: Tensor, ids: Tensor, fill: float) -> Tensor:
    """Return ``values[ids]``, or ``fill`` for negative ids; differentiable in the values."""
    missing = ids < 0
    if not bool(missing.any()):
        return values[ids]
    out = values.new_full((ids.numel(), *values.shape[1:]), fill)
    present = (~missing).nonzero().view(-1)
    return out.index_copy(0, present, values[ids[present]])
