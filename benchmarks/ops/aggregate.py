"""The aggregation alone: ours against torch's sparse product and PyG's gather and scatter.

A graph with power-law degrees, weighted sums of the in-neighbors' rows. The figure is milliseconds per aggregation,
including conversions. Each contestant has its own process and all of torch's threads. PyG writes one row per edge,
which does not fit into the memory of a typical machine at full width, so it processes 64 columns at a time. Then the
number of columns is varied, and ours also reads the features in bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from benchmarks.full_graph.peers import sparse_pair
from benchmarks.harness import Gate, compare, machine, measure_isolated, parse, publish
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.datasets.synthetic import power_law_graph
from lightning_gnn.graph import CSCGraph
from lightning_gnn.ops import aggregate

SIZES = {"nodes": (233_000, 2_000), "edges": (11_000_000, 20_000), "features": (256, 64)}
WIDTHS = (64, 128, 256, 512)
"""Further numbers of columns; an eighth of them in a quick run."""
PEERS = ("torch.sparse", "PyG, gather and scatter")


def make_inputs(spec: dict[str, Any]) -> tuple[CSCGraph, Tensor, Tensor]:
    """Return the graph, features ``[nodes, features]`` and weights ``[edges]`` in its order."""
    graph = CSCGraph.from_csc(*power_law_graph(spec["nodes"], spec["edges"], seed=0))
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(spec["nodes"], spec["features"], generator=generator)
    return graph, x, torch.rand(spec["edges"], generator=generator)


def make(spec: dict[str, Any]) -> Callable[[], Tensor]:
    """Return the function that a contestant repeats."""
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
    compressed = CompressedGraph.from_graph(graph).to(device)
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


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("aggregate", __doc__, SIZES, argv)
    described = machine()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = torch.get_num_threads()
    common = {**args.sizes, "device": device, "threads": threads}
    specs: dict[str, dict[str, Any] | None] = {"ours": {**common, "library": "ours"}}
    specs |= {name: {**common, "library": name} for name in PEERS}
    columns = [width if args.features >= 256 else width // 8 for width in WIDTHS]
    varying: dict[str, dict[str, Any] | None] = {}
    for width in columns:
        varied = {**common, "features": width}
        varying[f"ours, {width} columns"] = {**varied, "library": "ours"}
        varying[f"ours, {width} columns of bfloat16"] = {**varied, "library": "ours", "dtype": "bfloat16"}
        varying[f"torch.sparse, {width} columns"] = {**varied, "library": "torch.sparse"}
    rows = [
        row
        for some in (specs, varying)  # sequentially, as they would not fit into memory together
        for row in measure_isolated(contestant, {n: s for n, s in some.items() if args.only in n}, args.runs)
    ]
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
        ],
    }  # fmt: skip
    return publish(result, args.out)


if __name__ == "__main__":
    main()
