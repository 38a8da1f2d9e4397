"""A run that is interrupted repeatedly, at any point, ends like an uninterrupted run, bit for bit."""

import functools
import itertools
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping

from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from tests.campaigns import SLICES, campaign
from tests.faults.chains import (
    DATA_MODULES,
    HOOKS,
    Chain,
    Killed,
    Link,
    Node,
    Trigger,
    find_difference,
    interrupt,
    kill,
)
from tests.full_graph.launch import CONTEXT, run
from tests.patience import NEVER, PATIENCE

KILLS = 3
"""Per chain of a campaign; each slice interrupts at other points, for 24 interruptions in all."""


def compare(chain, whole, steps=True):
    assert whole.run()
    difference = find_difference(whole.results(steps), chain.results(steps))
    assert difference is None, difference


def play(chain, whole, rng, act, last=None, hooks=HOOKS, kills=KILLS, steps=True):
    if chain.options.get("limit_val_batches") == 0:
        hooks = [hook for hook in hooks if "validation" not in hook]
    while chain.kills < kills:
        hook = rng.choice(hooks)
        count = rng.choice((1, 1, 2, 3)) if "batch" in hook else 1
        if chain.run(Trigger(hook, count, act), last):
            break
    else:
        assert chain.run(None, last)
    assert chain.kills >= kills // 2
    compare(chain, whole, steps)


def share_cases(*values, slices, first=0):
    """Make a campaign; each slice gets some of the cases, with its own interruption points."""
    cases = [
        (number, *case)
        for number in range(SLICES)
        for place, case in enumerate(zip(*values, strict=False))
        if (place + number) % slices == first
    ]
    return lambda names: lambda test: pytest.mark.campaign(pytest.mark.parametrize(("number", *names), cases)(test))


@pytest.mark.slow
@share_cases(DATA_MODULES, slices=2)(("data",))
def test_interrupted_by_signals(data, number, tmp_path):
    module = Link if "link" in data else Node
    options = {"max_epochs": 12 if data.startswith("full") else 5}
    rng = random.Random(f"signals {data} {number}")
    chain, whole = (Chain(tmp_path / name, DATA_MODULES[data], module, **options) for name in ("chain", "whole"))
    play(chain, whole, rng, interrupt)


@pytest.mark.slow
@share_cases(DATA_MODULES, itertools.cycle([1, 2]), slices=2, first=1)(("data", "every"))
def test_killed_with_periodic_checkpoints(data, every, number, tmp_path):
    """Checkpoints at all places where Lightning writes them: after a batch, the end of an epoch, and a validation."""
    module = Link if "link" in data else Node
    options = {"max_epochs": 12 if data.startswith("full") else 5}
    rng = random.Random(f"killed {data} {number}")
    chain, whole = (Chain(tmp_path / name, DATA_MODULES[data], module, **options) for name in ("chain", "whole"))
    play(chain, whole, rng, kill, {"every_n_train_steps": every}, steps=False)


PERIODS = {
    "after each epoch": {},
    "at the end of training epochs": {"save_on_train_epoch_end": True},
    "after two steps": {"every_n_train_steps": 2},
    "by score": {"monitor": "val_loss", "save_last": True, "filename": "best"},
}
OPTIONS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3},
    "limited": {"limit_train_batches": 2},
    "validated often": {"val_check_interval": 2},
    "validated by steps": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "validated seldom": {"check_val_every_n_epoch": 2},
    "never validated": {"limit_val_batches": 0},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "by steps": {"max_steps": 18, "max_epochs": -1},
    "by steps and epochs": {"max_steps": 18},
    "no sanity check": {"num_sanity_val_steps": 0},
    "logged seldom": {"log_every_n_steps": 3},
}


@pytest.mark.slow
@share_cases(OPTIONS, itertools.cycle(["epoch", "step", None]), slices=4)(("name", "plateau"))
def test_with_options_of_the_trainer(name, plateau, number, tmp_path):
    module = functools.partial(Node, plateau)
    rng = random.Random(f"options {name} {number}")
    chain, whole = (
        Chain(tmp_path / kind, DATA_MODULES["neighbor"], module, **OPTIONS[name]) for kind in ("chain", "whole")
    )
    play(chain, whole, rng, interrupt)


@pytest.mark.slow
@share_cases(OPTIONS, itertools.cycle(PERIODS), slices=4, first=2)(("name", "period"))
def test_killed_with_options_of_the_trainer(name, period, number, tmp_path):
    rng = random.Random(f"options {name} {number}")
    chain, whole = (Chain(tmp_path / kind, DATA_MODULES["neighbor"], **OPTIONS[name]) for kind in ("chain", "whole"))
    play(chain, whole, rng, kill, PERIODS[period], steps=False)


def train_hybrid(rank, folder, data, options, act, number):
    """Run the whole chain on each rank; the last rank gets a signal."""
    rng = random.Random(f"hyscale {act.__name__} {data} {options} {number}")
    options = {"cpu_trainers": 2, "drm": False, "stall_timeout": 60.0, **options}
    strategy = functools.partial(HyScaleStrategy, **options)
    chain, whole = (Chain(Path(folder) / name, DATA_MODULES[data], strategy=strategy) for name in ("chain", "whole"))
    action = act if act is kill or rank == options["cpu_trainers"] - 1 else list
    play(chain, whole, rng, action, {"every_n_train_steps": 2} if act is kill else None, steps=act is interrupt)


HYBRID = [("neighbor", {}), ("neighbor", {"shares": [0.7, 0.3]}), ("own sampler", {})]


@pytest.mark.slow
@share_cases(*zip(*((*case, act) for act in (interrupt, kill) for case in HYBRID), strict=True), slices=4)(
    ("data", "options", "act")
)
def test_hybrid_training(data, options, act, number, tmp_path):
    run(train_hybrid, 2, str(tmp_path), data, options, act, number)


@campaign
@pytest.mark.parametrize("act", [interrupt, kill])
def test_hybrid_training_of_a_lone_trainer(act, number, tmp_path):
    train_hybrid(0, str(tmp_path), "neighbor", {"cpu_trainers": 1}, act, number)


def train_on_ranks(rank, folder, act):
    """Run the whole chain on each rank; one rank gets a signal."""
    rng = random.Random(f"ranks {act.__name__}")
    strategy = functools.partial(AscendHybridParallelStrategy, timeout=NEVER)
    options = {"max_epochs": 5, "devices": 2}
    chain, whole = (
        Chain(Path(folder) / name, DATA_MODULES["full"], strategy=strategy, **options) for name in ("chain", "whole")
    )
    action = act if act is kill or rank == 1 else list
    play(
        chain, whole, rng, action, {"every_n_train_steps": 1} if act is kill else None, kills=3, steps=act is interrupt
    )
    return chain.kills


@pytest.mark.slow
@pytest.mark.parametrize("act", [interrupt, kill])
def test_full_graph_training_on_two_ranks(act, tmp_path):
    first, second = run(train_on_ranks, 2, str(tmp_path), act)
    assert first == second == 3


def train_until_killed(folder, data, hook, count, out):
    """Train in its own process, which kills itself with SIGKILL."""
    torch.set_num_threads(1)
    chain = Chain(Path(folder), DATA_MODULES[data], max_epochs=6)
    checkpoint = chain.tmp_path / "last.ckpt"
    chain.checkpoint = checkpoint if checkpoint.is_file() else None
    killed = None if hook is None else Trigger(hook, count, functools.partial(os.kill, os.getpid(), signal.SIGKILL))
    assert chain.run(killed, {"every_n_train_steps": 2})
    results = {key: value for key, value in chain.results(steps=False).items() if key != "history"}
    torch.save(results, out)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["neighbor", "full"])
def test_killed_processes(data, tmp_path):
    rng = random.Random(f"processes {data}")
    (tmp_path / "whole").mkdir()
    (tmp_path / "chain").mkdir()

    def start(folder, hook=None, count=0):
        process = CONTEXT.Process(
            target=train_until_killed, args=(tmp_path / folder, data, hook, count, tmp_path / f"{folder}.pt")
        )
        process.start()
        process.join(PATIENCE)
        assert process.exitcode is not None
        return process.exitcode

    assert start("whole") == 0
    for _ in range(4):
        assert start("chain", rng.choice(HOOKS), rng.choice((2, 3))) in (-signal.SIGKILL, 0)
    assert start("chain") == 0
    whole, chain = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "chain"))
    difference = find_difference(whole, chain)
    assert difference is None, difference


class SaveAt(Trigger):
    """Writes a checkpoint as a user's own callback may, and ends the process before the next batch."""

    def __init__(self, hook, count, path):
        super().__init__(hook, count, lambda: None)
        self.path = path

    def _called(self, trainer, *args, **kwargs):
        done = self.done
        super()._called(trainer, *args, **kwargs)
        if self.done and not done:
            trainer.save_checkpoint(self.path)
            if self.hook == "on_train_batch_start":
                raise Killed

    def on_train_batch_start(self, *args):
        if self.done:
            raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}, {"max_steps": 15, "max_epochs": -1}], ids=str)
@pytest.mark.parametrize(
    ("hook", "count"),
    [
        ("on_train_start", 1),
        ("on_train_epoch_start", 2),
        ("on_train_batch_start", 3),
        ("on_train_batch_start", 7),
        ("on_train_batch_end", 3),
        ("on_train_batch_end", 6),
        ("on_validation_start", 1),
        ("on_validation_end", 1),
    ],
)
def test_saved_by_a_user_s_own_callback(hook, count, options, tmp_path):
    chain, whole = (
        Chain(tmp_path / name, DATA_MODULES["neighbor"], **{"max_epochs": 3, **options}) for name in ("chain", "whole")
    )
    path = tmp_path / "saved.ckpt"
    assert not chain.run(SaveAt(hook, count, path))
    chain.checkpoint = path
    assert chain.run()
    compare(chain, whole, steps=False)


def test_a_run_that_was_about_to_stop_early_stops(tmp_path):
    def stop_early():
        return EarlyStopping("val_loss", min_delta=10.0, patience=1)

    chain, whole = (
        Chain(tmp_path / name, DATA_MODULES["neighbor"], more=stop_early, max_epochs=9) for name in ("chain", "whole")
    )
    assert not chain.run(Trigger("on_validation_end", 2, kill), {"monitor": "val_loss", "every_n_train_steps": 6})
    assert not chain.run(Trigger("on_validation_end", 1, interrupt))
    assert chain.run()
    assert chain.trainer.global_step == 12
    compare(chain, whole, steps=False)


def test_a_resumed_run_may_be_longer(tmp_path):
    chain, whole = (Chain(tmp_path / name, DATA_MODULES["full"], max_epochs=n) for name, n in (("a", 3), ("b", 6)))
    assert chain.run(None, {})
    chain.checkpoint = tmp_path / "a" / "last.ckpt"
    chain.options["max_epochs"] = 6
    assert chain.run()
    compare(chain, whole)
