"""What LABOR gains beside uniform sampling: nodes per mini-batch, variance, time of an epoch, and accuracy.

A drawn graph with many edges per node, where targets have sources in common. The same GraphSAGE is trained with uniform
sampling and with LABOR, alone and with variates that layers (``layer_dependency``) or mini-batches
(``--batch-dependency``) share; it is tested with all neighbours. The figure is seconds per training epoch, each round
with another seed. Beside the table stand the means over an epoch of the nodes of a mini-batch, and of the squared error
of one layer's mean over sampled neighbours, against that over all neighbours: of a target, and of the mean of a
mini-batch's targets, times their number. Both are 1 for uniform sampling; errors of targets that share their sources do
not cancel, of which the second tells.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from benchmarks.harness import compare, measure, parse, publish
from benchmarks.machine import machine
from lightning_gnn.callbacks import Throughput
from lightning_gnn.graph.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.sampling import NeighborDataModule

SIZES = {
    "nodes": (20_000, 400),
    "edges": (2_000_000, 8_000),
    "features": (128, 16),
    "batch_size": (1024, 32),
    "fanout": (10, 4),
    "batch_dependency": (8, 4),
    "epochs": (5, 1),
}
HIDDEN, CLASSES = 128, 16


class Contestant:
    """Trains with one more seed at each call.

    Args:
        data: The graph.
        sizes: Of the benchmark.
        sampling: Arguments of the DataModule.
    """

    def __init__(self, data: Data, sizes: dict[str, int], sampling: dict[str, Any]) -> None:
        self.data, self.sizes, self.sampling = data, sizes, sampling
        self.accuracies: list[float] = []

    def batches(self, hops: int, **options: Any) -> NeighborDataModule:
        """Return the DataModule."""
        fanouts = [self.sizes["fanout"]] * hops
        size = self.sizes["batch_size"]
        return NeighborDataModule(self.data, num_neighbors=fanouts, batch_size=size, **self.sampling, **options)

    def __call__(self) -> float:
        """Return the seconds of an epoch."""
        pl.seed_everything(len(self.accuracies), verbose=False)
        model = GraphSAGE(self.data.num_features, HIDDEN, 2, CLASSES, dropout=0.3)
        throughput = Throughput()
        trainer = pl.Trainer(
            max_epochs=self.sizes["epochs"], accelerator="cpu", devices=1, limit_val_batches=0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[throughput],
        )  # fmt: skip
        module = NodeClassifier(model, CLASSES, lr=0.003)
        datamodule = self.batches(2, num_workers=1, inference="full", seed=len(self.accuracies))
        trainer.fit(module, datamodule)
        (found,) = trainer.test(module, datamodule, verbose=False)
        self.accuracies.append(100 * found["test_acc"])
        epoch = throughput.summary()
        assert epoch is not None
        return epoch.epoch_time_s

    def nodes(self) -> float:
        """Return the mean number of nodes of a mini-batch."""
        counts = [batch.num_nodes for batch in self.batches(2).train_dataloader()]
        return sum(counts) / len(counts)

    def squared_errors(self, rounds: int = 1) -> tuple[float, float]:
        """Return the squared error of one layer's mean, per feature.

        Args:
            rounds: Epochs to take the mean over.

        Returns:
            That of a target, and that of the mean of a mini-batch's targets, times their number.
        """
        exact = means(self.data.x, self.data.edge_index, self.data.num_nodes)
        of_targets, of_batches = [], []
        loader = self.batches(1).train_dataloader()
        for batch in (batch for _ in range(rounds) for batch in loader):
            seeds = batch.n_id[: batch.batch_size]
            wrong = means(batch.x, batch.edge_index, batch.num_nodes)[: batch.batch_size] - exact[seeds]
            of_targets.append(float(wrong.square().mean()))
            of_batches.append(float(wrong.mean(0).square().mean()) * len(seeds))
        return sum(of_targets) / len(of_targets), sum(of_batches) / len(of_batches)


def means(x: Tensor, edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the mean of each node's in-neighbours, 0 without any."""
    return scatter(x[edge_index[0]], edge_index[1], dim=0, dim_size=num_nodes, reduce="mean")


def ways(batch_dependency: int) -> dict[str, dict[str, Any]]:
    """Return arguments of the DataModule, by the contestants' names."""
    labor, layers, batches = {"sampler": "labor"}, {"layer_dependency": True}, {"batch_dependency": batch_dependency}
    return {
        "ours, uniform": {},
        "ours, LABOR": labor,
        "ours, LABOR, layers depend": labor | layers,
        f"ours, LABOR, {batch_dependency} batches depend": labor | batches,
        f"ours, LABOR, layers and {batch_dependency} batches depend": labor | layers | batches,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("labor", __doc__, SIZES, argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    described = machine()
    data = planted_power_law(args.nodes, args.edges, CLASSES, args.features, split=(0.5, 0.1, 0.4))
    contestants = {
        name: Contestant(data, args.sizes, sampling)
        for name, sampling in ways(args.batch_dependency).items()
        if args.only in name
    }
    calls: dict[str, Callable[[], float] | None] = {**contestants}
    rows = measure(calls, args.runs)
    figures = {}
    uniform = Contestant(data, args.sizes, {}).squared_errors()
    for name, contestant in contestants.items():
        errors = contestant.squared_errors()
        accuracies = contestant.accuracies[-args.runs :]
        figures[name] = {
            "nodes per batch": round(contestant.nodes()),
            "variance of a target's mean, of uniform": round(errors[0] / uniform[0], 3),
            "variance of a batch's mean, of uniform": round(errors[1] / uniform[1], 3),
            "test accuracy, %": round(sum(accuracies) / len(accuracies), 2),
        }
    names = [name for name in contestants if name != "ours, uniform"]
    result = {
        "benchmark": "labor",
        "title": f"Epochs on {args.nodes:,} nodes and {args.edges:,} edges, fanouts {[args.fanout] * 2}",
        "unit": "s",
        "settings": {**args.sizes, "hidden": HIDDEN, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [
            compare(rows, f"An epoch, {name} against uniform", [name], ["ours, uniform"], False, by_rounds=True)
            for name in names
        ],
        "extra": figures,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
