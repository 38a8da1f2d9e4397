"""How fast each epoch was, where its time went, and its figures."""

import copy
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader

from lightning_gnn.loading.batch import LoaderStats
from lightning_gnn.planning.preparation import edges_of


@dataclass
class EpochThroughput:
    """One training epoch, validation left out.

    Args:
        epoch_time_s: Seconds from the start of the epoch to the end of its last batch.
        model_s: Seconds that the training thread spent on forward, backward and optimizer.
        wait_s: Seconds that it waited for mini-batches: those in its loader's ``__next__``, where the loader counts
            them, else those between two steps.
        sampling_s: Thread-seconds of sampling; None if the loader counts none.
        features_s: Thread-seconds of feature loading; likewise.
        batches: Mini-batches of this process.
        edges: Their edges.
        all_edges: The edges of all processes.
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
        """Seconds of the training thread that went elsewhere: transfers, callbacks, loggers."""
        return max(0.0, self.epoch_time_s - self.model_s - self.wait_s)

    @property
    def mteps(self) -> float:
        """Million traversed edges per second, HyScale-GNN's metric (section VI-A): edges of all mini-batches / time."""
        return self.all_edges / self.epoch_time_s / 1e6 if self.epoch_time_s else 0.0

    @property
    def sampled_edges_per_s(self) -> float | None:
        """Edges per thread-second of sampling; None without sampling."""
        return self.edges / self.sampling_s if self.sampling_s else None


class Throughput(pl.Callback):
    """Measures each training epoch and logs ``epoch_time_s``, ``mteps`` and ``sampled_edges_per_s``.

    It works with any loader: those of this package count what sampling and feature loading cost; with others only the
    training thread is measured. Nothing of it goes into checkpoints. ``epochs`` holds one
    :class:`EpochThroughput` per finished epoch.
    """

    def __init__(self) -> None:
        self.epochs: list[EpochThroughput] = []
        self._epoch: EpochThroughput | None = None
        self._mark = 0.0
        self._batch_start = 0.0
        self._before: list[LoaderStats] = []

    def summary(self) -> EpochThroughput | None:
        """Return the median epoch, without the first if there are more; None before the first has ended."""
        if not self.epochs:
            return None
        rows = [asdict(epoch) for epoch in (self.epochs[1:] or self.epochs)]
        middle: dict[str, Any] = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            middle[name] = None if None in values else type(values[0])(median(values))
        return EpochThroughput(**middle)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._epoch = EpochThroughput()
        self._before = [copy.copy(times) for times in preparation_times(trainer)]
        self._mark = time.perf_counter()

    on_train_start = on_train_epoch_start  # a run that is resumed in mid-epoch has no epoch start

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave a validation in mid-epoch out."""
        self._mark = time.perf_counter()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Count the wait for the batch, and the batch."""
        self._batch_start = time.perf_counter()
        if self._epoch is not None:
            self._epoch.wait_s += self._batch_start - self._mark
            self._epoch.batches += 1
            self._epoch.edges += edges_of(batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Count the time of the model."""
        if self._epoch is None:
            return
        if trainer.is_last_batch and trainer.strategy.root_device.type != "cpu":
            torch.accelerator.synchronize()
        now = time.perf_counter()
        self._epoch.model_s += now - self._batch_start
        self._epoch.epoch_time_s += now - self._mark
        self._mark = now

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finish the epoch and log its figures."""
        epoch, self._epoch = self._epoch, None
        if epoch is None or not epoch.batches:
            return
        after = preparation_times(trainer)
        if after:
            spent = {name: _spent(self._before, after, name) for name in ("wait_s", "sampling_s", "features_s")}
            epoch.wait_s, epoch.sampling_s, epoch.features_s = spent["wait_s"], spent["sampling_s"], spent["features_s"]
        epoch.all_edges = epoch.edges
        if trainer.world_size > 1:
            # On rank 0 the progress bar has asked for the metrics already, which synchronize then. Let the others do so
            # before the next collective, or each would wait for the other.
            _ = trainer.callback_metrics
            edges = torch.tensor(float(epoch.edges), dtype=torch.float64, device=trainer.strategy.root_device)
            epoch.all_edges = int(trainer.strategy.reduce(edges, reduce_op="sum"))
        self.epochs.append(epoch)
        figures = {"epoch_time_s": epoch.epoch_time_s, "mteps": epoch.mteps}
        if epoch.sampled_edges_per_s is not None:
            figures["sampled_edges_per_s"] = epoch.sampled_edges_per_s
        pl_module.log_dict(figures, batch_size=1, rank_zero_only=True)


class LearningCurves(pl.Callback):
    """Keeps what was logged in each epoch, in ``epochs``: dictionaries such as ``{"epoch": 0, "val_acc": 0.9}``."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self._fitting = True

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Note whether a checkpoint that is loaded next is gone on from, or only tested."""
        self._fitting = stage == "fit"

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the epoch's figures; those of its validation are already there."""
        row = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        self.epochs.append({"epoch": trainer.current_epoch, **row})

    def state_dict(self) -> dict[str, Any]:
        """Return the figures so far, so that those of a resumed run begin with them."""
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the figures of the interrupted run; testing its best checkpoint takes no later ones away."""
        if self._fitting or not self.epochs:
            self.epochs = list(state_dict["epochs"])


def preparation_times(trainer: pl.Trainer) -> list[LoaderStats]:
    """Return the loaders' counts, empty for loaders that keep none."""
    if trainer.train_dataloader is None:
        return []
    loaders: Iterable[object] = CombinedLoader(trainer.train_dataloader).flattened
    times = [getattr(loader, "times", None) for loader in loaders]
    known = [each for each in times if isinstance(each, LoaderStats)]
    return known if len(known) == len(times) else []


def _spent(before: Iterable[LoaderStats], after: Iterable[LoaderStats], name: str) -> float:
    return float(sum(getattr(times, name) for times in after) - sum(getattr(times, name) for times in before))
