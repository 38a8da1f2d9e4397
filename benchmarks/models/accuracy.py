"""Accuracy of training in 16 bits.

Test accuracy after the same number of epochs, with the same seeds: in float32, with features stored in bfloat16
or float16 (``feature_dtype=``), and also trained in bfloat16 (``Trainer(precision="bf16-mixed")``); GraphSAGE and GAT
on mini-batches, and GCN on the full graph.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid

from benchmarks.harness import machine, measure, parse, publish
from lightning_gnn import FullGraphDataModule, NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GAT, GCN, GraphSAGE, NodeClassifier

SIZES = {"nodes": (20_000, 400), "edges": (200_000, 4_000), "epochs": (10, 1), "full_epochs": (50, 1)}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"feature_dtype": None, "precision": "32-true"},
    "bfloat16 features": {"feature_dtype": "bfloat16", "precision": "32-true"},
    "float16 features": {"feature_dtype": "float16", "precision": "32-true"},
    "bfloat16": {"feature_dtype": "bfloat16", "precision": "bf16-mixed"},
}
FANOUTS = [25, 10]
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GraphSAGE": (GraphSAGE, {}),
    "GAT": (GAT, {"heads": 4}),
    "GCN": (GCN, {}),
}


class Contestant:
    """Trains with the next seed at each call, and returns the test accuracy in percent."""

    def __init__(self, data: Data, model: str, way: str, epochs: int) -> None:
        self.data, self.model, self.epochs, self.seed = data, model, epochs, 0
        self.way = dict(WAYS[way])
        self.precision = self.way.pop("precision")

    def __call__(self) -> float:
        """Train and test once."""
        self.seed += 1
        pl.seed_everything(self.seed, verbose=False)
        num_classes = int(self.data.y.max()) + 1
        kind, more = MODELS[self.model]
        datamodule: Any = (
            NeighborDataModule(self.data, num_neighbors=FANOUTS, batch_size=128, seed=self.seed, **self.way)
            if self.model != "GCN"
            else FullGraphDataModule(self.data, **self.way)
        )
        model = kind(self.data.num_features, 64, num_layers=2, out_channels=num_classes, dropout=0.5, **more)
        module = NodeClassifier(model, num_classes=num_classes)
        trainer = pl.Trainer(
            accelerator="cpu",
            precision=self.precision,
            max_epochs=self.epochs,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule)
        return 100 * float(trainer.test(module, datamodule, verbose=False)[0]["test_acc"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    paths = {"planetoid": "folder of PyG's Planetoid files, to measure Cora and CiteSeer too"}
    args = parse("accuracy", __doc__, SIZES, argv, runs=5, paths=paths)
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    described = machine()
    graphs = {"synthetic": planted_power_law(args.nodes, args.edges, seed=0)}
    for name in ("Cora", "CiteSeer") if args.planetoid else ():
        graphs[name] = Planetoid(args.planetoid, name)[0]
    epochs = {model: args.full_epochs if model == "GCN" else args.epochs for model in MODELS}
    contestants: dict[str, Callable[[], float] | None] = {
        f"{way}, {model}, {name}": Contestant(data, model, way, epochs[model])
        for name, data in graphs.items()
        for model in MODELS
        for way in WAYS
    }
    rows = measure({n: c for n, c in contestants.items() if args.only in n}, args.runs, warmup=0)
    mean = {row["name"]: sum(row["values"]) / len(row["values"]) for row in rows}
    lost = {}
    for name, accuracy in mean.items():
        way, _, rest = name.partition(", ")
        if way != "float32" and f"float32, {rest}" in mean:
            lost[name] = round(mean[f"float32, {rest}"] - accuracy, 2)
    result = {
        "benchmark": "accuracy",
        "title": f"Test accuracy, GraphSAGE and GAT after {args.epochs} epochs, GCN after {args.full_epochs}",
        "unit": "%",
        "settings": {**args.sizes, "fanouts": FANOUTS, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [],
        "extra": {"mean points of accuracy lost against float32": lost},
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
