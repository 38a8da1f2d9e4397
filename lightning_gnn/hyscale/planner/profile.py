"""Profile of a node's first iterations, from which its plan is made while training continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean

from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.plan import PREPARATION_STAGES, CollectivePlan, StageTimes
from lightning_gnn.collective.profile import Profiler
from lightning_gnn.hyscale.costs import Cost, NodeCosts, TaskMapping
from lightning_gnn.hyscale.planner.search import plan_node

_SIMULATED_BATCHES = 400


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
            self._plan = thread.submit(_plan, times, fmean(self._seeds), mapping, costs, self._gpu_buffer_size)
            thread.shutdown(wait=False)
            self._begin, self.times = iteration + self._ahead, times

    def take(self, iteration: int) -> TaskMapping | None:
        """Return the plan in the iteration in which all ranks adopt it, after waiting for it; None before."""
        return None if self._plan is None or iteration < self._begin else self._plan.result()


def _plan(
    times: StageTimes, seeds: float, mapping: TaskMapping, costs: NodeCosts[Cost] | None, gpu_buffer_size: int
) -> TaskMapping:
    """Plan from the stage times of an accelerator's mini-batches of ``seeds`` seeds."""
    if costs is None:  # MorphGL's dispatcher is the special case of one trainer with fixed seeds
        alone = Dispatcher(times, gpu_buffer_size, num_batches=_SIMULATED_BATCHES).plan()
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
    plan = plan_node(costs, mapping.total, mapping.cpu_trainers, num_threads, gpu_buffer_size, only_collective=True)
    return plan.mapping


def collective_plan(buffers: tuple[int, int, int, int], times: StageTimes | None) -> CollectivePlan:
    """Return the plan of collective batching with these buffers, lead and runs."""
    on_gpu, on_cpu, lead, row = buffers
    if not on_gpu or not on_cpu:
        return CollectivePlan("gpu" if on_gpu else "cpu", max(1, on_gpu), on_cpu, times=times)
    return CollectivePlan("collective", on_gpu, on_cpu, lead=lead, row=row, times=times)
