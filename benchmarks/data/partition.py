"""Partitioning time, and the resulting communication between ranks: METIS, streaming (LDG), and random.

The figure is seconds to partition the nodes of a synthetic graph with communities. Also reported are the fraction of
edges between parts, and the number of remote rows in a mini-batch, counted on sampled ones: with seeds in the order of
one machine, and with seeds of the rank's own part; and for streaming without its seven additional passes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import compare, machine, measure, parse, publish
from lightning_gnn import NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.partitioned import assign
from lightning_gnn.planning.cluster_traffic import count_traffic

SIZES = {
    "nodes": (50_000, 400),
    "edges": (500_000, 3_000),
    "parts": (8, 4),
    "batch_size": (256, 16),
    "batches": (32, 4),
}
CLASSES, FEATURES, HOMOPHILY = 32, 4, 0.9
METHODS = {"ours, ldg": ("ldg", 8), "ours, ldg, one pass": ("ldg", 1), "metis": ("metis", 8), "random": ("random", 8)}
"""Partitioning methods, and the number of passes of the streaming one."""


class Contestant:
    """Partitions the nodes of a graph."""

    def __init__(self, data: Any, method: str, passes: int, parts: int) -> None:
        self.data, self.method, self.passes, self.parts = data, method, passes, parts
        self.graph = CSCGraph.from_data(data)
        self.seeds = {None: data.train_mask.nonzero().view(-1)}

    def __call__(self) -> float:
        """Partition the graph and return the seconds."""
        before, assign._PASSES = assign._PASSES, self.passes
        try:
            start = time.perf_counter()
            assign.assign_nodes(self.graph, self.parts, self.method, self.seeds)
            return time.perf_counter() - start
        finally:
            assign._PASSES = before

    def counts(self, batch_size: int, batches: int) -> dict[str, float]:
        """Return the communication between ranks."""
        before, assign._PASSES = assign._PASSES, self.passes
        try:
            owner = assign.assign_nodes(self.graph, self.parts, self.method, self.seeds)[None].numpy()
        finally:
            assign._PASSES = before
        source, target = self.graph.to_edge_index().numpy()
        module = NeighborDataModule(self.data, num_neighbors=[10, 10], batch_size=batch_size)
        one, own = (
            count_traffic(module.train_dataloader(), {None: owner}, self.parts, order, batches=batches)
            for order in ("global", "local")
        )
        return {
            "edges between parts": round(float((owner[source] != owner[target]).mean()), 3),
            "nodes of a mini-batch": round(one.nodes),
            "of other parts, order of one machine": round(one.remote_rows),
            "of other parts, own seeds": round(own.remote_rows),
        }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("partition", __doc__, SIZES, argv, runs=3)
    warnings.filterwarnings("ignore")
    described = machine()
    data = planted_power_law(args.nodes, args.edges, CLASSES, FEATURES, homophily=HOMOPHILY, split=(0.1, 0.1, 0.1))
    contestants = {
        name: Contestant(data, method, passes, args.parts)
        for name, (method, passes) in METHODS.items()
        if args.only in name
    }
    calls: dict[str, Callable[[], float] | None] = {**contestants}
    rows = measure(calls, args.runs)
    result = {
        "benchmark": "partition",
        "title": f"{args.parts} parts of {args.nodes:,} nodes and {args.edges:,} edges",
        "unit": "s",
        "settings": {**args.sizes, "classes": CLASSES, "homophily": HOMOPHILY, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [compare(rows, "The stream against METIS", ["ours, ldg"], ["metis"], False, by_rounds=True)]
        if {"ours, ldg", "metis"} <= contestants.keys()
        else [],
        "extra": {name: one.counts(args.batch_size, args.batches) for name, one in contestants.items()},
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
