"""From noisy stage times of the last iterations to what each stage takes, and would take under another mapping."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gnn.hyscale.resource_manager.mapping import Cost, IterationTimes, Stage, TaskMapping

HISTORY = 20
"""Measurements of a task that count, at the most: so many iterations after its speed has changed, none is of before."""
RIDGE = 0.1
"""How surely there is no overhead: as by so many measurements that say so. About a tenth over a third, squared: the
noise of a measurement over the overhead that is expected, both as parts of the time."""
LEAST_SLOPE = 0.25
"""Of a time, at least this part is counted as growing with the work: noise may say otherwise."""


@dataclass(frozen=True)
class Estimate:
    """What the stages take under a mapping, by the measurements."""

    mapping: TaskMapping
    times: IterationTimes  # stage times under it
    costs: tuple[Cost | None, ...]  # of each trainer for its seeds; None where nothing is known
    count: int = 0  # how many measurements there are of the task that has the fewest under this mapping

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
            cost.scaled(trainer) if cost and index < now.cpu_trainers else cost for index, cost in enumerate(self.costs)
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
    """What every task took in the last iterations: a line through them, which an outlier hardly moves."""

    # Measurements of a CPU task with another number of threads count only while there are none with the present one.

    def __init__(self) -> None:
        self._known: dict[str, deque[tuple[int, float, float]]] = {}

    def add(self, mapping: TaskMapping, times: IterationTimes) -> None:
        """Take in what an iteration took."""
        for name, threads, units, seconds in _tasks(mapping, times):
            if units and seconds:
                self._known.setdefault(name, deque(maxlen=HISTORY)).append((threads, units, seconds))

    def estimate(self, mapping: TaskMapping, last: IterationTimes) -> Estimate:
        """Return what the stages take under a mapping."""
        found: list[float | None] = []
        costs: list[Cost | None] = []
        counts = []
        for name, threads, units, seconds in _tasks(mapping, last):
            known = self._known.get(name, ())
            same = [(work, time) for then, work, time in known if then == threads]
            scaled = same or [(work, time * then / threads) for then, work, time in known]
            costs.append(_fitted(scaled, units) if scaled else None)
            found.append(costs[-1].seconds(units) if costs[-1] and units else seconds)
            if units and (seconds or name.startswith("trainer")):
                counts.append(len(same))
        sample_cpu, sample_accelerator, load, transfer, *trainers = found
        cpus = mapping.cpu_trainers
        times = IterationTimes(
            sample_cpu, load, tuple(trainers[:cpus]), tuple(trainers[cpus:]), transfer, sample_accelerator
        )
        return Estimate(mapping, times, tuple(costs[-len(mapping.seeds) :]), min(counts, default=0))

    def state(self) -> dict[str, list[list[float]]]:
        """Return all it knows, as plain lists and numbers."""
        return {name: [list(one) for one in known] for name, known in self._known.items()}

    def load_state(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Take back what :meth:`state` returned."""
        rows = dict(state).items()
        self._known = {name: deque(((int(t), u, s) for t, u, s in known), maxlen=HISTORY) for name, known in rows}


def _tasks(mapping: TaskMapping, times: IterationTimes) -> list[tuple[str, int, float, float | None]]:
    """Return stages and trainers: name, CPU threads (0 for accelerators), work in seeds or parts, and seconds."""
    share, cpus = mapping.accelerator_sampling, mapping.cpu_trainers
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


def _fitted(known: Sequence[tuple[float, float]], units: float) -> Cost:
    """Return the cost by measurements of some work, for about so many units; 0 stands for as many as were measured."""
    # Least squares of the relative errors, with an overhead that is expected to be small. What took far too long hardly
    # counts: its error is at most its own time.
    points = [(work / time, 1 / time) for work, time in known]
    units = units or sum(work for work, _ in known) / len(points)
    work, one = sum(x for x, _ in points), sum(y for _, y in points)
    works, mixed = sum(x * x for x, _ in points), sum(x * y for x, y in points)
    ones = sum(y * y for _, y in points) + RIDGE * (one / len(points)) ** 2
    determinant = works * ones - mixed * mixed
    overhead = max(0.0, (one * works - work * mixed) / determinant)
    per_unit = (work - overhead * mixed) / works
    seconds = max(overhead + per_unit * units, LEAST_SLOPE * work / works * units)
    per_unit = max(per_unit, LEAST_SLOPE * seconds / units)
    return Cost(max(0.0, seconds - per_unit * units), per_unit)


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor
