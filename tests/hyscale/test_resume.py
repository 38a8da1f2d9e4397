"""Runs that go on after an interruption: killed again and again, with orders of any kind, with what was decided."""

import os
import random
import re
import signal
import threading
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import WeightedRandomSampler
from torch_geometric.loader import NeighborLoader

from lightning_gnn.hyscale.decisions import Decision
from lightning_gnn.hyscale.mapping import TaskMapping
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.pyg import enable_pyg_sampling
from lightning_gnn.sampling.loader import ThreadedNodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.full_graph.launch import observe, run
from tests.hyscale.training import SILENT, Plain, datamodule, graph, hybrid, state


class Dropping(Plain):
    """What a resumed run could forget: dropout, the optimizer's moments, what hooks and validation draw."""

    def scores(self, batch):
        return self.net(F.dropout(batch.x, 0.5, self.training), batch.edge_index)[: batch.batch_size]

    def on_train_batch_start(self, batch, index):
        with torch.no_grad():
            self.net.convs[0].lin_l.bias += 1e-3 * torch.rand(3)

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch) + torch.rand(()), batch_size=batch.batch_size)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class SaveAt(pl.Callback):
    """Writes a checkpoint after a batch, and ends the run there if it shall."""

    def __init__(self, path, batch, stop=True):
        self.path, self.batch, self.stop = path, batch, stop

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.stop


def train(strategy, callbacks=(), path=None, data=None, seed=11, kind=Dropping, **options):
    """Train; return the strategy, and the weights and moments of the end."""
    torch.manual_seed(seed)
    module = kind()
    torch.manual_seed(seed)
    data = datamodule([3], batch_size=50, num_workers=2) if data is None else data()
    options = {**SILENT, "max_epochs": 3, "limit_val_batches": 1, **options}
    trainer = pl.Trainer(strategy=strategy, callbacks=list(callbacks), **options)
    trainer.fit(module, data, ckpt_path=path, weights_only=True)
    moments = trainer.optimizers[0].state_dict()["state"]
    final = {**state(module), **{f"{i} {name}": m for i, row in moments.items() for name, m in row.items()}}
    return trainer.strategy, final


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# -- killed again and again


class Dies(pl.Callback):
    """Kills this process, within a few steps, at whatever moment that is."""

    def __init__(self, rng):
        self.steps, self.seconds = rng.randint(1, 4), rng.uniform(0.0, 0.03)

    def on_train_batch_start(self, *args):
        self.steps -= 1
        if self.steps == 0:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def link_of_a_chain(rank, folder, replay, victim=None, seed=0):
    """Train on from the last checkpoint, if there is one, and be killed if it is this rank's turn."""
    path = Path(folder, "last.ckpt")
    saves = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True, enable_version_counter=False)
    callbacks = [saves, Dies(random.Random(seed))] if rank == victim else [saves]
    strategy = hybrid() if replay is None else HyScaleStrategy(1, devices=["cpu"], drm=replay)
    _, final = train(
        strategy,
        callbacks,
        path if path.exists() else None,
        max_epochs=8,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    return final


def log_of_decisions(path):
    """Write decisions that come one soon after the other, so that some are planned when a kill comes."""
    seeds = {0: (25, 25), 1: (30, 20), 4: (12, 38), 9: (50, 0), 13: (49, 1), 17: (20, 30)}
    lines = [Decision(TaskMapping(split, 1), "told", "told", number).to_json() for number, split in seeds.items()]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("drm", [False, "replay"])
def test_eight_kills_leave_no_trace(drm, tmp_path):
    replay = log_of_decisions(tmp_path / "decisions.jsonl") if drm else None
    rng = random.Random(f"kills {drm}")
    for number in range(8):
        victim = rng.randrange(2)
        found = observe(link_of_a_chain, 2, str(tmp_path / "chain"), replay, victim, f"{drm} {number}")
        assert found.exit_codes[victim] == -signal.SIGKILL
        assert re.search(rf"rank {victim} \(process \d+ on \S+\) died", found.errors[1 - victim])
    chain = run(link_of_a_chain, 2, str(tmp_path / "chain"), replay)
    whole = run(link_of_a_chain, 2, str(tmp_path / "whole"), replay)
    assert same(whole[0], whole[1])
    assert [same(final, whole[0]) for final in chain] == [True, True]


# -- interrupted, with orders of seeds that are drawn at random


class Shuffling(pl.LightningDataModule):
    """Has a loader that shuffles by itself."""

    def train_dataloader(self):
        data = graph()
        sampler = NeighborSampler(data, [3], seed=5)
        return ThreadedNodeLoader(data, sampler, input_nodes=data.train_mask, batch_size=50, shuffle=True)


class OfPyG(pl.LightningDataModule):
    """Has PyG's loader."""

    neighbors = (-1,)

    def train_dataloader(self):
        data = graph()
        return NeighborLoader(data, list(self.neighbors), input_nodes=data.train_mask, batch_size=50, shuffle=True)


def own_sampler():
    sampler = WeightedRandomSampler(torch.ones(200), 200)
    return datamodule([3], batch_size=50, sampler=sampler, num_workers=2)


ORDERS = {"by itself": Shuffling, "own sampler": own_sampler, "PyG's": OfPyG}
BATCHES = (1, 3, 6)  # in the first epoch, at its end, in the second


def interrupted(rank, folder):
    found = {}
    with enable_pyg_sampling():
        for name, data in ORDERS.items():
            _, whole = train(hybrid(), data=data)
            for batch in BATCHES:
                path = Path(folder, f"{name} {batch}.ckpt")
                train(hybrid(), [SaveAt(path, batch)], data=data)
                rest = [train(hybrid(), path=path, data=data, seed=seed)[1] for seed in (11, 12)]
                found[name, batch] = [same(whole, final) for final in rest]
    return found


@pytest.fixture(scope="module")
def goes_on(tmp_path_factory):
    return run(interrupted, 2, str(tmp_path_factory.mktemp("orders")))


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("order", ORDERS)
def test_orders_that_are_drawn_go_on(order, batch, goes_on):
    """Also in a process whose random streams began elsewhere."""
    assert [found[order, batch] for found in goes_on] == [[True, True]] * 2
