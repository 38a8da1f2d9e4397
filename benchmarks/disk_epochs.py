"""Blocks that several epochs with features on disk read: each looked ahead alone, and looking ahead into the next.

The graph of ``benchmarks/disk.py``. The figure is blocks of 4096 bytes that an epoch after the first reads, which does
not depend on how busy the machine is; ``extra`` sets all epochs against what Belady's rule reads, which knows them all.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.disk import datamodule, optimum, write_graph
from benchmarks.harness import parse, publish
from benchmarks.machine import machine
from lightning_gnn.graph import write_rows
from lightning_gnn.graph.folder import load_folder

SIZES = {
    "nodes": (400_000, 6_000),
    "features": (100, 600),
    "degree": (15, 5),
    "batch_size": (128, 32),
    "train_nodes": (5_120, 320),
}
SHARES = {"1/2": 2, "1/4": 4}
LEAST = 9_000_000
"""Bytes below which nothing could be read, of a quick run."""


def epochs(spec: dict[str, Any], memory: int, store: str, count: int, alone: bool) -> tuple[list[int], list[Any], Any]:
    """Return the blocks that each epoch reads, the nodes of all mini-batches, and the table."""
    loader = datamodule(spec, memory=memory, store=store).train_dataloader()
    loader.is_last = (lambda epoch: True) if alone else None
    table, trace, read = loader.tables["x"], [], [0]
    for _ in range(count):
        trace += [batch.n_id.numpy() for batch in loader]
        read.append(table.counts.blocks)
    return np.diff(read).tolist(), trace, table


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("disk_epochs", __doc__, SIZES, argv, runs=3, paths={"folder": "where the graph lies meanwhile"})
    described = machine()
    torch.set_num_threads(1)
    rows, comparisons, extra = [], [], {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_graph(folder, args.nodes, args.degree, args.features, args.train_nodes)
        file = write_rows(load_folder(folder, check=False).x, folder / "x.rows")
        spec = {"folder": name, "batch_size": args.batch_size}
        for share, part in SHARES.items():
            memory, medians = max(args.nodes * args.features * 4 // part, LEAST), []
            for alone in (True, False):
                read, trace, table = epochs(spec, memory, file.path, args.runs + 1, alone)
                key = f"ours, {share} of memory, {'each epoch alone' if alone else 'into the next epoch'}"
                later = read[1:]
                medians.append(statistics.median(later))
                rows.append({"name": key, "median": medians[-1], "min": min(later), "max": max(later), "values": later})
                best = optimum(trace, table.file, table.cache_rows)
                extra[key] = {"first epoch": read[0], "all against the optimum": round(sum(read) / max(best, 1), 3)}
            comparisons.append({
                "what": f"blocks of an epoch, {share} of memory", "target": None, "ours": rows[-1]["name"],
                "peer": rows[-2]["name"], "medians": medians[::-1], "ratio": round(medians[0] / max(medians[1], 1), 3),
                "interval": [round(medians[0] / max(medians[1], 1), 3)] * 2,
            })  # fmt: skip
    result = {
        "benchmark": "disk_epochs",
        "title": f"Blocks of 4096 bytes that an epoch reads, {args.nodes:,} nodes with {args.features} features",
        "unit": "blocks",
        "machine": described,
        "settings": {**args.sizes, "runs": args.runs, "epochs": args.runs + 1},
        "rows": rows,
        "comparisons": comparisons,
        "extra": extra,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
