"""Predict the epoch time, its bottleneck and the effect of other settings."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lightning_gnn.planning.overlap import Rhythm, rhythm
from lightning_gnn.planning.preparation import Preparation, ahead_of, prepare
from lightning_gnn.planning.steps import TimedStep, time_steps, time_together
from lightning_gnn.runtime.devices import is_busy, num_cores
from lightning_gnn.runtime.lightning import pl

WORKER_PARTS = ("sampling", "features", "preparing")
"""Parts that run in the workers, if any; all others run in the training thread."""
MIN_GAIN = 0.05  # smaller gains, as a fraction of the epoch time, count as noise


@dataclass(frozen=True)
class CPUForecast:
    """Forecast of a training epoch without validation.

    Args:
        preparation: Cost of preparing a mini-batch.
        steps: Cost of a training step by number of torch threads: one, and that of the run.
        threads: Number of torch threads in the run.
        cores: Number of cores of this process.
        batches: Number of mini-batches per epoch.
        slowdown: Measured time per mini-batch with workers in parallel, relative to
            :func:`~lightning_gnn.planning.overlap.rhythm`: they share caches, memory and the interpreter.
        unknown: Sentences on values that could not be measured.
        busy: Whether other processes kept the machine busy.
    """

    preparation: Preparation
    steps: dict[int, TimedStep]
    threads: int
    cores: int
    batches: int
    slowdown: float = 1.0
    unknown: tuple[str, ...] = ()
    busy: bool = False

    @property
    def step(self) -> TimedStep:
        """The training step of the run."""
        return self.steps[self.threads]

    @property
    def rhythm(self) -> Rhythm:
        """Time from one mini-batch to the next in the run."""
        return self._rhythm(self.preparation.workers, self.threads)

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch, including the wait for the first mini-batch."""
        return self._epoch(self.preparation.workers, self.threads)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds per mini-batch of each part; workers do sampling and features in parallel to the others."""
        preparing = {"sampling": self.preparation.sampling_s, "features": self.preparation.features_s}
        if not self.preparation.known:
            preparing = {"preparing": self.preparation.seconds}
        return {**preparing, **self.step.parts, "Lightning": self.step.outside_s}

    @property
    def bottleneck(self) -> str:
        """The largest of :attr:`parts` that limit the rhythm: of preparing, of training or of both."""
        names, bound = list(self.parts), self.rhythm.bound
        if bound != "cores" and self.preparation.workers:
            names = [name for name in names if (name in WORKER_PARTS) == (bound == "preparing")]
        return max(names, key=self.parts.__getitem__)

    def better_threads(self) -> tuple[int, int, float]:
        """Return the numbers of workers and torch threads with the shortest epoch, and its seconds."""
        if not self.preparation.known:
            return self.preparation.workers, self.threads, self.epoch_s
        choices = [(workers, threads) for workers in range(self.cores + 1) for threads in self.steps]
        current = (self.preparation.workers, self.threads)
        best = min(choices, key=lambda choice: self._epoch(*choice))
        if self._epoch(*best) > (1 - MIN_GAIN) * self.epoch_s:
            best = current
        return *best, self._epoch(*best)

    def _rhythm(self, workers: int, threads: int) -> Rhythm:
        prepared, step = self.preparation, self.steps[threads]
        parallel = step.total + prepared.deferred_s
        serial = self.steps[min(self.steps)].total + prepared.deferred_s
        predicted = rhythm(prepared.seconds, workers, parallel, serial, self.cores)
        return replace(predicted, seconds=predicted.seconds * self.slowdown) if workers else predicted

    def _epoch(self, workers: int, threads: int) -> float:
        first = self.preparation.seconds if workers else 0.0
        return first + self.batches * self._rhythm(workers, threads).seconds


def measure_run(
    datamodule: pl.LightningDataModule,
    module: pl.LightningModule,
    make_trainer: Callable[..., pl.Trainer],
    threads: int | None = None,
    alternatives: bool = True,
) -> CPUForecast:
    """Prepare and train on a few mini-batches, and forecast the epoch time; takes some seconds.

    Args:
        datamodule: DataModule whose training loader is measured.
        module: LightningModule; a copy of it is trained.
        make_trainer: Builds the Trainer of the run from arguments that replace the configured ones.
        threads: Number of torch threads; by default the current number.
        alternatives: Also time steps with one thread per core.

    Raises:
        ValueError: The run does not train in a single CPU process, or has no training batches.
    """
    threads, busy = torch.get_num_threads() if threads is None else threads, is_busy()
    trainer = make_trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    if trainer.strategy.root_device.type != "cpu":
        raise ValueError(
            f"there is nothing to plan: the run trains on {trainer.strategy.root_device}; give trainer=cpu, "
            "datamodule=collective (CPU and GPU prepare mini-batches together) or strategy=hyscale"
        )
    if trainer.world_size > 1:
        raise ValueError(
            f"lgnn plan predicts one process, but there are {trainer.world_size}; give trainer.devices=1 strategy=auto"
        )
    trainer.strategy.connect(module)  # a DataModule may access the model through its Trainer
    datamodule.trainer = trainer
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    num_batches = batches_of_epoch(loader, trainer.limit_train_batches)
    if not num_batches:
        raise ValueError("trainer.limit_train_batches leaves nothing to train, and so nothing to plan")
    batches, preparation = prepare(loader)
    thread_counts = {threads, 1, num_cores() if alternatives else 1}
    steps = {count: time_steps(copy.deepcopy(module), make_trainer, batches, count) for count in sorted(thread_counts)}
    flops = steps[1].flops  # counted in the training thread, which runs all products if it is the only one
    steps = {count: replace(step, flops=flops) for count, step in steps.items()}
    unknown = _list_unknown(datamodule, loader, preparation, MIN_GAIN * steps[threads].seconds)
    forecast = CPUForecast(preparation, steps, threads, num_cores(), num_batches, unknown=unknown, busy=busy)
    if not preparation.workers:
        return forecast
    overlapped = time_together(copy.deepcopy(module), make_trainer, loader, ahead_of(loader), threads)
    return forecast if overlapped is None else replace(forecast, slowdown=overlapped / forecast.rhythm.seconds)


def batches_of_epoch(loader: object, limit: int | float | None) -> int:
    """Return the number of mini-batches that Lightning trains on in an epoch; 0 if unknown."""
    try:
        count = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return limit if isinstance(limit, int) else 0
    if limit is None:
        return count
    return min(count, limit) if isinstance(limit, int) else int(count * limit)


def _list_unknown(datamodule: object, loader: object, preparation: Preparation, least_s: float) -> tuple[str, ...]:
    sentences = []
    if not preparation.known and preparation.ready_s > least_s:
        unknown = f"{type(loader).__name__} does not report the times of sampling and loading features"
        workers = f"{preparation.workers} processes or threads" if preparation.workers else "the training thread"
        sentences.append(f"{unknown}; {workers} deliver a mini-batch every {1e3 * preparation.ready_s:.3g} ms.")
    hooks = [
        name
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        if getattr(type(datamodule), name) is not getattr(pl.LightningDataModule, name)
    ]
    if hooks:
        sentences.append(f"The forecast does not include {type(datamodule).__name__}.{hooks[0]}, which was not called.")
    return tuple(sentences)
