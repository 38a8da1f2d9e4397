"""Whether epochs take as long as their plan said, and what the stages take by now."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from lightning_gnn.collective.plan import STAGES, CollectivePlan, StageTimes
from lightning_gnn.collective.profile import Profiler
from lightning_gnn.runtime.timeline import Timestamp

PARTED = 0.1
"""Of the predicted epoch: if a real one differs by more, it is planned anew."""
SHORTEST_S = 1.0
"""Of an epoch: to plan for a shorter one again takes longer than it could gain."""


class Watch:
    """Measures the epochs of a plan, and the stages all the while.

    An epoch's seconds are those of waiting for mini-batches and training them; a validation or what else is done
    between epochs does not count, nor does the training of the last mini-batch, whose end nobody tells. Where an epoch
    took another time than a plan made for just what was measured, that is no reason to plan again: what it took is
    expected from then on.

    Args:
        num_measurements: Of a stage, which replace what the plan was made for; of fewer the old one stays, as that of
            a processor which prepares nothing now.
        cpu_workers: How many prepare mini-batches on the CPU.
    """

    def __init__(self, num_measurements: int, cpu_workers: int) -> None:
        self._settings = num_measurements, cpu_workers
        self._profiler = Profiler(*self._settings)
        self._plan: CollectivePlan | None = None
        self._expected_each_s = 0.0
        self._num_batches = self._untrained = 0
        self._took_s = 0.0
        self._going_since: float | None = None
        self.took_s = 0.0
        """Seconds of the last whole epoch."""

    @property
    def expected_s(self) -> float:
        """Seconds that are expected of an epoch."""
        return self._expected_each_s * self._num_batches

    def begin(self, plan: CollectivePlan, num_batches: int) -> None:
        """Begin an epoch, which is whole."""
        if self._plan is None or plan.decisions != self._plan.decisions:
            model = 0.0 if plan.times is None else plan.times.model.mean
            predicted = max(0.0, plan.epoch_s.get("collective", 0.0) - model)
            self._expected_each_s = predicted / max(1, plan.num_batches)
        elif plan is not self._plan:  # planned again, to the same end
            self._expected_each_s = self.took_s / max(1, self._num_batches)
        self._plan, self._num_batches = plan, num_batches
        self._profiler = Profiler(*self._settings)
        self._took_s, self._going_since, self._untrained = 0.0, None, num_batches
        self.go()

    def go(self) -> None:
        """Go on after a pause."""
        if self._going_since is None:
            self._going_since = time.perf_counter()

    def pause(self) -> None:
        """Note that time does not count any more."""
        since, self._going_since = self._going_since, None
        if since is not None:
            self._took_s += time.perf_counter() - since

    def add(self, stage: str, start: Timestamp, end: Timestamp) -> None:
        """Note when a stage began and ended; may be called from any thread."""
        self._profiler.add(stage, start, end)

    def trained(self) -> None:
        """Note that one more mini-batch is handed out for training; the epoch is over with the last."""
        self._untrained -= 1
        self._profiler.collect()
        if not self._untrained:
            self.pause()
            self.took_s = self._took_s

    def forget(self) -> None:
        """Note that this epoch is none to go by."""
        self._untrained = -1
        self.pause()

    def parted(self) -> StageTimes | None:
        """Return what the stages take by now if the epoch before was whole and not as expected, else None."""
        plan, least = self._plan, self._settings[0]
        if plan is None or plan.times is None or self._untrained or not self.expected_s:
            return None
        if self.took_s < SHORTEST_S or abs(self.took_s - self.expected_s) <= PARTED * self.expected_s:
            return None
        found: dict[str, Any] = {
            stage: self._profiler.duration(stage) for stage in STAGES if self._profiler.count(stage) >= least
        }
        return replace(plan.times, **found)
