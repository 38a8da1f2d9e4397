"""Edges sorted by target with GCN's symmetric normalization (Kipf and Welling, ICLR 2017), shared by all layers."""

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate_update.edge_order import SORTED, UNSORTED, check_inside, edges_by_target, first_rows
from lightning_gnn.ops.library import define, library


def gcn_edges(
    edge_index: Tensor, num_nodes: int, num_targets: int, edge_weight: Tensor | None, loop_weight: float,
    add_self_loops: bool, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """Sort edges by target and weight them like PyG's ``gcn_norm``; an added self-loop is the last entry of its row."""
    from torch_geometric.nn.conv.gcn_conv import gcn_norm  # imported on use, because the import is slow

    improved = loop_weight != 1.0
    edge_index, weight = gcn_norm(edge_index, edge_weight, num_nodes, improved, add_self_loops, dtype=dtype)
    return first_rows(edges_by_target(edge_index, num_nodes, num_nodes, weight), num_targets)


define(
    "gcn_edges(Tensor edge_index, int num_nodes, int num_targets, Tensor? edge_weight, float loop_weight,"
    " bool add_self_loops, ScalarType dtype) -> Tensor[]",
    gcn_edges,
)


@torch.library.impl(library, "gcn_edges", "CPU")
def _gcn_edges_cpu(
    edge_index: Tensor, num_nodes: int, num_targets: int, edge_weight: Tensor | None, loop_weight: float,
    add_self_loops: bool, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    source, target = (part.contiguous().numpy() for part in edge_index)
    weight = torch.empty(0, dtype=dtype) if edge_weight is None else edge_weight.detach().to(dtype).contiguous()
    scale = torch.empty(num_nodes, dtype=dtype)
    loops = torch.full((num_nodes if add_self_loops else 0,), 1.0 if edge_weight is None else loop_weight, dtype=dtype)
    indptr = np.zeros(num_targets + 1, np.int64)
    status = _degrees(source, target, weight.numpy(), loops.numpy(), scale.numpy(), indptr)
    check_inside(status, source, target, num_nodes, num_nodes)
    indices, weights = np.empty(int(indptr[-1]), np.int32), torch.empty(int(indptr[-1]), dtype=dtype)
    fill = _fill if status == SORTED else _scatter
    fill(source, target, weight.numpy(), loops.numpy(), scale.numpy(), indptr, indices, weights.numpy())
    return [torch.from_numpy(indptr), torch.from_numpy(indices), weights]


@numba.njit(nogil=True, cache=True)
def _degrees(
    source: np.ndarray, target: np.ndarray, weight: np.ndarray, loops: np.ndarray, scale: np.ndarray,
    indptr: np.ndarray,
) -> int:  # fmt: skip
    """Write ``1 / sqrt(degree)`` of each node to ``scale``; return an invalid edge, or SORTED or UNSORTED."""
    num_nodes, num_targets, looped = scale.size, indptr.size - 1, loops.size > 0
    one = scale.dtype.type(1)
    scale[:] = 0
    previous, status = np.int64(0), SORTED
    for e in range(source.size):
        s, t = source[e], target[e]
        if s < 0 or s >= num_nodes or t < 0 or t >= num_nodes:
            return e
        if t < previous:
            status = UNSORTED
        previous = t
        value = weight[e] if weight.size else one
        if looped and s == t:
            if weight.size:
                loops[t] = value
            continue
        scale[t] += value
        if t < num_targets:
            indptr[t + 1] += 1
    for t in range(num_targets):
        indptr[t + 1] += indptr[t] + looped
    for v in range(num_nodes):
        degree = scale[v] + loops[v] if looped else scale[v]
        scale[v] = one / np.sqrt(degree) if degree != 0 else 0
    return status


@numba.njit(nogil=True, cache=True)
def _fill(
    source: np.ndarray, target: np.ndarray, weight: np.ndarray, loops: np.ndarray, scale: np.ndarray,
    indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray,
) -> None:  # fmt: skip
    """Write the entries of sorted edges sequentially."""
    num_targets, looped = indptr.size - 1, loops.size > 0
    e = 0
    for t in range(num_targets):
        at, own = indptr[t], scale[t]
        while e < source.size and target[e] == t:
            s = source[e]
            if not (looped and s == t):
                indices[at] = s
                weights[at] = (scale[s] * weight[e] if weight.size else scale[s]) * own
                at += 1
            e += 1
        if looped:
            indices[at] = t
            weights[at] = own * loops[t] * own


@numba.njit(nogil=True, cache=True)
def _scatter(
    source: np.ndarray, target: np.ndarray, weight: np.ndarray, loops: np.ndarray, scale: np.ndarray,
    indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray,
) -> None:  # fmt: skip
    """Write each edge to the next free slot of its target."""
    num_targets, looped = indptr.size - 1, loops.size > 0
    next_slot = indptr[:-1].copy()
    for e in range(source.size):
        s, t = source[e], target[e]
        if t >= num_targets or (looped and s == t):
            continue
        at = next_slot[t]
        next_slot[t] = at + 1
        indices[at] = s
        weights[at] = (scale[s] * weight[e] if weight.size else scale[s]) * scale[t]
    if looped:
        for t in range(num_targets):
            indices[next_slot[t]] = t
            weights[next_slot[t]] = scale[t] * loops[t] * scale[t]
