"""Callbacks that record the throughput, time breakdown and metrics of each epoch."""

import copy
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from lightning_gnn.loading.batch import LoaderStats
from lightning_gnn.planning.preparation import edges_of
from lightning_gnn.runtime.lightning import CombinedLoader, pl


@dataclass
class EpochThroughput:
    """Statistics of one training epoch, excluding validation.

    Args:
        epoch_time_s: Seconds from the start of the epoch to the end of its last batch.
        model_s: Seconds that the training thread spent on forward, backward and optimizer.
        wait_s: Seconds that the training thread waited for mini-batches: in the loader's ``__next__`` if the loader
            measures it, otherwise between two steps.
        sampling_s: Thread-seconds of sampling; None if the loader does not measure them.
        features_s: Thread-seconds of feature loading; None if the loader does not measure them.
        batches: Mini-batches of this process.
        edges: Edges in the mini-batches of this process.
        all_edges: Edges in the mini-batches of all processes.
    """

    epoch_time_s: float = 0.0
    model_s: float = 0.0
    wait_s: float = 0.0
    sampling_s: float | None = None
    features_s: float | None = None
    batches: int = 0
    edges: int = 0
    all_edges: int = 0

    @property
    def other_s(self) -> float:
        """Remaining seconds of the training thread: transfers, callbacks, loggers."""
        return max(0.0, self.epoch_time_s - self.model_s - self.wait_s)

    @property
    def mteps(self) -> float:
        """Million traversed edges per second (HyScale-GNN, section VI-A): edges of all mini-batches / time."""
        return self.all_edges / self.epoch_time_s / 1e6 if self.epoch_time_s else 0.0

    @property
    def sampled_edges_per_s(self) -> float | None:
        """Edges per thread-second of sampling; None without sampling."""
        return self.edges / self.sampling_s if self.sampling_s else None


class Throughput(pl.Callback):
    """Measures each training epoch and logs ``epoch_time_s``, ``mteps`` and ``sampled_edges_per_s``.

    Works with any loader. This package's loaders also measure sampling and feature loading; with others, only the
    training thread is measured. Not saved in checkpoints. ``epochs`` has one :class:`EpochThroughput` per finished
    epoch.
    """

    def __init__(self) -> None:
        self.epochs: list[EpochThroughput] = []
        self._epoch: EpochThroughput | None = None
        self._last_time = 0.0
        self._batch_start = 0.0
        self._stats_before: list[LoaderStats] = []

    def summary(self) -> EpochThroughput | None:
        """Return the median over the epochs, without the first if there are several; None before the first ends."""
        if not self.epochs:
            return None
        rows = [asdict(epoch) for epoch in (self.epochs[1:] or self.epochs)]
        medians: dict[str, Any] = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            medians[name] = None if None in values else type(values[0])(median(values))
        return EpochThroughput(**medians)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._epoch = EpochThroughput()
        self._stats_before = [copy.copy(times) for times in get_loader_stats(trainer)]
        self._last_time = time.perf_counter()

    on_train_start = on_train_epoch_start  # a run resumed mid-epoch does not call on_train_epoch_start

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exclude a validation in the middle of an epoch."""
        self._last_time = time.perf_counter()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Record the batch and the wait for it."""
        self._batch_start = time.perf_counter()
        if self._epoch is not None:
            self._epoch.wait_s += self._batch_start - self._last_time
            self._epoch.batches += 1
            self._epoch.edges += edges_of(batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Record the time of the model."""
        if self._epoch is None:
            return
        if trainer.is_last_batch and trainer.strategy.root_device.type != "cpu":
            torch.accelerator.synchronize()
        now = time.perf_counter()
        self._epoch.model_s += now - self._batch_start
        self._epoch.epoch_time_s += now - self._last_time
        self._last_time = now

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finish the epoch and log its statistics."""
        epoch, self._epoch = self._epoch, None
        if epoch is None or not epoch.batches:
            return
        after = get_loader_stats(trainer)
        if after:
            for name in ("wait_s", "sampling_s", "features_s"):
                since, until = (sum(getattr(times, name) for times in stats) for stats in (self._stats_before, after))
                setattr(epoch, name, float(until - since))
        epoch.all_edges = epoch.edges
        if trainer.world_size > 1:
            # On rank 0, the progress bar has read the metrics already, which is a collective. The other ranks must do
            # the same before the next collective, or the ranks would deadlock.
            _ = trainer.callback_metrics
            edges = torch.tensor(float(epoch.edges), dtype=torch.float64, device=trainer.strategy.root_device)
            epoch.all_edges = int(trainer.strategy.reduce(edges, reduce_op="sum"))
        self.epochs.append(epoch)
        metrics = {"epoch_time_s": epoch.epoch_time_s, "mteps": epoch.mteps}
        if epoch.sampled_edges_per_s is not None:
            metrics["sampled_edges_per_s"] = epoch.sampled_edges_per_s
        pl_module.log_dict(metrics, batch_size=1, rank_zero_only=True)


class LearningCurves(pl.Callback):
    """Records the logged metrics of each epoch in ``epochs``: dicts such as ``{"epoch": 0, "val_acc": 0.9}``."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self._is_fitting = True

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Record whether the next loaded checkpoint is resumed or only evaluated."""
        self._is_fitting = stage == "fit"

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the epoch's metrics, which include those of its validation."""
        row = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        self.epochs.append({"epoch": trainer.current_epoch, **row})

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics so far, with which a resumed run continues."""
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the metrics of a resumed run; evaluating a checkpoint does not discard later epochs."""
        if self._is_fitting or not self.epochs:
            self.epochs = list(state_dict["epochs"])


def get_loader_stats(trainer: pl.Trainer) -> list[LoaderStats]:
    """Return the training loaders' statistics; empty if any loader has none."""
    if trainer.train_dataloader is None:
        return []
    loaders: Iterable[object] = CombinedLoader(trainer.train_dataloader).flattened
    times = [getattr(loader, "times", None) for loader in loaders]
    stats = [each for each in times if isinstance(each, LoaderStats)]
    return stats if len(stats) == len(times) else []
