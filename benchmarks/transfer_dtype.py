"""What it costs in accuracy to send features to the accelerators in fewer bits.

Hybrid training with ``transfer_dtype`` None, float16 and int8: test accuracy of a GraphSAGE after as many epochs, with
the same seeds. The CPU stands for the accelerator; rounding is the same wherever it happens.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid

from benchmarks.harness import measure, parse, publish
from benchmarks.machine import machine
from lightning_gnn import NeighborDataModule
from lightning_gnn.graph.synthetic import planted_power_law
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.nn import GraphSAGE, NodeClassifier

SIZES = {"nodes": (20_000, 400), "edges": (200_000, 4_000), "epochs": (20, 1)}
DTYPES = (None, "float16", "int8")


class Contestant:
    """Trains with one more seed at each call, and returns the test accuracy in percent."""

    def __init__(self, data: Data, dtype: str | None, epochs: int) -> None:
        self.data, self.dtype, self.epochs = data, dtype, epochs
        self.seed = 0

    def __call__(self) -> float:
        """Train and test once."""
        self.seed += 1
        pl.seed_everything(self.seed, verbose=False)
        datamodule = NeighborDataModule(self.data, num_neighbors=[10, 10], batch_size=128, seed=self.seed)
        num_classes = int(self.data.y.max()) + 1
        model = GraphSAGE(self.data.num_features, 64, num_layers=2, out_channels=num_classes)
        module = NodeClassifier(model, num_classes=num_classes)
        strategy = HyScaleStrategy(cpu_trainers=0, devices=["cpu"], drm=False, transfer_dtype=self.dtype)
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=strategy,
            max_epochs=self.epochs,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule)
        scores = trainer.test(module, datamodule, verbose=False)[0]
        return 100 * float(scores["test_acc"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    paths = {"planetoid": "folder of PyG's Planetoid files, to measure Cora and CiteSeer too"}
    args = parse("transfer_dtype", __doc__, SIZES, argv, runs=5, paths=paths)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    described = machine()
    drawn = planted_power_law(args.nodes, args.edges, seed=0)
    graphs = {"synthetic": drawn}
    for name in ("Cora", "CiteSeer") if args.planetoid else ():
        graphs[name] = Planetoid(args.planetoid, name)[0]
    contestants: dict[str, Callable[[], float] | None] = {
        f"{dtype or 'float32'}, {name}": Contestant(data, dtype, args.epochs)
        for name, data in graphs.items()
        for dtype in DTYPES
    }
    rows = measure({n: c for n, c in contestants.items() if args.only in n}, args.runs, warmup=0)
    mean = {row["name"]: sum(row["values"]) / len(row["values"]) for row in rows}
    lost = {
        name: round(mean[f"float32, {name.split(', ')[1]}"] - accuracy, 2)
        for name, accuracy in mean.items()
        if f"float32, {name.split(', ')[1]}" in mean and not name.startswith("float32")
    }
    columns = {name: int(data.num_features) for name, data in graphs.items()}
    result = {
        "benchmark": "transfer_dtype",
        "title": f"Test accuracy after {args.epochs} epochs of GraphSAGE, features sent in fewer bits",
        "unit": "%",
        "settings": {**args.sizes, "runs": args.runs, "features": columns},
        "machine": described,
        "rows": rows,
        "comparisons": [],
        "extra": {
            "mean points of accuracy lost against float32": lost,
            "bytes per row, of float32": {
                name: {"float16": 0.5, "int8": round((width + 4) / (4 * width), 3)} for name, width in columns.items()
            },
        },
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
