"""A complete mini-batch, sample and features: NeighborDataModule's loader against PyG's and GraphBolt's, on the CPU.

The graph and the fanouts of ``benchmarks.sampling.neighbors``, 100 float32 features per node, unsorted edges. The
figure is milliseconds per mini-batch in the steady state: the consumer does no work, workers run ahead, and the first
and last mini-batches of each round are not counted. Each contestant has its own process. GraphBolt's mini-batches have
more edges for the same fanouts, as it samples every node again in each hop; their sizes are reported.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from benchmarks import graphbolt, peers
from benchmarks.harness import Gate, compare, measure_isolated, parse, publish
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datasets.synthetic import power_law_graph

SIZES = {
    "nodes": (1_000_000, 20_000),
    "edges": (30_000_000, 400_000),
    "features": (100, 100),
    "batch_size": (1024, 128),
    "batches": (24, 10),
}
MARGIN = 8
"""Uncounted mini-batches before and after: more than two workers with two mini-batches each can prefetch."""
CONTESTANTS = {
    "ours, 0 workers": {"library": "ours", "num_workers": 0},
    "ours, 1 worker": {"library": "ours", "num_workers": 1},
    "ours, 2 workers": {"library": "ours", "num_workers": 2},
    "PyG, 0 workers": {"library": "pyg", "num_workers": 0},
    "PyG, 2 workers": {"library": "pyg", "num_workers": 2},
    "PyG, 2 workers that also load features": {"library": "pyg", "num_workers": 2, "filter_per_worker": True},
    "GraphBolt, 0 workers": {"library": "graphbolt", "num_workers": 0},
    "GraphBolt, 0 workers, 2 threads": {"library": "graphbolt", "num_workers": 0, "torch_threads": 2},
    "GraphBolt, 2 workers": {"library": "graphbolt", "num_workers": 2},
}


def make_data(nodes: int, edges: int, features: int, classes: int = 32) -> Data:
    """Return a random graph with features, labels and unsorted edges."""
    indptr, indices = power_law_graph(nodes, edges, seed=0)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(edges, generator=generator)
    targets = torch.repeat_interleave(torch.arange(nodes), indptr.diff())
    return Data(
        x=torch.rand(nodes, features, generator=generator),
        y=torch.randint(classes, (nodes,), generator=generator),
        edge_index=torch.stack([indices[order], targets[order]]),
    )


def make_loader(data: Data, spec: dict[str, Any]) -> Iterable[Data]:
    """Return the loader of one contestant, with random seeds for one round."""
    count = (spec["batches"] + 2 * spec["margin"]) * spec["batch_size"]
    if count > data.num_nodes:
        raise ValueError(f"a round needs {count} seeds; use more --nodes or fewer --batches")
    nodes = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(1))[:count]
    kwargs = {
        "num_neighbors": spec["fanouts"],
        "batch_size": spec["batch_size"],
        "num_workers": spec["num_workers"],
        "pin_memory": spec["device"] != "cpu",
    }
    if spec["library"] == "ours":
        return NeighborDataModule(data, nodes, seed=0, **kwargs).train_dataloader()
    kwargs["filter_per_worker"] = spec.get("filter_per_worker")
    return peers.neighbor_loader(data, input_nodes=nodes, shuffle=True, **kwargs)


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Report milliseconds per mini-batch, including the copy to the device, if any."""
    data = make_data(spec["nodes"], spec["edges"], spec["features"])
    loader = make_loader(data, spec)
    if spec["device"] != "cpu":
        from torch_geometric.loader import PrefetchLoader

        loader = PrefetchLoader(loader, torch.device(spec["device"]))  # copies on a separate stream, for both sides
    for _ in range(gate.rounds):
        gate.wait()
        batches = iter(loader)
        _take(batches, spec["margin"])  # workers start and run ahead
        _synchronize(spec["device"])
        start = time.perf_counter()
        _take(batches, spec["batches"])
        _synchronize(spec["device"])
        milliseconds = (time.perf_counter() - start) * 1e3
        _take(batches, spec["margin"])  # while these are ready already, workers have nothing left to do
        if next(batches, None) is not None:
            raise RuntimeError("the epoch should be over")
        gate.report(milliseconds / spec["batches"])


def _take(batches: Iterator[Data], count: int) -> None:
    if sum(1 for _ in islice(batches, count)) < count:
        raise RuntimeError("the epoch ended early")


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def run(sizes: dict[str, int], runs: int, only: str = "", device: str = "cpu") -> list[dict[str, Any]]:
    """Run the contestants with ``only`` in their name; return their rows."""
    specs: dict[str, dict[str, Any] | None] = {}
    bolt: dict[str, dict[str, Any]] = {}
    for name, chosen in CONTESTANTS.items():
        if only in name:
            spec = {**sizes, **chosen, "fanouts": [15, 10, 5], "margin": MARGIN, "device": device}
            if chosen["library"] == "graphbolt":
                bolt |= {name: {**spec, "kind": "minibatch"}} if device == "cpu" else {}
            else:
                specs[name] = spec if chosen["library"] == "ours" or peers.can_sample() else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if bolt and graphbolt.python():
            indptr, indices = power_law_graph(sizes["nodes"], sizes["edges"], seed=0)
            where = graphbolt.write_graph(folder, indptr=indptr, indices=indices.int())
            bolt = {name: {**spec, "folder": where} for name, spec in bolt.items()}
        rows = measure_isolated(contestant, specs, runs, graphbolt.contestants(folder, bolt))
        for number, spec in enumerate(bolt):
            if graphbolt.python():
                next(row for row in rows if row["name"] == spec)["sizes"] = graphbolt.facts(folder, number)
    return rows


def comparisons(rows: list[dict[str, Any]], label: str, target: float | None) -> list[dict[str, Any]]:
    """Compare ours with PyG's loader, each with two workers and each without."""
    pyg_workers = [name for name in CONTESTANTS if name.startswith("PyG, 2")]
    return [
        compare(rows, f"{label}, 2 workers each, against PyG's NeighborLoader", ["ours, 2 workers"], pyg_workers, False,
                target),
        compare(rows, f"{label}, no workers, against PyG's NeighborLoader", ["ours, 0 workers"], ["PyG, 0 workers"],
                False),
        compare(rows, f"{label}, two cores, against GraphBolt", ["ours, 2 workers"],
                ["GraphBolt, 2 workers", "GraphBolt, 0 workers, 2 threads"], False),
        compare(rows, f"{label}, one core, against GraphBolt", ["ours, 0 workers"], ["GraphBolt, 0 workers"], False),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("minibatch", __doc__, SIZES, argv)
    described = graphbolt.machine()
    rows = run(args.sizes, args.runs, args.only)
    result = {
        "benchmark": "minibatch",
        "title": f"Mini-batches, {args.nodes:,} nodes, {args.edges:,} edges, {args.features} features",
        "unit": "ms per mini-batch",
        "settings": {**args.sizes, "fanouts": [15, 10, 5], "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": comparisons(rows, "Mini-batches", 6),
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
