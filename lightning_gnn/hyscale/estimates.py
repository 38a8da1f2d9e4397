"""From noisy stage times of the last iterations to what each stage takes, and would take under another mapping."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, takewhile
from math import sqrt
from statistics import median
from typing import Any

from lightning_gnn.hyscale.mapping import Cost, IterationTimes, Stage, TaskMapping

NEAR = 0.25
"""Measurements of so much more or less work are compared to tell a change; of others, the overhead would mislead."""
RIDGE = 0.1
"""How surely there is no overhead: as by so many measurements that say so. About a tenth over a third, squared: the
noise of a measurement over the overhead that is expected, both as parts of the time."""
LEAST_SLOPE = 0.25
"""Of a time, at least this part is counted as growing with the work: noise may say otherwise."""
RECENT, CLIP, SLACK, ALARM = 40, 3.0, 0.65, 9.0
"""To tell a change: measurements that are looked at (half of all, at the most), and, in standard deviations of one,
how far off each counts at the most, what is taken off for noise, and the sum that tells."""
LEAST_NOISE, USUAL_NOISE = 0.02, 0.1
"""Relative standard deviation of a measurement, at least: the second where too few are known to tell."""

Key = tuple[str, int, bool]
"""A task: its name, the threads that work at it (0 for accelerators'), and whether CPU trainers have seeds."""


@dataclass(frozen=True)
class Estimate:
    """What the stages take under a mapping, by the measurements.

    Args:
        times: Stage times under it.
        costs: Of each trainer for its seeds; None for one without.
    """

    mapping: TaskMapping
    times: IterationTimes
    costs: tuple[Cost | None, ...]

    @cached_property
    def stages(self) -> dict[Stage, float]:
        """Seconds of each stage that exists."""
        return self.times.stages()

    @cached_property
    def bottleneck(self) -> float:
        """Seconds of the slowest stage."""
        return self.times.bottleneck

    @property
    def transfer_per_seed(self) -> float:
        """Seconds of Data Transfer for a seed on any accelerator."""
        return (self.times.transfer or 0.0) / max(1, self.mapping.accelerator_seeds)

    def under(self, mapping: TaskMapping) -> Estimate:
        """Predict them under another mapping: time grows with work and the inverse of threads."""
        now, times = self.mapping, self.times
        sampler, loader, trainer = (old / max(1, new) for old, new in zip(now.threads, mapping.threads, strict=True))
        costs = [
            cost and Cost(cost.overhead * trainer, cost.per_unit * trainer) if index < now.cpu_trainers else cost
            for index, cost in enumerate(self.costs)
        ]
        trainers = [cost.seconds(n) if cost and n else None for cost, n in zip(costs, mapping.seeds, strict=True)]
        share, then = mapping.accelerator_sampling, now.accelerator_sampling
        found = IterationTimes(
            _times(times.sample_cpu, sampler * ((1 - share) / (1 - then) if then < 1 else 1.0)),
            _times(times.load, loader),
            tuple(trainers[: mapping.cpu_trainers]),
            tuple(trainers[mapping.cpu_trainers :]),
            _times(times.transfer, mapping.accelerator_seeds / max(1, now.accelerator_seeds)),
            _times(times.sample_accelerator, share / then if then else 1.0),
        )
        return Estimate(mapping, found, tuple(costs))


class Measurements:
    """What every task took since its speed changed last: a line through them, which an outlier hardly moves.

    Tasks of the CPU are kept apart by the number of threads, and all tasks by whether CPU trainers work beside them.

    Args:
        memory: Measurements of a task that are kept.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._known: dict[Key, deque[tuple[float, float]]] = {}

    def add(self, mapping: TaskMapping, times: IterationTimes) -> str | None:
        """Take in what an iteration took; return the task that runs at another speed than before, None if none does."""
        changed = None
        for key, units, seconds in _tasks(mapping, times):
            if not units or not seconds:
                continue
            known = self._known.setdefault(key, deque(maxlen=self._memory))
            known.append((units, seconds))
            new = _changed_since([time / work for work, time in known if abs(work - units) <= NEAR * units])
            if new:  # what was learned before, and with other threads, no longer holds
                recent = deque(list(known)[-new:], maxlen=self._memory)
                self._known = {other: entry for other, entry in self._known.items() if other[0] != key[0]}
                self._known[key] = recent
                changed = key[0]
        return changed

    def fewest(self, mapping: TaskMapping, last: IterationTimes) -> int:
        """Return how many measurements there are of the task that has the fewest under a mapping."""
        counts = [
            len(self._known.get(key, ()))
            for key, units, seconds in _tasks(mapping, last)
            if units and (seconds or key[0].startswith("trainer"))
        ]
        return min(counts, default=0)

    def estimate(self, mapping: TaskMapping, last: IterationTimes) -> Estimate:
        """Return what the stages take under a mapping.

        Args:
            last: The last times, for tasks of which nothing else is known.
        """
        times: list[float | None] = []
        costs: list[Cost | None] = []
        for key, units, seconds in _tasks(mapping, last):
            known = self._known.get(key) if units else None
            costs.append(_fitted(known, units) if known else None)
            times.append(costs[-1].seconds(units) if costs[-1] else seconds)
        sample_cpu, sample_accelerator, load, transfer, *trainers = times
        cpus = mapping.cpu_trainers
        found = IterationTimes(
            sample_cpu, load, tuple(trainers[:cpus]), tuple(trainers[cpus:]), transfer, sample_accelerator
        )
        return Estimate(mapping, found, tuple(costs[-len(mapping.seeds) :]))

    def forget_hybrid(self) -> None:
        """Forget what was measured beside CPU trainers that had seeds: it is long ago."""
        self._known = {key: known for key, known in self._known.items() if not key[2]}

    def state(self) -> list[list[Any]]:
        """Return all it knows, as plain lists and numbers."""
        return [[*key, [list(entry) for entry in known]] for key, known in self._known.items()]

    def load_state(self, state: Iterable[Sequence[Any]]) -> None:
        """Take back what :meth:`state` returned."""
        self._known = {
            (name, threads, beside): deque(((units, seconds) for units, seconds in known), maxlen=self._memory)
            for name, threads, beside, known in state
        }


def _tasks(mapping: TaskMapping, times: IterationTimes) -> list[tuple[Key, float, float | None]]:
    """Return stages and trainers, each with its units of work (seeds, or the part that is done there) and seconds."""
    share, beside = mapping.accelerator_sampling, mapping.cpu_seeds > 0
    sampler, loader, trainer = mapping.threads
    return [
        (("Sampling on the CPU", sampler, beside), 1 - share, times.sample_cpu),
        (("Sampling on accelerators", 0, beside), share, times.sample_accelerator),
        (("Feature Loading", loader, beside), 1.0, times.load),
        (("Data Transfer", 0, beside), float(mapping.accelerator_seeds), times.transfer),
        *(
            ((f"trainer {index}", trainer if index < mapping.cpu_trainers else 0, beside), float(seeds), seconds)
            for index, (seeds, seconds) in enumerate(zip(mapping.seeds, times.trainers, strict=True))
        ),
    ]


def _fitted(known: Iterable[tuple[float, float]], units: float) -> Cost:
    """Return the cost by measurements of some work, for about so many units.

    Least squares of the relative errors, with an overhead that is expected to be a small part of the time. What took
    far too long hardly counts: its error is at most its own time.
    """
    points = [(work / time, 1 / time) for work, time in known]
    work, one = sum(x for x, _ in points), sum(y for _, y in points)
    works, mixed = sum(x * x for x, _ in points), sum(x * y for x, y in points)
    ones = sum(y * y for _, y in points) + RIDGE * (one / len(points)) ** 2
    determinant = works * ones - mixed * mixed
    overhead = max(0.0, (one * works - work * mixed) / determinant)
    per_unit = (work - overhead * mixed) / works
    seconds = max(overhead + per_unit * units, LEAST_SLOPE * work / works * units)
    per_unit = max(per_unit, LEAST_SLOPE * seconds / units)
    return Cost(max(0.0, seconds - per_unit * units), per_unit)


def _changed_since(rates: Sequence[float]) -> int:
    """Return how many of the last rates are others than those before, 0 if none.

    Page's test: the deviations from the median of those before are summed up, the newest first.
    """
    recent = min(RECENT, len(rates) // 2)
    if not recent:
        return 0
    before = sorted(rates[:-recent])
    middle, quarter = median(before), len(before) // 4
    noise = LEAST_NOISE if len(before) >= RECENT else USUAL_NOISE
    deviation = max((before[-1 - quarter] - before[quarter]) / 1.35, noise * middle)  # 1.35: a normal one's middle half
    slack = SLACK + 1.25 / sqrt(len(before))  # the median itself is off by so much
    level = median(rates[-3:])
    for sign in (1, -1):
        off = (sign * (rate - middle) / deviation for rate in reversed(rates[-recent:]))
        if max(accumulate(min(max(each, -CLIP), CLIP) - slack for each in off)) > ALARM:
            return sum(1 for _ in takewhile(lambda rate: abs(rate - level) < abs(rate - middle), reversed(rates)))
    return 0


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor
