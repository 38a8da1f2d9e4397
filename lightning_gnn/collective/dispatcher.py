"""Chooses the buffer sizes, lead and alternation of a plan by simulation (MorphGL, section 4.2.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import ceil, sqrt
from statistics import fmean, pstdev

from lightning_gnn.collective.plan import (
    PREPARATION_STAGES,
    CollectivePlan,
    ScheduleName,
    StageTimes,
    initial_ratio,
    relaxed_time,
)
from lightning_gnn.collective.simulate import Durations, draw_durations, makespan, simulate_dual_buffer

SIMULATED_BATCHES = 400  # maximum length of simulated epochs; longer ones repeat the pattern: predictions are scaled
GPU_BUFFERS = (1, 2, 5)  # GPU run lengths in the grid, in addition to the maximum
CPU_BUFFERS = (1, 2, 4, 8, 16, 32)  # host buffer sizes in the grid, without alternation
HOST_PER_WORKER = 4  # limit of the (pinned) host buffer per worker, unless twice the device's buffer is more
PRUNING_MARGIN = 0.03  # plans that are worse than the best by this fraction in the first epoch are discarded
FINALISTS = 8  # number of best plans that are compared on further epochs
NUM_DRAWS, NUM_FINAL_DRAWS = 2, 16  # simulated epochs per plan in the first and in the final comparison
MIN_GAIN = 0.003  # minimum gain of a plan for both over the better processor alone; also twice its standard error


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
        schedule: Schedule to plan for; ``"paper"`` has no leads and no alternation.
    """

    def __init__(
        self, times: StageTimes, gpu_buffer_size: int = 10, *, num_batches: int, schedule: ScheduleName = "in_order"
    ) -> None:
        if min(num_batches, gpu_buffer_size) < 1:
            raise ValueError(f"num_batches={num_batches} and gpu_buffer_size={gpu_buffer_size} must be at least 1")
        self.times = times
        self.gpu_buffer_size = gpu_buffer_size
        self.num_batches, self.schedule = num_batches, schedule
        self.ratio = initial_ratio(times)
        self._simulated = min(num_batches, SIMULATED_BATCHES)
        self._varies = any(getattr(times, stage).spread for stage in PREPARATION_STAGES)
        self._durations_by_seed: dict[int, Durations] = {}
        on_host = max(gpu_buffer_size, 2 * times.cpu_workers)
        self._alone = {
            "cpu": CollectivePlan("cpu", 1, on_host, times=times, schedule=schedule),
            "gpu": CollectivePlan("gpu", 1, 0, times=times, schedule=schedule),
        }

    def plan(self) -> CollectivePlan:
        """Return the plan with the shortest predicted epoch."""
        grid = list(dict.fromkeys(self._grid(self.ratio)))
        # Compare the finalists on further draws, since the best of many plans is partly luck.
        tried = self._try_on_further_draws([*self._best_plans(grid), *self._alone.values()])
        # A plan for both processors must beat the better one alone by more than the spread of the draws explains.
        means = {plan: fmean(makespans) for plan, makespans in tried.items()}
        simple = min(self._alone.values(), key=lambda plan: means[plan])
        chosen = min(means, key=lambda plan: means[plan])
        gains = [one - other for one, other in zip(tried[simple], tried[chosen], strict=True)]
        if means[simple] - means[chosen] <= max(MIN_GAIN * means[simple], 2 * pstdev(gains) / sqrt(len(gains))):
            chosen = simple
        return self._predict(chosen, tried, rounds=len(grid) + len(self._alone))

    def _try_on_further_draws(self, plans: Iterable[CollectivePlan]) -> dict[CollectivePlan, list[float]]:
        return {plan: self._makespans(plan, 1 + NUM_DRAWS, NUM_FINAL_DRAWS) for plan in plans}

    def _predict(self, chosen: CollectivePlan, tried: dict[CollectivePlan, list[float]], rounds: int) -> CollectivePlan:
        """Return the chosen plan with predictions, scaled from the simulated mini-batches to the whole epoch."""
        plans, scale = {"collective": chosen, **self._alone}, self.num_batches / self._simulated
        simulation = simulate_dual_buffer(self.times, chosen, self._simulated, durations=self._durations(0))
        return replace(
            chosen,
            gpu_buffer_size=chosen.gpu_buffer_size if chosen.mode == "collective" else self.gpu_buffer_size,
            cpu_part=simulation.on_cpu / self._simulated,
            num_batches=self.num_batches,
            ratio=self.ratio,
            epoch_s={mode: fmean(tried[plan]) * scale for mode, plan in plans.items()},
            rounds=rounds,
        )

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
        paced = self.schedule == "in_order"
        leads, turns = whole(lead) if paced else 0, whole(round(row)) if row and paced else 0
        return CollectivePlan("collective", *sizes, lead=leads, row=turns, times=self.times, schedule=self.schedule)

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
