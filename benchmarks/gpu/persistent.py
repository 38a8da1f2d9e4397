"""PGSampler's evaluation: samples of each mode on graphs like those of its table II, cell by cell.

Graphs with the sizes and approximate degree skew of table II, 2 and 3 hops, fanouts 10, 15 and 20, batches of 2048 to
10240 seeds. For each cell: complete samples by the wall clock (figure 9), kernels by events (figure 8), and a check
that all contestants give the same sample. For one cell: the split of table I. Random reads are compared with a measured
ceiling.
"""

from __future__ import annotations

import inspect
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.device_clock import failure, rounds
from benchmarks.gpu.one_graph import LEVEL, OneGraph
from benchmarks.harness import compare
from lightning_gnn.ops import gather_rows

GRAPHS = {  # nodes, edges, exponent: hubs similar to the real ones within the generator's limit of sqrt(edges)
    "ogbn-products": (2_449_029, 61_859_140, 3.0),
    "Reddit": (232_965, 114_615_892, 3.0),
    "Yelp": (716_847, 13_954_819, 3.0),
    "ogbn-arxiv": (169_343, 1_166_243, 2.2),
    "Flickr": (89_250, 899_759, 2.4),
    "Coauthor-physics": (34_493, 495_924, 3.8),
}
Cell = tuple[int, int, int]
"""Hops, fanout and batch size."""
TARGET: Cell = (3, 10, 2048)
CPU = "CPU and transfer"
SECTOR = 32


def grid(quick: bool, tiny: bool) -> tuple[dict[str, tuple[int, int, float]], list[Cell], Cell]:
    """Return the graphs, the cells of each, and the one with a target."""
    # Kernels of a fanout are compiled for the first cell that uses them, so the cell with a target comes first.
    graphs, sizes, target = GRAPHS, ((2, 3), (10, 15, 20), (2048, 4096, 8192, 10240)), TARGET
    if quick:
        graphs, sizes = {name: GRAPHS[name] for name in ("ogbn-products", "ogbn-arxiv")}, ((2, 3), (10,), (2048, 10240))
    if tiny:
        graphs, sizes, target = {"tiny": (60, 300, 2.5)}, ((2,), (3,), (4, 8)), (2, 3, 4)
    order = sorted(itertools.product(*sizes), key=lambda cell: (cell != target, cell[1], -cell[0], cell[2]))
    return graphs, [(hops, fanout, batch) for hops, fanout, batch in order], target


def run(
    device: torch.device, runs: int, quick: bool, tiny: bool, limit_s: float, earlier: dict[str, Any],
    keep: Callable[[str, dict[str, Any]], None],
) -> dict[str, Any]:  # fmt: skip
    """Measure the cells that ``earlier`` lacks until the time is up, passing on the results after each."""
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

    default = inspect.signature(TritonNeighborSampler).parameters["mode"].default
    result: dict[str, Any] = {
        "title": "Sampling on a GPU", "unit": "us per sample", "times_mean_something": not tiny,
        "settings": {"runs": runs, "default": default, "quick": quick}, "rows": [], "graphs": {}, "cells": [],
    } | earlier | {"skipped": []}  # fmt: skip
    result["cells"] = [cell for cell in result["cells"] if "WRONG" not in str(cell["failed"])]
    start, (graphs, cells, target) = time.perf_counter(), grid(quick, tiny)
    known = [(cell["graph"], cell["hops"], cell["fanout"], cell["batch_size"]) for cell in result["cells"]]

    def skip(name: str, cell: Cell, why: str) -> None:
        result["skipped"].append({"graph": name, "cell": cell, "why": why})

    for name, sizes in graphs.items():
        todo = [cell for cell in cells if (name, *cell) not in known]
        bench = None
        for cell in todo:
            if time.perf_counter() - start > limit_s:
                skip(name, cell, "the time was up")
                continue
            try:
                if bench is None:
                    bench = Bench(device, *sizes, batch_size=max(batch for *_, batch in cells), runs=runs, bulks=(4,),
                                  small={"num_programs": 1, "num_warps": 1} if tiny else {})  # fmt: skip
                    described = dict(zip(("nodes", "edges", "exponent"), sizes, strict=True))
                    result["graphs"][name] = described | {"ceiling": bench.random_reads()}
                figures = {"graph": name, **bench.measure(cell)}
                for seen in figures["kernel_us"].values():
                    seen["random_gb_per_s"] = figures["random_accesses"] * SECTOR / seen["median"] / 1e3
                    ceiling = result["graphs"][name]["ceiling"]["gb_per_s"]
                    seen["share_of_ceiling"] = seen["random_gb_per_s"] / ceiling
                if cell == target:
                    figures["split"] = bench.split()
                result["cells"].append(figures)
                medians = {mode: round(seen["median"]) for mode, seen in figures["whole_us"].items()}
                print(f"{name} {cell}: us {medians}, failed {figures['failed']}", flush=True)
            except Exception as error:
                skip(name, cell, failure(error))
            result["comparisons"] = comparisons(result["cells"], target, default)
            keep("persistent", result)
    wrong = [f"{cell['graph']}: {cell['failed']}" for cell in result["cells"] if "WRONG" in str(cell["failed"])]
    return result | {"finished": not result["skipped"] and not wrong, "wrong": wrong}


@dataclass
class Bench(OneGraph):
    """One graph with a sampler for each mode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        from benchmarks.gpu.baselines import MODES

        there = self.host.to(self.device)
        self.samplers = {mode: self.sampler(there, mode=mode) for mode in MODES}

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Time complete samples and kernels of all modes in one cell of the grid."""
        hops, fanout, self.batch_size = cell
        self.fanouts = (fanout,) * hops
        wrong, sizes = self.compare({mode: partial(self.sample, own) for mode, own in self.samplers.items()}, 3)
        ran = {mode: sampler for mode, sampler in self.samplers.items() if mode not in wrong}
        calls: dict[str, Callable[[int], float]] = {mode: partial(self.alone, sampler) for mode, sampler in ran.items()}
        calls[CPU] = lambda turn: self.clock.wall(lambda: self.by_cpu(turn))
        whole = rounds(calls, self.runs, {CPU: 3})
        kernel = rounds({mode: partial(self.kernels, sampler) for mode, sampler in ran.items()}, self.runs)
        nodes, edges = sizes["nodes"], sizes["edges"]
        result: dict[str, Any] = {
            "hops": hops, "fanout": fanout, "batch_size": self.batch_size,
            "sampled_nodes": sum(nodes), "sampled_edges": sum(edges), "failed": wrong, "whole_us": {}, "kernel_us": {},
        }  # fmt: skip
        for figures, kind in ((whole, "whole_us"), (kernel, "kernel_us")):
            for mode, seen in figures.items():
                if isinstance(seen, str):
                    wrong[mode] = seen
                else:
                    result[kind][mode] = {"values": [round(us, 1) for us in seen], "median": statistics.median(seen)}
        # Each edge: its source in `indices`, a bid for the source, the winner, its local id. Each expanded node:
        # `indptr` when it is counted and when it is expanded. Each new node: its local id is stored.
        result["random_accesses"] = 4 * sum(edges) + 2 * sum(nodes[:-1]) + sum(nodes[1:])
        return result

    def split(self) -> dict[str, Any]:
        """Split a sample as the paper's table I does: per hop, preparation by the host and kernels."""
        hops, step, hop_by_hop = len(self.fanouts), len(LEVEL), self.samplers["hop_by_hop"]
        last = self.by_cpu(self.runs - 1)
        timed = [[launch.us for launch in self.launched(hop_by_hop, turn)] for turn in range(self.runs)]
        kernels = [statistics.median(column) for column in zip(*timed, strict=True)]
        walls = []
        for turn in range(self.runs):
            begin = self.clock.now()
            starts = [launch.at for launch in self.launched(hop_by_hop, turn, timed=False)]
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
                **{f"{part}_us": us for part, us in zip(LEVEL, phases, strict=True)},
            })  # fmt: skip
        queue = [self.launched(self.samplers["no_queue"], turn) for turn in range(self.runs)]
        discovery = {
            kernel: statistics.median(sum(made.us for made in each if made.kernel == kernel) for each in queue)
            for kernel in dict.fromkeys(made.kernel for made in queue[0])
        }
        ends = {"setup_us": setup, "emit_whole_us": emit, "emit_kernel_us": kernels[-1]}
        return {"hop_by_hop": by_hop, "ends": ends, "no_queue_kernel_us": discovery}

    def medians(self, calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """Return the median device time of each call in us, or its error."""
        timed = {name: lambda turn, call=call: self.clock.device(call) for name, call in calls.items()}
        seen = rounds(timed, self.runs + 1, dict.fromkeys(calls, 4))
        return {name: us if isinstance(us, str) else statistics.median(us[1:]) for name, us in seen.items()}

    def random_reads(self) -> dict[str, float]:
        """Measure the rate of random 32-byte reads from memory of the size of the graph's arrays."""
        bytes_ = 8 * self.host.num_nodes + self.host.num_bytes
        table = torch.zeros(bytes_ // SECTOR + 1, SECTOR // 4, device=self.device)
        reads = 1 << (8 if self.small else 24)
        index = torch.randint(table.size(0), (reads,), dtype=torch.int32, device=self.device)
        one, out = table.view(-1), torch.empty(reads, SECTOR // 4, device=self.device)
        spread = index * (SECTOR // 4) if one.numel() < 2**31 else index.long() * (SECTOR // 4)
        column = torch.empty(reads, device=self.device)
        us = self.medians({
            "gather_rows": lambda: gather_rows(table, index, out),
            "index_select of rows": lambda: torch.index_select(table, 0, index, out=out),
            "index_select of single values": lambda: torch.index_select(one, 0, spread, out=column),
        })  # fmt: skip
        rates = {name: SECTOR * reads / time / 1e3 for name, time in us.items() if not isinstance(time, str)}
        return {"bytes": bytes_, "reads": reads, "gb_per_s": max(rates.values()), **rates}


def comparisons(cells: Sequence[dict[str, Any]], target: Cell, default: str) -> list[dict[str, Any]]:
    """Compare the medians so far with the targets."""
    found: list[dict[str, Any]] = []

    def add(what: str, cell: dict[str, Any], kind: str, peer: str, aim: float | None) -> None:
        where = "{graph}, {hops} hops, fanout {fanout}, batch {batch_size}".format(**cell)
        rows = [{"name": mode, "median": round(seen["median"], 1)} for mode, seen in cell[kind].items()]
        found.append(compare(rows, f"{what}, {where}", [default], [peer], False, aim))

    for cell in cells:
        if (cell["hops"], cell["fanout"], cell["batch_size"]) == target:
            add("Whole samples, against hop by hop with the host", cell, "whole_us", "hop_by_hop", 2.3)
            add("Whole samples, against the CPU", cell, "whole_us", CPU, None)
    other = "persistent" if default == "fused" else "fused"
    for kind, what, aim in (("whole_us", "Whole samples", 0.95), ("kernel_us", "Kernels", None)):
        known = [cell for cell in cells if {default, other} <= cell[kind].keys()]
        known.sort(key=lambda cell: cell[kind][other]["median"] / cell[kind][default]["median"])
        for word, some in (("worst", known[:1]), ("best", known[-1:])):
            for cell in some:
                add(f"{what}, the {word} cell of the default", cell, kind, other, aim)
    return found
