"""Modules that several ranks and a plain Trainer train, and helpers that train and compare them."""

import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch_geometric.data import Data

from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.hyscale.drm import BalanceController
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.nn import GraphSAGE

SILENT = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def make_graph(num_nodes=230, dtype=torch.float64, classes=3):
    """Return a graph with all nodes but 30 in the training split."""
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(num_nodes, 6, generator=generator, dtype=dtype),
        y=torch.randint(classes, (num_nodes,), generator=generator),
        edge_index=torch.randint(num_nodes, (2, 5 * num_nodes), generator=generator),
        train_mask=torch.arange(num_nodes) < num_nodes - 30,
        val_mask=torch.arange(num_nodes) >= num_nodes - 30,
        test_mask=torch.arange(num_nodes) >= num_nodes - 25,
    )


def make_data(num_neighbors=(-1,), batch_size=60, dtype=torch.float64, **options):
    """Return mini-batches with all neighbors; the last one is smaller."""
    return NeighborDataModule(
        make_graph(dtype=dtype), num_neighbors=list(num_neighbors), batch_size=batch_size, seed=0, **options
    )


class Plain(pl.LightningModule):
    """One layer; the loss covers all seeds."""

    options: ClassVar = {}

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.net = GraphSAGE(6, 8, num_layers=1, out_channels=3, dropout=dropout).double()

    def scores(self, batch):
        return self.net(batch.x, batch.edge_index)[: batch.batch_size]

    def loss(self, batch):
        return F.cross_entropy(self.scores(batch), batch.y[: batch.batch_size])

    def training_step(self, batch, index):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Counting(Plain):
    """Counts its steps, and logs its loss."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def training_step(self, batch, index):
        self.steps += 1
        loss = super().training_step(batch, index)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=batch.batch_size)
        self.log("least", loss, on_step=False, on_epoch=True, reduce_fx="min")
        return loss


def make_hybrid(num_ranks=2, **options):
    """Return a strategy of CPU ranks with different shares."""
    shares = {2: [0.3, 0.7], 3: [0.2, 0.5, 0.3], 4: [0.1, 0.2, 0.3, 0.4]}.get(num_ranks)
    return HyScaleStrategy(**{"cpu_trainers": num_ranks, "drm": False, "shares": shares, **options})


@contextmanager
def beside_a_slow_cpu():
    """Replace the measured times by those of a CPU that slows the accelerators down."""
    compute = BalanceController._compute_times

    def slow(self, reports):
        times = compute(self, reports)
        trained = [1e-3 * seeds or None for seeds in times.seeds]
        return replace(
            times, sample_cpu=1e-5, load=1e-5, train_cpu=tuple(trained[:1]), train_accelerator=tuple(trained[1:]),
            iteration=2.0 if times.train_cpu[0] else 1.0,
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(BalanceController, "_compute_times", slow)
        yield


def fit(module, strategy="auto", data=None, epochs=2, filters=True, **options):
    """Train a module, by default without warnings; return the trainer."""
    warnings.simplefilter("ignore" if filters else "always")
    options = {**SILENT, "max_epochs": epochs, "limit_val_batches": 0, **getattr(module, "options", {}), **options}
    trainer = pl.Trainer(strategy=strategy, **options)
    trainer.fit(module, make_data() if data is None else data)
    return trainer


def copy_state(module):
    """Return a copy of all parameters and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
