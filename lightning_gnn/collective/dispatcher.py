"""Chooses the buffer sizes, lead and alternation of a plan by simulation (MorphGL, section 4.2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil, inf, isfinite, sqrt
from statistics import fmean, pstdev

from lightning_gnn.collective.plan import PREPARATION_STAGES, CollectivePlan, StageTimes
from lightning_gnn.collective.simulate import Durations, draw_durations, makespan, simulate_dual_buffer

SIMULATED_BATCHES = (
    400  # maximum length of simulated epochs; predictions are scaled, as longer epochs repeat the pattern
)
GPU_BUFFERS = (1, 2, 5)  # GPU run lengths in the grid, in addition to the maximum
CPU_BUFFERS = (1, 2, 4, 8, 16, 32)  # host buffer sizes in the grid, without alternation
HOST_PER_WORKER = 4  # limit of the (pinned) host buffer per worker, unless twice the device's buffer is more
PRUNING_MARGIN = 0.03  # plans that are worse than the best by this fraction in the first epoch are discarded
FINALISTS = 8  # number of best plans that are compared on further epochs
NUM_DRAWS, NUM_FINAL_DRAWS = 2, 16  # simulated epochs per plan in the first and in the final comparison
MIN_GAIN = 0.003  # minimum gain of a plan for both over the better processor alone; also twice its standard error


def relaxed_time(x: float, times: StageTimes) -> float:
    """Return C'(x) / n, seconds per mini-batch with unlimited buffers and divisible work (equation 6, repaired).

    This is the maximum of the times of PCIe, GPU and CPU if the GPU prepares x mini-batches for each one of the CPU
    (all for infinite x).
    """
    on_gpu = 1.0 if x == inf else x / (1 + x)
    on_cpu = 0.0 if x == inf else 1 / (1 + x)
    pcie = on_gpu * times.gpu + on_cpu * times.dma.mean
    gpu = on_gpu * times.gpu + times.model.mean
    return max(pcie, gpu, on_cpu * times.cpu)


def initial_ratio(times: StageTimes) -> float:
    """Return the smallest x that minimizes :func:`relaxed_time`: 0, or an intersection of two of its three terms."""
    cpu, gpu, dma, model = times.cpu, times.gpu, times.dma.mean, times.model.mean
    candidates = [0.0, (cpu - model) / (gpu + model), dma / model - 1]
    if gpu > 0:
        candidates.append((cpu - dma) / gpu)
    possible = sorted(x for x in candidates if x >= 0 and isfinite(x))
    return min(possible, key=lambda x: relaxed_time(x, times))


class Dispatcher:
    """Chooses the plan with the shortest simulated epoch from a grid over buffer sizes, lead and alternation.

    All plans are simulated with the same random durations, which follow the measured means and spreads. Finalists and
    each processor alone are compared on further draws, since the best of many plans is partly luck. A plan for both
    must win by more than the draws' spread explains.

    Args:
        times: Measured stage times.
        gpu_buffer_size: Maximum number of mini-batches that the GPU prepares in a row (``gbs``).
        num_batches: Number of mini-batches in an epoch. At most :data:`SIMULATED_BATCHES` are simulated, and the
            predicted seconds are scaled.
    """

    def __init__(self, times: StageTimes, gpu_buffer_size: int = 10, *, num_batches: int) -> None:
        if min(num_batches, gpu_buffer_size) < 1:
            raise ValueError(f"num_batches={num_batches} and gpu_buffer_size={gpu_buffer_size} must be at least 1")
        self.times = times
        self.gpu_buffer_size = gpu_buffer_size
        self.num_batches = num_batches
        self._simulated = min(num_batches, SIMULATED_BATCHES)
        self._varies = any(getattr(times, stage).spread for stage in PREPARATION_STAGES)
        self._durations_by_seed: dict[int, Durations] = {}

    def plan(self) -> CollectivePlan:
        """Return the plan with the shortest predicted epoch."""
        ratio = initial_ratio(self.times)
        on_host = max(self.gpu_buffer_size, 2 * self.times.cpu_workers)
        alone = {
            "cpu": CollectivePlan("cpu", 1, on_host, times=self.times),
            "gpu": CollectivePlan("gpu", 1, 0, times=self.times),
        }
        grid = list(dict.fromkeys(self._grid(ratio)))
        # Compare the finalists on further draws, since the best of many plans is partly luck.
        tried = {
            plan: self._makespans(plan, 1 + NUM_DRAWS, NUM_FINAL_DRAWS)
            for plan in [*self._best_plans(grid), *alone.values()]
        }
        # A plan for both processors must beat the better one alone by more than the spread of the draws explains.
        means = {plan: fmean(makespans) for plan, makespans in tried.items()}
        simple = min(alone.values(), key=lambda plan: means[plan])
        chosen = min(means, key=lambda plan: means[plan])
        gains = [one - other for one, other in zip(tried[simple], tried[chosen], strict=True)]
        if means[simple] - means[chosen] <= max(MIN_GAIN * means[simple], 2 * pstdev(gains) / sqrt(len(gains))):
            chosen = simple
        # Scale the predictions from the simulated mini-batches to the whole epoch.
        scale = self.num_batches / self._simulated
        return replace(
            chosen,
            gpu_buffer_size=chosen.gpu_buffer_size if chosen.mode == "collective" else self.gpu_buffer_size,
            cpu_part=self._simulate_cpu_part(chosen),
            num_batches=self.num_batches,
            ratio=ratio,
            epoch_s={
                "collective": means[chosen] * scale,
                **{mode: means[plan] * scale for mode, plan in alone.items()},
            },
            rounds=len(grid) + len(alone),
        )

    def _simulate_cpu_part(self, plan: CollectivePlan) -> float:
        simulation = simulate_dual_buffer(self.times, plan, self._simulated, durations=self._durations(0))
        return simulation.on_cpu / self._simulated

    def _grid(self, ratio: float) -> Iterator[CollectivePlan]:
        """Yield plans with leads derived from the workers' times, and alternation from the CPU's share."""
        limit, workers, working = self.gpu_buffer_size, self.times.cpu_workers, self.times.cpu_batching
        most_on_host = max(2 * limit, HOST_PER_WORKER * workers)
        trained_s = relaxed_time(ratio, self.times)
        taken, varying = working.mean / trained_s, working.spread / trained_s  # a worker's time, in training steps
        # Number of mini-batches that the GPU alone trains until the first workers have finished.
        alone = (working.mean + working.spread) / (self.times.gpu + self.times.model.mean)
        share = 1 / (1 + ratio)
        for on_gpu in sorted({min(limit, size) for size in (*GPU_BUFFERS, limit)}):
            for on_cpu in CPU_BUFFERS:
                for lead in (1, taken + 1, taken + 2 + 2 * varying, 1.4 * taken + 2, (on_cpu + workers) / share):
                    yield self._make_plan(on_gpu, min(on_cpu, most_on_host), lead)
            turn = on_gpu * share / max(1e-3, 1 - share)
            for row in (turn, 1.25 * turn) if turn >= 1 else ():
                sizes, leads = (row, max(row, workers), most_on_host), (1, alone, taken + 1, 1.3 * taken + 2)
                for size, lead in product(sizes, leads):
                    yield self._make_plan(on_gpu, min(size, most_on_host), lead, row)

    def _make_plan(self, on_gpu: int, on_cpu: float, lead: float, row: float = 0) -> CollectivePlan:
        def whole(size: float) -> int:
            return max(1, min(self._simulated, ceil(size)))

        sizes = on_gpu, whole(round(on_cpu))
        turns = whole(round(row)) if row else 0
        return CollectivePlan("collective", *sizes, lead=whole(lead), row=turns, times=self.times)

    def _best_plans(self, grid: list[CollectivePlan]) -> list[CollectivePlan]:
        """Return the best plans; among plans with the same makespan, the one with the smallest host buffer."""
        first = {plan: self._makespans(plan, 1, 1)[0] for plan in grid}
        limit = (1 + PRUNING_MARGIN) * min(first.values())
        means = {plan: fmean(self._makespans(plan, 1, NUM_DRAWS)) for plan in grid if first[plan] <= limit}
        best: dict[float, CollectivePlan] = {}
        for plan in sorted(means, key=lambda plan: (means[plan], plan.cpu_buffer_size)):
            best.setdefault(means[plan], plan)
        return list(best.values())[:FINALISTS]

    def _makespans(self, plan: CollectivePlan, first: int, count: int) -> list[float]:
        """Return the seconds of simulated epochs; only one epoch if the durations are constant."""
        seeds = range(first, first + (count if self._varies else 1))
        return [makespan(self.times, plan, self._simulated, self._durations(seed)) for seed in seeds]

    def _durations(self, seed: int) -> Durations:
        if seed not in self._durations_by_seed:
            self._durations_by_seed[seed] = draw_durations(self.times, self._simulated, seed)
        return self._durations_by_seed[seed]
