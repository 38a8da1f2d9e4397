"""Blocks that several epochs with features on disk read: each looked ahead alone, and looking ahead into the next.

Likewise collective batching and hybrid training, without looking ahead (rows are kept by last use) and with it.

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
from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.graph import write_rows
from lightning_gnn.graph.folder import load_folder
from lightning_gnn.hyscale.loader import PipelineSettings, SharedBatches, StagedLoader
from lightning_gnn.sampling.node_datamodule import NeighborDataModule

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


def epochs(
    spec: dict[str, Any], memory: int, store: str, count: int, alone: bool, module: str = "", lookahead: Any = None
) -> tuple[list[int], list[Any], Any]:
    """Return the blocks that each epoch reads, the nodes of all mini-batches, and the table."""
    kind = CollectiveDataModule if module == "collective" else NeighborDataModule
    loader: Any = datamodule(spec, kind, memory=memory, store=store, lookahead=lookahead).train_dataloader()
    loader.is_last = (lambda epoch: True) if alone else None
    if module == "hyscale":
        shared = SharedBatches(loader, lambda seeds, number: (0, seeds))
        loader = StagedLoader(loader, shared, PipelineSettings(), lambda share: None)
    table, trace, read = loader.tables["x"], [], [0]
    for _ in range(count):
        trace += [batch.n_id.numpy() for batch in loader]
        read.append(table.counts.blocks)
    return np.diff(read).tolist(), trace, table


def _compared(what: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    peer, ours = rows[-2:]
    ratio = round(peer["median"] / max(ours["median"], 1), 3)
    return {
        "what": what, "target": None, "ours": ours["name"], "peer": peer["name"],
        "medians": [ours["median"], peer["median"]], "ratio": ratio, "interval": [ratio] * 2,
    }  # fmt: skip


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
            memory = max(args.nodes * args.features * 4 // part, LEAST)
            for alone in (True, False):
                read, trace, table = epochs(spec, memory, file.path, args.runs + 1, alone)
                key = f"ours, {share} of memory, {'each epoch alone' if alone else 'into the next epoch'}"
                later = read[1:]
                middle = statistics.median(later)
                rows.append({"name": key, "median": middle, "min": min(later), "max": max(later), "values": later})
                best = optimum(trace, table.file, table.cache_rows)
                extra[key] = {"first epoch": read[0], "all against the optimum": round(sum(read) / max(best, 1), 3)}
            comparisons.append(_compared(f"blocks of an epoch, {share} of memory", rows))
        memory = max(args.nodes * args.features * 4 // 2, LEAST)
        for module in ("collective", "hyscale"):
            for lookahead in (0, None):
                read, _, _ = epochs(spec, memory, file.path, args.runs + 1, False, module, lookahead)
                key = f"{module}, 1/2 of memory, {'by last use' if lookahead == 0 else 'looking ahead'}"
                later = read[1:]
                middle = statistics.median(later)
                rows.append({"name": key, "median": middle, "min": min(later), "max": max(later), "values": later})
                extra[key] = {"first epoch": read[0]}
            comparisons.append(_compared(f"blocks of an epoch, {module}", rows))
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
