"""Assign nodes to parts by METIS, streaming or at random, balanced in nodes, in-edges and training seeds."""

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import NodeType

from lightning_gnn.graph.csc import CSCGraph, index_dtype
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.runtime.memory_info import available_bytes
from lightning_gnn.runtime.messages import shown

METHODS = ("metis", "ldg", "random")
"""Fewest cut edges, in several copies; eight passes, in 18 bytes per node (55 with the writing); at random."""
MAX_PARTS = 1 << 15
SLACK = 0.05  # allowed excess over the mean number of nodes, edges and seeds of a part
_PASSES = 8  # passes of the stream: in the first one, most neighbors have no part yet
_METIS_BYTES = 120  # peak memory of METIS including its input, per edge in both directions: measured and rounded up
_LDG_BYTES, _LDG_SECONDS = 55, 0.44e-6  # of lgnn partition method=ldg, per node and per edge: measured


def assign_nodes(
    graph: CSCGraph | HeteroCSCGraph,
    parts: int,
    method: str = "metis",
    seeds: Mapping[NodeType | None, Tensor] | None = None,
    seed: int = 0,
) -> dict[NodeType | None, Tensor]:
    """Return the part of each node, int16 ``[num_nodes]``, by node type (None in a homogeneous graph).

    Args:
        graph: The topology. Parts have equal numbers of nodes, in-edges and seeds, up to 5 %.
        parts: Number of parts.
        method: ``"metis"``, ``"ldg"`` or ``"random"``; see :func:`partition_graph`.
        seeds: Training seeds by node type, int64 ``[n]``.
        seed: Random seed.

    Raises:
        ValueError: ``method`` is unknown, or ``parts`` is not from 1 to the number of nodes (at most 32,768).
        ModuleNotFoundError: ``method="metis"`` without the package ``pymetis``.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    sizes: dict[Any, int] = graph.sizes if isinstance(graph, HeteroCSCGraph) else {None: graph.num_nodes}
    total = sum(sizes.values())
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= min(max(total, 1), MAX_PARTS):
        raise ValueError(f"parts={parts!r} must be a whole number from 1 to {min(max(total, 1), MAX_PARTS)}")
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    weights = np.zeros((total, 2), np.int64)
    indptr, indices = _merge(graph, starts, total)
    weights[:, 0] = np.diff(indptr)
    for name, ids in (seeds or {}).items():
        weights[starts[name] + ids.numpy(), 1] = 1
    shares = np.array([total, indices.size, weights[:, 1].sum()], np.float64) / parts
    limits = np.maximum(np.maximum(np.ceil(shares), np.floor(shares * (1 + SLACK))), 1)
    if method == "metis":
        part = _metis(indptr, indices, weights, parts, seed)
        _stream(indptr, indices, weights, part, limits, parts, 2, True)
    elif method == "ldg":
        part = np.full(total, -1, np.int16)
        # Tighten the limit on seeds pass by pass: a tight one would keep the first seeds where they were placed.
        for number in range(_PASSES):
            relaxed = limits + np.floor(shares * [0, 0, 1] * max(0.0, 1 - number / (_PASSES - 3)))
            _stream(indptr, indices, weights, part, relaxed, parts, 1, False)
    else:
        # Deal shuffled seeds, then shuffled other nodes, round robin: balanced by construction.
        part = np.empty(total, np.int16)
        order = np.random.default_rng(seed).permutation(total)
        order = order[np.argsort(-weights[order, 1], kind="stable")]
        part[order] = np.arange(total) % parts
    return {name: torch.from_numpy(part[start : start + sizes[name]]) for name, start in starts.items()}


def _merge(graph: CSCGraph | HeteroCSCGraph, starts: Mapping[Any, int], total: int) -> tuple[np.ndarray, np.ndarray]:
    """Merge the in-edge lists of all types, with the nodes of all types numbered consecutively."""
    if isinstance(graph, CSCGraph):
        return graph.indptr.numpy(), graph.indices.numpy()
    degrees = np.zeros(total, np.int64)
    for (_, _, target), relation in graph.relations.items():
        degrees[starts[target] : starts[target] + relation.num_nodes] += relation.in_degrees.numpy()
    indptr = np.zeros(total + 1, np.int64)
    np.cumsum(degrees, out=indptr[1:])
    indices: np.ndarray = np.empty(int(indptr[-1]), index_dtype(total))
    filled = indptr[:-1].copy()
    for (source, _, target), lists in graph.relations.items():
        _copy_lists(lists.indptr.numpy(), lists.indices.numpy(), filled[starts[target] :], starts[source], indices)
    return indptr, indices


@numba.njit(nogil=True, cache=True)
def _copy_lists(indptr: np.ndarray, indices: np.ndarray, filled: np.ndarray, first: int, out: np.ndarray) -> None:
    for v in range(indptr.size - 1):
        for e in range(indptr[v], indptr[v + 1]):
            out[filled[v]] = first + indices[e]
            filled[v] += 1


def _metis(indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray, parts: int, seed: int) -> np.ndarray:
    try:
        import pymetis
    except ImportError:
        raise ModuleNotFoundError(
            "method=metis needs a package: pip install 'lightning-gnn[partition]'; or use method=ldg"
        ) from None
    need, free = 2 * _METIS_BYTES * indices.size, available_bytes() or 0
    if need > free:
        needs = f"METIS needs about {shown(need)} for {indices.size:,} edges, but {shown(free)} are free"
        memory, seconds = shown(_LDG_BYTES * (indptr.size - 1)), max(1, _LDG_SECONDS * indices.size)
        raise MemoryError(f"{needs}; method=ldg needs about {memory} more, and {seconds:.0f} s of a core")
    total = indptr.size - 1
    col = np.repeat(np.arange(total), np.diff(indptr))
    ends = np.concatenate([col * total + indices, indices.astype(np.int64) * total + col])
    ends = ends[ends // total != ends % total]
    ends, edge_weights = np.unique(ends, return_counts=True)
    offsets = np.searchsorted(ends, np.arange(total + 1) * total)
    # pymetis takes one weight per node: the sum of the three balanced quantities, each scaled to a mean of 100.
    loads = np.column_stack([np.ones(total), weights]).astype(np.float64)
    node_weights = np.maximum((loads * (100 / np.maximum(loads.mean(0), 1e-9))).sum(1), 1).astype(np.int64)
    adjacency = pymetis.CSRAdjacency(offsets, ends % total)
    options = pymetis.Options(seed=seed % 2**31)
    result = pymetis.part_graph(
        parts, adjacency, vweights=node_weights, eweights=edge_weights, recursive=False, options=options
    )
    return np.array(result.vertex_part, np.int16)


@numba.njit(nogil=True, cache=True)
def _fits(loads: np.ndarray, limits: np.ndarray, p: int, edges: int, seeds: int) -> bool:
    """Return whether a node fits the limits of a part."""
    return (
        loads[p, 0] + 1 <= limits[0]
        and (loads[p, 1] + edges <= limits[1] or edges == 0 or loads[p, 1] == 0)
        and (loads[p, 2] + seeds <= limits[2] or seeds == 0)
    )


@numba.njit(nogil=True, cache=True)
def _fullness(loads: np.ndarray, limits: np.ndarray, p: int) -> float:
    return float(max(loads[p, 0] / limits[0], max(loads[p, 1] / limits[1], loads[p, 2] / limits[2])))


@numba.njit(nogil=True, cache=True)
def _best(
    indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray, part: np.ndarray, limits: np.ndarray,
    loads: np.ndarray, shared: np.ndarray, touched: np.ndarray, v: int,
) -> int:  # fmt: skip
    """Return the part with room for a node that maximizes its number of neighbors there, weighted by the free room."""
    edges, seeds, count = weights[v, 0], weights[v, 1], 0
    for e in range(indptr[v], indptr[v + 1]):
        p = part[indices[e]]
        if p >= 0 and indices[e] != v:
            if shared[p] == 0:
                touched[count] = p
                count += 1
            shared[p] += 1
    best, most = -1, 0.0
    for i in range(count):
        p = touched[i]
        if _fits(loads, limits, p, edges, seeds):
            score = shared[p] * (1.0 - _fullness(loads, limits, p)) + 1e-9 * shared[p]
            if score > most or (score == most and p < best):
                best, most = p, score
    for i in range(count):
        shared[touched[i]] = 0
    if best >= 0:
        return best
    # No part of a neighbor has room: take the emptiest part with room, or else the emptiest.
    least, room = 0.0, False
    for p in range(loads.shape[0]):
        fits, full = _fits(loads, limits, p, edges, seeds), _fullness(loads, limits, p)
        if best < 0 or (fits and not room) or (fits == room and full < least):
            best, least, room = p, full, fits
    return best


@numba.njit(nogil=True, cache=True)
def _stream(
    indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray, part: np.ndarray, limits: np.ndarray, parts: int,
    passes: int, relieve: bool,
) -> None:  # fmt: skip
    """Assign node by node in several passes (LDG: Stanton and Kliot 2012; restreaming: Nishimura and Ugander 2013)."""
    loads = np.zeros((parts, 3), np.int64)
    for v in range(part.size):
        if part[v] >= 0:
            loads[part[v], 0] += 1
            loads[part[v], 1] += weights[v, 0]
            loads[part[v], 2] += weights[v, 1]
    shared, touched = np.zeros(parts, np.int64), np.empty(parts, np.int64)
    for _ in range(passes):
        # With relieve, only move nodes out of parts that exceed a limit to which the node contributes.
        for v in range(part.size):
            p, edges, seeds = part[v], weights[v, 0], weights[v, 1]
            if relieve and not (
                loads[p, 0] > limits[0]
                or (edges > 0 and loads[p, 1] > limits[1])
                or (seeds > 0 and loads[p, 2] > limits[2])
            ):
                continue
            if p >= 0:
                loads[p, 0] -= 1
                loads[p, 1] -= edges
                loads[p, 2] -= seeds
            p = _best(indptr, indices, weights, part, limits, loads, shared, touched, v)
            part[v] = p
            loads[p, 0] += 1
            loads[p, 1] += edges
            loads[p, 2] += seeds
