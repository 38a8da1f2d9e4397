"""The time of a complete ``pl.Trainer`` fit to 90 % validation accuracy, on the CPU, against PyG's loader and layers.

The graph of ``make train`` with its model (GraphSAGE, 3 layers, 128 channels), and one of 22,000 nodes with 128
features, of which 2 % of the labels are random; with the 7 % of the other graph, no contestant exceeds 89 % on so few
nodes. Both sides train with the same sizes, optimizer, fanouts and seeds, and validate on sampled neighborhoods after
each epoch. Each contestant first trains a warm-up epoch, which compiles everything. The graph is in memory, and its
edges are not sorted. Ours also trains in bf16-mixed, with features in bfloat16. Each side uses the numbers of workers
and of torch's threads that are fastest for an epoch. The figure is seconds per fit, each with another seed; the numbers
of epochs are also reported.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch_geometric.data import Data
from torchmetrics.classification import MulticlassAccuracy

from benchmarks import peers
from benchmarks.harness import Gate, Isolated, compare, machine, measure, parse, publish
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier

SIZES = {"max_epochs": (60, 2), "shrink": (1, 40)}
GRAPHS: dict[str, dict[str, Any]] = {
    "make train": {
        "graph": {"num_nodes": 100_000, "num_edges": 2_000_000, "num_classes": 16, "num_features": 64},
        "fanouts": [10, 10, 5],
        "accuracy": 0.9,
    },
    "22k nodes": {
        "graph": {
            "num_nodes": 22_000,
            "num_edges": 342_000,
            "num_classes": 16,
            "num_features": 128,
            "label_noise": 0.02,
        },
        "fanouts": [10, 10, 5],
        "accuracy": 0.9,
    },
}
HIDDEN, BATCH_SIZE, LR, DROPOUT = 128, 1024, 0.003, 0.3
WAYS = {
    "ours": {"library": "ours"},
    "ours, bf16-mixed": {"library": "ours", "precision": "bf16-mixed", "feature_dtype": "bfloat16"},
    "PyG": {"library": "pyg", "trim": False},
    "PyG, trimmed": {"library": "pyg", "trim": True},
}
SETTINGS = {"ours": ((1, 2), (1, 1), (2, 1)), "pyg": ((0, 2), (2, 2), (2, 1))}
"""Numbers of workers and of torch's threads to try."""


class Until(pl.Callback):
    """Stops training when validation reaches the target accuracy."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy, self.reached, self.epochs = accuracy, 0.0, 0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the epoch's accuracy."""
        self.reached, self.epochs = float(trainer.callback_metrics["val_acc"]), trainer.current_epoch + 1
        trainer.should_stop = trainer.should_stop or self.reached >= self.accuracy


class PyGClassifier(peers.PyGClassifier):
    """PyG's example with validation, and with this benchmark's dropout and learning rate."""

    def __init__(self, sizes: tuple[int, int, int, int], trim: bool) -> None:
        super().__init__(*sizes, trim=trim)
        self.gnn.dropout.p = DROPOUT
        self.val_acc = MulticlassAccuracy(sizes[-1], average="micro")

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        """Log the accuracy of the seeds."""
        hops = {}
        if self.trim:
            hops = {
                "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
                "num_sampled_edges_per_hop": batch.num_sampled_edges,
            }
        logits: Tensor = self.gnn(batch.x, batch.edge_index, **hops)[: batch.batch_size]
        labels = batch.y[: batch.batch_size]
        self.val_acc(logits.softmax(dim=-1), labels)
        self.log("val_acc", self.val_acc, on_step=False, on_epoch=True, batch_size=labels.size(0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the same Adam as ours."""
        return torch.optim.Adam(self.parameters(), lr=LR)


def fit(spec: dict[str, Any], data: Data, seed: int, max_epochs: int) -> tuple[float, Until]:
    """Train from new weights; return the seconds, and the stopping callback."""
    pl.seed_everything(seed, verbose=False)
    start = time.perf_counter()
    num_classes = spec["graph"]["num_classes"]
    sizes = (data.num_features, HIDDEN, len(spec["fanouts"]), num_classes)
    kwargs = {"num_neighbors": spec["fanouts"], "batch_size": BATCH_SIZE, "num_workers": spec["num_workers"]}
    model: pl.LightningModule
    datamodule: pl.LightningDataModule
    if spec["library"] == "ours":
        model = NodeClassifier(GraphSAGE(*sizes, dropout=DROPOUT), num_classes, lr=LR)
        datamodule = NeighborDataModule(data, feature_dtype=spec.get("feature_dtype"), **kwargs)
    else:
        model = PyGClassifier(sizes, spec["trim"])
        masks = {f"input_{stage}_nodes": data[f"{stage}_mask"] for stage in ("train", "val")}
        datamodule = peers.PyGNodeData(data, **masks, **kwargs)
    until = Until(spec["accuracy"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision=spec.get("precision", "32-true"),
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[until],
    )
    trainer.fit(model, datamodule)
    return time.perf_counter() - start, until


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Report seconds per fit, and in a further turn its number of epochs; a turn with an empty message is one epoch."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(spec["torch_threads"])
    data = planted_power_law(**spec["graph"])
    fit(spec, data, 0, 1)
    epochs = 0
    for _ in range(gate.rounds):
        turn = gate.wait()
        if turn == "epochs":
            gate.report(epochs)
            continue
        seconds, until = fit(spec, data, turn, spec["max_epochs"] if turn else 1)
        if turn and until.reached < spec["accuracy"] and not spec["quick"]:
            raise RuntimeError(f"only {until.reached:.3f} after {until.epochs} epochs")
        epochs = until.epochs
        gate.report(seconds)


def best_setting(spec: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Return the contestant with the fastest workers and threads for an epoch; in a quick run, the first ones."""
    settings = SETTINGS[spec["library"]]
    times: dict[tuple[int, int], float] = {}
    for workers, threads in () if quick else settings:
        isolated = Isolated(contestant, {**spec, "num_workers": workers, "torch_threads": threads}, 1)
        try:
            times[workers, threads] = isolated(0)
        finally:
            isolated.close()
    workers, threads = min(times, key=lambda setting: times[setting], default=settings[0])
    return {**spec, "num_workers": workers, "torch_threads": threads}


def run(sizes: dict[str, int], runs: int, only: str = "", quick: bool = False) -> tuple[list[dict], dict[str, Any]]:
    """Run the contestants with ``only`` in their name; return their rows, and the epochs of each."""
    rows: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    for graph, about in GRAPHS.items():
        shrunk = {key: value // (sizes["shrink"] if key in ("num_nodes", "num_edges") else 1)
                  for key, value in about["graph"].items()}  # fmt: skip
        chosen: dict[str, Isolated | None] = {}
        counts: dict[str, list[float]] = {}
        try:
            for way, options in WAYS.items():
                name = f"{way}, {graph}"
                if only not in name:
                    continue
                if options["library"] == "pyg" and not peers.can_sample():
                    chosen[name] = None
                    continue
                spec = {**about, **options, "graph": shrunk, "max_epochs": sizes["max_epochs"], "quick": quick}
                spec = best_setting(spec, quick)
                extra[f"{name}, workers and threads"] = [spec["num_workers"], spec["torch_threads"]]
                chosen[name] = Isolated(contestant, spec, 2 * runs)
            rows += measure({name: _turns(one, counts.setdefault(name, [])) for name, one in chosen.items()}, runs, 0)
        finally:
            for one in chosen.values():
                if one is not None:
                    one.close()
        for name, seen in counts.items():
            if seen:
                extra[f"{name}, epochs"] = statistics.median(seen)
    return rows, extra


def _turns(one: Isolated | None, counts: list[float]) -> Any:
    if one is None:
        return None

    def turn() -> float:
        seconds = one(len(counts) + 1)  # the seed
        counts.append(one("epochs"))
        return seconds

    return turn


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("time_to_accuracy", __doc__, SIZES, argv)
    described = machine()
    rows, extra = run(args.sizes, args.runs, args.only, args.quick)
    comparisons = [
        compare(rows, f"Time to accuracy, {graph}, against PyG's loader", [f"ours, {graph}"],
                [f"PyG, {graph}", f"PyG, trimmed, {graph}"], False, 8)
        for graph in GRAPHS
    ]  # fmt: skip
    comparisons += [
        compare(rows, f"Time to accuracy, {graph}, bf16-mixed against float32", [f"ours, bf16-mixed, {graph}"],
                [f"ours, {graph}"], False)
        for graph in GRAPHS
    ]  # fmt: skip
    result = {
        "benchmark": "time_to_accuracy",
        "title": "Fits until 90 % validation accuracy",
        "unit": "s per fit",
        "settings": {**args.sizes, "graphs": GRAPHS, "hidden": HIDDEN, "batch_size": BATCH_SIZE, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": comparisons,
        "extra": extra,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
