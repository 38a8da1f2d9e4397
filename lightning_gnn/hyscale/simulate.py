"""Simulation of a node's iterations with one virtual clock for all trainers.

Accelerators follow the schedule of collective batching, or get mini-batches from HyScale-GNN's stages, as CPU trainers
always do. After each iteration, all trainers wait for the slowest one and for the all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapreplace
from statistics import fmean

import numpy as np

from lightning_gnn.collective.batch_schedule import BatchSchedule
from lightning_gnn.collective.simulate import MIN_DURATION_FRACTION, VirtualClock
from lightning_gnn.hyscale.costs import Cost, NodeCosts, TaskMapping, busy_seconds, should_sample

MIN_IN_FLIGHT = 6  # mini-batches in HyScale-GNN's stages, at least; otherwise one for each thread of the node
_BUSY = 0.85  # fraction of all cores' time from which threads that take turns wait for each other
_WARM_UP_FRACTION = 0.25  # of the simulated iterations, which fill the buffers


def simulate_iterations(
    costs: NodeCosts[Cost], mapping: TaskMapping, iterations: int, seed: int | None = None
) -> float:
    """Simulate a node under a mapping, and return the seconds of an iteration once the pipelines are full.

    Args:
        seed: Draws the durations of all stages with the costs' spread; None: the means.
    """
    seconds, fraction = _simulate(costs, mapping, iterations, seed, 1.0)
    # Threads cannot do more than keep all cores busy. Workers of collective batching, which prepare ahead whenever they
    # can, also keep others waiting if there are more threads than cores.
    busy = busy_seconds(costs, mapping.buffers is not None, mapping.seeds, None, fraction).cores / seconds
    waiting = 0.0
    if mapping.buffers is not None:
        active = [index for index, number in enumerate(mapping.seeds) if number]
        threads = sum(sum(mapping.rank_threads(index)[: 2 + (index < mapping.cpu_trainers)]) for index in active)
        waiting = max(0.0, threads / costs.cores - 1) * min(1.0, max(0.0, (busy - _BUSY) / (1 - _BUSY)))
    slowdown = max(busy, 1 + waiting)
    return _simulate(costs, mapping, iterations, seed, slowdown)[0] if slowdown > 1 else seconds


def _simulate(
    costs: NodeCosts[Cost], mapping: TaskMapping, iterations: int, seed: int | None, slowdown: float
) -> tuple[float, float]:
    """Return the seconds of an iteration, and the fraction of their mini-batches that accelerators prepare.

    Everything on the CPU takes ``slowdown`` times as long as if there was a core for each thread.
    """
    trainers = [index for index, seeds in enumerate(mapping.seeds) if seeds]
    if seed is None:  # equal accelerators behave equally without random durations
        kinds = {(mapping.seeds[i], _train_cost(costs, mapping, i), i < mapping.cpu_trainers): i for i in trainers}
        trainers = list(kinds.values())
    clocks = [_make_clock(costs, mapping, index, iterations, seed, slowdown) for index in trainers]
    first, start, end = int(_WARM_UP_FRACTION * iterations), 0.0, 0.0
    if mapping.buffers is not None and mapping.buffers[3]:  # measure whole turns of accelerators and CPU
        on_gpu, _, _, row = mapping.buffers
        first += (iterations - first) % (on_gpu + row)
    for iteration in range(iterations):
        if iteration == first:
            start = end
        for clock in clocks:
            clock.train_next()
        end = max(clock.now for clock in clocks) + costs.sync
        for clock in clocks:
            clock.now = end
    on_cpu = [clock.on_cpu / iterations for clock in clocks if isinstance(clock, VirtualClock)]
    fraction = 1 - fmean(on_cpu) if on_cpu else mapping.accelerator_fraction
    return (end - start) / (iterations - first), fraction


def _train_cost(costs: NodeCosts[Cost], mapping: TaskMapping, index: int) -> Cost:
    cpu = mapping.cpu_trainers
    return costs.train_cpu(mapping.threads[2])[index] if index < cpu else costs.train[index - cpu]


def _make_clock(
    costs: NodeCosts[Cost], mapping: TaskMapping, index: int, iterations: int, seed: int | None, slowdown: float
) -> VirtualClock | StagedClock:
    """Return the clock of a trainer, CPU trainers first."""
    seeds, is_cpu = mapping.seeds[index], index < mapping.cpu_trainers
    sampler, loader, _ = mapping.rank_threads(index)
    # Threads of all ranks may saturate the memory's bandwidth. Of threads that also sample, some load at a time.
    sampling, loading, num_loading = costs.sample.seconds(seeds), costs.load(1).seconds(seeds), mapping.threads[1]
    if mapping.buffers is not None:
        num_loading = max(1, round(sum(mapping.threads[:2]) * loading / ((sampling + loading) or 1.0)))
    seconds = {
        "sample": slowdown * sampling,
        "load": slowdown * costs.load(num_loading).seconds(seeds) * num_loading,
        "dma": 0.0 if is_cpu else costs.transfer.seconds(seeds),
        "model": (slowdown if is_cpu else 1.0) * _train_cost(costs, mapping, index).seconds(seeds),
    }
    if costs.sample_accelerator is not None:
        seconds["gpu_batching"] = costs.sample_accelerator.seconds(seeds)
    if mapping.buffers is None or is_cpu:
        durations = _draw(seconds, costs.spread, iterations, seed, index)
        fraction = 0.0 if is_cpu else mapping.accelerator_fraction
        in_flight = max(MIN_IN_FLIGHT, sum(mapping.threads))
        return StagedClock(durations, (sampler, loader, 1), in_flight, fraction, costs.takes_turns)
    on_gpu, on_cpu, lead, row = mapping.buffers
    seconds["cpu_batching"] = seconds.pop("sample") + seconds.pop("load")
    if costs.gather_accelerator is not None:
        seconds["uva"] = costs.gather_accelerator(on_gpu).seconds(seeds)
    longer = iterations + 2 * (on_gpu + on_cpu + lead)  # the last iterations are like those before
    drawn = _draw(seconds, costs.spread, longer, seed, index)
    workers = sampler + loader
    schedule = BatchSchedule(longer, on_gpu, on_cpu, workers, lead, row)
    return VirtualClock(schedule, workers, lambda stage, number: drawn[stage][number])


def _draw(means: dict[str, float], spread: float, count: int, seed: int | None, trainer: int) -> dict[str, list[float]]:
    """Return the durations of each stage for ``count`` mini-batches."""
    if seed is None or not spread:
        return {name: [mean] * count for name, mean in means.items()}
    generator = np.random.default_rng((seed, trainer))
    factors = np.maximum(generator.normal(1.0, spread, (len(means), count)), MIN_DURATION_FRACTION)
    return {name: (mean * row).tolist() for (name, mean), row in zip(means.items(), factors, strict=True)}


class StagedClock:
    """Simulates a trainer whose mini-batches pass through HyScale-GNN's stages, each with its own threads."""

    def __init__(
        self,
        durations: Mapping[str, Sequence[float]],  # of the stages sample, load, dma and model, and of gpu_batching
        threads: tuple[int, int, int],  # of sample, load and dma
        in_flight: int,  # maximum number of mini-batches in all stages
        fraction: float = 0.0,  # of the mini-batches that the accelerator samples
        takes_turns: bool = True,  # whether it cannot train meanwhile
    ) -> None:
        self.now = 0.0
        self._durations, self._in_flight = durations, in_flight
        self._fraction, self._takes_turns = fraction, takes_turns
        self._free = [[0.0] * count for count in threads]
        self._sampler_free = [0.0]
        self._begun: list[float] = []

    def train_next(self) -> None:
        """Advance until the next mini-batch is trained."""
        number, durations = len(self._begun), self._durations
        ready = self._begun[number - self._in_flight] if number >= self._in_flight else 0.0
        step = durations["model"][number]
        on_accelerator = should_sample(number, self._fraction)
        for stage, free in zip(("sample", "load", "dma"), self._free, strict=True):
            seconds = durations[stage][number]
            if stage == "sample" and on_accelerator:
                seconds, free = durations["gpu_batching"][number], self._sampler_free
                step += seconds if self._takes_turns else 0.0
            ready = max(ready, free[0]) + seconds
            heapreplace(free, ready)
        start = max(self.now, ready)
        self._begun.append(start)
        self.now = start + step
