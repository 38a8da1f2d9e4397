"""Edges sorted by target with GCN's symmetric normalization (Kipf and Welling, ICLR 2017), shared by all layers."""

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate_update.edge_order import edges_by_target
from lightning_gnn.ops.library import define, library


def gcn_edges(
    edge_index: Tensor, num_nodes: int, num_targets: int, edge_weight: Tensor | None, loop_weight: float,
    add_self_loops: bool, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """Sort edges by target and weight them like PyG's ``gcn_norm``, without synchronizing the device.

    An added self-loop is the last entry of its row. Existing ones keep their place, with weight 0, and edges beyond the
    targets' rows remain, behind them: the number of entries then follows from those of edges and targets.
    """
    weight = None if edge_weight is None else edge_weight.detach().to(dtype)
    indptr, source, *given = edges_by_target(edge_index, num_nodes, num_nodes, weight)
    num_edges = source.numel()
    target = torch.repeat_interleave(indptr.diff(), output_size=num_edges)
    values = given[0] if given else torch.ones(num_edges, dtype=dtype, device=source.device)
    loops = values.new_zeros(num_nodes)
    if add_self_loops:
        is_loop = source == target
        loops += loop_weight if given else 1.0
        if given:  # the last self-loop of a node
            place = torch.where(is_loop, torch.arange(num_edges, device=source.device), -1)
            last = indptr.new_full((num_nodes,), -1).scatter_reduce(0, target, place, "amax")
            loops = torch.where(last < 0, loops, values[last.clamp(min=0)]) if num_edges else loops
        values = values.masked_fill(is_loop, 0)
    degree = loops
    if num_edges:
        degree = degree + torch.segment_reduce(values, "sum", offsets=indptr, initial=0, unsafe=True)
    scale = torch.where(degree == 0, 0, degree.rsqrt())
    values = scale[source] * values * scale[target]
    indptr = indptr[: num_targets + 1]
    if not add_self_loops:
        return [indptr, source, values]
    # Each row moves by the number of self-loops before it.
    numbers = torch.arange(num_edges + num_targets + 1, device=source.device)
    indptr = indptr + numbers[: num_targets + 1]
    places = torch.cat([numbers[:num_edges] + target.clamp(max=num_targets), indptr[1:] - 1])
    own = scale[:num_targets]
    entries = (
        torch.cat([source, numbers[:num_targets].to(torch.int32)]),
        torch.cat([values, own * loops[:num_targets] * own]),
    )
    return [indptr, *(torch.empty_like(part).index_copy_(0, places, part) for part in entries)]


define(
    "gcn_edges(Tensor edge_index, SymInt num_nodes, SymInt num_targets, Tensor? edge_weight, float loop_weight,"
    " bool add_self_loops, ScalarType dtype) -> Tensor[]",
    gcn_edges,
)


@torch.library.impl(library, "gcn_edges", "CPU")
def _gcn_edges_cpu(
    edge_index: Tensor, num_nodes: int, num_targets: int, edge_weight: Tensor | None, loop_weight: float,
    add_self_loops: bool, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    weight = None if edge_weight is None else edge_weight.detach().to(dtype)
    edges = torch.ops.lightning_gnn.edges_by_target(edge_index, num_nodes, num_nodes, weight)
    rows, source = edges[0].numpy(), edges[1].numpy()
    values = edges[2].numpy() if len(edges) > 2 else torch.empty(0, dtype=dtype).numpy()
    scale = torch.empty(num_nodes, dtype=dtype).numpy()
    loops = torch.full((num_nodes if add_self_loops else 0,), 1.0 if edge_weight is None else loop_weight, dtype=dtype)
    indptr = np.zeros(num_targets + 1, np.int64)
    _measure(rows, source, values, loops.numpy(), scale, indptr)
    size = source.size + num_targets * add_self_loops  # as gcn_edges, with unused entries behind those of the targets
    indices, weights = np.empty(size, np.int32), torch.empty(size, dtype=dtype)
    _normalize(rows, source, values, loops.numpy(), scale, indptr, indices, weights.numpy())
    return [torch.from_numpy(indptr), torch.from_numpy(indices), weights]


@numba.njit(nogil=True, cache=True)
def _measure(
    rows: np.ndarray, source: np.ndarray, weight: np.ndarray, loops: np.ndarray, scale: np.ndarray, indptr: np.ndarray
) -> None:
    """Write ``1 / sqrt(degree)`` of each node, the weights of existing self-loops, and the offsets of the targets."""
    looped, one = loops.size > 0, scale.dtype.type(1)
    for t in range(scale.size):
        degree = scale.dtype.type(0)
        for e in range(rows[t], rows[t + 1]):
            value = weight[e] if weight.size else one
            if looped and source[e] == t:
                if weight.size:
                    loops[t] = value
                continue
            degree += value
        if looped:
            degree += loops[t]
        scale[t] = one / np.sqrt(degree) if degree != 0 else 0
        if t + 1 < indptr.size:
            indptr[t + 1] = rows[t + 1] + (t + 1) * looped


@numba.njit(nogil=True, cache=True)
def _normalize(
    rows: np.ndarray, source: np.ndarray, weight: np.ndarray, loops: np.ndarray, scale: np.ndarray,
    indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray,
) -> None:  # fmt: skip
    """Write the entries of the targets, and zeros behind them."""
    looped, at = loops.size > 0, 0
    for t in range(indptr.size - 1):
        own = scale[t]
        for e in range(rows[t], rows[t + 1]):
            s = source[e]
            indices[at] = s
            weights[at] = 0 if looped and s == t else (scale[s] * weight[e] if weight.size else scale[s]) * own
            at += 1
        if looped:
            indices[at] = t
            weights[at] = own * loops[t] * own
            at += 1
    indices[at:] = 0
    weights[at:] = 0
