"""Share seeds out to trainers so that all are done at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerCost:
    """Time that a trainer takes for a mini-batch of n seeds: ``overhead + per_seed * n``, and 0 for none.

    Args:
        overhead: Seconds.
        per_seed: Seconds, more than 0.
        least: Fewest.
    """

    overhead: float
    per_seed: float
    least: int = 0

    def seconds(self, seeds: float) -> float:
        """Return the time for some seeds."""
        return self.overhead + self.per_seed * seeds if seeds > 0 else 0.0

    def seeds(self, seconds: float) -> float:
        """Return the seeds that it gets done in some time, at least the fewest."""
        return max(float(self.least), (seconds - self.overhead) / self.per_seed)


def split_evenly_in_time(
    total: int, costs: Sequence[TrainerCost | None], shared: Sequence[int] = (), shared_per_seed: float = 0.0
) -> list[float]:
    """Return how many seeds each trainer should get for the slowest to be done as early as possible.

    Args:
        total: Seeds to share out.
        costs: Cost of each trainer; None for one that gets nothing.
        shared: Trainers that also share one resource, as accelerators share the transfer of their mini-batches.
        shared_per_seed: Seconds of that resource for a seed of any of them.

    Returns:
        Seeds of each trainer, not whole, which add up to ``total``.

    Raises:
        ValueError: No trainer may get any.
    """
    if all(cost is None for cost in costs):
        raise ValueError(f"there is no trainer for {total} seeds")
    seconds, seeds = _filled(total, costs)
    inside = sum(seeds[index] for index in shared)
    if inside * shared_per_seed <= seconds:
        return seeds
    # The shared resource is the bottleneck: seen from the others, the group is one trainer of its speed.
    others = [None if index in shared else cost for index, cost in enumerate(costs)]
    least = sum(cost.least for index, cost in enumerate(costs) if cost is not None and index in shared)
    _, seeds = _filled(total, [*others, TrainerCost(0.0, shared_per_seed, least)])
    _, within = _filled(seeds.pop(), [cost if index in shared else None for index, cost in enumerate(costs)])
    return [a + b for a, b in zip(seeds, within, strict=True)]


def _filled(total: float, costs: Sequence[TrainerCost | None]) -> tuple[float, list[float]]:
    """Return the time after which trainers are done with ``total`` seeds together, and the seeds of each."""
    present = [cost for cost in costs if cost is not None]
    active = present
    while True:
        # sum of (seconds - overhead) / per_seed over those that get more than their least
        rest = total - sum(cost.least for cost in present if cost not in active)
        rates = sum(1 / cost.per_seed for cost in active)
        seconds = (rest + sum(cost.overhead / cost.per_seed for cost in active)) / rates
        enough = [cost for cost in active if (seconds - cost.overhead) / cost.per_seed >= cost.least]
        if len(enough) == len(active) or not enough:
            break
        active = enough
    seeds = [0.0 if cost is None else cost.seeds(seconds) for cost in costs]
    factor = total / (sum(seeds) or 1.0)
    return seconds, [value * factor for value in seeds]


def whole_seeds(total: int, wanted: Sequence[float], costs: Sequence[TrainerCost | None]) -> tuple[int, ...]:
    """Round to whole seeds that add up to ``total``; those left over go where they are done first.

    Args:
        total: Sum of the result.
        wanted: Seeds of each trainer, which add up to about ``total``.
        costs: Cost of each trainer; None for one that gets nothing.
    """
    seeds = [
        0 if cost is None else max(cost.least, int(value + 1e-9)) for value, cost in zip(wanted, costs, strict=True)
    ]
    open_to = [(index, cost) for index, cost in enumerate(costs) if cost is not None]

    def after(entry: tuple[int, TrainerCost]) -> float:
        return entry[1].seconds(seeds[entry[0]] + 1)

    def now(entry: tuple[int, TrainerCost]) -> tuple[bool, float]:
        return seeds[entry[0]] > entry[1].least, entry[1].seconds(seeds[entry[0]])

    while sum(seeds) < total:
        seeds[min(open_to, key=after)[0]] += 1
    while sum(seeds) > total:
        seeds[max((entry for entry in open_to if seeds[entry[0]]), key=now)[0]] -= 1
    return tuple(seeds)
