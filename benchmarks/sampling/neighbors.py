"""Neighbor sampling alone: ``sample_neighbors`` against pyg-lib, torch-sparse and GraphBolt, on the CPU.

A graph with power-law degrees, mini-batches of 1024 seeds, fanouts 15, 10, 5; no features. The figure is millions of
sampled edges per second. Threads sample separate mini-batches. pyg-lib also runs with two intra-op threads for one
mini-batch, and in two processes that do not have to send back their samples. GraphBolt runs in its own environment, see
``benchmarks.graphbolt``. It samples every node again in each hop, so a mini-batch of the same fanouts has more edges:
it is compared per edge and per mini-batch. ``--against`` also measures another checkout of this package.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import graphbolt, peers
from benchmarks.harness import Gate, Isolated, compare, measure, parse, publish

FANOUTS = [15, 10, 5]
SIZES = {
    "nodes": (1_000_000, 20_000),
    "edges": (30_000_000, 400_000),
    "batch_size": (1024, 128),
    "batches": (16, 8),
}
AGAINST = "folder of another checkout of this package, say of the commit before, to measure beside this one"


def other_checkout(spec: dict[str, Any], gate: Gate) -> None:
    """Sample in a process that imports the package of another checkout."""
    sys.path.insert(0, spec["path"])
    import lightning_gnn
    from benchmarks.sampling import contestants  # remove this checkout's modules, which are already imported

    found = Path(str(lightning_gnn.__file__)).resolve()
    if not found.is_relative_to(Path(spec["path"]).resolve()):
        raise RuntimeError(f"{spec['path']} has no lightning_gnn: {found} was imported")
    contestants.serve(spec, gate)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    # Not at the top: a process that measures another checkout imports this module first.
    from benchmarks.sampling import contestants

    args = parse("sampling", __doc__, SIZES, argv, paths={"against": AGAINST})
    described = graphbolt.machine()
    graph = contestants.make_graph(args.nodes, args.edges)
    seeds = contestants.draw_seeds(args.nodes, args.batch_size, args.batches)
    pools = contestants.threads()
    torch.set_num_threads(1)

    def threaded(sample: peers.OpSampler | None, threads: int) -> Callable[[], float] | None:
        return None if sample is None else partial(contestants.rate, sample, seeds, pools[threads])

    def hashed(threads: int) -> Callable[[], float]:
        sample = contestants.ours(graph, FANOUTS)
        return contestants.hashing(partial(contestants.rate, sample, seeds, pools[threads]))

    def torch_threads(sample: peers.OpSampler | None, threads: int) -> Callable[[], float] | None:
        def run() -> float:
            torch.set_num_threads(threads)
            try:
                return contestants.rate(sample, seeds)
            finally:
                torch.set_num_threads(1)

        return None if sample is None else run

    indices = graph.indices.long()
    pyg_lib = peers.pyg_lib_sampler(graph.indptr, indices, FANOUTS)
    torch_sparse = peers.torch_sparse_sampler(graph.indptr, indices, FANOUTS)
    spec = {**args.sizes, "fanouts": FANOUTS}
    processes: list[Isolated] = []
    if pyg_lib is not None and args.only in "pyg-lib, 2 processes":
        specs = [{**spec, "part": part} for part in (0, 1)]
        processes = [Isolated(contestants.pyg_lib_process, spec, args.runs + 1) for spec in specs]
    before = [name for name in BEFORE if args.only in name] if args.against else []
    other = Isolated(other_checkout, {**spec, "path": args.against}, len(before) * (args.runs + 1)) if before else None

    def at_once(parts: list[Any]) -> float:
        for process in parts:
            process.begin()
        return sum([process.result() for process in parts])

    folder = tempfile.TemporaryDirectory()
    bolt = _graphbolt(graph, Path(folder.name), spec, args.only)

    sample = contestants.ours(graph, FANOUTS)
    runs = {
        "ours, 1 thread": threaded(sample, 1),
        BEFORE[0]: None if other is None else partial(other, 1),
        "pyg-lib, 1 thread": threaded(pyg_lib, 1),
        "torch-sparse, 1 thread": threaded(torch_sparse, 1),
        "ours, 2 threads": threaded(sample, 2),
        BEFORE[1]: None if other is None else partial(other, 2),
        "pyg-lib, 2 threads": threaded(pyg_lib, 2),
        "pyg-lib, 2 threads of torch": torch_threads(pyg_lib, 2),
        "pyg-lib, 2 processes": partial(at_once, processes) if processes else None,
        "torch-sparse, 2 threads": threaded(torch_sparse, 2),
        **{name: partial(at_once, parts) if parts else None for name, parts in bolt.items()},
        "ours by hashing, 1 thread": hashed(1),
        "ours by hashing, 2 threads": hashed(2),
        "ours, disjoint, 1 thread": threaded(contestants.ours(graph, FANOUTS, disjoint=True), 1),
    }
    chosen = {name: run for name, run in runs.items() if args.only in name and (args.against or name not in BEFORE)}
    rows = measure(chosen, args.runs)
    sizes = {"ours": _mean_sizes(graph, seeds)}
    if any(bolt.values()):
        sizes["GraphBolt"] = graphbolt.facts(Path(folder.name))
    for process in (
        *processes,
        *([] if other is None else [other]),
        *(part for parts in bolt.values() for part in parts),
    ):
        process.close()
    folder.cleanup()
    for pool in pools.values():
        pool.shutdown()

    one, two = ["ours, 1 thread"], ["ours, 2 threads"]
    # Two threads hardly speed up a single operator call; the caller gains by sampling two batches at once.
    inside, outside = ["pyg-lib, 2 threads of torch"], ["pyg-lib, 2 threads", "pyg-lib, 2 processes"]
    sparse = ["torch-sparse, 1 thread", "torch-sparse, 2 threads"]
    comparisons = [
        compare(rows, "Sampling, one core, against pyg-lib", one, ["pyg-lib, 1 thread"], True, 8),
        compare(rows, "Sampling, two cores, against pyg-lib with two threads", two, inside, True, 10),
        compare(rows, "Sampling, two cores, against two batches at once in pyg-lib", two, outside, True, 7),
        compare(rows, "Sampling, one core, against torch-sparse", one, sparse[:1], True),
        compare(rows, "Sampling, two cores, against torch-sparse", two, sparse[1:], True),
        compare(rows, "Sampling, one core, against GraphBolt, per edge", one, BOLT[:1], True),
        compare(rows, "Sampling, two cores, against GraphBolt, per edge", two, BOLT[1:], True),
    ]
    if "GraphBolt" in sizes:
        per_batch = [_per_batch(row, sizes["GraphBolt" if row["name"] in BOLT else "ours"]["edges"]) for row in rows]
        by_batch = [
            compare(per_batch, "Sampling, one core, against GraphBolt, per mini-batch", one, BOLT[:1], True),
            compare(per_batch, "Sampling, two cores, against GraphBolt, per mini-batch", two, BOLT[1:], True),
        ]
        comparisons += [{**each, "unit": "mini-batches/s"} for each in by_batch]
    if args.against:
        comparisons += [
            compare(rows, "Sampling, one core, against before", one, BEFORE[:1], True, 1.5, by_rounds=True),
            compare(rows, "Sampling, two cores, against before", two, BEFORE[1:], True, by_rounds=True),
        ]
    result = {
        "benchmark": "sampling",
        "title": f"Neighbor sampling, {args.nodes:,} nodes, {args.edges:,} edges, fanouts {FANOUTS}",
        "unit": "million edges/s",
        "settings": {**args.sizes, "fanouts": FANOUTS, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": comparisons,
        "extra": {**contestants.extra_memory(graph, seeds, FANOUTS), "sizes of a mini-batch": sizes},
    }
    return publish(result, args.out)


def _graphbolt(graph: Any, folder: Path, spec: dict[str, Any], only: str) -> dict[str, list[Any]]:
    """Start GraphBolt's contestants with ``only`` in their name, each of one or more processes."""
    where = graphbolt.write_graph(folder, indptr=graph.indptr, indices=graph.indices)
    plain = {**spec, "kind": "sampling", "folder": where, "independent": True}
    halves = {f"{BOLT[2]}, part {part}": {**plain, "part": part, "parts": 2} for part in (0, 1)}
    specs = {BOLT[0]: plain, BOLT[1]: {**plain, "torch_threads": 2}, **halves}
    started = graphbolt.contestants(folder, {name: own for name, own in specs.items() if only in name})
    return {name: [part for own, part in started.items() if own.startswith(name) and part] for name in BOLT}


def _mean_sizes(graph: Any, seeds: list[torch.Tensor]) -> dict[str, float]:
    from lightning_gnn.ops import sample_neighbors

    samples = [sample_neighbors(graph, own, FANOUTS, int(own[0])) for own in seeds]
    return {
        "edges": statistics.fmean(sample.edge.numel() for sample in samples),
        "nodes": statistics.fmean(sample.node.numel() for sample in samples),
    }


def _per_batch(row: dict[str, Any], edges: float) -> dict[str, Any]:
    """Convert millions of edges per second to mini-batches per second."""
    if "median" not in row:
        return row
    scaled = {key: row[key] * 1e6 / edges for key in ("median", "min", "max")}
    return {**row, **scaled, "values": [value * 1e6 / edges for value in row["values"]]}


BEFORE = ["before, 1 thread", "before, 2 threads"]
BOLT = ["GraphBolt, 1 thread", "GraphBolt, 2 threads of torch", "GraphBolt, 2 processes"]

if __name__ == "__main__":
    main()
