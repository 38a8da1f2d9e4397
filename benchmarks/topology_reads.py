"""Waits for the disk while a mapped topology is sampled: lists asked for before their hop, or as they are read.

The graph of ``benchmarks/disk.py`` without its features, memory-mapped, and out of the page cache at first. Some
mini-batches of two hops are sampled one after another in one thread. The figure is major page faults per mini-batch,
each of which is a wait for the disk in the middle of a hop; ``extra`` has the ranges that were asked for.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.disk import forget_pages, write_graph
from benchmarks.harness import parse, publish
from benchmarks.machine import machine
from lightning_gnn.graph import list_reads
from lightning_gnn.graph.topology_files import load_topology
from lightning_gnn.ops import sample_neighbors
from lightning_gnn.ops.sample import numba as sampling

SIZES = {"nodes": (2_000_000, 20_000), "degree": (15, 15), "batch_size": (512, 64), "batches": (20, 3)}
FANOUTS = [15, 10]


def faults(folder: Path, sizes: dict[str, int], ask: bool, key: int) -> tuple[float, float]:
    """Return the major faults of a mini-batch, and the ranges that it asked for."""
    forget_pages(folder)
    graph = load_topology(folder, sizes["nodes"], True, False, "")
    list_reads.expect_list_reads(graph.indices, larger_than=0)
    asked, real = [0], list_reads.read_lists_ahead

    def reading(*arguments: Any) -> int:
        asked.append(real(*arguments) if ask else 0)
        return asked[-1]

    sampling.read_lists_ahead = reading
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        for number in range(sizes["batches"]):
            generator = torch.Generator().manual_seed(1000 * key + number)
            seeds = torch.randint(sizes["nodes"], (sizes["batch_size"],), generator=generator)
            sample_neighbors(graph, seeds, FANOUTS, key=number)
        waited = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
    finally:
        sampling.read_lists_ahead = real
        list_reads._expected.clear()
    return waited / sizes["batches"], sum(asked) / sizes["batches"]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("topology_reads", __doc__, SIZES, argv, runs=3, paths={"folder": "where the graph lies meanwhile"})
    described = machine()
    torch.set_num_threads(1)
    rows, extra = [], {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_graph(folder, args.nodes, args.degree, 1, args.batch_size)
        faults(folder, {**args.sizes, "batches": 1}, True, 0)  # compiles
        for contestant, ask in (("ours, asked for before the hop", True), ("ours, as they are read", False)):
            found = [faults(folder, args.sizes, ask, 1 + run) for run in range(args.runs)]
            values = [each for each, _ in found]
            median = statistics.median(values)
            rows.append(
                {"name": contestant, "median": median, "min": min(values), "max": max(values), "values": values}
            )
            extra[contestant] = {"ranges asked for": round(statistics.median(ranges for _, ranges in found), 1)}
    result = {
        "benchmark": "topology_reads",
        "title": f"Major faults of a mini-batch of {args.batch_size} seeds, {args.nodes:,} nodes",
        "unit": "faults",
        "machine": described,
        "settings": {**args.sizes, "runs": args.runs, "fanouts": FANOUTS},
        "rows": rows,
        "comparisons": [],
        "extra": extra,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
