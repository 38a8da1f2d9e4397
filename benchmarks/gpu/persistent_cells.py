"""Measurements of ``benchmarks.gpu.persistent``: cells of the grid, ceiling of random reads, caches of hot lists."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch_geometric.sampler import NodeSamplerInput

from benchmarks.device_clock import Clock, Launch, failure, rounds
from benchmarks.gpu import baselines
from benchmarks.gpu.baselines import MODES, BaselineSampler
from lightning_gnn.datasets.synthetic import power_law_graph
from lightning_gnn.features.hot_cache import SECTOR_BYTES, Cacheable, CacheOrder, row_cost
from lightning_gnn.features.table import FeatureTable
from lightning_gnn.gpu_sampling.access_counts import count_reads
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.ops import batch_key, gather_rows, sample_neighbors
from lightning_gnn.sampling.neighbor import NeighborSampler
from lightning_gnn.triton_kernels import sample as kernels
from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

PHASES = ("expand", "settle")
"""The launches of a level, ``triton_kernels/hops.py``."""
SECTOR = 32
FEATURES = 100  # ogbn-products
BUDGETS = (0.0, 0.02, 0.1, 0.3)
"""Cache sizes relative to the bytes of topology and features."""


class Bench:
    """One graph with a sampler for each mode."""

    def __init__(self, args: argparse.Namespace, name: str, device: torch.device, cpu: str) -> None:
        nodes, edges, exponent = args.graphs[name]
        indptr, indices = power_law_graph(nodes, edges, exponent=exponent, seed=0)
        self.args, self.name, self.device, self.cpu, self.clock = args, name, device, cpu, Clock(device)
        self.host = CSCGraph.from_csc(indptr, indices.int())
        self.graph = self.host.to(device)
        self.small: dict[str, Any] = {"num_programs": 1, "num_warps": 1} if args.interpret else {}
        modes = args.modes.split(",") if args.modes else MODES
        self.samplers = {
            mode: BaselineSampler(self.graph.indptr, self.graph.indices, mode=mode, **self.small) for mode in modes
        }
        generator = torch.Generator().manual_seed(1)
        most = max(batch for _, _, batch in args.cells)
        self.seeds = [torch.randperm(nodes, generator=generator)[:most] for _ in range(4)]
        self.seeds_there = [seeds.to(device) for seeds in self.seeds]

    def sample(self, mode: str, cell: tuple[int, int, int], turn: int) -> Any:
        """Sample one mini-batch; the seeds are on the device, or on the CPU if it samples."""
        hops, fanout, batch = cell
        at, key = turn % len(self.seeds), batch_key(0, batch=turn)
        if mode != self.cpu:
            return self.samplers[mode].sample(self.seeds_there[at][:batch], [fanout] * hops, key)
        out = sample_neighbors(self.host, self.seeds[at][:batch], [fanout] * hops, key, backend="numba")
        moved = (out.node, out.edge_index, out.edge)
        return *(ids.to(self.device) for ids in moved), None, *out[4:]

    def check(self, cell: tuple[int, int, int]) -> tuple[dict[str, str], Any]:
        """Compare three mini-batches of each mode with the CPU's; return the differences, and the last sample."""
        wrong: dict[str, str] = {}
        wanted: Any = None
        for turn, mode in itertools.product(range(3), (self.cpu, *self.samplers)):
            if mode in wrong:
                continue
            try:
                out = self.sample(mode, cell, turn)
                if mode == self.cpu:
                    wanted = out
                for part, ours, theirs in zip(("node", "edge_index", "edge"), out, wanted, strict=False):
                    if not torch.equal(ours, theirs):
                        wrong[mode] = f"WRONG SAMPLE: {part} of mini-batch {turn} differs from the CPU's"
                if [list(counts) for counts in out[4:6]] != [list(counts) for counts in wanted[4:6]]:
                    wrong[mode] = f"WRONG SAMPLE: sizes of mini-batch {turn} differ from the CPU's"
            except Exception as error:
                wrong[mode] = failure(error)
        return wrong, wanted

    def measure(self, cell: tuple[int, int, int]) -> dict[str, Any]:
        """Time complete samples and kernels of all modes in one cell of the grid."""
        wrong, last = self.check(cell)
        modes = [mode for mode in (*self.samplers, self.cpu) if mode not in wrong]
        whole = rounds({mode: partial(self.whole, mode, cell) for mode in modes}, self.args.runs, {self.cpu: 3})
        gpu = [mode for mode in modes if mode != self.cpu]
        kernel = rounds({mode: partial(self.kernels, mode, cell) for mode in gpu}, self.args.runs)
        nodes, edges = last[4], last[5]
        result: dict[str, Any] = {
            "graph": self.name, "hops": cell[0], "fanout": cell[1], "batch_size": cell[2],
            "sampled_nodes": sum(nodes), "sampled_edges": sum(edges), "failed": wrong, "whole_us": {}, "kernel_us": {},
        }  # fmt: skip
        for figures, kind in ((whole, "whole_us"), (kernel, "kernel_us")):
            for mode, seen in figures.items():
                if isinstance(seen, str):
                    wrong[mode] = seen
                else:
                    result[kind][mode] = {"values": [round(us, 1) for us in seen], "median": statistics.median(seen)}
        result["pre_us"] = {  # everything except kernels: the host, launches, copies, synchronizations
            mode: result["whole_us"][mode]["median"] - seen["median"]
            for mode, seen in result["kernel_us"].items()
            if mode in result["whole_us"]
        }
        # Each edge: its source in `indices`, a bid for the source, the winner, its local id. Each expanded node:
        # `indptr` when it is counted and when it is expanded. Each new node: its local id is stored.
        result["random_accesses"] = 4 * sum(edges) + 2 * sum(nodes[:-1]) + sum(nodes[1:])
        return result

    def whole(self, mode: str, cell: tuple[int, int, int], turn: int) -> float:
        """Return the us of a complete sample."""
        return self.clock.wall(lambda: self.sample(mode, cell, turn))

    def launches(self, mode: str, cell: tuple[int, int, int], turn: int, timed: bool = True) -> list[Launch]:
        """Return the launches of a sample; if untimed, only with the host's launch times."""
        made = self.clock.launches(lambda: self.sample(mode, cell, turn), (kernels, baselines), timed)
        # If the scratch memory had to grow, ignore the launches before.
        return made[-(len(PHASES) * (cell[0] + 1) + 1) :] if mode in ("hop_by_hop", "launches") else made

    def kernels(self, mode: str, cell: tuple[int, int, int], turn: int) -> float:
        """Return the us of all kernels of a sample, the copy to the output included."""
        return sum(launch.us for launch in self.launches(mode, cell, turn))

    def split(self, cell: tuple[int, int, int]) -> dict[str, Any]:
        """Split a sample as the paper's table I does: per hop, preparation by the host and kernels."""
        hops, step = cell[0], len(PHASES)
        _, last = self.check(cell)
        timed = [[launch.us for launch in self.launches("hop_by_hop", cell, turn)] for turn in range(self.args.runs)]
        kernels = [statistics.median(column) for column in zip(*timed, strict=True)]
        walls = []
        for turn in range(self.args.runs):
            begin = self.clock.now()
            starts = [launch.at for launch in self.launches("hop_by_hop", cell, turn, timed=False)]
            stamps = [begin, *starts[: step * (hops + 1) : step], starts[-1], self.clock.now()]
            walls.append([after - before for before, after in itertools.pairwise(stamps)])
        setup, *levels, emit = [statistics.median(column) for column in zip(*walls, strict=True)]
        by_hop = []
        for level, wall in enumerate(levels):
            phases = kernels[step * level : step * (level + 1)]
            workload, edges = (last[4][level - 1], last[5][level - 1]) if level else (0, 0)
            by_hop.append({
                "hop": level, "workload": workload, "edges": edges,
                "whole_us": wall, "kernel_us": sum(phases), "pre_us": wall - sum(phases),
                **{f"{part}_us": us for part, us in zip(PHASES, phases, strict=True)},
            })  # fmt: skip
        queue = [self.launches("no_queue", cell, turn) for turn in range(self.args.runs)]
        discovery = {
            kernel: statistics.median(sum(made.us for made in each if made.kernel == kernel) for each in queue)
            for kernel in dict.fromkeys(made.kernel for made in queue[0])
        }
        ends = {"setup_us": setup, "emit_whole_us": emit, "emit_kernel_us": kernels[-1]}
        return {"hop_by_hop": by_hop, "ends": ends, "no_queue_kernel_us": discovery}


def rounded(value: Any) -> Any:
    """Round floats for a file."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def medians(contestants: dict[str, Callable[[int], float]], runs: int) -> dict[str, Any]:
    """Return the median of each contestant, or its error."""
    seen = rounds(contestants, runs + 1, dict.fromkeys(contestants, 4))
    return {name: us if isinstance(us, str) else statistics.median(us[1:]) for name, us in seen.items()}


def random_reads(bench: Any) -> dict[str, float]:
    """Measure the rate of random 32-byte reads from memory of the size of the graph's arrays."""
    bytes_ = 8 * bench.host.num_nodes + bench.host.num_bytes
    table = torch.zeros(bytes_ // SECTOR + 1, SECTOR // 4, device=bench.device)
    reads = 1 << (8 if bench.args.interpret else 24)
    index = torch.randint(table.size(0), (reads,), dtype=torch.int32, device=bench.device)
    one, out = table.view(-1), torch.empty(reads, SECTOR // 4, device=bench.device)
    spread = index * (SECTOR // 4) if one.numel() < 2**31 else index.long() * (SECTOR // 4)
    column = torch.empty(reads, device=bench.device)
    calls: dict[str, Callable[[], Any]] = {
        "gather_rows": lambda: gather_rows(table, index, out),
        "index_select of rows": lambda: torch.index_select(table, 0, index, out=out),
        "index_select of single values": lambda: torch.index_select(one, 0, spread, out=column),
    }
    us = medians({name: partial(_device, bench, call) for name, call in calls.items()}, bench.args.runs)
    rates = {name: SECTOR * reads / time / 1e3 for name, time in us.items() if not isinstance(time, str)}
    return {"bytes": bytes_, "reads": reads, "gb_per_s": max(rates.values()), **rates}


LAUNCHES = {"num_warps": (2, 4, 8), "programs_per_sm": (1, 2, 4, 8, 16), "fetch_size": (5, 32, 128)}
"""Options of a launch; a program of the paper claims 5 tasks at a time."""


def launches(bench: Bench, cell: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Sweep the shape of a launch: us of whole samples and of kernels; the fetch size is for the queue only."""
    rows = []
    sizes = LAUNCHES if not bench.args.interpret else {name: values[:1] for name, values in LAUNCHES.items()}
    for warps, programs, fetch in itertools.product(*sizes.values()):
        for mode in ("fused", "persistent") if fetch == sizes["fetch_size"][-1] else ("persistent",):
            options = {**bench.small, "num_warps": warps, "programs_per_sm": programs, "fetch_size": fetch}
            sampler = TritonNeighborSampler(bench.graph.indptr, bench.graph.indices, mode=mode, **options)
            bench.samplers["launch"] = sampler
            calls = {"whole": partial(_whole, bench, sampler, cell), "kernels": partial(bench.kernels, "launch", cell)}
            rows.append({"mode": mode, **options, "us": medians(calls, bench.args.runs)})
    del bench.samplers["launch"]
    return rows


def _device(bench: Any, call: Callable[[], Any], turn: int) -> float:
    return bench.clock.device(call)


def _pinned_sampler(bench: Any, host: Any, mode: str, **options: Any) -> Any:
    # The placement of PersistentNeighborSampler: offsets on the device, edges in pinned memory.
    indptr = host.indptr.to(bench.device)
    return TritonNeighborSampler(indptr, host.indices, device=bench.device, mode=mode, **bench.small, **options)


def _whole(bench: Any, sampler: Any, cell: tuple[int, int, int], turn: int) -> float:
    seeds = bench.seeds_there[turn % len(bench.seeds)][: cell[2]]
    return bench.clock.wall(lambda: sampler.sample(seeds, [cell[1]] * cell[0], turn))


def caches(bench: Bench, cell: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Sweep ``cache_bytes``: hot lists for a pinned topology, hot rows for pinned features."""
    on_gpu = bench.device.type == "cuda"
    values = torch.rand(bench.host.num_nodes, FEATURES if not bench.args.interpret else 5)
    table = FeatureTable(values.pin_memory() if on_gpu else values)
    node = bench.sample(next(iter(bench.samplers)), cell, 0)[0]
    host = bench.host.pin_memory() if on_gpu else bench.host
    hops, fanout, batch = cell
    sampler = NeighborSampler(host, [fanout] * hops, seed=0, backend="numba")
    reads = count_reads(sampler, NodeSamplerInput(None, torch.arange(host.num_nodes)), batch, range(8))
    counts = [reads.rows[None].numpy(), reads.lists.numpy()]
    sizes = [
        np.full(host.num_nodes, table.row_bytes, np.int64),
        host.in_degrees.numpy() * host.indices.element_size(),
    ]
    costs, lookups = (row_cost(table.row_bytes), SECTOR_BYTES), (4 * host.num_nodes, 16 * host.num_nodes + 8)
    order = CacheOrder([Cacheable(*kind) for kind in zip(counts, sizes, costs, lookups, strict=True)])
    total = host.num_bytes + table.num_nodes * table.row_bytes
    sweep = []
    for share in BUDGETS if not bench.args.interpret else BUDGETS[::3]:
        chosen = order.best(int(share * total))
        hot, lists = chosen.nodes
        rows = table.cached(hot, bench.device) if hot.numel() else table
        hits = [float(count[nodes].sum() / count.sum()) for count, nodes in zip(counts, chosen.nodes, strict=True)]
        cached = {"cached": host.cache_adjacency(lists, bench.device)} if lists.numel() else {}
        out = torch.empty(node.numel(), table.num_features, device=bench.device)
        try:
            sampler = _pinned_sampler(bench, host, "fused", **cached)
        except TypeError as error:
            sweep.append({"cache_bytes": int(share * total), "failed": failure(error)})
            continue
        us = medians(
            {
                "sample": partial(_whole, bench, sampler, cell),
                "gather": partial(_device, bench, partial(rows.gather, node, out)),
            },
            bench.args.runs,
        )
        sweep.append({
            "cache_bytes": int(share * total), "share": share, "us": us, "feature_hit_rate": hits[0],
            "adjacency_hit_rate": hits[1], "used_bytes": sum(chosen.nbytes),
        })  # fmt: skip
    return sweep
