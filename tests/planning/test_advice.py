"""The largest part of an epoch, and the advice for it: only settings that this run could use and does not."""

import copy
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn import NeighborDataModule
from lightning_gnn.callbacks import EpochThroughput
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.planning import advice as module
from lightning_gnn.planning.advice import advice, bf16_speedup
from tests.hyscale.training import SILENT


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(module, "num_cores", lambda: 4)
    monkeypatch.setattr(module, "bf16_speedup", lambda trainer: trainer.speedup)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    return monkeypatch


def run(workers=1, precision="32-true", device="cpu", known=True, speedup=1.0, **more):
    loader = SimpleNamespace(**({"num_threads": workers} if known else {}))
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device(device)), precision=precision, loggers=[],
        log_every_n_steps=10, num_training_batches=20, train_dataloader=loader, speedup=speedup, **more,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def plain_loaders(monkeypatch):
    monkeypatch.setattr(module, "_loader", lambda trainer: trainer.train_dataloader)


WAITING = EpochThroughput(10.0, model_s=2.0, wait_s=8.0, sampling_s=6.0, features_s=3.0)
MODEL = EpochThroughput(10.0, model_s=9.0, wait_s=1.0, sampling_s=2.0, features_s=1.0)
OTHER = EpochThroughput(10.0, model_s=2.0, wait_s=1.0, sampling_s=2.0, features_s=1.0)


@pytest.mark.parametrize(
    ("epoch", "trainer", "text"),
    [
        (WAITING, run(0), "Largest part: Waiting, 80% of an epoch; datamodule.num_workers=1 would"),
        (WAITING, run(1), "datamodule.num_workers=2 would parallelize the slowest stage, sampling"),
        (WAITING, run(4), "smaller datamodule.num_neighbors would reduce"),
        (WAITING, run(known=False), "SimpleNamespace does not report its stages"),
        (MODEL, run(speedup=2.0), "trainer.precision=bf16-mixed would reduce it: a step in bf16-mixed takes 0.50x"),
        (MODEL, run(speedup=0.8, precision="bf16-mixed"), "trainer.precision=32-true would reduce it"),
        (OTHER, run(), "Largest part: Other, 70% of an epoch; larger mini-batches have fewer steps"),
    ],
)
def test_what_is_said(epoch, trainer, text):
    assert text in advice(epoch, trainer)


@pytest.mark.parametrize(
    "trainer", [run(), run(speedup=2.0, precision="bf16-mixed"), run(speedup=2.0, device="meta"), run(speedup=None)]
)
def test_nothing_is_promised_that_is_not_known(trainer):
    assert advice(MODEL, trainer) == "Largest part: Model, 90% of an epoch"


def test_what_this_run_has_and_could_have_counts(machine):
    trainer = run()
    trainer.loggers = [object()]
    assert "trainer.log_every_n_steps (now 10)" in advice(OTHER, trainer)
    assert advice(EpochThroughput(), run()) is None
    assert "bf16" not in advice(MODEL, run(speedup=1.1))  # less than this does not show
    machine.setattr(torch, "get_num_threads", lambda: 1)
    assert "torch_threads=4" in advice(MODEL, run())


def test_the_measurement_changes_neither_the_module_nor_the_random_state():
    data = planted_power_law(200, 1000, num_classes=3, num_features=8, split=(0.5, 0.2, 0.2), seed=0)
    module = NodeClassifier(GraphSAGE(8, 16, num_layers=2, out_channels=3), num_classes=3)
    trainer = pl.Trainer(max_epochs=1, **SILENT)
    trainer.fit(module, NeighborDataModule(data, num_neighbors=[3, 3], batch_size=32))
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert bf16_speedup(trainer) > 0
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
