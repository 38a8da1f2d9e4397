"""Self-loops and the symmetric normalisation of a compressed graph, as PyG defines them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.chunks import Chunks
from lightning_gnn.graph.columns import compress_columns, count_columns


def add_self_loops(graph: Any) -> Any:
    """Replace the self-loops of a graph by one per vertex, in the same partition; ``edge_ids`` is -1 for these.

    ``cache["weight_ids"]`` of the result names, for each of its edges, the user's edge that gives its weight: for a
    self-loop the last one that the vertex had (as in PyG's ``add_remaining_self_loops``), else -1.

    Raises:
        ValueError: The graph is bipartite.
    """
    _check_square(graph, "self-loops")
    device = graph.device
    graph = graph.to("cpu")
    forward, kept = _with_loops(graph.forward)
    backward, back_kept = (forward, kept) if graph.shares_chunks else _with_loops(graph.backward)
    assert graph.backward.edge_ids is not None
    places = np.arange(graph.num_edges) if graph.edge_ids is None else graph.edge_ids.numpy()
    rows, columns = graph.forward.entry_rows().numpy(), graph.forward.entry_columns().numpy()
    edge_ids, weight_ids, back_ids = (
        torch.from_numpy(ids).to(forward.edge_dtype)
        for ids in _relink(kept, back_kept, places, graph.backward.edge_ids.numpy(), rows, columns, graph.num_targets)
    )
    backward = replace(backward, edge_ids=back_ids)
    cache = {"weight_ids": weight_ids}
    return replace(graph, forward=forward, backward=backward, edge_ids=edge_ids, cache=cache).to(device)


def gcn_weight(
    graph: Any, edge_weight: Tensor | None, improved: bool, add_self_loops: bool, dtype: torch.dtype | None
) -> Tensor:
    """Compute what :meth:`CompressedGraph.gcn_weight` returns."""
    _check_square(graph, "the symmetric normalisation")
    looped = graph.with_self_loops() if add_self_loops else graph
    if edge_weight is None:
        values = torch.ones(looped.num_edges, dtype=dtype, device=graph.device)
    elif add_self_loops:
        values = pick(edge_weight, looped.cache["weight_ids"], 2.0 if improved else 1.0)
    else:
        values = graph.edge_order(edge_weight)
    rows, columns = looped.forward.entry_rows(), looped.forward.entry_columns()
    degrees = values.new_zeros(graph.num_targets).index_add(0, rows, values)
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


def _check_square(graph: Any, what: str) -> None:
    if graph.num_sources != graph.num_targets:
        raise ValueError(
            f"{what} must have the same vertices on both sides, but the graph has {graph.num_sources} sources and "
            f"{graph.num_targets} targets"
        )


def _with_loops(chunks: Chunks) -> tuple[Chunks, np.ndarray]:
    """Return the chunks, and for each entry its place before, or -1 - v for the self-loop of vertex v."""
    rows, row_ptr, indptr = chunks.rows.numpy(), chunks.row_ptr.numpy(), chunks.indptr.numpy()
    columns, first, last, kept = _replace_loops(rows, indptr, chunks.entry_columns().numpy(), chunks.num_rows)
    column_ptr = count_columns(columns, first, last, row_ptr, chunks.num_columns)
    out, _ = compress_columns(columns, rows, first, last, row_ptr, column_ptr, chunks.num_rows, chunks.num_columns)
    return out, kept


@numba.njit(nogil=True, cache=True)
def _replace_loops(rows, indptr, columns, num_rows):
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
def _relink(kept, back_kept, places, old_back_ids, rows, columns, num_vertices):
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
