"""Heterogeneous, temporal, weighted and LABOR sampling: our operator against pyg-lib's and GraphBolt's, on one core.

Four graphs: one of the shape of OGB-MAG (papers, authors, institutions, fields; seven edge types including reverse
ones), one of users and items with rating times, a homogeneous one with weights, and a dense one with communities, for
LABOR. Mini-batches of 1024 seeds, fanouts 10 and 10. The figure is millions of sampled edges per second. pyg-lib
samples the same seeds from the same arrays, which it requires in int64. GraphBolt runs in its own environment, see
``benchmarks.graphbolt``, without times, as its rule for them is another. The numbers of nodes (in thousands) of a
mini-batch of the dense graph, sampled uniformly and by LABOR, are also reported.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import graphbolt, peers
from benchmarks.harness import compare, measure, parse, publish
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.graph import CSCGraph, HeteroCSCGraph
from lightning_gnn.ops import Labor, sample_hetero_neighbors, sample_neighbors

FANOUTS = [10, 10]
SIZES = {"edges": (21_000_000, 60_000), "batch_size": (1024, 64), "batches": (8, 3)}
MAG_NODES = {"paper": 736_389, "author": 1_134_649, "institution": 8_740, "field_of_study": 59_965}
MAG_EDGES = {
    ("author", "affiliated_with", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has_topic", "field_of_study"): 7_505_078,
}
Sample = Callable[[Tensor], int]


def ends(num_sources: int, num_targets: int, num_edges: int, generator: torch.Generator) -> Tensor:
    """Return random edges between two node types, both with a few hubs."""
    return torch.stack([
        (torch.rand(num_edges, generator=generator) ** 2 * count).long().clamp(max=count - 1)
        for count in (num_sources, num_targets)
    ])  # fmt: skip


def mag(num_edges: int) -> HeteroCSCGraph:
    """Return a graph of OGB-MAG's shape, with ``num_edges`` edges in approximately its proportions."""
    generator, scale = torch.Generator().manual_seed(0), num_edges / 21_111_007 / 1.74  # including reverse types
    sizes = {name: max(8, int(count * min(1.0, scale * 1.74))) for name, count in MAG_NODES.items()}
    relations = {}
    for (source, name, target), count in MAG_EDGES.items():
        edge_index = ends(sizes[source], sizes[target], max(8, int(count * scale)), generator)
        relations[source, name, target] = CSCGraph.from_edge_index(edge_index, sizes[target], sizes[source])
        if source != target:
            back = CSCGraph.from_edge_index(edge_index.flip(0), sizes[source], sizes[target])
            relations[target, f"rev_{name}", source] = back
    return HeteroCSCGraph.build(sizes, relations)


def ratings(num_edges: int) -> HeteroCSCGraph:
    """Return users and items, with the times of ratings in both directions."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"user": max(50, num_edges // 50), "item": max(20, num_edges // 200)}
    edge_index = ends(sizes["user"], sizes["item"], num_edges // 2, generator)
    when = torch.randint(1_000_000, (edge_index.size(1),), generator=generator)
    rates = CSCGraph.from_edge_index(edge_index, sizes["item"], sizes["user"]).with_time(when)
    back = CSCGraph.from_edge_index(edge_index.flip(0), sizes["user"], sizes["item"]).with_time(when)
    return HeteroCSCGraph.build(sizes, {("user", "rates", "item"): rates, ("item", "rev_rates", "user"): back})


def weighted(num_edges: int) -> tuple[CSCGraph, CSCGraph]:
    """Return a homogeneous graph, without and with weights."""
    generator = torch.Generator().manual_seed(2)
    count = max(50, num_edges // 20)
    graph = CSCGraph.from_edge_index(ends(count, count, num_edges // 2, generator), count)
    return graph, graph.with_weight(torch.rand(graph.num_edges, generator=generator, dtype=torch.float64) + 1e-3)


def crowded(num_edges: int) -> CSCGraph:
    """Return a graph with communities and 50 edges per node, in which targets share sources."""
    nodes = max(200, num_edges // 100)
    data = planted_power_law(num_nodes=nodes, num_edges=num_edges // 2, num_classes=16, num_features=1)
    return CSCGraph.from_data(data)


def ours_typed(graph: HeteroCSCGraph, name: str, times: bool = False) -> Sample:
    def sample(seeds: Tensor) -> int:
        seed_time = {name: _times(seeds)} if times else None
        out = sample_hetero_neighbors(graph, {name: seeds}, FANOUTS, int(seeds[0]), seed_time=seed_time)
        return sum(edge.numel() for edge in out.edge.values())

    return sample


def ours(graph: CSCGraph, labor: Labor | None = None) -> Sample:
    return lambda seeds: sample_neighbors(graph, seeds, FANOUTS, int(seeds[0]), labor=labor).edge.numel()


def pyg_lib_typed(graph: HeteroCSCGraph, name: str, times: bool = False) -> Sample | None:
    """Return pyg-lib's heterogeneous operator, called like in PyG's NeighborSampler, or None if it is not installed."""
    if not peers.importable("pyg_lib"):
        return None
    relations = {"__".join(key): relation for key, relation in graph.relations.items()}
    colptr = {key: relation.indptr for key, relation in relations.items()}
    row = {key: relation.indices.long() for key, relation in relations.items()}
    edge_time = {key: relation.time for key, relation in relations.items()} if times else None
    fanouts = dict.fromkeys(relations, FANOUTS)

    def sample(seeds: Tensor) -> int:
        out = torch.ops.pyg.hetero_neighbor_sample(
            graph.node_types, graph.edge_types, colptr, row, {name: seeds}, fanouts, None, edge_time,
            {name: _times(seeds)} if times else None, None, True, False, True, times, "uniform", True,
        )  # fmt: skip
        return sum(part.numel() for part in out[0].values())

    return sample


def pyg_lib_weighted(graph: CSCGraph) -> Sample | None:
    if not peers.importable("pyg_lib"):
        return None
    indices, weight = graph.indices.long(), graph.weight

    def sample(seeds: Tensor) -> int:
        out = torch.ops.pyg.neighbor_sample(
            graph.indptr, indices, seeds, FANOUTS, None, None, None, weight, True, False, True, False, "uniform", True
        )
        return out[0].numel()

    return sample


def _times(seeds: Tensor) -> Tensor:
    return seeds * 7919 % 1_000_000


def rate(sample: Sample, seeds: Sequence[Tensor]) -> float:
    """Return millions of sampled edges per second."""
    start = time.perf_counter()
    edges = sum(map(sample, seeds))
    return edges / (time.perf_counter() - start) / 1e6


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("typed_sampling", __doc__, SIZES, argv)
    described = graphbolt.machine()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)

    def seeds(count: int) -> list[Tensor]:
        return [torch.randperm(count, generator=generator)[: args.batch_size] for _ in range(args.batches)]

    papers, rated, (plain, heavy) = mag(args.edges), ratings(args.edges), weighted(args.edges)
    untimed = HeteroCSCGraph.build(
        rated.sizes,
        {name: CSCGraph(part.indptr, part.indices, None, source_count=part.source_count)
         for name, part in rated.relations.items()},
    )  # fmt: skip
    dense = crowded(args.edges)
    of_papers, of_users, of_nodes, of_dense = (
        seeds(count) for count in (papers.sizes["paper"], rated.sizes["user"], plain.num_nodes, dense.num_nodes)
    )
    samples: dict[str, tuple[Sample | None, list[Tensor]]] = {
        "ours, MAG": (ours_typed(papers, "paper"), of_papers),
        "pyg-lib, MAG": (pyg_lib_typed(papers, "paper"), of_papers),
        "ours, users and items": (ours_typed(untimed, "user"), of_users),
        "pyg-lib, users and items": (pyg_lib_typed(untimed, "user"), of_users),
        "ours, times": (ours_typed(rated, "user", True), of_users),
        "pyg-lib, times": (pyg_lib_typed(rated, "user", True), of_users),
        "ours, uniform": (ours(plain), of_nodes),
        "ours, weights": (ours(heavy), of_nodes),
        "pyg-lib, weights": (pyg_lib_weighted(heavy), of_nodes),
        "ours, uniform, dense": (ours(dense), of_dense),
        "ours, LABOR, dense": (ours(dense, Labor()), of_dense),
    }
    runs = {
        name: None if sample is None else partial(rate, sample, batches)
        for name, (sample, batches) in samples.items()
        if args.only in name
    }
    with tempfile.TemporaryDirectory() as name:
        bolt = _graphbolt(Path(name), args, papers, untimed, heavy)
        try:
            rows = measure(runs | bolt, args.runs)
        finally:
            for process in filter(None, bolt.values()):
                process.close()

    def nodes(labor: Labor | None) -> float:
        counts = [sample_neighbors(dense, ids, FANOUTS, int(ids[0]), labor=labor).node.numel() for ids in of_dense]
        return sum(counts) / len(counts) / 1e3

    found = {"uniform": nodes(None), "LABOR": nodes(Labor()), "LABOR, layers depend": nodes(Labor(True))}
    against = "against pyg-lib, one core"
    comparisons = [
        compare(rows, f"Typed sampling, graph like OGB-MAG, {against}", ["ours, MAG"], ["pyg-lib, MAG"], True, 5),
        compare(
            rows, f"Typed sampling, users and items, {against}", ["ours, users and items"],
            ["pyg-lib, users and items"], True, 5,
        ),
        compare(rows, f"Temporal sampling, {against}", ["ours, times"], ["pyg-lib, times"], True, 5),
        compare(rows, f"Weighted sampling, {against}", ["ours, weights"], ["pyg-lib, weights"], True),
        *(
            compare(rows, f"Sampling {what}, against GraphBolt", [f"ours, {what}"], [f"GraphBolt, {what}"], True)
            for what in BOLT
        ),
        compare(rows, "Weighted sampling against our uniform", ["ours, weights"], ["ours, uniform"], True, 0.5),
        compare(
            rows, "LABOR sampling against our uniform, dense graph", ["ours, LABOR, dense"], ["ours, uniform, dense"],
            True,
        ),
    ]  # fmt: skip
    result = {
        "benchmark": "typed_sampling",
        "title": f"Heterogeneous, temporal and weighted sampling, {args.edges:,} edges, fanouts {FANOUTS}",
        "unit": "million edges/s",
        "settings": {**args.sizes, "fanouts": FANOUTS, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": comparisons,
        "extra": {"thousand_nodes_per_batch": {name: round(count, 1) for name, count in found.items()}},
    }
    return publish(result, args.out)


BOLT = {"MAG": "paper", "users and items": "user", "weights": None}
"""GraphBolt's graphs, with the node type of the seeds."""


def _graphbolt(
    folder: Path, args: Any, papers: HeteroCSCGraph, untimed: HeteroCSCGraph, heavy: CSCGraph
) -> dict[str, Any]:
    """Start GraphBolt's contestants."""
    specs: dict[str, dict[str, Any]] = {}
    for (what, kind), graph in zip(BOLT.items(), (papers, untimed, heavy), strict=True):
        if args.only in f"GraphBolt, {what}" and graphbolt.python():
            spec = {"kind": "sampling", "fanouts": FANOUTS, "batch_size": args.batch_size, "batches": args.batches}
            spec["independent"] = True
            if isinstance(graph, HeteroCSCGraph):
                spec |= {
                    "nodes": graph.sizes[str(kind)],
                    "seed_type": kind,
                    **graphbolt.write_typed(folder / what, graph),
                }
            else:
                (folder / what).mkdir()
                arrays = {"indptr": graph.indptr, "indices": graph.indices, "weight": graph.weight.float()}
                spec |= {"nodes": graph.num_nodes, "weights": "weight"}
                spec["folder"] = graphbolt.write_graph(folder / what, **arrays)
            specs[f"GraphBolt, {what}"] = spec
    missing = {f"GraphBolt, {what}": None for what in BOLT if args.only in f"GraphBolt, {what}"}
    return missing | graphbolt.contestants(folder, specs)


if __name__ == "__main__":
    main()
