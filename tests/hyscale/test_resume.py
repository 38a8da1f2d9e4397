"""Resuming: runs that are killed repeatedly, any order of seeds, and restored decisions."""

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

from lightning_gnn.hyscale.costs import TaskMapping
from lightning_gnn.hyscale.drm import BalanceController, Decision, read_decisions
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.loading import NodeLoader
from lightning_gnn.pyg import enable_pyg_sampling
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.campaigns import cases_of
from tests.full_graph.launch import observe, run
from tests.hyscale.training import SILENT, Plain, copy_state, make_data, make_graph, make_hybrid


class Dropping(Plain):
    """Uses what a resumed run could lose: dropout, optimizer moments, random numbers of hooks and validation."""

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
    """Saves a checkpoint after a batch, and optionally stops the run there."""

    def __init__(self, path, batch, stop=True):
        self.path, self.batch, self.stop = path, batch, stop

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.stop


def train(strategy, callbacks=(), path=None, data=None, seed=11, kind=Dropping, **options):
    """Train; return the strategy, and the final weights and moments."""
    torch.manual_seed(seed)
    module = kind()
    torch.manual_seed(seed)
    data = make_data([3], batch_size=50, num_workers=2) if data is None else data()
    options = {**SILENT, "max_epochs": 3, "limit_val_batches": 1, **options}
    trainer = pl.Trainer(strategy=strategy, callbacks=list(callbacks), **options)
    trainer.fit(module, data, ckpt_path=path, weights_only=True)
    moments = trainer.optimizers[0].state_dict()["state"]
    final = {**copy_state(module), **{f"{i} {name}": m for i, row in moments.items() for name, m in row.items()}}
    return trainer.strategy, final


def are_equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# -- repeated kills


class RandomKill(pl.Callback):
    """Kills this process at a random moment within a few steps."""

    def __init__(self, rng):
        self.steps, self.seconds = rng.randint(1, 4), rng.uniform(0.0, 0.03)

    def on_train_batch_start(self, *args):
        self.steps -= 1
        if self.steps == 0:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def train_until_killed(rank, folder, replay, victim=None, seed=0):
    """Resume from the last checkpoint, if any; this rank is killed if it is ``victim``."""
    path = Path(folder, "last.ckpt")
    saves = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True, enable_version_counter=False)
    callbacks = [saves, RandomKill(random.Random(seed))] if rank == victim else [saves]
    strategy = make_hybrid() if replay is None else HyScaleStrategy(1, devices=["cpu"], drm=replay)
    _, final = train(
        strategy,
        callbacks,
        path if path.exists() else None,
        max_epochs=8,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    return final


def write_decisions(path):
    """Write a log with decisions in quick succession, so that some are pending when the process is killed."""
    seeds = {0: (25, 25), 1: (30, 20), 4: (12, 38), 9: (50, 0), 13: (49, 1), 17: (20, 30)}
    lines = [Decision(TaskMapping(split, 1), "fixed", "fixed", number).to_json() for number, split in seeds.items()]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("drm", [False, "replay"])
def test_eight_kills_leave_no_trace(drm, tmp_path):
    replay = write_decisions(tmp_path / "decisions.jsonl") if drm else None
    rng = random.Random(f"kills {drm}")
    for number in range(8):
        victim = rng.randrange(2)
        found = observe(train_until_killed, 2, str(tmp_path / "chain"), replay, victim, f"{drm} {number}")
        assert found.exit_codes[victim] == -signal.SIGKILL
        assert re.search(rf"rank {victim} \(process \d+ on \S+\) died", found.errors[1 - victim])
    chain = run(train_until_killed, 2, str(tmp_path / "chain"), replay)
    whole = run(train_until_killed, 2, str(tmp_path / "whole"), replay)
    assert are_equal(whole[0], whole[1])
    assert [are_equal(final, whole[0]) for final in chain] == [True, True]


# -- interruptions with random orders of seeds


class Shuffling(pl.LightningDataModule):
    """Uses a loader that shuffles."""

    def train_dataloader(self):
        data = make_graph()
        sampler = NeighborSampler(data, [3], seed=5)
        return NodeLoader(data, sampler, input_nodes=data.train_mask, batch_size=50, shuffle=True)


class OfPyG(pl.LightningDataModule):
    """Uses PyG's loader."""

    neighbors = (-1,)

    def train_dataloader(self):
        data = make_graph()
        return NeighborLoader(data, list(self.neighbors), input_nodes=data.train_mask, batch_size=50, shuffle=True)


def make_sampled_datamodule():
    sampler = WeightedRandomSampler(torch.ones(200), 200)
    return make_data([3], batch_size=50, sampler=sampler, num_workers=2)


ORDERS = {"by itself": Shuffling, "own sampler": make_sampled_datamodule, "PyG's": OfPyG}
BATCHES = (1, 3, 6)  # in the first epoch, at its end, in the second


def train_interrupted(rank, folder, orders):
    found = {}
    with enable_pyg_sampling():
        for name, batches in orders.items():
            data = ORDERS[name]
            _, whole = train(make_hybrid(), data=data)
            for batch in batches:
                path = Path(folder, f"{name} {batch}.ckpt")
                train(make_hybrid(), [SaveAt(path, batch)], data=data)
                rest = [train(make_hybrid(), path=path, data=data, seed=seed)[1] for seed in (11, 12)]
                found[name, batch] = [are_equal(whole, final) for final in rest]
    return found


@pytest.fixture(scope="module")
def goes_on(request, tmp_path_factory):
    orders = {}
    for case in cases_of(request.session, test_orders_that_are_drawn_go_on):
        orders.setdefault(case["order"], []).append(case["batch"])
    return run(train_interrupted, 2, str(tmp_path_factory.mktemp("orders")), orders)


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("order", ORDERS)
def test_orders_that_are_drawn_go_on(order, batch, goes_on):
    """Also in a process with other random state at its start."""
    assert [found[order, batch] for found in goes_on] == [[True, True]] * 2


# -- restored decisions


def slow_down_trainer(monkeypatch):
    """Make trainer 0 seem three times as fast as trainer 1, and both together twice as fast as one."""
    times = BalanceController._compute_times

    def _compute_times(self, reports):
        iteration = 0.1 if all(report.seeds > 0 for report in reports) else 0.2
        stages = "sample", "sample_accelerator", "load", "transfer"
        changed = []
        for report, seconds in zip(reports, (0.001, 0.003), strict=True):
            found = {name: 1e-4 for name in stages if getattr(report, name) >= 0}
            changed.append(report._replace(train=seconds * report.seeds, iteration=iteration, **found))
        return times(self, changed)

    monkeypatch.setattr(BalanceController, "_compute_times", _compute_times)


def train_and_warn(*arguments, **options):
    """Train; return the strategy, the final state, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return *train(*arguments, **options), [str(warning.message) for warning in caught]


def record_and_replay(rank, folder):
    """Record decisions, replay them, resume a replay after each of them, and record to an unwritable file."""
    record, options = Path(folder, "log", "decisions.jsonl"), {"devices": ["cpu"], "threads": [1, 1, 1]}
    strategy, whole = train(HyScaleStrategy(1, 0.5, decision_log=record, **options), max_epochs=10)
    decisions = read_decisions(record.read_text().splitlines())
    assert len(strategy.balance.history) == 39  # of 40 iterations; the times of the last one are never reported
    assert all(entry.seeds for entry, _ in strategy.balance.history)
    mapping = strategy.balance.mapping
    assert mapping.total == 50
    assert mapping.seeds[0] > mapping.seeds[1] > 0
    assert len(decisions) >= 2
    assert all(decision.explanation for decision in decisions)
    assert [decision.mapping.seeds for decision in decisions[:2]] == [(0, 50), (25, 25)]
    replays = [train(HyScaleStrategy(1, devices=["cpu"], drm=record), max_epochs=10)[1]]
    for place, decision in enumerate(decisions[1:3]):
        path = Path(folder, f"{place}.ckpt")
        at = decision.observation  # iterations that were split before the decision are in flight
        train(HyScaleStrategy(1, devices=["cpu"], drm=record), [SaveAt(path, at)], max_epochs=10)
        replays.append(train(HyScaleStrategy(1, devices=["cpu"], drm=record), path=path, max_epochs=10)[1])
    assert all(are_equal(final, whole) for final in replays)
    broken = Path(folder, "broken.jsonl")

    class Removes(pl.Callback):
        def on_train_start(self, trainer, module):
            if rank == 0:
                broken.unlink()
                broken.mkdir()

    strategy, _, messages = train_and_warn(
        HyScaleStrategy(1, 0.5, decision_log=broken, **options), [Removes()], max_epochs=10
    )
    said = [line for line in messages if "broken.jsonl is incomplete" in line and "replay would differ" in line]
    assert len(said) == (rank == 0)
    assert len(strategy.balance.history) == 39


def make_balanced_strategy(num_ranks=2, **options):
    return HyScaleStrategy(num_ranks, **{"drm": True, "threads": [1, 1, 1], **options})


def make_sampling_state(share):
    return HyScaleStrategy(1, 0.5, devices=["cpu"], threads=[1, 1, 1], accelerator_sampling=share)


def of_other_threads(state):
    state["mapping"]["threads"] = [9, 9, 9]


def of_another_version(state):
    state["history"] = [[state["mapping"], {}]]  # the format of an older version
    del state["act_from"]


def resume_states(rank, folder):
    """Resume with a manager's state, or start with a new one where the state does not match."""
    path = Path(folder, "middle.ckpt")
    train(make_balanced_strategy(), [SaveAt(path, 6)])
    strategy, _ = train(make_balanced_strategy(), path=path)
    assert strategy.balance.manager._number == 11
    for change in (of_other_threads, of_another_version):
        checkpoint = torch.load(path, weights_only=True)
        change(checkpoint["hyscale"]["balance"]["0"]["manager"])
        changed = Path(folder, f"changed {rank}.ckpt")
        torch.save(checkpoint, changed)
        strategy, _, messages = train_and_warn(make_balanced_strategy(), path=changed)
        assert sum("hyscale rebalances" in line for line in messages) == (rank == 0)
        assert strategy.balance.current.threads == strategy.balance.mapping.threads == (1, 1, 1)
        assert strategy.balance.manager._number <= 5
    other = HyScaleStrategy(1, devices=["cpu"], threads=[1, 1, 1])
    train(other, path=path)  # other trainers start with a new state
    assert other.balance.manager._number <= 5
    # A share of 0 could not grow, and one for accelerators that no longer sample would never be removed.
    for before, after in ((0.0, 0.4), (0.4, 0.0), (0.2, 0.4)):
        train(make_sampling_state(before), [SaveAt(path, 6)])
        strategy, _ = train(make_sampling_state(after), path=path)
        balance = strategy.balance
        if before and after:
            assert balance.manager._number == 11
            continue
        assert balance.manager.log[0].mapping.accelerator_sampling == balance.current.accelerator_sampling == after
        assert balance.manager._number <= 5
        assert bool(after) == any(times.sample_accelerator for times, _ in balance.history)


class Skips(Dropping):
    def training_step(self, batch, index):
        return None if index == 1 else super().training_step(batch, index)


def measure_stages(rank, folder):
    """Measure every stage while some losses are skipped and gradients are accumulated."""
    strategy, _ = train(make_hybrid(shares=[0.5, 0.5], cpu_trainers=1, devices=["cpu"], transfer_dtype="int8"))
    times = [entry for entry, _ in strategy.balance.history]
    assert len(times) == 11
    for entry in times:
        assert min(entry.sample_cpu, entry.load, entry.transfer) > 0
        assert len(entry.train_cpu) == len(entry.train_accelerator) == 1
        assert entry.seeds == (25, 25)
    strategy, _ = train(make_balanced_strategy(), kind=Skips, accumulate_grad_batches=2)
    assert len(strategy.balance.history) == 11


def run_cases(rank, folder):
    """Run all cases; return the error of each."""
    errors = {}
    for scenario in (record_and_replay, resume_states, measure_stages):
        path = Path(folder, scenario.__name__)
        path.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            if scenario != measure_stages:
                slow_down_trainer(monkeypatch)
            try:
                scenario(rank, path)
            except Exception:
                errors[scenario.__name__] = traceback.format_exc()
    return errors


@pytest.mark.slow
def test_decisions_go_on(tmp_path):
    for errors in run(run_cases, 2, str(tmp_path)):
        assert not errors, "\n".join(errors.values())


# -- files


def leave_a_checkpoint(rank, path):
    return train(make_hybrid(), [SaveAt(path, 6)])[1]


@pytest.mark.slow
def test_a_checkpoint_loads_without_the_strategy(tmp_path):
    path = tmp_path / "middle.ckpt"
    ours, _ = run(leave_a_checkpoint, 2, str(path))
    loaded = Dropping()
    loaded.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    assert all(torch.equal(value, ours[name]) for name, value in copy_state(loaded).items())
    trained, plain = train("auto", path=path)
    assert trained.lightning_module.trainer.global_step == 12
    assert not are_equal(plain, ours)
