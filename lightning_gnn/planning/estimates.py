"""From noisy stage times of the last iterations to what each stage costs, and would cost under another mapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from lightning_gnn.planning.mapping import IterationTimes, Mapping
from lightning_gnn.planning.split import TrainerCost

NEAR = 0.25
"""Measurements count for the present mapping while no trainer's seeds differ from now by more than this."""
FAR = 2.0
"""From this ratio of seeds on, two measurements tell a trainer's overhead from its cost per seed."""
LEAST_SLOPE = 0.25
"""Of a trainer's time, at least this part is counted as growing with its seeds: noise may say otherwise."""
RECENT, JUMP = 3, 0.2
SEVERAL, DRIFT = 8, 0.08
"""How a change of speed is told from noise: see :func:`has_jumped`."""


@dataclass(frozen=True)
class Measurement:
    """Stage times and the mapping they were measured with."""

    mapping: Mapping
    times: IterationTimes

    @cached_property
    def rates(self) -> dict[str, float]:
        """Times that should not depend on small changes of the mapping, by what they tell about."""
        times, mapping = self.times, self.mapping
        left, share = 1 - mapping.accelerator_sampling, mapping.accelerator_sampling
        found = {
            "Sampling on the CPU": _times(times.sample_cpu, 1 / left if left else 1.0),
            "Sampling on accelerators": _times(times.sample_accelerator, 1 / share if share else 1.0),
            "Feature Loading": times.load,
        }
        if mapping.accelerator_seeds:
            found["Data Transfer"] = _times(times.transfer, 1 / mapping.accelerator_seeds)
        for index, (seconds, seeds) in enumerate(zip(times.trainers, mapping.seeds, strict=True)):
            if seeds:
                found[f"trainer {index}"] = _times(seconds, 1 / seeds)
        return {name: seconds for name, seconds in found.items() if seconds}

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
    """What the stages cost under a mapping, by the measurements of it.

    Args:
        mapping: The mapping.
        times: Stage times under it.
        costs: Cost of each trainer; None for one without seeds.
        count: How many measurements.
        error: Relative standard error of the slowest stage's time.
    """

    mapping: Mapping
    times: IterationTimes
    costs: tuple[TrainerCost | None, ...]
    count: int
    error: float

    @property
    def bottleneck(self) -> float:
        """Time of the slowest stage."""
        return self.times.bottleneck

    @property
    def transfer_per_seed(self) -> float:
        """Seconds of Data Transfer per seed on any accelerator."""
        seeds = self.mapping.accelerator_seeds
        return (self.times.transfer or 0.0) / seeds if seeds else 0.0

    def under(self, mapping: Mapping) -> IterationTimes:
        """Predict the stage times under another mapping.

        Work is taken to scale with seeds and sampling share, and with the inverse of the threads.
        """
        now = self.mapping
        sampler, loader, trainer = (old / max(1, new) for old, new in zip(now.threads, mapping.threads, strict=True))
        trainers: list[float | None] = []
        for index, (cost, seeds) in enumerate(zip(self.costs, mapping.seeds, strict=True)):
            factor = trainer if index < mapping.cpu_trainers else 1.0
            trainers.append(None if cost is None or not seeds else cost.seconds(seeds) * factor)
        sample_cpu, sample_accelerator, transfer = _to_shares_of(mapping, Measurement(now, self.times))
        return IterationTimes(
            _times(sample_cpu, sampler),
            _times(self.times.load, loader),
            tuple(trainers[: mapping.cpu_trainers]),
            tuple(trainers[mapping.cpu_trainers :]),
            transfer,
            sample_accelerator,
        )


def estimate(mapping: Mapping, near: Sequence[Measurement], history: Sequence[Measurement] = ()) -> Estimate:
    """Return what the stages cost under a mapping.

    Each stage's time is the median over the measurements near the mapping. A trainer's time is split into overhead
    and cost per seed where it was also measured with less than half or more than twice the seeds, and is otherwise
    proportional to its seeds.

    Args:
        mapping: The mapping.
        near: Measurements near it, at least one.
        history: Measurements under any mapping.
    """
    costs: list[TrainerCost | None] = []
    for index, seeds in enumerate(mapping.seeds):
        points = _points(index, near) if seeds else []
        wanted = mapping.threads[2] if index < mapping.cpu_trainers else None
        far = [
            measurement
            for measurement in history
            if measurement.mapping.seeds[index] * FAR <= seeds or measurement.mapping.seeds[index] >= FAR * seeds
        ]
        costs.append(_fit(points, _points(index, far, wanted)) if points else None)
    trainers = [None if cost is None else cost.seconds(n) for cost, n in zip(costs, mapping.seeds, strict=True)]
    scaled = [_to_shares_of(mapping, measurement) for measurement in near]
    times = IterationTimes(
        _median([sample_cpu for sample_cpu, _, _ in scaled]),
        _median([measurement.times.load for measurement in near]),
        tuple(trainers[: mapping.cpu_trainers]),
        tuple(trainers[mapping.cpu_trainers :]),
        _median([transfer for _, _, transfer in scaled]),
        _median([sample_accelerator for _, sample_accelerator, _ in scaled]),
        iteration=_median([measurement.times.iteration for measurement in near]),
    )
    slowest = [measurement.times.bottleneck for measurement in near]
    error = _standard_error(slowest) / (median(slowest) or 1.0)
    return Estimate(mapping, times, tuple(costs), len(near), error)


def has_jumped(near: Sequence[Measurement]) -> tuple[str, int] | None:
    """Return which stage's speed has changed, and how many measurements ago.

    It has if the last three are all off by more than a fifth to the same side, or the median of the last eight by more
    than six standard errors (and 8 %).

    Args:
        near: Measurements near one mapping, the oldest first.
    """
    rows = [measurement.rates for measurement in near]
    for name in rows[-1] if rows else ():
        values = [row[name] for row in rows if name in row]
        if len(values) < 2 * RECENT:
            continue
        before, recent = median(values[:-RECENT]), values[-RECENT:]
        if min(recent) > before * (1 + JUMP) or max(recent) < before / (1 + JUMP):
            return name, RECENT
        if len(values) < 2 * SEVERAL:
            continue
        before = median(values[:-SEVERAL])
        error = _standard_error(values[:-SEVERAL]) * (len(values) / SEVERAL - 1) ** 0.5
        if abs(median(values[-SEVERAL:]) - before) > max(DRIFT * before, 6 * error):
            return name, SEVERAL
    return None


def _to_shares_of(mapping: Mapping, measurement: Measurement) -> tuple[float | None, float | None, float | None]:
    """Return times of both kinds of Sampling and of Data Transfer as if a mapping's shares had been in force."""
    then, times = measurement.mapping, measurement.times
    left, share = 1 - then.accelerator_sampling, then.accelerator_sampling
    return (
        _times(times.sample_cpu, (1 - mapping.accelerator_sampling) / left if left else 1.0),
        _times(times.sample_accelerator, mapping.accelerator_sampling / share if share else 1.0),
        _times(times.transfer, mapping.accelerator_seeds / max(1, then.accelerator_seeds)),
    )


def _points(index: int, history: Sequence[Measurement], threads: int | None = None) -> list[tuple[int, float]]:
    """Return seeds and seconds of a trainer, with so many trainer threads if given."""
    points = []
    for measurement in history:
        seconds, seeds = measurement.times.trainers[index], measurement.mapping.seeds[index]
        if seconds and seeds and threads in (None, measurement.mapping.threads[2]):
            points.append((seeds, seconds))
    return points


def _fit(near: Sequence[tuple[int, float]], far: Sequence[tuple[int, float]]) -> TrainerCost:
    seeds, seconds = median(n for n, _ in near), median(t for _, t in near)
    rate = median(t / n for n, t in near)
    if len(far) < RECENT:
        return TrainerCost(0.0, rate)
    slope = median((t - seconds) / (n - seeds) for n, t in far)
    slope = min(max(slope, LEAST_SLOPE * rate), rate)
    return TrainerCost(max(0.0, median(t - slope * n for n, t in near)), slope)


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median, by the median deviation from it."""
    middle = median(values)
    return 1.4826 * 1.2533 * median(abs(value - middle) for value in values) / len(values) ** 0.5


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor
