"""Planning of collective batching under hybrid training: one plan for all accelerators of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lightning_gnn.collective.plan import PREPARATION_STAGES, CollectivePlan
from lightning_gnn.collective.prefetcher import CollectiveBatching
from lightning_gnn.collective.profile import Profiler


class PreparationPlanner:
    """Plans from the times of all accelerators, so that all ranks adopt the same plan in the same iteration."""

    def __init__(self, batching: CollectiveBatching, num_batches: Callable[[], int]) -> None:
        self._batching, self._num_batches = batching, num_batches
        self._profiler = Profiler(batching.profiler.num_measurements)
        self._begin = -1  # iteration in which the plan takes effect; negative while measuring

    def observe(self, rows: Iterable[Mapping[str, float]], cpu_workers: int, iteration: int) -> None:
        """Add the accelerators' times of the previous iteration; with enough of them, start planning in a thread."""
        if self._begin >= 0:
            return
        for row in rows:
            model = row["train"] - sum(max(0.0, row[stage]) for stage in ("gpu_batching", "uva"))
            seconds = {**row, "model": model}
            for stage in PREPARATION_STAGES:
                if seconds[stage] >= 0:
                    self._profiler.add(stage, 0.0, seconds[stage])
        self._profiler.cpu_workers = cpu_workers
        if self._profiler.enough() and (times := self._profiler.stage_times()) is not None:
            self._batching.start_planning(times, self._num_batches())
            self._begin = iteration + self._batching.most_ahead

    def take(self, iteration: int) -> CollectivePlan | None:
        """Return the new plan in the iteration in which it takes effect, after waiting for it; None before."""
        planning = self._batching.planning
        return None if planning is None or iteration < self._begin else planning.result()
