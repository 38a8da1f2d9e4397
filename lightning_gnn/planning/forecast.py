"""What an epoch will take, what holds it up, and what other settings would change."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytorch_lightning as pl
import torch

from lightning_gnn.planning.overlap import Rhythm, rhythm
from lightning_gnn.planning.preparation import Preparation, ahead_of, prepare
from lightning_gnn.planning.steps import TimedStep, time_steps, time_together
from lightning_gnn.runtime.cores import is_busy, num_cores

WORTH = 0.05  # a gain below this part of the epoch is noise


@dataclass(frozen=True)
class CPUForecast:
    """An epoch of training, validation left out.

    Args:
        preparation: What a mini-batch costs before it is trained on.
        steps: What a step costs, by torch's threads: with one, and with those of the run.
        threads: Torch's threads in the run.
        cores: Cores of this process.
        batches: Mini-batches of an epoch.
        slowdown: By how much a mini-batch takes longer where workers prepare beside training than by
            :func:`~lightning_gnn.planning.overlap.rhythm`: they share caches, memory and the interpreter.
        unknown: What could not be measured, in sentences.
        busy: Whether others kept the machine busy.
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
        """A step of the run."""
        return self.steps[self.threads]

    @property
    def rhythm(self) -> Rhythm:
        """From one mini-batch to the next."""
        return self._rhythm(self.preparation.workers, self.threads)

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch: the first mini-batch has to be waited for."""
        return self._epoch(self.preparation.workers, self.threads)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds per mini-batch of what is done for it, by name; workers do sampling and features beside the rest."""
        known = {"sampling": self.preparation.sampling_s, "features": self.preparation.features_s}
        if not self.preparation.known:
            known = {"preparing": self.preparation.seconds}
        return {**known, **self.step.parts, "Lightning": self.step.outside_s}

    @property
    def bottleneck(self) -> str:
        """The largest of :attr:`parts` on the side that the other side waits for."""
        ahead: list[str] = [name for name in ("sampling", "features", "preparing") if name in self.parts]
        names = [name for name in self.parts if self.preparation.workers == 0 or name not in ahead]
        if self.rhythm.bound == "preparing":
            names = ahead
        elif self.rhythm.bound == "cores":
            names = list(self.parts)
        return max(names, key=self.parts.__getitem__)

    def better_threads(self) -> tuple[int, int, float]:
        """Return the number of workers and of torch's threads with the shortest epoch, and its seconds."""
        if not self.preparation.known:
            return self.preparation.workers, self.threads, self.epoch_s
        choices = [(workers, threads) for workers in range(self.cores + 1) for threads in self.steps]
        own = (self.preparation.workers, self.threads)
        best = min(choices, key=lambda choice: self._epoch(*choice))
        if self._epoch(*best) > (1 - WORTH) * self.epoch_s:
            best = own
        return *best, self._epoch(*best)

    def _rhythm(self, workers: int, threads: int) -> Rhythm:
        prepared, step = self.preparation, self.steps[threads]
        inside = prepared.training_thread_s - (prepared.seconds if prepared.workers == 0 else 0.0)
        own = step.total + max(0.0, inside)
        alone = self.steps[min(self.steps)].total + max(0.0, inside)
        beat = rhythm(prepared.seconds, workers, own, alone, self.cores)
        return replace(beat, seconds=beat.seconds * self.slowdown) if workers else beat

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
    """Prepare and train on a few mini-batches, and say what an epoch will take; some seconds.

    Args:
        datamodule: Of the run; its training loader is asked for mini-batches.
        module: Of the run; a copy of it is trained.
        make_trainer: Builds the Trainer of the run; takes arguments that replace the configured ones.
        threads: Of torch; by default as many as it uses now.
        alternatives: Also time steps with as many threads as there are cores.

    Raises:
        ValueError: The run is not on one CPU process, or nothing would be trained.
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
    trainer.strategy.connect(module)  # a DataModule may ask its Trainer for the model
    datamodule.trainer = trainer
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    count = batches_of_epoch(loader, trainer.limit_train_batches)
    if not count:
        raise ValueError("trainer.limit_train_batches leaves nothing to train, and so nothing to plan")
    batches, preparation = prepare(loader)
    numbers = {threads, 1, num_cores() if alternatives else 1}
    steps = {number: time_steps(copy.deepcopy(module), make_trainer, batches, number) for number in sorted(numbers)}
    flops = steps[1].flops
    steps = {number: replace(step, flops=flops) for number, step in steps.items()}
    unknown = _unknown(datamodule, loader, preparation, WORTH * steps[threads].seconds)
    found = CPUForecast(preparation, steps, threads, num_cores(), count, unknown=unknown, busy=busy)
    if not preparation.workers:
        return found
    together = time_together(copy.deepcopy(module), make_trainer, loader, ahead_of(loader), threads)
    return found if together is None else replace(found, slowdown=together / found.rhythm.seconds)


def batches_of_epoch(loader: object, limit: int | float | None) -> int:
    """Return how many mini-batches of a loader Lightning trains on in an epoch; 0 where that is unknown."""
    try:
        count = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return limit if isinstance(limit, int) else 0
    if limit is None:
        return count
    return min(count, limit) if isinstance(limit, int) else int(count * limit)


def _unknown(datamodule: object, loader: object, preparation: Preparation, least_s: float) -> tuple[str, ...]:
    sentences = []
    if not preparation.known and preparation.ready_s > least_s:
        what = f"{type(loader).__name__} is not of this package: what its sampling and its features take is unknown"
        ways = f"{preparation.workers} processes or threads" if preparation.workers else "the training thread"
        sentences.append(f"{what}; {ways} hand out a mini-batch each {1e3 * preparation.ready_s:.3g} ms.")
    own = [
        name
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        if getattr(type(datamodule), name) is not getattr(pl.LightningDataModule, name)
    ]
    if own:
        sentences.append(f"{type(datamodule).__name__}.{own[0]} is not in the figures: mini-batches went around it.")
    return tuple(sentences)
