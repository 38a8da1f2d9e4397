"""Task mapping and stage times of hybrid training: output and input of a resource manager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Literal, NamedTuple

Stage = Literal["sample_cpu", "sample_accelerator", "load", "train_cpu", "accelerator"]
"""Stages that algorithm 1 of HyScale-GNN sorts; ``accelerator`` combines Data Transfer and accelerator training."""

STAGES: tuple[Stage, ...] = ("sample_cpu", "sample_accelerator", "load", "train_cpu", "accelerator")
"""All stages, in the order of line 2 of algorithm 1."""

CPU_TASKS: tuple[Stage, ...] = ("sample_cpu", "load", "train_cpu")
"""Stages that run on CPU threads, in the order of :attr:`TaskMapping.threads`."""


@dataclass(frozen=True)
class TaskMapping:
    """Assignment of the work and the CPU threads of one node (section III-B of HyScale-GNN)."""

    # seeds of each trainer in one iteration, CPU trainers first; 0 excludes a trainer. Their sum never changes.
    seeds: tuple[int, ...]
    cpu_trainers: int = 0
    # CPU threads of Sampling, Feature Loading and all CPU trainers. Their sum never changes.
    threads: tuple[int, int, int] = (1, 1, 1)
    # fraction of the sampling done by accelerators, 0 to 1; with ``buffers``, of the whole preparation, as predicted
    accelerator_sampling: float = 0.0
    # gbs, cbs, lead and row of collective batching on each accelerator; None: HyScale-GNN's stages prepare everything
    buffers: tuple[int, int, int, int] | None = None

    def __post_init__(self) -> None:
        if not self.seeds or sum(self.seeds) < 1 or min(self.seeds) < 0:
            raise ValueError(f"seeds must be at least one number per trainer, none negative, not all 0: {self.seeds}")
        if not 0 <= self.cpu_trainers <= len(self.seeds):
            raise ValueError(f"cpu_trainers={self.cpu_trainers}, but seeds has {len(self.seeds)} entries")
        if len(self.threads) != 3 or min(self.threads[:2]) < 1 or self.threads[2] < min(1, self.cpu_trainers):
            raise ValueError(
                f"threads must be three numbers (Sampling, Feature Loading, CPU trainers), each at least 1 if the task "
                f"exists, but they are {self.threads}"
            )
        if not 0 <= self.accelerator_sampling <= 1:
            raise ValueError(f"accelerator_sampling must be between 0 and 1, but is {self.accelerator_sampling}")

    @property
    def total(self) -> int:
        """Total seeds of all trainers."""
        return sum(self.seeds)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each trainer's fraction of the seeds."""
        return tuple(seeds / self.total for seeds in self.seeds)

    @property
    def cpu_seeds(self) -> int:
        """Total seeds of the CPU trainers."""
        return sum(self.seeds[: self.cpu_trainers])

    @property
    def accelerator_seeds(self) -> int:
        """Total seeds of the accelerators."""
        return sum(self.seeds[self.cpu_trainers :])

    @property
    def accelerator_fraction(self) -> float:
        """Fraction of their own mini-batches that accelerators sample, or prepare."""
        # Only accelerators prepare on accelerators, so their fraction exceeds the share of all mini-batches.
        seeds = self.accelerator_seeds
        return min(1.0, self.accelerator_sampling * self.total / seeds) if seeds else 0.0

    def rank_threads(self, trainer: int, uses_threads: Sequence[bool] | None = None) -> tuple[int, int, int]:
        """Return a trainer's threads for sampling and feature loading, in proportion to its work, and for training."""
        kept = 1.0 if self.buffers is None else 1.0 - self.accelerator_fraction
        work = [seeds * (1.0 if index < self.cpu_trainers else kept) for index, seeds in enumerate(self.seeds)]
        share = work[trainer] / (sum(compress(work, uses_threads or [True] * len(work))) or 1)
        sampling, loading, training = self.threads
        own = max(1, training // max(1, self.cpu_trainers)) if trainer < self.cpu_trainers else 1
        return max(1, round(sampling * share)), max(1, round(loading * share)), own

    def __str__(self) -> str:
        """Return one line: seeds of the CPU trainers + seeds of the accelerators, and the threads."""
        groups = {"cpu": self.seeds[: self.cpu_trainers], "accelerator": self.seeds[self.cpu_trainers :]}
        seeds = " + ".join(f"{name} {'/'.join(map(str, group))}" for name, group in groups.items() if group)
        text = f"seeds {seeds}, threads {'/'.join(map(str, self.threads))}"
        if self.buffers is not None:
            on_gpu, on_cpu, *_ = self.buffers
            sizes = {(False, True): "by the CPU", (True, False): "by accelerators"}.get((on_gpu > 0, on_cpu > 0))
            return f"{text}, prepared {sizes or f'{on_gpu} by accelerators, {on_cpu} by the CPU'}"
        share = self.accelerator_sampling
        return text + (f", {share:.0%} sampled on accelerators" if share else "")

    def check(self, times: IterationTimes) -> None:
        """Raise ValueError if the times are for other trainers."""
        if (len(times.train_cpu), len(times.trainers)) != (self.cpu_trainers, len(self.seeds)):
            raise ValueError(
                f"times of {len(times.train_cpu)} CPU trainers and {len(times.train_accelerator)} accelerators, but "
                f"the mapping has {self.cpu_trainers} and {len(self.seeds) - self.cpu_trainers}"
            )
        if times.seeds is not None and len(times.seeds) != len(self.seeds):
            raise ValueError(f"times for seeds {times.seeds}, but the mapping has {len(self.seeds)} trainers")

    @property
    def samples_on_accelerators(self) -> bool:
        """Whether accelerators sample for HyScale-GNN's stages; collective batching decides itself."""
        return self.accelerator_sampling > 0 and self.buffers is None

    def check_same_work(self, saved: TaskMapping) -> None:
        """Raise ValueError if a saved mapping has other totals, trainers or sampling devices."""
        found, expected = (
            (each.total, each.cpu_trainers, len(each.seeds), sum(each.threads), each.samples_on_accelerators)
            for each in (saved, self)
        )
        if found != expected:
            raise ValueError(f"the saved state is for {saved}, which does not fit {self}")

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping as plain lists and numbers."""
        buffers = {} if self.buffers is None else {"buffers": list(self.buffers)}
        state = {name: value for name, value in vars(self).items() if name != "buffers"}
        return {**state, "seeds": list(self.seeds), "threads": list(self.threads), **buffers}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> TaskMapping:
        """Restore a mapping from :meth:`to_dict`."""
        try:
            sampler, loader, trainer = state["threads"]
            return cls(
                tuple(int(seeds) for seeds in state["seeds"]),
                int(state["cpu_trainers"]),
                (int(sampler), int(loader), int(trainer)),
                float(state["accelerator_sampling"]),
                None if state.get("buffers") is None else tuple(map(int, state["buffers"])),  # type: ignore[arg-type]
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a mapping of seeds and threads: {state!r}") from error


@dataclass(frozen=True)
class IterationTimes:
    """Seconds that each stage of one hybrid training iteration took; None for a stage that does not exist."""

    # A stage's time is the interval between iterations if it were the only stage: if its threads process different
    # mini-batches, the thread-seconds divided by the number of threads.

    sample_cpu: float | None
    load: float | None
    train_cpu: tuple[float | None, ...] = ()  # propagation of each CPU trainer; None or 0 for one without seeds
    train_accelerator: tuple[float | None, ...] = ()  # propagation of each accelerator
    transfer: float | None = None  # Data Transfer of the slowest accelerator
    sample_accelerator: float | None = None  # sampling on the slowest accelerator
    iteration: float | None = None  # from the start of this iteration to that of the next; None if an epoch ended
    # seeds of each trainer during the measurement; None: those of the mapping one pipeline depth (in observations) ago
    seeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        stages = self.sample_cpu, self.load, self.transfer, self.sample_accelerator, self.iteration
        for seconds in (*stages, *self.trainers):
            if seconds is not None and not 0 <= seconds < float("inf"):
                raise ValueError(f"stage times must be finite and not negative: {self}")

    @property
    def trainers(self) -> tuple[float | None, ...]:
        """Propagation times of all trainers, in the order of :attr:`TaskMapping.seeds`."""
        return (*self.train_cpu, *self.train_accelerator)

    def stages(self) -> dict[Stage, float]:
        """Return the times of the existing stages, in the order of :data:`STAGES`."""
        seconds_by_stage: dict[Stage, float | None] = {
            "sample_cpu": self.sample_cpu,
            "sample_accelerator": self.sample_accelerator,
            "load": self.load,
            "train_cpu": _slowest(self.train_cpu),
            "accelerator": _slowest((self.transfer, *self.train_accelerator)),
        }
        return {stage: seconds for stage, seconds in seconds_by_stage.items() if seconds is not None}

    @property
    def bottleneck(self) -> float:
        """Time of the slowest stage, which equals an iteration of an ideal pipeline (equation 6)."""
        return max(self.stages().values(), default=0.0)

    def scaled(self, factor: float) -> IterationTimes:
        """Return a copy with every time multiplied by ``factor``."""

        def scale(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * factor

        trainers = {name: tuple(map(scale, getattr(self, name))) for name in ("train_cpu", "train_accelerator")}
        stages = {name: scale(getattr(self, name)) for name in ("sample_cpu", "load", "transfer", "sample_accelerator")}
        return replace(self, **trainers, **stages)  # type: ignore[arg-type]  # by name


def _slowest(times: Sequence[float | None]) -> float | None:
    """Return the longest positive time, or None."""
    return max((seconds for seconds in times if seconds), default=None)


class Cost(NamedTuple):
    """Linear cost in seconds of n units of work: ``overhead + per_unit * n``, and 0 without work."""

    overhead: float
    per_unit: float

    def seconds(self, units: float) -> float:
        """Return the seconds for ``units`` of work."""
        return self.overhead + self.per_unit * units if units else 0.0

    def scaled(self, factor: float) -> Cost:
        """Return a copy with the time multiplied by ``factor``."""
        return Cost(self.overhead * factor, self.per_unit * factor)


def split_evenly(total: int, costs: Sequence[Cost]) -> tuple[int, ...]:
    """Split seeds between trainers so that the slowest finishes as early as possible."""
    if len(set(costs)) <= 1:
        share, rest = divmod(total, max(1, len(costs)))
        return tuple(share + (index < rest) for index in range(len(costs)))

    def seeds_within(seconds: float) -> list[float]:
        return [max(0.0, (seconds - cost.overhead) / cost.per_unit) for cost in costs]

    low, high = 0.0, min(cost.seconds(total) for cost in costs)
    for _ in range(32):  # bisect the time in which all seeds can be processed
        middle = (low + high) / 2
        low, high = (low, middle) if sum(seeds_within(middle)) >= total else (middle, high)
    seeds = [int(number + 1e-6) for number in seeds_within(high)]
    while sum(seeds) != total:  # the trainers that finish first take the remainder, those that finish last give it
        step = 1 if sum(seeds) < total else -1
        possible = [index for index in range(len(costs)) if seeds[index] + step >= 0]
        ends = {index: costs[index].seconds(seeds[index] + (step > 0)) for index in possible}
        seeds[(min if step > 0 else max)(ends, key=ends.__getitem__)] += step
    return tuple(seeds)
