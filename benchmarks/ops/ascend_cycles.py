"""Cycles of the Ascend C kernels, counted by their simulator ("twin"): aggregations, maxima, layers on a mini-batch.

The twin simulates 24 cores. Graphs have the sizes of Cora, CiteSeer and PubMed, and one has the density of Reddit with
12,000 vertices. Each aggregates its features, 256 hidden channels, and 8 heads of attention: by vertex on the vector
cores, with dense tiles on the cube cores, each with its best plan, and by the planner's choice. The figure is thousands
of cycles; every round uses new random graphs. No times are measured, nor is a chip used; ``ascend_ops/twin/RULES.md``
lists what is known about its timing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.harness import compare, machine, measure, parse, publish
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.ops.aggregate import ascend_twin
from lightning_gnn.ops.aggregate.ascend_twin import launch, record_launches
from lightning_gnn.ops.aggregate.chip import bounds
from lightning_gnn.ops.aggregate.chip_plan import HEIGHT, Kernel, plan_chip
from lightning_gnn.ops.aggregate_update.ascend import Chip

SIZES = {"shrink": (1, 20), "cores": (24, 2), "sources": (20_000, 60), "targets": (4_000, 40), "degree": (10, 4)}
GRAPHS = {
    "Cora's size": (2_708, 10_556, 1_433, 2.9),
    "CiteSeer's size": (3_327, 9_104, 3_703, 3.0),
    "PubMed's size": (19_717, 88_648, 500, 2.2),
    "dense as Reddit": (12_000, 304_000, 602, 2.1),
}
"""Vertices, edges, columns of the features, exponent of the degrees' power law."""
KERNELS: dict[str, tuple[Kernel, ...]] = {"vector": ("vector",), "cube": ("cube",), "plan": ("cube", "vector")}
COLUMNS = 128
"""Sizes of the mini-batch."""


def aggregation(args: Any, name: str, what: str, kernels: tuple[Kernel, ...], seed: int) -> float:
    """Return the cycles of aggregating a graph with the best plan for some kernels."""
    vertices, edges, features, exponent = GRAPHS[name]
    vertices, edges, features = vertices // args.shrink, edges // args.shrink, features // args.shrink
    data = planted_power_law(vertices, edges, 4, 1, exponent=exponent, homophily=0.8, seed=seed)
    graph = CompressedGraph.from_edge_index(data.edge_index, vertices)
    heads, width = {"features": (1, features), "hidden": (1, 256), "attention": (8, 8)}[what]
    whole = graph.chunked().chunks
    plan = plan_chip(heads * width, whole, PlanSettings(), args.cores, kernels=kernels, heads=heads)
    x, weight = torch.randn(vertices, heads, width).half(), torch.rand(graph.num_edges, heads).half()
    chunks = whole.recut(HEIGHT[plan.kernel]).tensors()
    kernel = ascend_twin.aggregate_vector if plan.kernel == "vector" else ascend_twin.aggregate_chunks
    with record_launches() as launches:
        kernel(chunks, vertices, x, weight, "sum", bounds(plan.slices), bounds(plan.chunk_ranges))
    return sum(counted.makespan for counted in launches)


def mini_batch(args: Any, reduce: str, backward: bool, seed: int) -> float:
    """Return the cycles of one layer's sums or maxima, or of their gradient."""
    draw = torch.Generator().manual_seed(seed)
    target = torch.randint(args.targets, (args.targets * args.degree,), generator=draw)
    source = (args.sources * torch.rand(target.numel(), generator=draw) ** 2).long()
    edges = torch.ops.lightning_gnn.edges_by_target(torch.stack([source, target]), args.sources, args.targets, None)
    x, chip = torch.randn(args.sources, COLUMNS, generator=draw).half(), Chip(launch, args.cores)
    with record_launches() as launches:
        if reduce == "max":
            best, ties = chip.maxima(edges, x)
            if backward:
                chip.maxima_backward(edges, torch.ones_like(best) / ties.clamp(min=1), best, x)
        else:
            sums = chip.sums(edges, x, False)
            if backward:
                chip.sums_backward(edges, torch.ones_like(sums).half(), args.sources, False)
    return launches[-1].makespan


def in_thousands(count: Callable[[int], float]) -> Callable[[], float]:
    """Return a contestant that numbers its rounds."""
    rounds = iter(range(1_000_000))
    return lambda: count(next(rounds)) / 1e3


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("ascend_cycles", __doc__, SIZES, argv, runs=1)
    warnings.filterwarnings("ignore")
    described = machine()
    cases = [f"{name}, {what}" for name in GRAPHS for what in ("features", "hidden", "attention")]
    counted: dict[str, Callable[[int], float]] = {
        f"ours, {case}: {how}": partial(aggregation, args, *case.split(", "), kernels)
        for case in cases
        for how, kernels in KERNELS.items()
    }
    layers = {
        f"ours, mini-batch: {reduce}{', gradient' * backward}": partial(mini_batch, args, reduce, backward)
        for reduce in ("max", "sum")
        for backward in (False, True)
    }
    chosen = {name: in_thousands(count) for name, count in (counted | layers).items() if args.only in name}
    rows = measure(dict(chosen), args.runs, warmup=0)
    compared = [
        compare(rows, f"{case}: the plan's choice against {how}", [f"ours, {case}: plan"], [f"ours, {case}: {how}"],
                False)
        for case in cases for how in ("vector", "cube")
    ] + [
        compare(rows, f"A maximum against a sum{gradient}", [f"ours, mini-batch: max{gradient}"],
                [f"ours, mini-batch: sum{gradient}"], False)
        for gradient in ("", ", gradient")
    ]  # fmt: skip
    result = {
        "benchmark": "ascend_cycles",
        "title": f"The Ascend C kernels on {args.cores} simulated cores",
        "unit": "thousands of cycles",
        "settings": {**args.sizes, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": compared,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
