"""Closed forms of a node's iteration: the start of the search, and a lower bound.

With unlimited buffers, an iteration takes as long as its busiest resource: an accelerator, its PCIe link, the CPU
threads of a task, or all cores. Each is linear in the fraction of mini-batches that accelerators prepare, so the best
fraction is 0, 1 or an intersection. This is equation 6 of MorphGL with the trainers and stages of equations 7 to 13 of
HyScale-GNN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from lightning_gnn.hyscale.costs import Cost, NodeCosts, TaskMapping, Threads, busy_seconds, split_evenly

_MAX_THREAD_COUNTS = 32  # candidates for the CPU trainers' threads


@dataclass(frozen=True)
class Candidate:
    """A mapping, with its seconds per iteration according to the closed forms."""

    mapping: TaskMapping
    collective: bool  # whether accelerators prepare whole mini-batches, else they may only sample
    seconds: float
    fraction: float  # of their mini-batches that accelerators prepare, or sample, themselves


def best_fraction(
    costs: NodeCosts[Cost], collective: bool, seeds: Sequence[int], threads: Threads | None
) -> tuple[float, float]:
    """Return the shortest time of an iteration in seconds, and the accelerators' fraction for it."""
    none = busy_seconds(costs, collective, seeds, threads, 0.0).seconds()
    if costs.sample_accelerator is None:
        return max(none), 0.0
    every = busy_seconds(costs, collective, seeds, threads, 1.0).seconds()
    if none == every:
        return max(none), 0.0
    lines = list(zip(none, (one - zero for zero, one in zip(none, every, strict=True)), strict=True))
    places = [0.0, 1.0]
    for (start, slope), (other, slope_of_other) in combinations(lines, 2):
        if slope != slope_of_other and 0 < (place := (other - start) / (slope - slope_of_other)) < 1:
            places.append(place)
    return min((max(start + place * slope for start, slope in lines), place) for place in places)


def candidates(costs: NodeCosts[Cost], total: int, cpu_trainers: int, num_threads: int) -> list[Candidate]:
    """Return the best mapping for each kind of preparation and number of CPU training threads, the fastest first.

    Args:
        total: Seeds of an iteration.
        num_threads: CPU threads to distribute, at least one per task.
    """
    most = num_threads - 2
    counts = (
        sorted({*range(max(1, cpu_trainers), most + 1, 1 + most // _MAX_THREAD_COUNTS), most}) if cpu_trainers else [0]
    )
    found = [
        _best_split(costs, collective, total, cpu_trainers, num_threads, count)
        for collective in {False, costs.can_gather}
        for count in counts
    ]
    return sorted(found, key=lambda candidate: candidate.seconds)


def check_trainers(cpu_trainers: int, num_accelerators: int, num_threads: int) -> None:
    """Raise a ValueError if there are no trainers, or fewer threads than tasks."""
    if cpu_trainers < 0 or cpu_trainers + num_accelerators < 1:
        raise ValueError(f"cpu_trainers={cpu_trainers} without an accelerator leaves nothing to train on")
    if num_threads < 2 + cpu_trainers:
        needed = f"Sampling, Feature Loading and CPU trainers need {2 + cpu_trainers}"
        raise ValueError(f"num_threads={num_threads}, but {needed}")


def lower_bound(costs: NodeCosts[Cost], total: int, cpu_trainers: int) -> float:
    """Return seconds that no mapping and no schedule can fall below with these costs."""
    return min(
        best_fraction(costs, collective, seeds, None)[0]
        for collective in {False, costs.can_gather}
        for seeds in _search(costs, collective, total, cpu_trainers, None)
    )


def _best_split(
    costs: NodeCosts[Cost], collective: bool, total: int, cpu: int, num_threads: int, trainer: int
) -> Candidate:
    """Return the best seeds and the best threads of sampling and feature loading for a number of training threads."""
    left = num_threads - trainer
    # The best division between sampling and feature loading hardly depends on the seeds of each trainer. Accelerators
    # that sample count as further sampling threads. With collective batching, the same threads do both.
    sampling = costs.sample.seconds(total)
    further = 0.0
    if costs.sample_accelerator is not None and costs.train:
        further = costs.num_accelerators * costs.sample.per_unit / costs.sample_accelerator.per_unit

    def slower(sampler: int) -> float:
        return max(sampling / (sampler + further), costs.load(left - sampler).seconds(total))

    low, high = 1, left - 1
    while low < high:  # binary search: more sampling threads speed up sampling but slow down loading
        middle = (low + high) // 2
        low, high = (low, middle) if slower(middle) <= slower(middle + 1) else (middle + 1, high)
    threads = [(sampler, left - sampler, trainer) for sampler in sorted({low, max(1, low - 1)})]
    found = [best_seeds(costs, collective, total, cpu, each) for each in threads]
    return min(found, key=lambda candidate: candidate.seconds)


def best_seeds(costs: NodeCosts[Cost], collective: bool, total: int, cpu_trainers: int, threads: Threads) -> Candidate:
    """Return the best seeds of each trainer, and the best fraction on accelerators, for numbers of threads."""
    found = []
    for seeds in _search(costs, collective, total, cpu_trainers, threads):
        seconds, fraction = best_fraction(costs, collective, seeds, threads)
        share = fraction * sum(seeds[cpu_trainers:]) / total
        found.append(Candidate(TaskMapping(seeds, cpu_trainers, threads, share), collective, seconds, fraction))
    return min(found, key=lambda candidate: candidate.seconds)


def _search(
    costs: NodeCosts[Cost], collective: bool, total: int, cpu: int, threads: Threads | None
) -> Iterator[tuple[int, ...]]:
    """Yield the trainers' seeds without CPU trainers, and those of the best share of CPU trainers."""
    by_thread = costs.train_cpu(costs.cores if threads is None else threads[2]) if cpu else ()

    def split(on_cpu: int) -> tuple[int, ...]:
        return (*split_evenly(on_cpu, by_thread), *split_evenly(total - on_cpu, costs.train))

    if not costs.train:
        yield split(total)
        return
    yield split(0)
    if cpu and min(cost.seconds(1) for cost in by_thread) >= best_fraction(costs, collective, split(0), threads)[0]:
        return  # a single seed takes a CPU trainer longer than all seeds take the accelerators
    # Binary search: the time first falls and then rises with the CPU trainers' seeds. A step changes every accelerator.
    low, high, step = 1, total, len(costs.train)
    while cpu and low < high:
        middle = (low + high) // 2
        here, there = (
            best_fraction(costs, collective, split(min(each, total)), threads)[0] for each in (middle, middle + step)
        )
        low, high = (low, middle) if here <= there else (middle + 1, high)
    if cpu:
        yield from (split(min(max(1, each), total)) for each in (low - step, low, low + step))
