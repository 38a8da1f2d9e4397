"""Aggregations of whole graphs on a simulated Ascend chip: each kernel by its best plan, and the plan's choice.

The kernels run on their twin with 24 cores: vertex by vertex on the vector cores; on the cube cores with rows that each
group and panel gathers anew; and with whole rows that all cores gather once, dense tiles being made by the kernel or
kept. Graphs have the sizes of Cora, CiteSeer and PubMed, and one is as dense as Reddit with 12,000 vertices. GCN's
weights never change; GAT's attention of 8 heads is new each time. The figure is thousands of cycles, each run's of
other graphs; ``extra`` has the copies of rows, the bytes and the cycles that were planned, of the last one. No second
is measured, and no chip.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import parse, publish
from benchmarks.machine import machine
from lightning_gnn.ascend_ops.cost_model import Kernel, atlas_a2
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.hybrid_plan import HybridPlan, PlanSettings
from lightning_gnn.graph.synthetic import planted_power_law
from lightning_gnn.ops.aggregate import ascend_twin
from lightning_gnn.ops.aggregate.backends import bounds, chunk_tensors
from lightning_gnn.ops.aggregate.chip_plan import plan_chip

SIZES = {"shrink": (1, 20), "cores": (24, 2)}
GRAPHS = {
    "Cora's size": (2_708, 10_556, 1_433, 2.9),
    "CiteSeer's size": (3_327, 9_104, 3_703, 3.0),
    "PubMed's size": (19_717, 88_648, 500, 2.2),
    "dense as Reddit": (12_000, 304_000, 602, 2.1),
}
"""Vertices, edges, columns of the features, exponent of the degrees' power law."""
CONTESTANTS: dict[str, tuple[tuple[Kernel, ...], bool]] = {
    "vector": (("vector",), False),
    "cube": (("cube",), False),
    "gathered": (("gathered",), False),
    "gathered, tiles kept": (("gathered",), True),
    "the plan's choice": (("cube", "gathered", "vector"), True),
}
"""Kernels to choose from, and whether tiles may be kept where weights never change."""
HIDDEN, HEADS = 256, 8


def run(graph: CompressedGraph, plan: HybridPlan, x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Return what the twin counts of an aggregation by a plan."""
    chunks, cut = chunk_tensors(graph.forward.recut(plan.height or 1)), bounds(plan.slices)
    rows = graph.num_targets
    with ascend_twin.record_launches() as launches:
        if plan.kernel == "gathered":
            how = list(plan.waves), plan.group_size, plan.kept
            ascend_twin.aggregate_gathered(chunks, rows, x, weight, "sum", cut, *how)
        else:
            kernel = ascend_twin.aggregate_vector if plan.kernel == "vector" else ascend_twin.aggregate_chunks
            kernel(chunks, rows, x, weight, "sum", cut, bounds(plan.chunk_ranges))
    paths = ("hbm_read", "l2_read", "gm_write")
    return {
        "cycles": sum(launch.makespan for launch in launches),
        **{f"{path} MB": sum(launch.bytes[path] for launch in launches) / 1e6 for path in paths},
    }


def contest(graph: CompressedGraph, x: torch.Tensor, weight: torch.Tensor, cores: int, static: bool) -> dict[str, Any]:
    """Run each contestant's best plan, and those of the cube kernels with three groups of columns."""
    found: dict[str, Any] = {}
    forced: dict[str, tuple[Any, bool]] = {
        "cube, three groups": (("cube",), False), "gathered, three groups": (("gathered",), False)
    }  # fmt: skip
    for name, (kernels, keeps) in (CONTESTANTS | forced).items():
        if keeps and not static and name != "the plan's choice":
            continue
        if name in forced and cores % 3:
            continue
        settings = PlanSettings(num_groups=3 if name in forced else "auto")
        columns, heads = x.size(1) * x.size(2), x.size(1)
        how: dict[str, Any] = {"kernels": kernels, "heads": heads, "static": keeps and static}
        plan = plan_chip(columns, {"": graph.forward}, settings, cores, atlas_a2(), **how)
        chosen = next(one for one in plan.candidates if one.num_groups == plan.num_groups)
        counted = run(graph, plan, x, weight)
        found[name] = {
            "plan": f"{plan.num_groups} groups, {chosen.note}",
            "planned": chosen.cost,
            "copies": chosen.terms["copies"],
            **counted,
        }
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("ascend_gathered", __doc__, SIZES, argv, runs=1)
    described = machine()
    each: dict[str, dict[str, Any]] = {}
    values: dict[str, list[float]] = {}
    drawn = itertools.product(range(args.runs), GRAPHS.items())
    for seed, (name, (nodes, edges, columns, exponent)) in drawn:
        nodes, edges, columns = nodes // args.shrink, edges // args.shrink, columns // args.shrink
        data = planted_power_law(nodes, edges, 4, 1, exponent=exponent, homophily=0.8, seed=seed)
        graph = CompressedGraph.from_edge_index(data.edge_index, nodes)
        for what, heads, width in (("features", 1, columns), ("hidden", 1, HIDDEN), ("attention", HEADS, 8)):
            case = f"{name}, {what}"
            if args.only in case:
                x = torch.randn(nodes, heads, width).half()
                weight = torch.rand(graph.num_edges, heads).half()
                each[case] = contest(graph, x, weight, args.cores, what != "attention")
                for contestant, found in each[case].items():
                    values.setdefault(f"ours, {case}: {contestant}", []).append(found["cycles"] / 1e3)
    rows = [
        {"name": name, "values": found, "median": statistics.median(found), "min": min(found), "max": max(found)}
        for name, found in values.items()
    ]
    gains = {
        case: {
            name: found["cycles"] / contestants["the plan's choice"]["cycles"] for name, found in contestants.items()
        }
        for case, contestants in each.items()
    }
    result = {
        "benchmark": "ascend_gathered",
        "title": f"One aggregation by each of the Ascend C kernels, {args.cores} simulated cores",
        "unit": "thousands of cycles",
        "settings": {**args.sizes, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [],
        "extra": {"over the plan's choice": gains, "each": each},
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
