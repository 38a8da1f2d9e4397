"""Modules that take their sizes from the first mini-batch: several ranks train what a plain Trainer trains."""

import os

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv

from lightning_gnn import AscendHybridParallelStrategy, FullGraphDataModule
from lightning_gnn.nn import GCN
from tests.full_graph.launch import observe, run
from tests.hyscale.training import SILENT, Plain, datamodule, fit, graph, hybrid, state


class Lazy(Plain):
    """A convolution of PyG, a normalization with lazy buffers, and a layer of torch."""

    def __init__(self):
        super().__init__()
        self.net = SAGEConv(-1, 8).double()
        self.norm, self.head = torch.nn.LazyBatchNorm1d().double(), torch.nn.LazyLinear(3).double()
        self.register_buffer("steps", torch.zeros(()))

    def scores(self, batch):
        self.steps += 1
        self.log("share", float(batch.batch_size), batch_size=batch.batch_size)
        hidden = super().scores(batch)
        return self.head(self.norm(hidden).relu() if self.normalizes else hidden.relu())

    normalizes = False

    def validation_step(self, batch, index):
        return self.loss(batch)


class LazyByHand(Lazy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Normalized(Lazy):
    normalizes = True


class OverNodes(pl.LightningModule):
    """A full graph, of which each rank has some rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net, self.head = GCN(6, 8, num_layers=1, out_channels=8, dropout=0.0).double(), torch.nn.LazyLinear(3)
        self.head.double()

    def training_step(self, batch, index):
        scores = self.head(self.net(batch.x, batch.edge_index).relu())
        return F.cross_entropy(scores[batch.train_mask], batch.y[batch.train_mask])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(rank, kind, several):
    os.environ.pop("PL_GLOBAL_SEED", None)  # which other tests have set, and ascend_hybrid goes back to
    module, data, strategy = kind(), datamodule(), hybrid() if several else "auto"
    options = {"limit_val_batches": 1}
    if kind is OverNodes:
        data = FullGraphDataModule(graph())
        strategy, options = AscendHybridParallelStrategy(), {"devices": 2 if several else 1}
    elif not kind.normalizes:
        module.norm = None  # which would have no size
    else:
        data = datamodule(drop_last=True)
    fit(module, strategy, data, **options)
    return state(module)


@pytest.mark.parametrize("kind", [Lazy, LazyByHand, OverNodes])
def test_lazy_modules_are_initialized_and_trained_as_by_a_plain_trainer(kind):
    plain = train(0, kind, False)
    first, second = run(train, 2, kind, True)
    for name, expected in plain.items():
        torch.testing.assert_close(first[name], expected, rtol=1e-9, atol=1e-12)
        assert torch.equal(first[name], second[name]), name


def test_lazy_buffers_become_those_of_all_ranks():
    first, second = run(train, 2, Normalized, True)
    assert first["norm.num_batches_tracked"] > 0
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


class Unused(Lazy):
    def scores(self, batch):
        return Plain.scores(self, batch)


def unused(rank):
    trainer = pl.Trainer(strategy=hybrid(), max_epochs=1, **SILENT)
    trainer.fit(Unused(), datamodule())


def test_a_lazy_module_that_no_step_uses_is_named():
    for error in observe(unused, 2).errors:
        assert "norm.weight, norm.bias, head.weight, head.bias, norm.running_mean" in error
        assert "has no size yet, and no rank's first mini-batch gives it one" in error
