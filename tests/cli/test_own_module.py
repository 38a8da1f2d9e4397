"""A user's own model and LightningModule, in a file in the working directory."""

import sys

import pytest
import torch

from lightning_gnn.cli.commands import export as export_command
from tests.cli.command import lgnn, metrics_of

FILE = """
import pytorch_lightning as pl
import torch
from torch_geometric.nn import SAGEConv


class Network(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, num_layers, out_channels):
        super().__init__()
        self.first, self.last = SAGEConv(in_channels, hidden_channels), SAGEConv(hidden_channels, out_channels)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


class Module(pl.LightningModule):
    name = "model"

    def __init__(self, model, num_classes, lr):
        super().__init__()
        setattr(self, self.name, model)
        self.lr = lr

    def forward(self, batch):
        return getattr(self, self.name)(batch.x, batch.edge_index)[: batch.batch_size]

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch, batch_idx, stage="val"):
        right = self(batch).argmax(dim=-1) == batch.y[: batch.batch_size]
        self.log(f"{stage}_acc", right.float().mean(), batch_size=batch.batch_size)
        self.log(f"{stage}_mine", right.sum().float(), batch_size=batch.batch_size)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx, "test")

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Otherwise(Module):
    name = "net"
"""
OWN = ["model._target_=my_own_file.Network", "~model.dropout", "~model.input_dropout"]
OWN += ["~task.label_smoothing", "~task.metrics", "~task.weight_decay"]  # null options are not passed on


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_own_file.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_own_file", None)


@pytest.mark.slow
def test_they_are_found_trained_and_exported(folder, capfd):
    options = [*OWN, "task._target_=my_own_file.Module", "task.metric=mine"]
    assert lgnn(folder / "run", *options) == 0
    assert "2-layer Network on synthetic" in capfd.readouterr().out
    metrics = metrics_of(folder / "run")
    assert metrics["test_mine"] > 0
    checkpoint = f"ckpt_path={folder / 'run/checkpoints/best.ckpt'}"
    assert export_command.main([checkpoint, "--to=own.pt2"]) == 0
    assert float(capfd.readouterr().out.split()[-1]) < 1e-5
    rows = torch.export.load("own.pt2").module()(torch.randn(9, 8), torch.randint(9, (2, 30)))
    assert rows.shape == (9, 3)


@pytest.mark.parametrize(("told", "logged"), [((), "acc, loss"), (("task.metrics=[macro_f1]",), "acc, macro_f1, loss")])
def test_a_metric_that_is_not_logged_is_refused_before_training(told, logged, tmp_path, capfd):
    assert lgnn(tmp_path, "task.metric=macro_ap", *told) == 2
    said = (
        f"error: task.metric=macro_ap is not among the logged metrics ({logged}); add it by 'task.metrics=[macro_ap]'\n"
    )
    assert capfd.readouterr().err == said
