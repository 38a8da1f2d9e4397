"""Runs that go on after an interruption: killed again and again, with orders of any kind, with what was decided."""

import os
import random
import re
import signal
import threading
import traceback
import warnings
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import WeightedRandomSampler
from torch_geometric.loader import NeighborLoader

from lightning_gnn.hyscale.resource_manager.controller import STEP_FIELDS, BalanceController
from lightning_gnn.hyscale.resource_manager.decisions import Decision, read_decisions
from lightning_gnn.hyscale.resource_manager.mapping import TaskMapping
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.loading import NodeLoader
from lightning_gnn.pyg import enable_pyg_sampling
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.campaigns import cases_of
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
        return NodeLoader(data, sampler, input_nodes=data.train_mask, batch_size=50, shuffle=True)


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


def interrupted(rank, folder, orders):
    found = {}
    with enable_pyg_sampling():
        for name, batches in orders.items():
            data = ORDERS[name]
            _, whole = train(hybrid(), data=data)
            for batch in batches:
                path = Path(folder, f"{name} {batch}.ckpt")
                train(hybrid(), [SaveAt(path, batch)], data=data)
                rest = [train(hybrid(), path=path, data=data, seed=seed)[1] for seed in (11, 12)]
                found[name, batch] = [same(whole, final) for final in rest]
    return found


@pytest.fixture(scope="module")
def goes_on(request, tmp_path_factory):
    orders = {}
    for case in cases_of(request.session, test_orders_that_are_drawn_go_on):
        orders.setdefault(case["order"], []).append(case["batch"])
    return run(interrupted, 2, str(tmp_path_factory.mktemp("orders")), orders)


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("order", ORDERS)
def test_orders_that_are_drawn_go_on(order, batch, goes_on):
    """Also in a process whose random streams began elsewhere."""
    assert [found[order, batch] for found in goes_on] == [[True, True]] * 2


# -- what was decided


def unlevel(monkeypatch):
    """Let trainer 0 seem three times as fast as trainer 1."""
    times, train_time = BalanceController._compute_times, STEP_FIELDS.index("train")

    def _compute_times(self, rows):
        rows = [list(row) for row in rows]
        for row, seconds in zip(rows, (0.001, 0.003), strict=True):
            row[train_time] = seconds * row[0]
        return times(self, rows)

    monkeypatch.setattr(BalanceController, "_compute_times", _compute_times)


def train_and_warn(*arguments, **options):
    """Train; return the strategy, the end, and the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        return *train(*arguments, **options), [str(warning.message) for warning in told]


def recorded(rank, folder):
    """Record decisions, replay them, go on with a replay after each of them, and record where nothing can be."""
    record, options = Path(folder, "log", "decisions.jsonl"), {"devices": ["cpu"], "threads": [1, 1, 1]}
    strategy, whole = train(HyScaleStrategy(1, 0.5, decision_log=record, **options), max_epochs=10)
    decisions = read_decisions(record.read_text().splitlines())
    assert len(strategy.balance.history) == 39  # of 40 iterations, the last one's times are never told
    assert all(entry.seeds for entry, _ in strategy.balance.history)
    mapping = strategy.balance.mapping
    assert mapping.total == 50
    assert mapping.seeds[0] > mapping.seeds[1] > 0
    assert len(decisions) >= 2
    assert all(decision.explanation for decision in decisions)
    assert decisions[0].mapping.seeds == (25, 25)
    replays = [train(HyScaleStrategy(1, devices=["cpu"], drm=record), max_epochs=10)[1]]
    for place, decision in enumerate(decisions[1:3]):
        path = Path(folder, f"{place}.ckpt")
        at = decision.observation  # while iterations that were shared out before the decision are under way
        train(HyScaleStrategy(1, devices=["cpu"], drm=record), [SaveAt(path, at)], max_epochs=10)
        replays.append(train(HyScaleStrategy(1, devices=["cpu"], drm=record), path=path, max_epochs=10)[1])
    assert all(same(final, whole) for final in replays)
    broken = Path(folder, "broken.jsonl")

    class Removes(pl.Callback):
        def on_train_start(self, trainer, module):
            if rank == 0:
                broken.unlink()
                broken.mkdir()

    strategy, _, told = train_and_warn(
        HyScaleStrategy(1, 0.5, decision_log=broken, **options), [Removes()], max_epochs=10
    )
    said = [line for line in told if "broken.jsonl is incomplete" in line and "replay would differ" in line]
    assert len(said) == (rank == 0)
    assert len(strategy.balance.history) == 39


def balanced(num_ranks=2, **options):
    return HyScaleStrategy(num_ranks, **{"drm": True, "threads": [1, 1, 1], **options})


def sampling_there(share):
    return HyScaleStrategy(1, 0.5, devices=["cpu"], threads=[1, 1, 1], accelerator_sampling=share)


def of_other_threads(state):
    state["mapping"]["threads"] = [9, 9, 9]


def of_another_version(state):
    state["history"] = [[state["mapping"], {}]]  # as it once was
    del state["act_from"]


def continued(rank, folder):
    """Go on with a manager's state, or begin anew where it does not fit."""
    path = Path(folder, "middle.ckpt")
    train(balanced(), [SaveAt(path, 6)])
    strategy, _ = train(balanced(), path=path)
    assert strategy.balance.manager._number == 11
    for change in (of_other_threads, of_another_version):
        checkpoint = torch.load(path, weights_only=True)
        change(checkpoint["hyscale"]["balance"]["0"]["manager"])
        changed = Path(folder, f"changed {rank}.ckpt")
        torch.save(checkpoint, changed)
        strategy, _, told = train_and_warn(balanced(), path=changed)
        assert sum("hyscale rebalances" in line for line in told) == (rank == 0)
        assert strategy.balance.threads == strategy.balance.mapping.threads == (1, 1, 1)
        assert strategy.balance.manager._number <= 5
    other = HyScaleStrategy(1, devices=["cpu"], threads=[1, 1, 1])
    train(other, path=path)  # with other trainers it begins anew
    assert other.balance.manager._number <= 5
    # A share of 0 could not grow, and one for accelerators that no longer sample would be kept for ever.
    for before, after in ((0.0, 0.4), (0.4, 0.0), (0.2, 0.4)):
        train(sampling_there(before), [SaveAt(path, 6)])
        strategy, _ = train(sampling_there(after), path=path)
        balance = strategy.balance
        if before and after:
            assert balance.manager._number == 11
            continue
        assert balance.mapping.accelerator_sampling == balance.accelerator_sampling == after
        assert balance.manager._number <= 5
        assert bool(after) == any(times.sample_accelerator for times, _ in balance.history)


class Skips(Dropping):
    def training_step(self, batch, index):
        return None if index == 1 else super().training_step(batch, index)


def measured(rank, folder):
    """Measure every stage; skip losses, accumulate."""
    strategy, _ = train(hybrid(shares=[0.5, 0.5], cpu_trainers=1, devices=["cpu"], transfer_dtype="int8"))
    times = [entry for entry, _ in strategy.balance.history]
    assert len(times) == 11
    for entry in times:
        assert min(entry.sample_cpu, entry.load, entry.transfer) > 0
        assert len(entry.train_cpu) == len(entry.train_accelerator) == 1
        assert entry.seeds == (25, 25)
    strategy, _ = train(balanced(), kind=Skips, accumulate_grad_batches=2)
    assert len(strategy.balance.history) == 11


def one_after_the_other(rank, folder):
    """Go through them; return what went wrong in each."""
    errors = {}
    for scenario in (recorded, continued, measured):
        path = Path(folder, scenario.__name__)
        path.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            unlevel(monkeypatch)
            try:
                scenario(rank, path)
            except Exception:
                errors[scenario.__name__] = traceback.format_exc()
    return errors


@pytest.mark.slow
def test_decisions_go_on(tmp_path):
    for errors in run(one_after_the_other, 2, str(tmp_path)):
        assert not errors, "\n".join(errors.values())


# -- files


def leave_a_checkpoint(rank, path):
    return train(hybrid(), [SaveAt(path, 6)])[1]


@pytest.mark.slow
def test_a_checkpoint_loads_without_the_strategy(tmp_path):
    path = tmp_path / "middle.ckpt"
    ours, _ = run(leave_a_checkpoint, 2, str(path))
    loaded = Dropping()
    loaded.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    assert all(torch.equal(value, ours[name]) for name, value in state(loaded).items())
    trained, plain = train("auto", path=path)
    assert trained.lightning_module.trainer.global_step == 12
    assert not same(plain, ours)
