"""Who does what in hybrid training, and how long it took: the two things that a resource manager passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Stage = Literal["sample_cpu", "sample_accelerator", "load", "train_cpu", "accelerator"]
"""What algorithm 1 of HyScale-GNN sorts; ``accelerator`` is Data Transfer and training on it, bundled."""

STEP_FIELDS: tuple[Stage, ...] = ("sample_cpu", "sample_accelerator", "load", "train_cpu", "accelerator")
"""In the order of the paper's line 2."""

CPU_TASKS: tuple[Stage, ...] = ("sample_cpu", "load", "train_cpu")
"""Those that CPU threads work at, in the order of :attr:`TaskMapping.threads`."""


@dataclass(frozen=True)
class TaskMapping:
    """How the work and the CPU threads of one node are shared out (section III-B of HyScale-GNN)."""

    # seeds of each trainer in one iteration, the CPU trainers first, then the accelerators; 0 for a trainer that is
    # taken out. Their sum never changes.
    seeds: tuple[int, ...]
    cpu_trainers: int = 0
    # CPU threads of Sampling, of Feature Loading and of the CPU trainers together. Their sum never changes.
    threads: tuple[int, int, int] = (1, 1, 1)
    accelerator_sampling: float = 0.0  # share of the sampling that accelerators do, 0 to 1

    def __post_init__(self) -> None:
        if not self.seeds or sum(self.seeds) < 1 or min(self.seeds) < 0:
            raise ValueError(f"seeds must be at least one number per trainer, none negative, not all 0: {self.seeds}")
        if not 0 <= self.cpu_trainers <= len(self.seeds):
            raise ValueError(f"cpu_trainers={self.cpu_trainers}, but there are seeds for {len(self.seeds)} trainers")
        if len(self.threads) != 3 or min(self.threads[:2]) < 1 or self.threads[2] < min(1, self.cpu_trainers):
            raise ValueError(
                f"threads must be three numbers (Sampling, Feature Loading, CPU trainers), each at least 1 where there "
                f"is such a task, but they are {self.threads}"
            )
        if not 0 <= self.accelerator_sampling <= 1:
            raise ValueError(f"accelerator_sampling must be between 0 and 1, but is {self.accelerator_sampling}")

    @property
    def total(self) -> int:
        """Seeds of all trainers."""
        return sum(self.seeds)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each trainer's seeds over the total."""
        return tuple(seeds / self.total for seeds in self.seeds)

    @property
    def cpu_seeds(self) -> int:
        """Seeds of the CPU trainers."""
        return sum(self.seeds[: self.cpu_trainers])

    @property
    def accelerator_seeds(self) -> int:
        """Seeds of the accelerators."""
        return sum(self.seeds[self.cpu_trainers :])

    def __str__(self) -> str:
        """Return it in one line: seeds of CPU trainers + seeds of accelerators, and the threads."""
        groups = {"cpu": self.seeds[: self.cpu_trainers], "accelerator": self.seeds[self.cpu_trainers :]}
        seeds = " + ".join(f"{name} {'/'.join(map(str, group))}" for name, group in groups.items() if group)
        text = f"seeds {seeds}, threads {'/'.join(map(str, self.threads))}"
        return text + (f", {self.accelerator_sampling:.0%} sampled there" if self.accelerator_sampling else "")

    def check(self, times: IterationTimes) -> None:
        """Refuse times that are not for these trainers."""
        if (len(times.train_cpu), len(times.trainers)) != (self.cpu_trainers, len(self.seeds)):
            raise ValueError(
                f"times of {len(times.train_cpu)} CPU trainers and {len(times.train_accelerator)} accelerators, but "
                f"the mapping has {self.cpu_trainers} and {len(self.seeds) - self.cpu_trainers}"
            )
        if times.seeds is not None and len(times.seeds) != len(self.seeds):
            raise ValueError(f"times for seeds {times.seeds}, but there are {len(self.seeds)} trainers")

    def check_same_work(self, saved: TaskMapping) -> None:
        """Refuse a saved mapping that shares out other work, or among others."""
        found, expected = (
            (each.total, each.cpu_trainers, len(each.seeds), sum(each.threads), each.accelerator_sampling > 0)
            for each in (saved, self)
        )
        if found != expected:
            raise ValueError(f"the saved state is for {saved}, which does not fit {self}")

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain lists and numbers."""
        return {**vars(self), "seeds": list(self.seeds), "threads": list(self.threads)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> TaskMapping:
        """Take back what :meth:`to_dict` returned."""
        try:
            sampler, loader, trainer = state["threads"]
            return cls(
                tuple(int(seeds) for seeds in state["seeds"]),
                int(state["cpu_trainers"]),
                (int(sampler), int(loader), int(trainer)),
                float(state["accelerator_sampling"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no mapping of seeds and threads: {state!r}") from error


@dataclass(frozen=True)
class IterationTimes:
    """What one iteration of hybrid training took in each stage, in seconds; None for a stage that does not exist."""

    # A stage's time is that between two iterations if the stage were the only one: where several threads work at mini-
    # batches of their own, their thread-seconds divided by the number of threads.

    sample_cpu: float | None
    load: float | None
    train_cpu: tuple[float | None, ...] = ()  # propagation of each CPU trainer; None or 0 for one without seeds
    train_accelerator: tuple[float | None, ...] = ()  # propagation of each accelerator
    transfer: float | None = None  # data Transfer, the slowest accelerator's
    sample_accelerator: float | None = None  # sampling on accelerators, the slowest
    # seeds of each trainer with which this was measured; None means the mapping that was in force as many observations
    # ago as the pipeline is deep
    seeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for seconds in (self.sample_cpu, self.load, self.transfer, self.sample_accelerator, *self.trainers):
            if seconds is not None and not 0 <= seconds < float("inf"):
                raise ValueError(f"stage times must be finite and not negative: {self}")

    @property
    def trainers(self) -> tuple[float | None, ...]:
        """Propagation of every trainer, in the order of :attr:`TaskMapping.seeds`."""
        return (*self.train_cpu, *self.train_accelerator)

    def stages(self) -> dict[Stage, float]:
        """Return the stages that exist as algorithm 1 sorts them, in the order of its line 2."""
        found: dict[Stage, float | None] = {
            "sample_cpu": self.sample_cpu,
            "sample_accelerator": self.sample_accelerator,
            "load": self.load,
            "train_cpu": _slowest(self.train_cpu),
            "accelerator": _slowest((self.transfer, *self.train_accelerator)),
        }
        return {stage: seconds for stage, seconds in found.items() if seconds is not None}

    @property
    def bottleneck(self) -> float:
        """Time of the slowest stage, which an ideal pipeline needs for an iteration (equation 6)."""
        return max(self.stages().values(), default=0.0)

    @property
    def propagation(self) -> float:
        """Time of the slowest trainer or of the transfers to them, whichever is longer."""
        return _slowest((self.transfer, *self.trainers)) or 0.0

    def scaled(self, factor: float) -> IterationTimes:
        """Return it with every time multiplied."""

        def times(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * factor

        trainers = {name: tuple(map(times, getattr(self, name))) for name in ("train_cpu", "train_accelerator")}
        stages = {name: times(getattr(self, name)) for name in ("sample_cpu", "load", "transfer", "sample_accelerator")}
        return replace(self, **trainers, **stages)  # type: ignore[arg-type]  # by name


def _slowest(times: Sequence[float | None]) -> float | None:
    """Return the longest of the times that are more than 0, None where there is none."""
    return max((seconds for seconds in times if seconds), default=None)


class Cost(NamedTuple):
    """Seconds that a task takes for n units of work: ``overhead + per_unit * n``, and 0 for none."""

    overhead: float
    per_unit: float

    def seconds(self, units: float) -> float:
        """Return the time for some units of work."""
        return self.overhead + self.per_unit * units if units else 0.0

    def scaled(self, factor: float) -> Cost:
        """Return it with the time multiplied."""
        return Cost(self.overhead * factor, self.per_unit * factor)


def split_evenly(
    total: int, costs: Sequence[Cost | None], group: Sequence[int] = (), group_per_seed: float = 0.0, least: int = 1
) -> tuple[int, ...]:
    """Share seeds out to trainers so that the slowest is done as early as possible."""
    present = {index: cost for index, cost in enumerate(costs) if cost is not None}
    if not present:
        raise ValueError(f"there is no trainer for {total} seeds")

    def done(seconds: float) -> dict[int, float]:
        found = {index: max(float(least), (seconds - cost.overhead) / cost.per_unit) for index, cost in present.items()}
        together = sum(found[index] for index in group if index in found) * group_per_seed
        if together > seconds:
            found.update({index: found[index] * seconds / together for index in group if index in found})
        return found

    low, high = 0.0, min(cost.seconds(total) for cost in present.values()) + group_per_seed * total
    for _ in range(32):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(done(middle).values()) >= total else (middle, high)
    seeds = {index: max(least, int(number + 1e-6)) for index, number in done(high).items()}
    while sum(seeds.values()) < total:  # what rounding left over goes where it is done first
        seeds[min(seeds, key=lambda index: present[index].seconds(seeds[index] + 1))] += 1
    while sum(seeds.values()) > total:
        several = [index for index in seeds if seeds[index] > least] or [index for index in seeds if seeds[index]]
        seeds[max(several, key=lambda index: present[index].seconds(seeds[index]))] -= 1
    return tuple(seeds.get(index, 0) for index in range(len(costs)))
