"""From noisy stage times of the last iterations to what each stage costs, and would cost under another mapping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from lightning_gnn.hyscale.mapping import IterationTimes, Mapping, Stage
from lightning_gnn.hyscale.running_cost import RunningCost
from lightning_gnn.hyscale.split import TrainerCost

NEAR = 0.25
"""Measurements count for the present mapping while no trainer's seeds differ from now by more than this."""


class Measurement(NamedTuple):
    """Stage times and the mapping they were measured with."""

    mapping: Mapping
    times: IterationTimes

    def is_near(self, mapping: Mapping) -> bool:
        """Whether it tells about another mapping too: same threads, nearly the same shares."""
        if self.mapping.threads != mapping.threads:
            return False
        if abs(self.mapping.accelerator_sampling - mapping.accelerator_sampling) > NEAR * mapping.accelerator_sampling:
            return False
        if self.mapping.seeds == mapping.seeds:
            return True
        pairs = zip(self.mapping.seeds, mapping.seeds, strict=True)
        return all((then > 0) == (now > 0) and abs(then - now) <= NEAR * now for then, now in pairs)


@dataclass(frozen=True)
class Estimate:
    """What the stages cost under a mapping, by the measurements.

    Args:
        mapping: The mapping.
        times: Stage times under it.
        costs: Cost of each trainer; None for one without seeds.
        error: Relative standard error of the slowest stage's time.
    """

    mapping: Mapping
    times: IterationTimes
    costs: tuple[TrainerCost | None, ...]
    error: float

    @cached_property
    def stages(self) -> dict[Stage, float]:
        """Time of each stage that exists."""
        return self.times.stages()

    @cached_property
    def bottleneck(self) -> float:
        """Time of the slowest stage."""
        return max(self.stages.values(), default=0.0)

    @property
    def transfer_per_seed(self) -> float:
        """Seconds of Data Transfer per seed on any accelerator."""
        seeds = self.mapping.accelerator_seeds
        return (self.times.transfer or 0.0) / seeds if seeds else 0.0

    def under(self, mapping: Mapping) -> IterationTimes:
        """Predict the stage times under another mapping.

        Work is taken to scale with seeds and sampling share, and with the inverse of the threads.
        """
        now, times = self.mapping, self.times
        sampler, loader, trainer = (old / max(1, new) for old, new in zip(now.threads, mapping.threads, strict=True))
        trainers: list[float | None] = []
        for index, (cost, seeds) in enumerate(zip(self.costs, mapping.seeds, strict=True)):
            factor = trainer if index < mapping.cpu_trainers else 1.0
            trainers.append(None if cost is None or not seeds else cost.seconds(seeds) * factor)
        share, then = mapping.accelerator_sampling, now.accelerator_sampling
        return IterationTimes(
            _times(times.sample_cpu, sampler * ((1 - share) / (1 - then) if then < 1 else 1.0)),
            _times(times.load, loader),
            tuple(trainers[: mapping.cpu_trainers]),
            tuple(trainers[mapping.cpu_trainers :]),
            _times(times.transfer, mapping.accelerator_seeds / max(1, now.accelerator_seeds)),
            _times(times.sample_accelerator, share / then if then else 1.0),
        )


Key = tuple[str, int, bool]
"""What costs: its name, the threads that work at it (0 for accelerators), and whether CPU trainers have seeds."""


class Costs:
    """What every trainer and stage was found to cost.

    Costs of CPU tasks are kept apart by the number of threads, and all by whether CPU trainers work beside them: what
    was learned of the one is no more than a hint to the other.

    Args:
        memory: Older measurements fade out exponentially, over this many.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._costs: dict[Key, RunningCost] = {}
        self._mapping: Mapping | None = None
        self._tasks: list[tuple[Key, float]] = []

    def add(self, measurement: Measurement, before: Iterable[Measurement]) -> str | None:
        """Take in a measurement.

        Args:
            measurement: The measurement.
            before: Those before it, the last one last.

        Returns:
            Which trainer or stage runs at another speed than before.
        """
        changed = None
        for (key, units), seconds in zip(self._tasks_of(measurement.mapping), _seconds(measurement.times), strict=True):
            if not seconds or not units:
                continue
            cost = self._costs.get(key)
            if cost is None:
                cost = self._costs[key] = self._new(key)
            since = cost.add(units, seconds)
            if since:
                self._restart(key, [*before, measurement], since)
                changed = key[0]
        return changed

    def fewest(self, mapping: Mapping) -> int:
        """Return how many measurements there are of that trainer or stage of a mapping that has the fewest."""
        known = [self._costs[key].count for key, units in self._tasks_of(mapping) if units and key in self._costs]
        missing = any(n and (key not in self._costs) for key, n in self._tasks[len(_STAGES) :])
        return 0 if missing else min(known, default=0)

    def estimate(self, mapping: Mapping, last: IterationTimes) -> Estimate:
        """Return what the stages cost under a mapping.

        Args:
            mapping: The mapping.
            last: The last times, for stages of which no time is known.
        """
        times: list[float | None] = []
        costs: list[TrainerCost | None] = []
        slowest, error = 0.0, 0.0
        for (key, units), seconds in zip(self._tasks_of(mapping), _seconds(last), strict=True):
            cost = self._costs.get(key) if units else None
            costs.append(None if cost is None else TrainerCost(cost.overhead, cost.per_unit))
            times.append(seconds if cost is None else cost.seconds(units))
            if cost is not None and cost.seconds(units) > slowest:
                slowest, error = cost.seconds(units), cost.error(units)
        sample_cpu, sample_accelerator, load, transfer, *trainers = times
        cpus = mapping.cpu_trainers
        found = IterationTimes(
            sample_cpu, load, tuple(trainers[:cpus]), tuple(trainers[cpus:]), transfer, sample_accelerator
        )
        return Estimate(mapping, found, tuple(costs[len(_STAGES) :]), error)

    def state(self) -> list[list[Any]]:
        """Return all it knows, as plain lists and numbers."""
        return [[*key, *cost.state()] for key, cost in self._costs.items()]

    def load_state(self, state: Iterable[Sequence[Any]]) -> None:
        """Take back what :meth:`state` returned."""
        self._costs = {(name, threads, beside): RunningCost(*rest) for name, threads, beside, *rest in state}

    def _new(self, key: Key) -> RunningCost:
        hint = self._costs.get((key[0], key[1], not key[2]))
        return RunningCost(self._memory, key[0].startswith("trainer")) if hint is None else hint.heir()

    def _restart(self, key: Key, measurements: Iterable[Measurement], since: int) -> None:
        """The cost is another one: what was learned before, and with other threads, no longer holds."""
        points = []
        for measurement in measurements:
            for (of, units), seconds in zip(_tasks(measurement.mapping), _seconds(measurement.times), strict=True):
                if of == key and units and seconds:
                    points.append((units, seconds))
        cost = self._costs[key].restarted(points[-since:])
        self._costs = {other: known for other, known in self._costs.items() if other[0] != key[0]}
        self._costs[key] = cost

    def _tasks_of(self, mapping: Mapping) -> list[tuple[Key, float]]:
        if mapping is not self._mapping and mapping != self._mapping:
            self._mapping, self._tasks = mapping, _tasks(mapping)
        return self._tasks


_STAGES = ("Sampling on the CPU", "Sampling on accelerators", "Feature Loading", "Data Transfer")


def _tasks(mapping: Mapping) -> list[tuple[Key, float]]:
    """Return the stages and trainers, each with its units of work: seeds, or the part that is done there."""
    share, beside = mapping.accelerator_sampling, mapping.cpu_seeds > 0
    sampler, loader, trainer = mapping.threads
    work = (1 - share, share, 1.0, float(mapping.accelerator_seeds))
    tasks = list(zip(_STAGES, (sampler, 0, loader, 0), work, strict=True))
    for index, seeds in enumerate(mapping.seeds):
        tasks.append((f"trainer {index}", trainer if index < mapping.cpu_trainers else 0, float(seeds)))
    return [((name, threads, beside), units) for name, threads, units in tasks]


def _seconds(times: IterationTimes) -> tuple[float | None, ...]:
    """Return the times in the order of :func:`_tasks`."""
    stages = (times.sample_cpu, times.sample_accelerator, times.load, times.transfer)
    return (*stages, *times.train_cpu, *times.train_accelerator)


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor
