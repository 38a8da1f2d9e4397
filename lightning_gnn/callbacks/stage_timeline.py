"""What each stage of each mini-batch did when, in one epoch of a real run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import CombinedLoader

from lightning_gnn.callbacks.epochs import preparation_times
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.collective.simulate import simulate_dual_buffer
from lightning_gnn.hyscale.decisions import Decision
from lightning_gnn.hyscale.mapping import IterationTimes
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.report import reporting
from lightning_gnn.report.timeline import Counter, Mark, save_trace
from lightning_gnn.runtime.timeline import Clock, Recorder, Timeline


class StageTimeline(pl.Callback):
    """Records one epoch as a timeline: ``<path>.json`` for https://ui.perfetto.dev, and ``<path>.png``.

    The collective loader tells every stage; where it has a plan, the plan's predicted timeline is laid beside the
    measured one. Of other loaders it shows when the training thread waited and when the model was trained. Under
    ``hyscale`` the trace also holds the stage times of each iteration as curves, and every decision of its resource
    manager as an event with its explanation; those that change something are recorded during the whole run.

    In a run with several processes the first one records. Nothing of it goes into checkpoints. A file that cannot be
    written is a warning.

    Args:
        path: Of the two files, without their endings; the folder is made.
        max_batches: Mini-batches after which recording ends; None: the whole epoch.
        epoch: Which epoch, counted from 0: by default the second, for in the first things are compiled and measured. A
            run that has fewer records its last one, a resumed run the first that begins.

    Raises:
        ValueError: ``max_batches`` or ``epoch`` is out of range.
    """

    def __init__(self, path: str | Path = "timeline", max_batches: int | None = 200, epoch: int = 1) -> None:
        if max_batches is not None and max_batches < 1:
            raise ValueError(f"max_batches must be at least 1 or None, but is {max_batches}")
        if epoch < 0:
            raise ValueError(f"epoch counts from 0, but is {epoch}")
        self.path = Path(path)
        self.max_batches = max_batches
        self.epoch = epoch
        self.timelines: dict[str, Timeline] = {}
        """``"measured"`` and, where there is a plan, ``"predicted"``, once the epoch has ended."""
        self.decisions: list[Mark] = []
        """Of the resource manager, in seconds of ``time.perf_counter()``."""
        self.counters: list[Counter] = []
        """Stage times of each recorded iteration under ``hyscale``, in milliseconds."""
        self._recorder: Recorder | None = None  # while it records
        self._recorded = 0  # mini-batches
        self._title = ""
        self._mark = 0.0
        self._waited: float | None = None
        self._last: tuple[IterationTimes, Decision | None] | None = None
        self._written = 0

    # -- hooks

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget what another run has left."""
        self.timelines, self.decisions, self.counters = {}, [], []
        self._recorder, self._recorded, self._last, self._written = None, 0, None, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what a resource manager begins with, and begin in a run that is resumed in mid-epoch."""
        balance = _balance(trainer)
        if balance is not None and balance.manager is not None:
            self._decided(balance.manager.log[-1], time.perf_counter())
        self._begin(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin, if this is the epoch."""
        self._begin(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave a validation in mid-epoch out of the waiting."""
        self._mark = time.perf_counter()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note that a mini-batch has come."""
        if self._recorder is not None:
            begun, waited = self._waited, _waited(trainer)
            self._waited = waited
            now = time.perf_counter()
            end = now if begun is None or waited is None else min(now, self._mark + waited - begun)
            self._recorder.add("CPU", "wait", batch_idx, self._mark, end)
            self._recorder.begin_model(batch_idx)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that it has been trained, and what has been decided."""
        if self._recorder is not None:
            self._recorder.end_model()
        self._mark = now = time.perf_counter()
        self._observe(trainer, now)
        if self._recorder is None:
            return
        self._recorded += 1
        if self.max_batches is not None and self._recorded >= self.max_batches:
            self._finish(trainer, self._recorder)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finish, and write the files."""
        if self._recorder is not None and self._recorded:
            self._finish(trainer, self._recorder)
        if self.timelines and not self._written:
            self._write()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write them again if there were decisions since."""
        if self.timelines and self._written < len(self.decisions):
            self._write()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Forget an epoch that did not end."""
        self._recorder = None
        for loader in _loaders(trainer):
            loader.timeline = None

    # -- recording

    def _begin(self, trainer: pl.Trainer) -> None:
        self._mark = time.perf_counter()
        begun = trainer.current_epoch >= min(self.epoch, _last_epoch(trainer))
        if not trainer.is_global_zero or self.timelines or self._recorded or not begun:
            return
        device = trainer.strategy.root_device
        self._recorder = Recorder(Clock(device), "CPU" if device.type == "cpu" else "GPU")
        self._recorder.timeline = Timeline()
        self._recorder.begin()
        self._title = f"{type(trainer.datamodule).__name__}, epoch {trainer.current_epoch}"  # type: ignore[attr-defined]
        for loader in _loaders(trainer):
            loader.timeline = Timeline()
        self._waited = _waited(trainer)
        self._mark = time.perf_counter()

    def _observe(self, trainer: pl.Trainer, now: float) -> None:
        """Take what hybrid training has measured and decided since the last mini-batch."""
        balance = _balance(trainer)
        if balance is None or not balance.history or balance.history[-1] is self._last:
            return
        self._last = balance.history[-1]
        times, decision = self._last
        if self._recorder is not None:
            self.counters += _curves(times, balance.threads, now)
        if decision is not None and (decision.changed or self._recorder is not None):
            self._decided(decision, now)

    def _decided(self, decision: Decision, now: float) -> None:
        weight = "decision" if decision.changed else "note"
        values = {"observation": decision.observation, "mapping": str(decision.mapping)}
        self.decisions.append(Mark(decision.action, now, decision.explanation, weight, values))

    def _finish(self, trainer: pl.Trainer, recorder: Recorder) -> None:
        self._recorder = None
        recorder.write()
        timeline = recorder.timeline or Timeline()
        loaders = _loaders(trainer)
        told = [loader.timeline for loader in loaders]
        for loader in loaders:
            loader.timeline = None
        if told and told[0] is not None and told[0].intervals:
            timeline = told[0]  # which tells the model itself
        most = self.max_batches if self.max_batches is not None else len(timeline.intervals)
        predicted = _predicted(loaders[0], int(trainer.num_training_batches)) if loaders else None
        names = getattr(loaders[0], "names", {}) if loaders else {}
        if predicted is not None:
            self.timelines["predicted"] = replace(predicted.first(most), names=names)
        self.timelines["measured"] = replace(timeline.first(most), names=names)

    def _write(self) -> None:
        self._written = len(self.decisions)
        with reporting(f"{self.path}.json"):
            save_trace(self.timelines, f"{self.path}.json", self.decisions, self.counters)
        with reporting(f"{self.path}.png"):
            from lightning_gnn.report.figure import save_timeline  # matplotlib may be missing or broken

            save_timeline(self.timelines, self._title, f"{self.path}.png", self.decisions)


def _waited(trainer: pl.Trainer) -> float | None:
    """Return the seconds of waiting that the training loaders have counted, as the figures of an epoch have them."""
    times = preparation_times(trainer)
    return sum(float(each.wait_s) for each in times) if times else None


def _last_epoch(trainer: pl.Trainer) -> float:
    """Return the number of the last epoch that a run may reach."""
    epochs = inf if trainer.max_epochs is None or trainer.max_epochs < 0 else float(trainer.max_epochs)
    if trainer.max_steps > 0:
        steps = trainer.num_training_batches / trainer.accumulate_grad_batches
        epochs = min(epochs, max(1, ceil(trainer.max_steps / ceil(steps)) if isfinite(steps) and steps else 1))
    return epochs - 1


def _loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the training loaders that record a timeline."""
    if trainer.train_dataloader is None:
        return []
    found: Iterable[Any] = CombinedLoader(trainer.train_dataloader).flattened
    return [loader for loader in found if hasattr(type(loader), "timeline")]


def _balance(trainer: pl.Trainer) -> Any:
    return trainer.strategy.balance if isinstance(trainer.strategy, HyScaleStrategy) else None


def _predicted(loader: Any, num_batches: int) -> Timeline | None:
    """Return the timeline of an epoch as a loader's plan predicts it."""
    plan = getattr(loader, "plan", None)
    if not isinstance(plan, CollectivePlan) or plan.times is None:
        return None
    return simulate_dual_buffer(plan.times, plan, num_batches).timeline


def _curves(times: IterationTimes, threads: tuple[int, int, int], now: float) -> list[Counter]:
    """Return what an iteration of hybrid training took, its seeds and its threads."""
    stages = {"sampling": times.sample_cpu, "sampling there": times.sample_accelerator}
    stages |= {"feature loading": times.load, "transfer": times.transfer}
    stages |= {f"CPU trainer {i}": seconds for i, seconds in enumerate(times.train_cpu)}
    stages |= {f"accelerator {i}": seconds for i, seconds in enumerate(times.train_accelerator)}
    found = [
        Counter("stages, ms", now, {name: 1e3 * seconds for name, seconds in stages.items() if seconds is not None})
    ]
    if times.seeds is not None:
        found.append(Counter("seeds", now, {f"trainer {i}": float(n) for i, n in enumerate(times.seeds)}))
    found.append(
        Counter("threads", now, dict(zip(("sampling", "loading", "training"), map(float, threads), strict=True)))
    )
    return found
