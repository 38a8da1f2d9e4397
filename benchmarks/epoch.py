"""A training epoch through ``pl.Trainer``: our DataModule and model against PyG's LightningNodeData, on the CPU.

GraphSAGE with 2 layers and 256 hidden channels, fanouts 25 and 10, mini-batches of 1024 seeds. PyG's side runs once as
its Lightning example does, on all sampled nodes in each layer, and once with ``trim_to_layer``, which ours does by
itself. The figure is seconds per epoch, after one that does not count. Each contestant has a process of its own; each
side's best number of workers and of torch's threads counts.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks import peers
from benchmarks.harness import Gate, compare, measure_isolated, parse, publish
from benchmarks.machine import machine
from benchmarks.minibatch import make_data
from benchmarks.timed_epochs import TimedEpochs
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.sampling.node_datamodule import NeighborDataModule

CLASSES = 32
SIZES = {
    "nodes": (500_000, 10_000),
    "edges": (10_000_000, 100_000),
    "features": (100, 16),
    "hidden": (256, 32),
    "batch_size": (1024, 128),
    "train_nodes": (20_000, 1_000),
}
OURS = {
    f"ours, {workers} worker{'s' * (workers > 1)}, {threads} torch thread{'s' * (threads > 1)}": {
        "library": "ours",
        "num_workers": workers,
        "torch_threads": threads,
    }
    for workers in (1, 2)
    for threads in (1, 2)
}
PYG = {
    f"PyG{', trimmed' * trim}, {workers} workers, {threads} torch thread{'s' * (threads > 1)}": {
        "library": "pyg",
        "num_workers": workers,
        "torch_threads": threads,
        "trim": trim,
    }
    for trim in (False, True)
    for workers, threads in ((0, 2), (2, 2), (2, 1))
}
CONTESTANTS = {**OURS, **PYG}


def make(spec: dict[str, Any]) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """Return the model and the DataModule of one contestant."""
    pl.seed_everything(0, verbose=False)
    data = make_data(spec["nodes"], spec["edges"], spec["features"], CLASSES)
    seeds = torch.randperm(spec["nodes"])[: spec["train_nodes"]]
    kwargs = {
        "num_neighbors": [25, 10],
        "batch_size": spec["batch_size"],
        "num_workers": spec["num_workers"],
        "pin_memory": spec["device"] != "cpu",
    }
    sizes = (spec["features"], spec["hidden"], 2, CLASSES)
    if spec["library"] == "ours":
        model = NodeClassifier(GraphSAGE(*sizes, dropout=0.5), CLASSES, lr=0.01)
        return model, NeighborDataModule(data, seeds, **kwargs)
    from torch_geometric.data.lightning import LightningNodeData

    return peers.PyGClassifier(*sizes, trim=spec["trim"]), LightningNodeData(data, seeds, **kwargs)


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Train for as many epochs as there are rounds."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(spec["torch_threads"])
    model, datamodule = make(spec)
    trainer = pl.Trainer(
        accelerator="gpu" if spec["device"] == "cuda" else "cpu",
        devices=1,
        max_epochs=gate.rounds,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TimedEpochs(gate)],
    )
    trainer.fit(model, datamodule)


def run(sizes: dict[str, int], runs: int, only: str = "", device: str = "cpu") -> list[dict[str, Any]]:
    """Run the contestants whose name contains ``only``; returns their rows."""
    specs: dict[str, dict[str, Any] | None] = {}
    for name, chosen in CONTESTANTS.items():
        if only in name:
            able = chosen["library"] == "ours" or peers.can_sample()
            specs[name] = {**sizes, **chosen, "device": device} if able else None
    return measure_isolated(contestant, specs, runs)


def comparisons(rows: list[dict[str, Any]], label: str, targets: tuple[float | None, float | None]) -> list[dict]:
    """Set ours against PyG's example, and against the same with trimming."""
    trimmed = [name for name in PYG if "trimmed" in name]
    plain = [name for name in PYG if "trimmed" not in name]
    return [
        compare(rows, f"{label}, against PyG's LightningNodeData", list(OURS), plain, False, targets[0]),
        compare(rows, f"{label}, against the same with trim_to_layer", list(OURS), trimmed, False, targets[1]),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("epoch", __doc__, SIZES, argv, runs=3)
    described = machine()
    rows = run(args.sizes, args.runs, args.only)
    result = {
        "benchmark": "epoch",
        "title": f"Epoch of GraphSAGE, {args.nodes:,} nodes, {args.edges:,} edges, {args.train_nodes:,} seeds",
        "unit": "s per epoch",
        "settings": {**args.sizes, "fanouts": [25, 10], "layers": 2, "classes": CLASSES, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": comparisons(rows, "Training epoch", (2.2, 1.0)),
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
