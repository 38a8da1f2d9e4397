"""Planning as published: equation 6, and its refinement by the simulator's feedback (MorphGL, section 4.2.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, floor

from typing_extensions import override

from lightning_gnn.collective.batch_schedule import ScheduleAction
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.dual_buffer import DualBuffer
from lightning_gnn.collective.plan import PREPARATION_STAGES, CollectivePlan, relaxed_time
from lightning_gnn.collective.simulate import VirtualClock


def cpu_buffer_size(gpu_buffer_size: int, x: float) -> int:
    """Return ``cbs = floor(gbs / x)``, at least 1."""
    return max(1, floor(min(gpu_buffer_size / x, 1e9)))


class PublishedDispatcher(Dispatcher):
    """Chooses ``cbs`` from equation 6, then one larger or smaller as long as one processor waits for the other.

    Equation 6 is repaired (:func:`~lightning_gnn.collective.plan.relaxed_time`). The feedback is that of the published
    schedule, simulated with the means of the stage times. It ends when CPU and GPU block each other about equally long
    in each overlap, within one GPU batching, or with the fastest of all sizes tried when a size recurs.

    Args and Raises: See :class:`Dispatcher`. The paper has no lead, which ``schedule="in_order"`` needs: CPU workers
    start as many mini-batches ahead as are trained meanwhile.

    Source: MorphGL, section 4.2.2; the extreme cases of section 4.2.3 become plans for one processor.
    """

    @override
    def plan(self) -> CollectivePlan:
        """Return the published plan, with predictions for :attr:`schedule`."""
        times, seconds = self.times, dict[int, float]()
        chosen = self._alone["cpu"]
        if self.ratio > 0 and times.model.mean <= max(times.cpu, times.dma.mean):
            size = min(cpu_buffer_size(self.gpu_buffer_size, self.ratio), self._simulated)
            while 1 <= size <= self._simulated and size not in seconds:
                clock = self._simulate(size)
                seconds[size] = clock.now
                more_on_cpu = clock.lags["gpu"] - clock.lags["cpu"]
                if abs(more_on_cpu) < times.gpu * max(1, clock.overlaps):
                    break
                size += 1 if more_on_cpu > 0 else -1
            else:
                size = min(seconds, key=lambda each: seconds[each]) if size else 0
            chosen = self._make_published(size) if size else self._alone["gpu"]
        tried = self._try_on_further_draws({chosen, *self._alone.values()})
        return self._predict(chosen, tried, rounds=len(seconds))

    def _make_published(self, size: int) -> CollectivePlan:
        meanwhile = ceil(self.times.cpu_batching.mean / relaxed_time(self.ratio, self.times)) + 2
        lead = None if self.schedule == "paper" else max(self.gpu_buffer_size + size, meanwhile)
        sizes = self.gpu_buffer_size, size
        return CollectivePlan("collective", *sizes, lead=lead, times=self.times, schedule=self.schedule)

    def _simulate(self, size: int) -> _FeedbackClock:
        schedule = DualBuffer(range(self._simulated), self.gpu_buffer_size, size, self.times.cpu_workers)
        means = {stage: getattr(self.times, stage).mean for stage in PREPARATION_STAGES}
        clock = _FeedbackClock(schedule, self.times.cpu_workers, lambda stage, number: means[stage])
        clock.run()
        return clock


@dataclass
class _FeedbackClock(VirtualClock):
    """Also measures the blocking phases, by the processor whose buffer is not full, and counts overlaps."""

    lags: dict[str, float] = field(default_factory=lambda: {"cpu": 0.0, "gpu": 0.0, "": 0.0})  # seconds
    overlaps: int = 0  # cycles of filling, blocking and flushing
    late: str = ""  # processor that the current action waits for
    since: float = 0.0  # start of the current action

    @override
    def _step(self) -> ScheduleAction:
        assert isinstance(self.schedule, DualBuffer)
        self.lags[self.late] += self.now - self.since
        self.since, before = self.now, self.schedule.phase
        step = super()._step()
        phase = self.schedule.phase
        self.overlaps += before != "flushing" == phase
        if step.kind == "wait" or (step.kind == "train" and phase == "blocking"):
            self.late = "cpu"  # until the next flush: the GPU trains and refills meanwhile
        elif phase == "flushing":
            self.late = ""
        elif self.late != "cpu":
            self.late = "gpu" if phase == "blocking" else ""
        return step
