"""Self-loops and the symmetric normalization of whole graphs, as PyG defines them."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_gnn.graph.csr import CSR

_Array = npt.NDArray[Any]


class LoopedRows(NamedTuple):
    """Rows of a square matrix with exactly one self-loop each, which comes last."""

    indptr: _Array  # first entry of each row, int64 [R + 1]
    columns: _Array  # column of each entry, int32 [n]
    edge_ids: _Array  # the user's edge of each entry, int64 [n], -1 for a self-loop
    weight_ids: _Array
    """The user's edge that gives each entry its weight, int64 ``[n]``: for a self-loop the last one that the vertex
    had (as in PyG's ``add_remaining_self_loops``), else -1.
    """


def loop_rows(first: int, indptr: _Array, columns: _Array, user_edges: _Array) -> LoopedRows:
    """Replace the self-loops of rows, which stand for the vertices from ``first`` on, by one each."""
    num_rows = indptr.size - 1
    row_of = np.repeat(np.arange(num_rows), np.diff(indptr))
    stays = columns != first + row_of
    lengths = np.bincount(row_of[stays], minlength=num_rows) + 1
    offsets: _Array = np.concatenate([[0], np.cumsum(lengths)])
    loops = offsets[1:] - 1
    is_loop = np.zeros(offsets[-1], bool)
    is_loop[loops] = True
    looped: _Array = np.empty(is_loop.size, np.int32)
    looped[loops] = np.arange(first, first + num_rows)
    looped[~is_loop] = columns[stays]
    edge_ids: _Array = np.full(is_loop.size, -1, np.int64)
    edge_ids[~is_loop] = user_edges[stays]
    weight_ids = edge_ids.copy()
    np.maximum.at(weight_ids, loops[row_of[~stays]], user_edges[~stays])
    return LoopedRows(offsets, looped, edge_ids, weight_ids)


def symmetric_norm(rows: CSR, degrees: Tensor, values: Tensor | None = None) -> Tensor:
    """Scale values ``[num_edges]``, by default ones, by one over the root of both vertices' sums of them."""
    scale = inverse_root(degrees)
    from_column, to_row = scale[rows.indices], scale[rows.entry_rows()]
    return from_column * to_row if values is None else from_column * values * to_row


def inverse_root(degrees: Tensor) -> Tensor:
    """Return one over the root of each, and 0 for 0; float ``[n]``."""
    scale = degrees.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0.0)


def pick(values: Tensor, ids: Tensor, fill: float) -> Tensor:
    """Return ``values[ids]``, and ``fill`` where an id is negative; differentiable in the values."""
    missing = ids < 0
    if not bool(missing.any()):
        return values[ids]
    out = values.new_full((ids.numel(), *values.shape[1:]), fill)
    present = (~missing).nonzero().view(-1)
    return out.index_copy(0, present, values[ids[present]])
