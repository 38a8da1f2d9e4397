"""Contestants of the sampling benchmark that import this package, possibly from another checkout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Gate
from lightning_gnn.datasets.synthetic import power_law_graph
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.ops import sample_neighbors
from lightning_gnn.ops.sample import numba as sample_numba


def rate(sample: peers.OpSampler, seeds: list[Tensor], pool: ThreadPoolExecutor | None = None) -> float:
    """Return millions of sampled edges per second over some mini-batches, in this thread or in a pool's threads."""
    start = time.perf_counter()
    edges = sum(map(sample, seeds) if pool is None else pool.map(sample, seeds))
    return edges / (time.perf_counter() - start) / 1e6


def make_graph(nodes: int, edges: int) -> CSCGraph:
    indptr, indices = power_law_graph(nodes, edges, seed=0)
    return CSCGraph.from_csc(indptr, torch.from_numpy(indices.numpy().astype(np.int32)))


def draw_seeds(num_nodes: int, batch_size: int, batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randperm(num_nodes, generator=generator)[:batch_size] for _ in range(batches)]


def ours(graph: CSCGraph, fanouts: list[int], disjoint: bool = False) -> peers.OpSampler:
    return lambda seeds: sample_neighbors(graph, seeds, fanouts, int(seeds[0]), disjoint=disjoint).edge.numel()


def hashing(run: Callable[[], float]) -> Callable[[], float]:
    """Return a run that treats all graphs as too large for a table of their nodes."""

    def limited() -> float:
        kept, sample_numba.TABLE_LIMIT = sample_numba.TABLE_LIMIT, 0
        try:
            return run()
        finally:
            sample_numba.TABLE_LIMIT = kept

    return limited


def threads() -> dict[int, ThreadPoolExecutor]:
    """Return pools with one and two threads, without intra-op threads of torch."""
    return {count: ThreadPoolExecutor(count, initializer=partial(torch.set_num_threads, 1)) for count in (1, 2)}


def serve(spec: dict[str, Any], gate: Gate) -> None:
    """Sample with the imported package, with the number of threads given in each turn."""
    torch.set_num_threads(1)
    sample = ours(make_graph(spec["nodes"], spec["edges"]), spec["fanouts"])
    seeds = draw_seeds(spec["nodes"], spec["batch_size"], spec["batches"])
    pools = threads()
    for _ in range(gate.rounds):
        count = gate.wait()
        gate.report(rate(sample, seeds, pools[count]))


def pyg_lib_process(spec: dict[str, Any], gate: Gate) -> None:
    """Sample in a worker process, like PyG's loaders, and discard the sample."""
    torch.set_num_threads(1)
    indptr, indices = power_law_graph(spec["nodes"], spec["edges"], seed=0)
    sample = peers.pyg_lib_sampler(indptr, indices, spec["fanouts"])
    assert sample is not None
    seeds = draw_seeds(spec["nodes"], spec["batch_size"], spec["batches"])[spec["part"] :: 2]
    for _ in range(gate.rounds):
        gate.wait()
        gate.report(rate(sample, seeds))


def extra_memory(graph: CSCGraph, seeds: list[Tensor], fanouts: list[int]) -> dict[str, float]:
    """Measure the memory that one more worker thread retains between mini-batches."""
    kept: dict[str, int] = {}

    def work() -> None:
        for some in seeds:
            ours(graph, fanouts)(some)
        scratch = vars(sample_numba._scratch)
        kept["table"] = scratch["table"].nbytes
        kept["hash tables"] = sum(slots.words.nbytes for slots in scratch["slots"].values())
        kept["ends"] = sum(edges.ends.nbytes for edges in scratch["edges"].values())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return {
        "table_bytes_per_node_and_thread": kept["table"] / graph.num_nodes,
        "buffers_mb_per_thread": round((sum(kept.values()) - kept["table"]) / 1e6, 1),
    }
