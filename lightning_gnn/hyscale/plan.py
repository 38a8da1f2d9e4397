"""One plan of a node: seeds, threads and who prepares (MorphGL, equation 6; HyScale-GNN, equations 5 to 13).

Closed forms come first: with unlimited buffers, an iteration takes as long as its busiest resource, an accelerator, its
PCIe link, the CPU threads of a task, or all cores. Each is linear in the fraction of mini-batches that accelerators
prepare, so the best fraction is 0, 1 or an intersection. Local search then improves the best mappings in a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from math import ceil
from statistics import fmean
from typing import Any, NamedTuple

from lightning_gnn.collective.dispatcher import HOST_PER_WORKER, MIN_GAIN, Dispatcher
from lightning_gnn.collective.plan import PREPARATION_STAGES, CollectivePlan, StageTimes
from lightning_gnn.collective.profile import Profiler
from lightning_gnn.hyscale.costs import (
    Cost,
    NodeCosts,
    TaskMapping,
    Threads,
    busy_seconds,
    iteration,
    linearize,
    split_evenly,
)
from lightning_gnn.hyscale.simulate import simulate_iterations

_MAX_THREAD_COUNTS = 32  # candidates for the CPU trainers' threads
_ROUNDS = 4  # of closed forms: larger mini-batches share vertices, and so cost less per seed
_ITERATIONS, _FINAL_ITERATIONS = 120, 1000  # simulated iterations of a trial, and of a finalist
_PER_BUFFER = 4  # further iterations of a trial for each mini-batch of its buffers, which fill first and drain later
_STARTS = 4  # mappings from which local search starts, of those that the closed forms give
_MOST_TRIALS = 150  # mappings that one local search tries
_LEAST_GAIN = 0.002  # of a step of the local search
_DISPATCHED_BATCHES = 400  # that MorphGL's dispatcher simulates


class Candidate(NamedTuple):
    """A mapping, with its seconds per iteration according to the closed forms."""

    seconds: float
    mapping: TaskMapping
    collective: bool  # whether accelerators prepare whole mini-batches, else they may only sample


@dataclass(frozen=True)
class NodePlan:
    """The mapping with the shortest iteration, and how far from optimal it can be."""

    mapping: TaskMapping
    seconds: float  # of an iteration
    bound: float  # seconds that no mapping and no schedule can fall below
    # mapping and seconds of each system, and of each processor that prepares, alone
    alone: dict[str, tuple[TaskMapping, float]] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """How much longer than the lower bound an iteration is."""
        return max(0.0, self.seconds / self.bound - 1)


# -- closed forms


def best_fraction(
    costs: NodeCosts[Cost], collective: bool, seeds: Sequence[int], threads: Threads | None
) -> tuple[float, float]:
    """Return the shortest time of an iteration in seconds, and the accelerators' fraction for it."""
    none = busy_seconds(costs, collective, seeds, threads, 0.0).seconds()
    if costs.sample_accelerator is None:
        return max(none), 0.0
    every = busy_seconds(costs, collective, seeds, threads, 1.0).seconds()
    lines = list(zip(none, (one - zero for zero, one in zip(none, every, strict=True)), strict=True))
    places = [0.0, 1.0]
    for (start, slope), (other, slope_of_other) in combinations(set(lines), 2):
        if slope != slope_of_other and 0 < (place := (other - start) / (slope - slope_of_other)) < 1:
            places.append(place)
    return min((max(start + place * slope for start, slope in lines), place) for place in places)


def best_seeds(costs: NodeCosts[Cost], collective: bool, total: int, cpu_trainers: int, threads: Threads) -> Candidate:
    """Return the best seeds of each trainer, and the best fraction on accelerators, for numbers of threads."""
    found = []
    for seeds in _list_seeds(costs, collective, total, cpu_trainers, threads):
        seconds, fraction = best_fraction(costs, collective, seeds, threads)
        share = fraction * sum(seeds[cpu_trainers:]) / total
        found.append(Candidate(seconds, TaskMapping(seeds, cpu_trainers, threads, share), collective))
    return min(found, key=_seconds)


def candidates(costs: NodeCosts[Cost], total: int, cpu_trainers: int, num_threads: int) -> list[Candidate]:
    """Return the best mapping for each kind of preparation and number of CPU training threads, the fastest first.

    Args:
        total: Seeds of an iteration.
        num_threads: CPU threads to distribute, at least one per task.
    """
    most = num_threads - 2
    counts = [0]
    if cpu_trainers:
        counts = sorted({*range(cpu_trainers, most + 1, 1 + most // _MAX_THREAD_COUNTS), most})
    kinds = {False, costs.can_gather}
    found = (_best_threads(costs, kind, total, cpu_trainers, num_threads, count) for kind in kinds for count in counts)
    return sorted(found, key=_seconds)


def lower_bound(costs: NodeCosts[Cost], total: int, cpu_trainers: int) -> float:
    """Return seconds that no mapping and no schedule can fall below with these costs."""
    return min(
        best_fraction(costs, collective, seeds, None)[0]
        for collective in {False, costs.can_gather}
        for seeds in _list_seeds(costs, collective, total, cpu_trainers, None)
    )


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds


def _best_threads(
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

    best = _lowest(slower, 1, left - 1)
    threads = [(sampler, left - sampler, trainer) for sampler in sorted({best, max(1, best - 1)})]
    return min((best_seeds(costs, collective, total, cpu, each) for each in threads), key=_seconds)


def _list_seeds(
    costs: NodeCosts[Cost], collective: bool, total: int, cpu: int, threads: Threads | None
) -> Iterator[tuple[int, ...]]:
    """Yield the trainers' seeds without CPU trainers, and those of the best share of CPU trainers."""
    by_thread = costs.train_cpu(costs.cores if threads is None else threads[2]) if cpu else ()

    def split(on_cpu: int) -> tuple[int, ...]:
        return (*split_evenly(on_cpu, by_thread), *split_evenly(total - on_cpu, costs.train))

    def seconds(on_cpu: int) -> float:
        return best_fraction(costs, collective, split(min(on_cpu, total)), threads)[0]

    if not costs.train:
        yield split(total)
        return
    yield split(0)
    if not cpu or min(cost.seconds(1) for cost in by_thread) >= seconds(0):
        return  # a single seed takes a CPU trainer longer than all seeds take the accelerators
    step = len(costs.train)  # which changes every accelerator
    best = _lowest(seconds, 1, total, step)
    yield from (split(min(max(1, each), total)) for each in (best - step, best, best + step))


def _lowest(seconds: Callable[[int], float], low: int, high: int, step: int = 1) -> int:
    """Return by binary search where a time that first falls and then rises is lowest."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if seconds(middle) <= seconds(middle + step) else (middle + 1, high)
    return low


# -- the plan


def plan(
    costs: NodeCosts[Any],
    total: int,
    cpu_trainers: int,
    num_threads: int,
    gpu_buffer_size: int | None = None,
    only_collective: bool = False,
) -> NodePlan:
    """Plan seeds, threads and preparation together.

    Args:
        costs: Costs of the user's model and data on this node.
        total: Seeds of an iteration.
        cpu_trainers: Number of CPU trainers; the plan may leave them without seeds.
        num_threads: CPU threads to distribute.
        gpu_buffer_size: Maximum number of mini-batches that an accelerator prepares in a row. None: HyScale-GNN's
            stages prepare all, planned by the closed forms without a simulation (its initial mapping, section III-B).
        only_collective: Whether accelerators must use collective batching, also if the CPU prepares everything.

    Raises:
        ValueError: There are no trainers, or fewer threads than tasks.

    Source: MorphGL, equation 6; HyScale-GNN, equations 5 to 13; both repaired.
    """
    trainers = cpu_trainers + costs.num_accelerators
    if cpu_trainers < 0 or trainers < 1:
        raise ValueError(f"cpu_trainers={cpu_trainers} without an accelerator leaves nothing to train on")
    if num_threads < 2 + cpu_trainers:
        needed = f"Sampling, Feature Loading and CPU trainers need {2 + cpu_trainers}"
        raise ValueError(f"num_threads={num_threads}, but {needed}")
    equal = [total / trainers] * trainers
    if gpu_buffer_size is None:
        return _plan_stages(replace(costs, gather_accelerator=None), total, equal, cpu_trainers, num_threads)
    costs = linearize(costs, equal)
    search = _LocalSearch(costs, gpu_buffer_size)
    found = candidates(costs, total, cpu_trainers, num_threads)
    # Each system alone, and together: from the closed forms, and from the systems alone.
    systems = _collective_systems(search, total, cpu_trainers, num_threads)
    if not only_collective:
        in_parallel = replace(costs, gather_accelerator=None, takes_turns=False)
        beside = candidates(in_parallel, total, cpu_trainers, num_threads)
        staged = [*[each for each in found if not each.collective][:2], *beside[:2]]
        systems["hybrid training"] = search.improved(each.mapping for each in staged)
    collective = [each.mapping for each in found if each.collective][:2]
    starts = chain.from_iterable(map(search.with_buffers, collective))
    together = search.improved(chain(starts, *systems.values()))
    # Compare on longer runs with other durations, as the best of many mappings is partly luck.
    seed = 1 if costs.spread else None
    final = {
        mapping: simulate_iterations(costs, mapping, _FINAL_ITERATIONS, seed)
        for mapping in chain(together, *systems.values())
    }
    fastest = {name: min(mappings, key=final.__getitem__) for name, mappings in systems.items()}
    # A system alone is preferred if it is as fast.
    simple, best = (min(group, key=final.__getitem__) for group in (fastest.values(), final))
    if final[best] > (1 - MIN_GAIN) * final[simple]:
        best = simple
    alone = {name: (mapping, final[mapping]) for name, mapping in fastest.items()}
    return NodePlan(best, final[best], lower_bound(costs, total, cpu_trainers), alone)


def _plan_stages(costs: NodeCosts[Any], total: int, seeds: Sequence[float], cpu: int, num_threads: int) -> NodePlan:
    """Plan HyScale-GNN's stages: repeat the closed forms with costs that are linear around the last seeds."""
    tried: dict[TaskMapping, float] = {}
    for _ in range(_ROUNDS):
        found = candidates(linearize(costs, seeds), total, cpu, num_threads)
        tried |= {each.mapping: iteration(costs, each.mapping) for each in found[:_ROUNDS]}
        seeds = found[0].mapping.seeds
    best = min(tried, key=tried.__getitem__)
    return NodePlan(best, tried[best], lower_bound(linearize(costs, seeds), total, cpu))


def _collective_systems(search: _LocalSearch, total: int, cpu: int, num_threads: int) -> dict[str, list[TaskMapping]]:
    """Return mappings of collective batching alone, and of each processor alone for the preparation."""
    costs = search.costs
    if not costs.can_gather:
        return {}
    seeds, workers = (*(0,) * cpu, *split_evenly(total, costs.train)), num_threads - cpu
    mapping = TaskMapping(seeds, cpu, (workers // 2, workers - workers // 2, cpu))
    _, fraction = best_fraction(costs, True, seeds, mapping.threads)
    on_cpu = max(2, 2 * max(1, workers // costs.num_accelerators))
    modes = {
        "accelerators prepare all": [replace(mapping, accelerator_sampling=1.0, buffers=(1, 0, 0, 0))],
        "CPU prepares all": [replace(mapping, buffers=(0, on_cpu, 0, 0))],
    }
    starts = [*search.with_buffers(replace(mapping, accelerator_sampling=fraction)), *chain(*modes.values())]
    return {"collective batching": search.improved(starts, only_sizes=True), **modes}


class _LocalSearch:
    """Tries neighbors of a mapping in the simulation as long as one is faster."""

    def __init__(self, costs: NodeCosts[Cost], gpu_buffer_size: int) -> None:
        self.costs, self.gpu_buffer_size = costs, gpu_buffer_size
        self._seconds: dict[TaskMapping, float] = {}

    def seconds(self, mapping: TaskMapping) -> float:
        """Return the simulated seconds of an iteration."""
        if mapping not in self._seconds:
            seed = 0 if self.costs.spread else None
            longer = 0 if mapping.buffers is None else _PER_BUFFER * sum(mapping.buffers[:3])
            self._seconds[mapping] = simulate_iterations(self.costs, mapping, _ITERATIONS + longer, seed)
        return self._seconds[mapping]

    def with_buffers(self, mapping: TaskMapping) -> Iterator[TaskMapping]:
        """Yield a mapping of the closed forms with buffers of collective batching: for one, and for many in a row."""
        costs, fraction = self.costs, mapping.accelerator_fraction
        workers = max(1, sum(mapping.threads[:2]) // costs.num_accelerators)
        if not 0 < fraction < 1:
            yield replace(mapping, buffers=(1, 0, 0, 0) if fraction else (0, max(2, workers), 0, 0))
            return
        # A worker's time and that of an accelerator that prepares all, both in iterations.
        seeds = max(mapping.seeds[mapping.cpu_trainers :])
        working = costs.sample.seconds(seeds) + costs.load(1).seconds(seeds)
        trained = max(busy_seconds(costs, True, mapping.seeds, mapping.threads, fraction).seconds())
        every = max(busy_seconds(costs, True, mapping.seeds, mapping.threads, 1.0).train)
        taken, alone = working / trained, (1 + costs.spread) * working / every
        most = max(2 * self.gpu_buffer_size, HOST_PER_WORKER * workers)
        for on_gpu in sorted({1, max(1, self.gpu_buffer_size // 2), self.gpu_buffer_size}):
            turn = on_gpu * (1 - fraction) / fraction
            sizes = [(round(turn), ceil(taken) + 2, 0)]
            if on_gpu > 1:
                rows, leads = {round(turn), round(1.25 * turn)}, (alone, taken + 1, 1.3 * taken + 2)
                sizes += [(row, ceil(lead), row) for row in rows for lead in leads]
            for on_cpu, lead, row in sizes:
                yield replace(mapping, buffers=(on_gpu, min(max(1, on_cpu), most), max(1, lead), min(row, most)))

    def improved(self, starts: Iterable[TaskMapping], only_sizes: bool = False) -> list[TaskMapping]:
        """Improve the fastest of the starts."""
        fastest = sorted(dict.fromkeys(starts), key=self.seconds)[:_STARTS]
        return [self.improve(start, only_sizes) for start in fastest]

    def improve(self, mapping: TaskMapping, only_sizes: bool = False) -> TaskMapping:
        """Return the mapping at which no neighbor is faster."""
        moves = [self._sizes] if only_sizes else [self._sizes, self._seeds, self._threads, self._shares]
        most = len(self._seconds) + _MOST_TRIALS
        while len(self._seconds) < most:
            limit = (1 - _LEAST_GAIN) * self.seconds(mapping)
            neighbors = chain.from_iterable(move(mapping) for move in moves)
            better = next((each for each in neighbors if self.seconds(each) < limit), None)
            if better is None:
                break
            mapping = better
        return mapping

    def _seeds(self, mapping: TaskMapping) -> Iterator[TaskMapping]:
        """Move seeds between CPU trainers and accelerators."""
        cpu, costs = mapping.cpu_trainers, self.costs
        if not cpu or not costs.train:
            return
        by_thread = costs.train_cpu(mapping.threads[2])
        for part in (32, 8, 128):
            for sign in (-1, 1):
                on_cpu = mapping.cpu_seeds + sign * max(1, mapping.total // part)
                if 0 <= on_cpu <= mapping.total:
                    seeds = (*split_evenly(on_cpu, by_thread), *split_evenly(mapping.total - on_cpu, costs.train))
                    yield replace(mapping, seeds=seeds)

    def _threads(self, mapping: TaskMapping) -> Iterator[TaskMapping]:
        """Move threads from one CPU task to another."""
        least = (1, 1, mapping.cpu_trainers)
        for count in (1, max(2, sum(mapping.threads) // 8)):
            for donor in range(3):
                for receiver in range(3 if mapping.cpu_trainers else 2):
                    threads = list(mapping.threads)
                    threads[donor] -= count
                    threads[receiver] += count
                    if donor != receiver and threads[donor] >= least[donor]:
                        yield replace(mapping, threads=(threads[0], threads[1], threads[2]))

    def _shares(self, mapping: TaskMapping) -> Iterator[TaskMapping]:
        """Change the part of the sampling, or of the preparation, that accelerators are expected to take."""
        if self.costs.sample_accelerator is None or not mapping.accelerator_seeds:
            return
        most = mapping.accelerator_seeds / mapping.total
        for change in (-0.1, 0.1, -0.03, 0.03):
            share = min(max(0.0, mapping.accelerator_sampling + change), most)
            if share != mapping.accelerator_sampling:
                yield replace(mapping, accelerator_sampling=share)

    def _sizes(self, mapping: TaskMapping) -> Iterator[TaskMapping]:
        """Change the sizes of the buffers of collective batching, the lead, and the length of alternating runs."""
        if mapping.buffers is None:
            return
        on_gpu, on_cpu, lead, row = mapping.buffers
        buffers = []
        for gbs in {max(1, on_gpu // 2), 2 * on_gpu, on_gpu + 1} if on_gpu else {1}:
            if gbs <= self.gpu_buffer_size:
                buffers.append((gbs, on_cpu, lead, row))
        for cbs in {on_cpu // 2, 2 * on_cpu, on_cpu + 1} if on_cpu else {1}:
            if on_gpu or cbs:
                buffers.append((on_gpu, cbs, lead, row))
        if on_gpu and on_cpu:
            buffers += [(on_gpu, on_cpu, other, row) for other in {max(1, lead * 3 // 4), lead + 1, ceil(lead * 4 / 3)}]
            # A run without alternation, or longer and shorter ones with room for it.
            buffers += [(on_gpu, on_cpu, lead, 0 if row else on_cpu)]
            longer = {row + 1, row - 1} if row > 1 else {2} if row else set()
            buffers += [(on_gpu, max(1, on_cpu + other - row), lead, other) for other in longer]
        yield from (replace(mapping, buffers=each) for each in buffers if each != mapping.buffers)


# -- plans while training continues


class NodePlanner:
    """Plans once from the times of all accelerators: all ranks adopt the same plan in the same iteration.

    Source: MorphGL, section 4.2.1 (online profiling).
    """

    def __init__(self, gpu_buffer_size: int, num_measurements: int, ahead: int) -> None:
        self._gpu_buffer_size, self._ahead = gpu_buffer_size, ahead
        self._profiler = Profiler(num_measurements)
        self._seeds: list[float] = []  # of the mini-batches measured, as shares may change meanwhile
        self._plan: Future[TaskMapping] | None = None
        self._begin = 0  # iteration in which the plan is adopted
        self.times: StageTimes | None = None
        """The profile, once complete."""

    def observe(
        self, rows: Iterable[Mapping[str, float]], mapping: TaskMapping, costs: NodeCosts[Cost] | None, iteration: int
    ) -> None:
        """Add the accelerators' times of an iteration; with enough of them, start planning in a thread.

        Args:
            rows: Seconds of each stage on each accelerator, negative if unknown.
            mapping: The mapping of these times.
            costs: Measured costs of the CPU trainers; None if seeds and threads are fixed.
        """
        if self._plan is not None:
            return
        for row in rows:
            model = row["train"] - sum(max(0.0, row[stage]) for stage in ("gpu_batching", "uva"))
            seconds = {**row, "model": model}
            self._seeds.append(row["seeds"])
            for stage in PREPARATION_STAGES:
                if seconds[stage] >= 0:
                    self._profiler.add(stage, 0.0, seconds[stage])
        accelerators = range(mapping.cpu_trainers, len(mapping.seeds))
        workers = sum(sum(mapping.rank_threads(trainer)[:2]) for trainer in accelerators)
        self._profiler.cpu_workers = max(1, workers // len(accelerators))
        if self._profiler.enough() and (times := self._profiler.stage_times()) is not None:
            thread = ThreadPoolExecutor(1, "lightning-gnn-planner")
            self._plan = thread.submit(_plan_profile, times, fmean(self._seeds), mapping, costs, self._gpu_buffer_size)
            thread.shutdown(wait=False)
            self._begin, self.times = iteration + self._ahead, times

    def take(self, iteration: int) -> TaskMapping | None:
        """Return the plan in the iteration in which all ranks adopt it, after waiting for it; None before."""
        return None if self._plan is None or iteration < self._begin else self._plan.result()


def _plan_profile(
    times: StageTimes, seeds: float, mapping: TaskMapping, costs: NodeCosts[Cost] | None, gpu_buffer_size: int
) -> TaskMapping:
    """Plan from the stage times of an accelerator's mini-batches of ``seeds`` seeds."""
    if costs is None:  # MorphGL's dispatcher is the special case of one trainer with fixed seeds
        alone = Dispatcher(times, gpu_buffer_size, num_batches=_DISPATCHED_BATCHES).plan()
        buffers = (*alone.buffers, alone.ahead, alone.row)
        return replace(mapping, accelerator_sampling=1 - alone.cpu_share, buffers=buffers)
    profiled = {stage: Cost(0.0, getattr(times, stage).mean / seeds) for stage in PREPARATION_STAGES}
    # CPU trainers measure sampling and loading separately, the workers of accelerators only both.
    sampling, loading = costs.sample.per_unit, costs.load(1).per_unit
    share = sampling / (sampling + loading) if sampling + loading else 0.5
    load = profiled["cpu_batching"].scaled(1 - share)
    costs = replace(
        costs,
        sample=profiled["cpu_batching"].scaled(share),
        load=lambda threads: load.scaled(1 / threads),
        train=(profiled["model"],) * costs.num_accelerators,
        transfer=profiled["dma"],
        sample_accelerator=profiled["gpu_batching"],
        gather_accelerator=lambda batches: profiled["uva"],
        takes_turns=True,
        spread=times.model.spread / times.model.mean,
    )
    num_threads = sum(mapping.threads)
    return plan(costs, mapping.total, mapping.cpu_trainers, num_threads, gpu_buffer_size, only_collective=True).mapping


def collective_plan(buffers: tuple[int, int, int, int], times: StageTimes | None) -> CollectivePlan:
    """Return the plan of collective batching with these buffers, lead and runs."""
    on_gpu, on_cpu, lead, row = buffers
    if not on_gpu or not on_cpu:
        return CollectivePlan("gpu" if on_gpu else "cpu", max(1, on_gpu), on_cpu, times=times)
    return CollectivePlan("collective", on_gpu, on_cpu, lead=lead, row=row, times=times)
