"""Search for the best mapping of a node: closed forms, then local search in the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from lightning_gnn.collective.dispatcher import HOST_PER_WORKER, MIN_GAIN, Dispatcher
from lightning_gnn.collective.plan import Duration, StageTimes
from lightning_gnn.hyscale.costs import Cost, NodeCosts, TaskMapping, split_evenly
from lightning_gnn.hyscale.planner.relaxation import (
    Candidate,
    candidates,
    check_trainers,
    lower_bound,
)
from lightning_gnn.hyscale.planner.simulate import simulate_iterations

_ITERATIONS, _FINAL_ITERATIONS = 80, 600  # simulated iterations of a trial, and of a finalist
_STARTS = 2  # starts of the local search for each kind of preparation
_MOST_TRIALS = 150  # mappings that one local search tries
_LEAST_GAIN = 0.002  # of a step of the local search


@dataclass(frozen=True)
class NodePlan:
    """The mapping with the shortest simulated iteration, and how far from optimal it can be."""

    mapping: TaskMapping
    seconds: float  # of an iteration, simulated
    bound: float  # seconds that no mapping and no schedule can fall below
    single: dict[str, TaskMapping]  # of each system, and of each processor that prepares, alone
    single_seconds: dict[str, float]  # of their iterations
    trials: int  # mappings simulated

    @property
    def gap(self) -> float:
        """How much longer than the lower bound an iteration is."""
        return max(0.0, self.seconds / self.bound - 1)


def plan_node(
    costs: NodeCosts[Cost],
    total: int,
    cpu_trainers: int,
    num_threads: int,
    gpu_buffer_size: int = 10,
    only_collective: bool = False,
) -> NodePlan:
    """Plan seeds, threads and preparation together.

    Args:
        costs: Costs of the user's model and data on this node.
        total: Seeds of an iteration.
        cpu_trainers: Number of CPU trainers; the plan may leave them without seeds.
        num_threads: CPU threads to distribute.
        gpu_buffer_size: Maximum number of mini-batches that an accelerator prepares in a row.
        only_collective: Whether accelerators must use collective batching, also if the CPU prepares everything.

    Raises:
        ValueError: There are no trainers, or fewer threads than tasks.

    Source: MorphGL, equation 6; HyScale-GNN, equations 5 to 13; both repaired.
    """
    check_trainers(cpu_trainers, costs.num_accelerators, num_threads)
    search = _LocalSearch(costs, gpu_buffer_size)
    found = candidates(costs, total, cpu_trainers, num_threads)
    alone = _alone(costs, total, cpu_trainers, num_threads, gpu_buffer_size)
    if not only_collective:
        staged = [one for one in found if not one.collective][:_STARTS]
        alone["hybrid training"] = min((search.improve(one.mapping) for one in staged), key=search.seconds)
    # Together: from the closed forms, and from the best system alone.
    starts = [one for one in found if one.collective][:_STARTS]
    together = [search.improve(mapping) for one in starts for mapping in _start(costs, one, gpu_buffer_size)]
    together.append(search.improve(min(alone.values(), key=search.seconds)))
    # Compare on longer runs with other durations, as the best of many mappings is partly luck.
    seed = 1 if costs.spread else None
    final = {
        mapping: simulate_iterations(costs, mapping, _FINAL_ITERATIONS, seed)
        for mapping in {*together, *alone.values()}
    }
    # A system alone is preferred if it is as fast.
    simple, best = (min(group, key=final.__getitem__) for group in (alone.values(), final))
    if final[best] > (1 - MIN_GAIN) * final[simple]:
        best = simple
    seconds = {name: final[mapping] for name, mapping in alone.items()}
    return NodePlan(best, final[best], lower_bound(costs, total, cpu_trainers), alone, seconds, search.trials)


def _alone(
    costs: NodeCosts[Cost], total: int, cpu: int, num_threads: int, gpu_buffer_size: int
) -> dict[str, TaskMapping]:
    """Return the plans of collective batching alone, and of each processor alone for the preparation."""
    if not costs.can_gather:
        return {}
    seeds, workers = (*(0,) * cpu, *split_evenly(total, costs.train)), num_threads - cpu
    mapping = TaskMapping(seeds, cpu, (workers // 2, workers - workers // 2, cpu))
    times = stage_times(costs, mapping, gpu_buffer_size)
    plan = Dispatcher(times, gpu_buffer_size, num_batches=_FINAL_ITERATIONS).plan()
    modes = {
        "collective batching": (1 - plan.cpu_share, (*plan.buffers, plan.ahead, plan.row)),
        "accelerators prepare all": (1.0, (1, 0, 0, 0)),
        "CPU prepares all": (0.0, (0, max(2, 2 * times.cpu_workers), 0, 0)),
    }
    return {
        name: replace(mapping, accelerator_sampling=fraction, buffers=buffers)
        for name, (fraction, buffers) in modes.items()
    }


def stage_times(costs: NodeCosts[Cost], mapping: TaskMapping, gpu_buffer_size: int) -> StageTimes:
    """Return the stage times of collective batching on one accelerator under a mapping."""
    seeds = max(mapping.seeds[mapping.cpu_trainers :])
    workers = max(1, sum(mapping.threads[:2]) // costs.num_accelerators)
    assert costs.sample_accelerator is not None
    assert costs.gather_accelerator is not None
    means = {
        "cpu_batching": costs.sample.seconds(seeds) + costs.load(1).seconds(seeds),
        "dma": costs.transfer.seconds(seeds),
        "gpu_batching": costs.sample_accelerator.seconds(seeds),
        "uva": costs.gather_accelerator(gpu_buffer_size).seconds(seeds),
        "model": max(cost.seconds(seeds) for cost in costs.train) + costs.sync,
    }
    durations = {name: Duration(mean, costs.spread * mean) for name, mean in means.items()}
    return StageTimes(**durations, cpu_workers=workers)


def _start(costs: NodeCosts[Cost], candidate: Candidate, gpu_buffer_size: int) -> Iterator[TaskMapping]:
    """Yield a candidate's mapping, for collective batching with buffers for one and for many in a row."""
    mapping, fraction = candidate.mapping, candidate.fraction
    if not candidate.collective:
        yield mapping
        return
    workers = max(1, sum(mapping.threads[:2]) // costs.num_accelerators)
    if not 0 < fraction < 1:
        yield replace(mapping, buffers=(1, 0, 0, 0) if fraction else (0, max(2, workers), 0, 0))
        return
    seeds = max(mapping.seeds[mapping.cpu_trainers :])
    working = costs.sample.seconds(seeds) + costs.load(1).seconds(seeds)
    for on_gpu in {1, gpu_buffer_size}:
        on_cpu = max(1, ceil(on_gpu * (1 - fraction) / fraction))
        lead = ceil(working / candidate.seconds) + 2
        yield replace(mapping, buffers=(on_gpu, min(on_cpu, HOST_PER_WORKER * workers), lead, 0))


class _LocalSearch:
    """Tries neighbors of a mapping in the simulation as long as one is faster."""

    def __init__(self, costs: NodeCosts[Cost], gpu_buffer_size: int) -> None:
        self.costs, self.gpu_buffer_size = costs, gpu_buffer_size
        self._seconds: dict[TaskMapping, float] = {}

    @property
    def trials(self) -> int:
        """Number of mappings simulated."""
        return len(self._seconds)

    def seconds(self, mapping: TaskMapping) -> float:
        """Return the simulated seconds of an iteration."""
        if mapping not in self._seconds:
            seed = 0 if self.costs.spread else None
            self._seconds[mapping] = simulate_iterations(self.costs, mapping, _ITERATIONS, seed)
        return self._seconds[mapping]

    def improve(self, mapping: TaskMapping) -> TaskMapping:
        """Return the mapping at which no neighbor is faster."""
        most = self.trials + _MOST_TRIALS
        while self.trials < most:
            limit = (1 - _LEAST_GAIN) * self.seconds(mapping)
            better = next((each for each in self._neighbors(mapping) if self.seconds(each) < limit), None)
            if better is None:
                break
            mapping = better
        return mapping

    def _neighbors(self, mapping: TaskMapping) -> Iterator[TaskMapping]:
        moves: list[Callable[[TaskMapping], Iterator[TaskMapping]]] = [
            self._sizes,
            self._seeds,
            self._threads,
            self._shares,
        ]
        for move in moves:
            yield from move(mapping)

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
        for gbs in {max(1, on_gpu // 2), 2 * on_gpu, on_gpu + 1} if on_gpu else {1}:
            if gbs <= self.gpu_buffer_size:
                yield replace(mapping, buffers=(gbs, on_cpu, lead, row))
        for cbs in {on_cpu // 2, 2 * on_cpu, on_cpu + 1} if on_cpu else {1}:
            if on_gpu or cbs:
                yield replace(mapping, buffers=(on_gpu, cbs, lead, row))
        if on_gpu and on_cpu:
            for other in {max(1, lead * 3 // 4), lead + 1, ceil(lead * 4 / 3)}:
                yield replace(mapping, buffers=(on_gpu, on_cpu, other, row))
            for other in {0, row + 1, max(1, row - 1)} if row else {1, 2}:
                yield replace(mapping, buffers=(on_gpu, on_cpu, lead, other))
