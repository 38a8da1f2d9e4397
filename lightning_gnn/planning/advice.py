"""Advice after a run: the largest part of the epoch time, and a setting that would reduce it."""

import copy
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Protocol

import torch

from lightning_gnn.planning.steps import time_steps
from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.lightning import CombinedLoader, pl

MIN_BF16_SPEEDUP = 1.15  # ratio of the times of a step, float32 to bf16-mixed, from which on bf16-mixed is suggested
MAX_BF16_SLOWDOWN = 0.95  # the same ratio, below which bf16-mixed is advised against
_NUM_BATCHES = 3


class Epoch(Protocol):
    """An epoch as :class:`~lightning_gnn.callbacks.Throughput` measures it."""

    epoch_time_s: float
    model_s: float
    wait_s: float
    sampling_s: float | None
    features_s: float | None

    @property
    def other_s(self) -> float: ...  # noqa: D102


def advice(epoch: Epoch, trainer: pl.Trainer) -> str | None:
    """Return a sentence on the largest part of the training thread's time, with a setting that would reduce it."""
    if not epoch.epoch_time_s:
        return None
    parts = {"Model": epoch.model_s, "Waiting": epoch.wait_s, "Other": epoch.other_s}
    name = max(parts, key=parts.__getitem__)
    advise = {"Model": _advise_on_model, "Waiting": _advise_on_waiting, "Other": _advise_on_other}[name]
    remedy = advise(epoch, trainer)
    return f"Largest part: {name}, {parts[name] / epoch.epoch_time_s:.0%} of an epoch{remedy and f'; {remedy}'}"


def _advise_on_waiting(epoch: Epoch, trainer: pl.Trainer) -> str:
    loader = _loader(trainer)
    workers = getattr(loader, "num_threads", None)
    if epoch.sampling_s is None or epoch.features_s is None or workers is None:
        return f"{type(loader).__name__} does not report its stages" if loader is not None else ""
    stage = "sampling" if epoch.sampling_s >= epoch.features_s else "loading features"
    if workers == 0:
        return f"datamodule.num_workers=1 would prepare mini-batches (mostly {stage}) in parallel to training"
    busy = epoch.sampling_s + epoch.features_s + epoch.model_s
    if workers < num_cores() and busy < 0.8 * num_cores() * epoch.epoch_time_s:
        return f"datamodule.num_workers={workers + 1} would parallelize the slowest stage, {stage}"
    return f"most of it is {stage}, which smaller datamodule.num_neighbors would reduce"


def _advise_on_model(epoch: Epoch, trainer: pl.Trainer) -> str:
    if trainer.strategy.root_device.type != "cpu":
        return ""
    threads, cores = torch.get_num_threads(), num_cores()
    preparing = (epoch.sampling_s or 0.0) + (epoch.features_s or 0.0)
    if threads < cores and preparing + epoch.model_s < 0.8 * cores * epoch.epoch_time_s:
        return f"torch_threads={cores} would use idle cores"
    precision = str(trainer.precision)
    if precision not in ("32-true", "bf16-mixed") or (speedup := bf16_speedup(trainer)) is None:
        return ""
    measured = (
        f"a step in bf16-mixed takes {1 / speedup:.2f}x of the time here, measured on {_NUM_BATCHES} mini-batches"
    )
    if precision == "32-true" and speedup >= MIN_BF16_SPEEDUP:
        return f"trainer.precision=bf16-mixed would reduce it: {measured}"
    if precision == "bf16-mixed" and speedup < MAX_BF16_SLOWDOWN:
        return f"trainer.precision=32-true would reduce it: {measured}"
    return ""


def bf16_speedup(trainer: pl.Trainer) -> float | None:
    """Return the time of a training step in float32 over that in bf16-mixed on the CPU, or None for several ranks.

    Copies of the module train on a few mini-batches of the Trainer's loader; the random state is restored.
    """
    loader, module = _loader(trainer), trainer.lightning_module
    if trainer.world_size > 1 or not isinstance(loader, Iterable):
        return None
    batches, seconds = list(islice(iter(loader), _NUM_BATCHES)), []
    with torch.random.fork_rng(devices=()):
        for precision in ("32-true", "bf16-mixed"):
            make_trainer = partial(pl.Trainer, accelerator="cpu", devices=1, precision=precision)
            copied = [copy.copy(batch) for batch in batches]
            step = time_steps(copy.deepcopy(module), make_trainer, copied, torch.get_num_threads())
            seconds.append(step.seconds)
    return seconds[0] / seconds[1]


def _advise_on_other(epoch: Epoch, trainer: pl.Trainer) -> str:
    every = getattr(trainer, "log_every_n_steps", 0)
    if trainer.loggers and 0 < every < trainer.num_training_batches:
        return f"a larger trainer.log_every_n_steps (now {every}) would log less often"
    return "larger mini-batches have fewer steps"


def _loader(trainer: pl.Trainer) -> object:
    if trainer.train_dataloader is None:
        return None
    return next(iter(CombinedLoader(trainer.train_dataloader).flattened), None)
