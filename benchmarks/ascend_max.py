"""A maximum beside a sum on an Ascend chip, in simulated cycles: the vector cores' kernels, forward and gradient.

Of a mini-batch, sorted by row and used once, and of a whole graph, by the kernels on their twin with 24 cores. Sums are
those of ``aggregate_update`` without a product and of ``aggregate_vector``, in float16; maxima and how many attain them
are float32. The figure is thousands of cycles of a launch; each round draws other edges, and L2 is empty when a kernel
starts. No second is measured, and no chip: what is known of its times is in ``ascend_ops/twin/RULES.md``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.harness import compare, measure, parse, publish
from benchmarks.machine import machine
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.hybrid_plan import PlanSettings
from lightning_gnn.ops import aggregate
from lightning_gnn.ops.aggregate import chip_plan
from lightning_gnn.ops.aggregate.ascend_twin import launch, record_launches
from lightning_gnn.ops.aggregate_update.ascend import Chip

SIZES = {
    "sources": (20_000, 60),
    "targets": (4_000, 40),
    "degree": (10, 4),
    "columns": (128, 16),
    "nodes": (4_000, 50),
    "edges": (100_000, 300),
    "cores": (24, 2),
}


def mini_batch(args: Any, seed: int, reduce: str) -> tuple[float, float]:
    """Return thousands of cycles of a mini-batch, forward and of its gradient."""
    draw = torch.Generator().manual_seed(seed)
    target = torch.randint(args.targets, (args.targets * args.degree,), generator=draw)
    source = (args.sources * torch.rand(target.numel(), generator=draw) ** 2).long()
    edges = torch.ops.lightning_gnn.edges_by_target(torch.stack([source, target]), args.sources, args.targets, None)
    x, chip = torch.randn(args.sources, args.columns, generator=draw).half(), Chip(launch, args.cores)
    with record_launches() as launches:
        if reduce == "max":
            best, ties = chip.maxima(edges, x)
            chip.maxima_backward(edges, torch.ones_like(best) / ties.clamp(min=1), best, x)
        else:
            sums = chip.sums(edges, x, False)
            chip.sums_backward(edges, torch.ones_like(sums).half(), args.sources, False)
    forward, backward = (result.makespan / 1000 for result in launches)
    return forward, backward


def graph(args: Any, seed: int, reduce: str) -> tuple[float, float]:
    """Return the same of a whole graph."""
    draw = torch.Generator().manual_seed(seed)
    edge_index = (args.nodes * torch.rand(2, args.edges, generator=draw) ** 1.5).long()
    plan = PlanSettings(num_workers=args.cores)
    whole = CompressedGraph.from_edge_index(edge_index, args.nodes, settings=plan)
    x = torch.randn(args.nodes, args.columns, generator=draw).half().requires_grad_()
    heights = {"cube": (), "gathered": (), "vector": (8,)}
    with record_launches() as launches, patch.object(chip_plan, "HEIGHTS", heights):
        aggregate(whole, x, None, reduce, "ascend_twin").sum().backward()  # type: ignore[arg-type, no-untyped-call]
    forward, backward = (result.makespan / 1000 for result in launches)
    return forward, backward


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("ascend_max", __doc__, SIZES, argv, runs=3)
    warnings.filterwarnings("ignore")
    described = machine()
    kinds = {"mini-batch": mini_batch, "graph": graph}
    taken: dict[tuple[str, int, str], tuple[float, float]] = {}

    def contestant(kind: str, reduce: str, backward: int) -> Callable[[], float]:
        turn = iter(range(1_000_000))

        def run() -> float:
            key = kind, next(turn), reduce
            if key not in taken:  # forward and gradient are counted together
                taken[key] = kinds[kind](args, key[1], reduce)
            return taken[key][backward]

        return run

    names = {
        (kind, reduce, backward): f"{'ours, ' if reduce == 'max' else ''}{reduce} of a {kind}{', gradient' * backward}"
        for kind in kinds
        for reduce in ("max", "sum")
        for backward in (0, 1)
    }
    calls: dict[str, Callable[[], float] | None] = {
        name: contestant(*key) for key, name in names.items() if args.only in name
    }
    rows = measure(calls, args.runs)
    result = {
        "benchmark": "ascend_max",
        "title": f"Maxima and sums of {args.columns} columns, {args.cores} simulated cores",
        "unit": "thousands of cycles",
        "settings": {**args.sizes, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [
            compare(rows, f"A maximum against a sum, {kind}{', gradient' * backward}", [names[kind, "max", backward]],
                    [names[kind, "sum", backward]], False, by_rounds=True)
            for kind in kinds
            for backward in (0, 1)
        ],
    }  # fmt: skip
    return publish(result, args.out)


if __name__ == "__main__":
    main()
