"""The aggregation alone: ours against torch's sparse product and PyG's gather and scatter, and where the gain is from.

A graph with power-law degrees, weighted sums of the in-neighbours' rows. The figure is milliseconds per aggregation,
conversions included. Each contestant has a process of its own and all of torch's threads. PyG writes a row per edge,
which at full width does not fit the memory of a usual machine: it works through the columns 64 at a time. Then the
columns are varied, and ours reads the same features in bfloat16 too.

The JSON also holds

- each step, in the order of NeutronAscend's figure 10: equal ranges of vertices per worker, then the hybrid plan, then
  chunks compressed for locality (the figure's third step, pipelining, is what prefetching does here, and is part of
  all of them), and what users get, which takes that last step only where a model of the caches expects a gain;
- the load of 30 workers under ranges of equally many vertices, under the paper's ranges of equally many chunks, and
  under the plan (the paper's figure 4), with a plot;
- what the partition costs, the rows loaded with it, and after how many epochs it pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import Tensor
from torch_geometric.utils import scatter

from benchmarks.full_graph_peers import sparse_pair
from benchmarks.harness import Gate, compare, machine, measure_isolated, parse, publish
from lightning_gnn.graph import CSCGraph
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.hybrid_plan import PlanSettings, plan_cores
from lightning_gnn.graph.synthetic import power_law_graph
from lightning_gnn.ops import aggregate

SIZES = {"nodes": (233_000, 2_000), "edges": (11_000_000, 20_000), "features": (256, 64), "workers": (30, 30)}
WIDTHS = (64, 128, 256, 512)
"""Columns that are tried beside those of the option; quick, an eighth of them."""
PEERS = ("torch.sparse", "PyG, gather and scatter")
STEPS = {
    "equal ranges of vertices": {"order": "natural", "num_groups": 1, "mode": "ranges"},
    "+ hybrid plan": {"order": "natural", "num_groups": "auto", "mode": "plan"},
    "+ compression for locality": {"order": "locality", "num_groups": "auto", "mode": "plan"},
}
DEFAULT = {"order": "auto", "num_groups": "auto", "mode": "plan"}
"""What ``FullGraphDataModule`` does: vertices by locality where a model of the caches expects a gain from it."""


def make_inputs(spec: dict[str, Any]) -> tuple[CSCGraph, Tensor, Tensor]:
    """Return the graph, features ``[nodes, features]`` and weights ``[edges]`` in its order."""
    graph = CSCGraph.from_csc(*power_law_graph(spec["nodes"], spec["edges"], seed=0))
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(spec["nodes"], spec["features"], generator=generator)
    return graph, x, torch.rand(spec["edges"], generator=generator)


def make(spec: dict[str, Any]) -> Callable[[], Tensor]:
    """Return what a contestant repeats."""
    graph, x, weight = make_inputs(spec)
    edge_index = graph.to_edge_index()
    device = spec["device"]
    if spec["library"] == "torch.sparse":
        matrix, _ = (part.to(device) for part in sparse_pair(edge_index, weight, graph.num_nodes))
        x = x.to(device)
        return lambda: matrix @ x
    if spec["library"].startswith("PyG"):
        (row, col), x, weight = edge_index.to(device), x.to(device), weight.to(device)[:, None]
        blocks = x.split(64, dim=1)

        def gather_and_scatter() -> Tensor:
            parts = [scatter(b.index_select(0, row) * weight, col, 0, graph.num_nodes, "sum") for b in blocks]
            return torch.cat(parts, dim=1)

        return gather_and_scatter
    compressed = CompressedGraph.from_graph(graph, num_chunks=spec.get("num_chunks", "auto"), order=spec["order"])
    compressed = compressed.replace_settings(PlanSettings(num_groups=spec["num_groups"])).to(device)
    dtype = getattr(torch, spec.get("dtype", "float32"))
    ordered, x = compressed.edge_order(weight).to(device, dtype), x.to(device, dtype)
    return lambda: aggregate(compressed, x, ordered)


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Aggregate once per round."""
    torch.set_num_threads(spec["threads"])
    repeat = make(spec)
    for _ in range(gate.rounds):
        gate.wait()
        start = time.perf_counter()
        repeat()
        if spec["device"] == "cuda":
            torch.cuda.synchronize()
        gate.report((time.perf_counter() - start) * 1e3)


def loads(spec: dict[str, Any], workers: int) -> dict[str, Any]:
    """Edges times columns of each worker: ranges of equally many vertices or locality-aware chunks, and the plan."""
    graph, _, _ = make_inputs({**spec, "features": 1})
    degrees = graph.in_degrees.numpy()
    ranges = [int(part.sum()) for part in np.array_split(degrees, workers)]
    settings = PlanSettings(num_workers=workers)
    compressed = CompressedGraph.from_graph(graph, order="natural", settings=settings)
    plan = plan_cores(spec["features"], compressed.forward.loads, settings)
    grouped = CompressedGraph.from_graph(graph, num_chunks=min(16 * workers, graph.num_nodes)).forward.loads
    work = {
        "ranges of equally many chunks": [
            int(part.sum()) * spec["features"] for part in np.array_split(grouped, workers)
        ],
        "ranges of vertices": [load * spec["features"] for load in ranges],
        "hybrid plan": [int(work) for work in plan.work],
    }
    balance = {f"max/mean, {name}": float(f"{max(w) * workers / sum(w):.4g}") for name, w in work.items()}
    return {"workers": workers, "groups": plan.num_groups, **work, **balance}


def partition_cost(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of building the chunks, and the rows they load."""
    graph, _, _ = make_inputs({**spec, "features": 1})
    small = CSCGraph.from_csc(*power_law_graph(100, 1000, seed=0))
    CompressedGraph.from_graph(small)  # compiles
    start = time.perf_counter()
    compressed = CompressedGraph.from_graph(graph)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    CompressedGraph.from_graph(graph, order="natural")
    natural = time.perf_counter() - start
    return {
        "seconds": round(seconds, 2),
        "seconds, natural order": round(natural, 2),
        **asdict(compressed.redundancy()),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot the loads of the workers beside each other."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = ("ranges of vertices", "ranges of equally many chunks", "hybrid plan")
    figure, axes = pyplot.subplots(1, len(names), figsize=(12, 3), sharey=True, layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        axis.bar(range(result["workers"]), [load / 1e6 for load in result[name]])
        axis.set(title=f"{name}: max/mean {result[f'max/mean, {name}']:.3g}", xlabel="worker")
    axes[0].set_ylabel("edges x columns [million]")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("aggregate", __doc__, SIZES, argv)
    described = machine()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = torch.get_num_threads()
    common = {**args.sizes, "device": device, "threads": threads}
    specs: dict[str, dict[str, Any] | None] = {}
    for step, chosen in STEPS.items():
        given = {"num_chunks": threads} if chosen["mode"] == "ranges" else {}
        specs[f"ours, {step}"] = {**common, **chosen, **given, "library": "ours"}
    specs["ours"] = {**common, **DEFAULT, "library": "ours"}
    specs |= {name: {**common, "library": name} for name in PEERS}
    columns = [width if args.features >= 256 else width // 8 for width in WIDTHS]
    varying: dict[str, dict[str, Any] | None] = {}
    for width in columns:
        varied = {**common, "features": width, **DEFAULT}
        varying[f"ours, {width} columns"] = {**varied, "library": "ours"}
        varying[f"ours, {width} columns of bfloat16"] = {**varied, "library": "ours", "dtype": "bfloat16"}
        varying[f"torch.sparse, {width} columns"] = {**varied, "library": "torch.sparse"}
    rows = [
        row
        for some in (specs, varying)  # one after the other: together they would not fit into memory
        for row in measure_isolated(contestant, {n: s for n, s in some.items() if args.only in n}, args.runs)
    ]
    extra: dict[str, Any] = {}
    if not args.only:
        medians = {row["name"]: row["median"] for row in rows}
        extra["partition"] = partition_cost(common)
        saved = medians["ours, + hybrid plan"] - medians["ours, + compression for locality"]
        # A two-layer GCN aggregates four times per epoch, forward and backward.
        extra["partition"]["epochs of a two-layer GCN until it pays"] = (
            int(extra["partition"]["seconds"] * 1e3 / (4 * saved)) + 1 if saved > 0 else "never, on this graph"
        )
        extra["load per worker"] = loads(common, args.workers)
        if args.out is not None:
            draw(extra["load per worker"], args.out.with_name("aggregate_load.png"))
    what = f"Aggregation, {args.features} columns"
    result = {
        "benchmark": "aggregate",
        "title": f"Aggregation, {args.nodes:,} nodes, {args.edges:,} edges, {args.features} columns",
        "unit": "ms per aggregation",
        "settings": {**args.sizes, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [
            compare(rows, f"{what}, against torch.sparse", ["ours"], ["torch.sparse"], False, 2.0),
            compare(rows, f"{what}, against PyG's gather and scatter", ["ours"], [PEERS[1]], False, 15.0),
            *(
                compare(rows, f"Aggregation, {width} columns, against torch.sparse", [f"ours, {width} columns"],
                        [f"torch.sparse, {width} columns"], False, 1.3)
                for width in columns
            ),
            *(
                compare(rows, f"Aggregation, {width} columns, bfloat16 against float32",
                        [f"ours, {width} columns of bfloat16"], [f"ours, {width} columns"], False, 1.6)
                for width in columns
            ),
            compare(rows, f"{what}, against equal ranges of vertices", ["ours"],
                    ["ours, equal ranges of vertices"], False, 1.0),
        ],
        "extra": extra,
    }  # fmt: skip
    return publish(result, args.out)


if __name__ == "__main__":
    main()
