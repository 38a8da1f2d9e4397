"""Where the time of a sampled edge goes, and what the memory of this machine allows: nanoseconds of one thread.

Each phase runs over whole hops by itself, with the functions of which the sampler is made; there they run in turns, in
blocks. The bound is what the same random reads cost if nothing is done with them: one of ``indices`` per edge, one of
the table of nodes per edge, and one of ``indptr`` per node that is expanded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.ops import sample_neighbors
from lightning_gnn.ops.gather.numba import take
from lightning_gnn.ops.intrinsics import prefetch
from lightning_gnn.ops.sample import eligible, picks, relabel
from lightning_gnn.ops.sample.numba import write_targets

PHASES = ("picks", "reads of indices and relabelling", "targets", "whole")
_ALL = 2**62
_BITS = 20


@numba.njit(nogil=True, cache=True)
def _read(table: np.ndarray, index: np.ndarray, ahead: int) -> int:
    total = 0
    for i in range(index.size - ahead):
        prefetch(table, index[i + ahead])
        total += table[index[i]]
    return total


def random_read(table: np.ndarray, reads: int = 1 << 20) -> float:
    """Return the nanoseconds of a random read, as many of them on their way as the machine can have."""
    index = np.random.default_rng(0).integers(table.size, size=reads)
    return min(_seconds(lambda ahead=ahead: _read(table, index, ahead)) for ahead in (8, 16, 32, 64)) / reads * 1e9


def _seconds(function: Callable[[], object], runs: int = 3) -> float:
    function()
    best = float("inf")
    for _ in range(runs):
        start = time.thread_time()
        function()
        best = min(best, time.thread_time() - start)
    return best


def nanoseconds_per_edge(graph: CSCGraph, seeds: Tensor, fanouts: list[int], runs: int = 5) -> dict[str, float]:
    """Return the phases of a mini-batch, the whole, and the bound, per sampled edge."""
    indptr, indices, key = graph.indptr.numpy(), graph.indices.numpy(), np.uint64(7)
    out = sample_neighbors(graph, seeds, fanouts, 7)
    m, n = out.edge.numel(), out.node.numel()
    node, row, edge = np.empty(n + m + 1, np.int64), np.empty(m, np.int64), np.empty(m, np.int64)
    ends, tree, col = np.empty(n, np.int64), np.empty(0, np.int64), np.empty(m, np.int64)
    table, scratch = np.zeros(graph.num_nodes, np.uint32), picks.lane_scratch()
    spent: dict[str, float] = dict.fromkeys(PHASES, np.inf)
    expanded = 0
    for stamp in range(1, runs + 2):
        costs = dict.fromkeys(spent, 0.0)

        def clocked(name: str, function: Callable[..., Any], *arguments: Any, costs: Any = costs) -> Any:
            start = time.thread_time()
            result = function(*arguments)
            costs[name] += time.thread_time() - start
            return result

        k, low, at = seeds.numel(), 0, 0
        node[:k] = seeds.numpy()
        relabel.enter_all(table, stamp << _BITS, node, k)
        for fanout in fanouts:
            _, end = clocked(
                "picks", picks.pick_edges, indptr, node, node, tree, low, k, fanout, False, False, key,
                np.uint64(0), eligible.no_times(), edge, ends, at, _ALL, scratch,
            )  # fmt: skip
            clocked("reads of indices and relabelling", relabel.begin_reading, indices, edge, row, at, end)
            low, expanded = k, k
            k = clocked(
                "reads of indices and relabelling", relabel.relabel_by_table, table, stamp << _BITS, _BITS, node, k,
                indices, edge, row, at, end, end,
            )  # fmt: skip
            at = end
        clocked("targets", write_targets, ends, expanded, col)
        clocked("whole", sample_neighbors, graph, seeds, fanouts, 7)
        assert (at, k) == (m, n)
        assert np.array_equal(row, out.edge_index[0].numpy())
        if stamp > 1:
            spent = {name: min(spent[name], seconds) for name, seconds in costs.items()}
    result = {name: seconds / m * 1e9 for name, seconds in spent.items()}
    # What else a mini-batch of PyG's needs of an edge, or a fused layer.
    edge_ids = np.random.default_rng(0).permutation(graph.num_edges).astype(indices.dtype)
    result["edge ids of a graph in no order"] = _seconds(lambda: take(edge_ids, edge, row)) / m * 1e9
    by_target = torch.ops.lightning_gnn.edges_by_target
    result["CSC of the mini-batch"] = _seconds(lambda: by_target(out.edge_index, n, n, None)) / m * 1e9
    reads = {"indices": random_read(indices), "table": random_read(table), "indptr": random_read(indptr)}
    result |= {f"a random read of {name}": cost for name, cost in reads.items()}
    result["bound: these reads alone"] = reads["indices"] + reads["table"] + reads["indptr"] * expanded / m
    return {name: round(float(cost), 2) for name, cost in result.items()}
