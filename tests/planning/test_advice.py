"""The largest part of an epoch, and the advice for it: only settings that this run could use and does not."""

from types import SimpleNamespace

import pytest
import torch

from lightning_gnn.callbacks import EpochThroughput
from lightning_gnn.planning import advice as module
from lightning_gnn.planning.advice import advice


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(module, "num_cores", lambda: 4)
    monkeypatch.setattr(module, "product_rate", lambda dtype: 3.0 if dtype == torch.bfloat16 else 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    return monkeypatch


def run(workers=1, precision="32-true", device="cpu", known=True, **more):
    loader = SimpleNamespace(**({"num_threads": workers} if known else {}))
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device(device)), precision=precision, loggers=[],
        log_every_n_steps=10, num_training_batches=20, train_dataloader=loader, **more,
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
        (MODEL, run(known=False), "Largest part: Model, 90% of an epoch; trainer.precision=bf16-mixed may reduce it"),
        (OTHER, run(), "Largest part: Other, 70% of an epoch; larger mini-batches have fewer steps"),
    ],
)
def test_what_is_said(epoch, trainer, text):
    assert text in advice(epoch, trainer)


@pytest.mark.parametrize("trainer", [run(), run(known=False, precision="bf16-mixed"), run(device="meta")])
def test_nothing_is_promised_that_is_not_known(trainer):
    assert advice(MODEL, trainer) == "Largest part: Model, 90% of an epoch"


def test_what_this_run_has_and_could_have_counts(machine):
    trainer = run()
    trainer.loggers = [object()]
    assert "trainer.log_every_n_steps (now 10)" in advice(OTHER, trainer)
    assert advice(EpochThroughput(), run()) is None
    machine.setattr(module, "product_rate", lambda dtype: 1.0)  # bfloat16 is not faster here
    assert "bf16" not in advice(MODEL, run(known=False))
    machine.setattr(torch, "get_num_threads", lambda: 1)
    assert "torch_threads=4" in advice(MODEL, run())
