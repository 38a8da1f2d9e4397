"""Advice after a run: the largest part of the epoch time, and a setting that would reduce it."""

from typing import Protocol

import torch

from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.lightning import CombinedLoader, pl
from lightning_gnn.runtime.machine_rates import product_rate

MIN_BF16_SPEEDUP = 1.3  # speedup of bfloat16 matrix products from which on bf16-mixed is suggested


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
    # On this package's mini-batches, layers compute in float32 at every precision.
    if str(trainer.precision) == "32-true" and not hasattr(_loader(trainer), "num_threads"):
        speedup = product_rate(torch.bfloat16) / product_rate(torch.float32)
        if speedup >= MIN_BF16_SPEEDUP:
            return f"trainer.precision=bf16-mixed may reduce it: bfloat16 products are {speedup:.1f}x as fast here"
    return ""


def _advise_on_other(epoch: Epoch, trainer: pl.Trainer) -> str:
    every = getattr(trainer, "log_every_n_steps", 0)
    if trainer.loggers and 0 < every < trainer.num_training_batches:
        return f"a larger trainer.log_every_n_steps (now {every}) would log less often"
    return "larger mini-batches have fewer steps"


def _loader(trainer: pl.Trainer) -> object:
    if trainer.train_dataloader is None:
        return None
    return next(iter(CombinedLoader(trainer.train_dataloader).flattened), None)
