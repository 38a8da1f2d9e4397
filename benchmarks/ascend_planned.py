"""The planner's cost model against the simulation: cycles of aggregations, over four of the paper's graphs, all steps.

The cost model (``ascend_ops/cost_model.py``) adds up what each chunk copies and computes, and is fitted to the twin on
small graphs. The simulation (``ascend_sim_kernels.py``) follows every instruction, with cores that wait for each other,
for L2 and for HBM. If both agreed within 5 %, the simulation could be replaced by the model. The figure is modelled
cycles over simulated ones, in per cent, for the sum of an epoch's aggregations; ``extra`` has each of them. The twin
itself cannot take the simulation's place: it runs ``aggregate_cube`` and ``update`` on split cores only, and one core
after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.ascend_sim import rounded, setting_of
from benchmarks.ascend_sim_epoch import STEPS, Epoch, Graph, make_graph, simulate
from benchmarks.ascend_sim_machines import machine
from benchmarks.harness import parse, publish
from benchmarks.machine import machine as this_machine
from lightning_gnn.ascend_ops.cost_model import chunk_cycles, hbm_bytes
from lightning_gnn.ops.aggregate.chip_plan import count_chunks, hbm_rate

SIZES = {"shrink": (1, 40)}
GRAPHS = ("CiteSeer", "Cora", "PubMed", "Reddit, smaller")
"""Graphs of the paper; Reddit in the size in which the simulation changes assumptions."""


def modelled(epoch: Epoch, graph: Graph, width: int) -> float:
    """Return the cycles of an aggregation by the cost model: those of its plan, or of even ranges of vertices."""
    if plan := epoch.plans.get(width):
        return float(next(candidate.cost for candidate in plan.candidates if candidate.num_groups == plan.num_groups))
    setting = epoch.setting
    chunks = graph.ranges_of_vertices(epoch.loads[width].size).forward
    counts = count_chunks(chunks, -(-chunks.rows.numel() // epoch.loads[width].size))
    cycles, start = chunk_cycles("vector", counts, width, 1, setting.parameters, setting.buffers)
    supply = hbm_bytes("vector", counts, width, setting.parameters) / hbm_rate(setting.parameters)
    return max(float(cycles.max()) + start, supply)


def compare(epoch: Epoch, graph: Graph) -> dict[str, Any]:
    """Return modelled cycles over simulated ones, in per cent, of each aggregation and of all."""
    launches = [launch.cycles for what, launch in epoch.launches if what == "aggregate"]
    widths = [*graph.widths[:-1], *reversed(graph.widths[:-1])]
    planned = [modelled(epoch, graph, width) for width in widths]
    each = {str(width): 100 * ours / theirs for width, ours, theirs in zip(widths, planned, launches, strict=True)}
    return {"all": 100 * sum(planned) / sum(launches), "by columns": each}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("ascend_planned", __doc__, SIZES, argv, runs=1)
    described = this_machine()
    found: dict[str, dict[str, Any]] = {}
    for name in (name for name in GRAPHS if args.only in name):
        graph = make_graph(name, None, args.shrink)
        for arch in ("unified", "split"):
            for step in STEPS:
                epoch = simulate(setting_of(machine(arch), graph), graph, step)
                found[f"ours, {name}, {arch}, {step}"] = compare(epoch, graph)
    sums = [figures["all"] for figures in found.values()]
    each = [value for figures in found.values() for value in figures["by columns"].values()]
    result = {
        "benchmark": "ascend_planned",
        "title": "Cycles by the planner's cost model, per cent of the simulated ones",
        "unit": "%",
        "settings": {**args.sizes, "runs": 1},
        "machine": described,
        "rows": [{"name": name, "values": [figures["all"]], **dict.fromkeys(("median", "min", "max"), figures["all"])}
                 for name, figures in found.items()],
        "comparisons": [],
        "extra": {"of sums": [min(sums), max(sums)], "of single launches": [min(each), max(each)], "each": found},
    }  # fmt: skip
    return publish(rounded(result), args.out)


if __name__ == "__main__":
    main()
