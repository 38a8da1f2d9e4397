"""Estimates stage times from noisy measurements of the last iterations, and predicts them for other mappings."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from lightning_gnn.hyscale.resource_manager.mapping import Cost, IterationTimes, Stage, TaskMapping

HISTORY = 40
"""Measurements used per task."""
CHANGE = 1.3
"""Ratio of three times in a row to the earlier ones of the same work, from which a task's speed has changed."""
_RUN = 3
RIDGE = 0.1
"""Weight of the prior that a task has no overhead, in measurements: (relative noise 0.1 / expected overhead 1/3)^2."""
MIN_SLOPE_FRACTION = 0.25
"""Minimum fraction of a task's time that is assumed to grow with its work, whatever noisy fits indicate."""


@dataclass(frozen=True)
class Estimate:
    """Estimated stage times under a mapping."""

    mapping: TaskMapping
    times: IterationTimes  # stage times under the mapping
    costs: tuple[Cost | None, ...]  # cost of each trainer's seeds; None without measurements
    count: int = 0  # measurements under this mapping of the task with the fewest

    @cached_property
    def stages(self) -> dict[Stage, float]:
        """Seconds of each existing stage."""
        return self.times.stages()

    @cached_property
    def bottleneck(self) -> float:
        """Seconds of the slowest stage."""
        return self.times.bottleneck


class Measurements:
    """Recent times of every task, and an outlier-resistant linear fit through them."""

    # Measurements of a CPU task with a different thread count are used only until one with the current count exists.

    def __init__(self) -> None:
        self._measured: dict[str, deque[tuple[int, float, float]]] = {}

    def add(self, mapping: TaskMapping, times: IterationTimes) -> None:
        """Add the times of one iteration."""
        for name, threads, units, seconds in _list_tasks(mapping, times):
            if units and seconds:
                known = self._measured.setdefault(name, deque(maxlen=HISTORY))
                known.append((threads, units, seconds))
                if _has_changed_speed(known):
                    self._measured[name] = deque([*known][-_RUN:], HISTORY)

    def estimate(self, mapping: TaskMapping, last: IterationTimes) -> Estimate:
        """Estimate the stage times under a mapping."""
        estimated: list[float | None] = []
        costs: list[Cost | None] = []
        counts = []
        for name, threads, units, seconds in _list_tasks(mapping, last):
            known = self._measured.get(name, ())
            same = [(work, time) for old_threads, work, time in known if old_threads == threads]
            scaled = same or [(work, time * old_threads / threads) for old_threads, work, time in known]
            costs.append(_fit_cost(scaled, units) if scaled else None)
            estimated.append(costs[-1].seconds(units) if costs[-1] and units else seconds)
            if units and (seconds or name.startswith("trainer")):
                counts.append(len(same))
        sample_cpu, sample_accelerator, load, transfer, *trainers = estimated
        cpus = mapping.cpu_trainers
        times = IterationTimes(
            sample_cpu, load, tuple(trainers[:cpus]), tuple(trainers[cpus:]), transfer, sample_accelerator
        )
        return Estimate(mapping, times, tuple(costs[-len(mapping.seeds) :]), min(counts, default=0))

    def state(self) -> dict[str, list[list[float]]]:
        """Return all measurements as plain lists and numbers."""
        return {name: [list(one) for one in known] for name, known in self._measured.items()}

    def load_state(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Restore measurements from :meth:`state`."""
        rows = dict(state).items()
        self._measured = {name: deque(((int(t), u, s) for t, u, s in known), maxlen=HISTORY) for name, known in rows}


def _list_tasks(mapping: TaskMapping, times: IterationTimes) -> list[tuple[str, int, float, float | None]]:
    """Return name, CPU threads (0 on accelerators), work (seeds or a fraction) and seconds of stages and trainers."""
    share, cpus = 0.0 if mapping.buffers is not None else mapping.accelerator_sampling, mapping.cpu_trainers
    sampler, loader, trainer = mapping.threads
    return [
        ("Sampling on the CPU", sampler, 1 - share, times.sample_cpu),
        ("Sampling on accelerators", 0, share, times.sample_accelerator),
        ("Feature Loading", loader, 1.0, times.load),
        ("Data Transfer", 0, float(mapping.accelerator_seeds), times.transfer),
        *(
            (f"trainer {index}", trainer if index < cpus else 0, float(seeds), seconds)
            for index, (seeds, seconds) in enumerate(zip(mapping.seeds, times.trainers, strict=True))
        ),
    ]


def _has_changed_speed(known: Sequence[tuple[int, float, float]]) -> bool:
    """Whether the last times of the same work all differ by far, in one direction, from the earlier ones."""
    work, last = known[-1][:2], [*known][-_RUN:]
    times = [seconds for *other, seconds in known if tuple(other) == work]
    recent, earlier = times[-_RUN:], times[:-_RUN]
    if not earlier or any(each[:2] != work for each in last):
        return False
    return min(recent) > CHANGE * median(earlier) or max(recent) * CHANGE < median(earlier)


def _fit_cost(known: Sequence[tuple[float, float]], units: float) -> Cost:
    """Fit a cost to ``(work, seconds)`` pairs, for about ``units`` of work; 0 means the mean measured work."""
    # Least squares of the relative errors, with a ridge penalty on the overhead. Relative errors make slow outliers
    # harmless: their error is at most 1.
    points = [(work / time, 1 / time) for work, time in known]
    units = units or sum(work for work, _ in known) / len(points)
    work, one = sum(x for x, _ in points), sum(y for _, y in points)
    works, mixed = sum(x * x for x, _ in points), sum(x * y for x, y in points)
    ones = sum(y * y for _, y in points) + RIDGE * (one / len(points)) ** 2
    determinant = works * ones - mixed * mixed
    overhead = max(0.0, (one * works - work * mixed) / determinant)
    per_unit = (work - overhead * mixed) / works
    seconds = max(overhead + per_unit * units, MIN_SLOPE_FRACTION * work / works * units)
    per_unit = max(per_unit, MIN_SLOPE_FRACTION * seconds / units)
    return Cost(max(0.0, seconds - per_unit * units), per_unit)
