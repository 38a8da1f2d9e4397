"""A rank that stands still ends the run under each strategy with heartbeats, and is named."""

import os
import re
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_gnn import AscendHybridParallelStrategy, FullGraphDataModule, HyScaleStrategy
from lightning_gnn.distributed.monitored_ddp import MonitoredDDPStrategy
from tests.full_graph.launch import observe, run
from tests.full_graph.training import SideBySide, small_data, trainer_of
from tests.patience import NEVER
from tests.refusals import refuses

STRATEGIES = {
    "hyscale": HyScaleStrategy,
    "ascend_hybrid": AscendHybridParallelStrategy,
    "monitored_ddp": MonitoredDDPStrategy,
}


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("value", [0, float("nan"), "5"])
def test_wrong_values_are_refused(kind, value):
    refuses(
        ValueError, "stall_timeout must be a positive number of seconds, but is ", STRATEGIES[kind], stall_timeout=value
    )


def test_the_same_default_and_ddp_s_options():
    assert (
        pl.Trainer(strategy="monitored_ddp", accelerator="cpu", devices=2, logger=False).strategy.stall_timeout == 300
    )
    assert AscendHybridParallelStrategy().stall_timeout == HyScaleStrategy().options.stall_timeout == 300
    assert AscendHybridParallelStrategy(timeout=20).stall_timeout == 20
    assert MonitoredDDPStrategy(find_unused_parameters=True)._ddp_kwargs == {"find_unused_parameters": True}
    refuses(
        TypeError,
        "unknown option find_unused; did you mean find_unused_parameters?",
        MonitoredDDPStrategy,
        find_unused=1,
    )


def sleep_at(module, place):
    if place == os.environ["PLACE"] and module.global_rank == 1 and module.trainer.fit_loop.total_batch_idx > 1:
        time.sleep(NEVER)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, module):
        ctx.module = module
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        sleep_at(ctx.module, "backward")
        return grad, None


class Mixin:
    def training_step(self, batch, index):
        sleep_at(self, "training_step")
        output = super().training_step(batch, index)
        loss = output["loss"] if isinstance(output, dict) else output
        return Slow.apply(loss, self)

    def on_train_batch_start(self, batch, index):
        sleep_at(self, "hook")


class OfGraphs(Mixin, SideBySide):
    pass


class OfVectors(Mixin, BoringModel):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))  # DDP broadcasts it before each forward pass


def train(rank, kind, place):
    os.environ["PLACE"] = place
    os.dup2(os.open(Path(os.environ["RANK_FOLDER"], f"{rank}.stderr"), os.O_CREAT | os.O_WRONLY), 2)
    trainer = trainer_of(STRATEGIES[kind](stall_timeout=2.0), 2, max_epochs=-1, limit_val_batches=0)
    if kind == "ascend_hybrid":
        trainer.fit(OfGraphs((("gcn", 0.0),)), FullGraphDataModule(small_data()))
    else:
        trainer.fit(OfVectors())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "place", "named", "where"),
    [
        ("ascend_hybrid", "training_step", 1, "training_step"),
        ("ascend_hybrid", "backward", 1, "backward"),
        ("monitored_ddp", "training_step", 1, "training_step"),
        (
            "monitored_ddp",
            "hook",
            None,
            r"(backward|the broadcast of buffers) for \d+ s \(itself, or it waits there for another rank\)",
        ),
    ],
)
def test_a_rank_that_stands_still(kind, place, named, where):
    texts = []

    def read(processes, folder):
        for process in processes:
            process.join()
        texts.extend((folder / f"{rank}.stderr").read_text() for rank in range(2))

    found = observe(train, 2, kind, place, during=read, lost=[0, 1])
    said = "\n".join([*texts, *map(str, found.errors)])
    if named is None:  # no rank computes too long: the one that waits says so
        assert re.search(f"rank 0 hangs in {where}", said), said
        return
    assert re.search(rf"rank {named} \(process \d+ on \S+\) failed: hangs in {where} for \d+ s", said), said
    assert re.search(f"rank {named} hangs in {where}", texts[named]), texts[named]
    assert "sleep_at" in texts[named]
    assert "rank 0 hangs" not in said


def train_a_little(rank, kind):
    torch.manual_seed(3)
    module = BoringModel()
    pl.Trainer(
        accelerator="cpu", devices=2, strategy=kind, max_epochs=1, limit_train_batches=5, limit_val_batches=2,
        accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module)  # fmt: skip
    return module.layer.weight.detach()


@pytest.mark.slow
def test_monitored_ddp_trains_as_ddp():
    found, expected = run(train_a_little, 2, "monitored_ddp"), run(train_a_little, 2, "ddp")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
