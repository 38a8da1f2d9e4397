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
        """Return the seeds that it gets done in some time."""
        return max(self.least, (seconds - self.overhead) / self.per_seed)


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
    group = set(shared) if shared_per_seed > 0 else set()

    def filled(seconds: float) -> list[float]:
        seeds = [0.0 if cost is None else cost.seeds(seconds) for cost in costs]
        inside = sum(seeds[index] for index in group)
        room = seconds / shared_per_seed if group else 0.0
        if inside > room:
            factor = room / inside
            seeds = [value * factor if index in group else value for index, value in enumerate(seeds)]
        return seeds

    if all(cost is None for cost in costs):
        raise ValueError(f"there is no trainer for {total} seeds")
    low, high = 0.0, 1e-9
    while sum(filled(high)) < total:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(filled(middle)) >= total else (middle, high)
    seeds = filled(high)
    excess = sum(seeds) / total
    return [value / excess for value in seeds]


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
