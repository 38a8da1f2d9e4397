"""The schedule on a virtual clock (MorphGL, section 4.2.3, performance model)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from lightning_gnn.collective.batch_schedule import BatchSchedule, ScheduleAction
from lightning_gnn.collective.plan import PREPARATION_STAGES, CollectivePlan, StageTimes
from lightning_gnn.runtime.timeline import Interval, Resource, Timeline

Durations = Callable[[str, int], float]  # seconds of a stage, by its name and the mini-batch's number

LEAST = 0.01  # of the mean: no drawn duration is shorter


@dataclass
class Simulation:
    """What happened in a simulated epoch."""

    makespan: float  # seconds until the last mini-batch is trained
    timeline: Timeline
    """Each stage of each mini-batch, the lane of a CPU stage being its worker; the GPU's batching is there twice, as it
    occupies the GPU and PCIe (equation 1)."""
    steps: list[ScheduleAction]  # what the training thread did, in order
    on_cpu: int  # mini-batches that the CPU prepared


def simulate_dual_buffer(
    times: StageTimes,
    plan: CollectivePlan,
    num_batches: int,
    *,
    durations: Durations | None = None,
    seed: int | None = None,
) -> Simulation:
    """Simulate an epoch; the decisions are those of :class:`~lightning_gnn.collective.BatchSchedule`.

    Args:
        times: What the stages take, and how many CPU workers there are.
        plan: Who prepares the mini-batches; its ``buffers`` and what it is ``ahead`` count.
        num_batches: Mini-batches of the epoch.
        durations: Seconds of each stage of each mini-batch instead of the means of ``times``.
        seed: Without them, draw them from normal distributions with the means and spreads of ``times``.

    Raises:
        ValueError: There is no mini-batch.
    """
    if num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, but is {num_batches}")
    if durations is None:
        means = {stage: getattr(times, stage).mean for stage in PREPARATION_STAGES}
        drawn = None if seed is None else drawn_durations(times, num_batches, seed)
        durations = drawn or (lambda stage, number: means[stage])
    clock = _clock(times, plan, num_batches, durations)
    clock.recorded = True
    clock.run()
    return Simulation(clock.now, Timeline(clock.intervals), clock.steps, clock.on_cpu)


def makespan(times: StageTimes, plan: CollectivePlan, num_batches: int, durations: Durations) -> float:
    """Return the seconds of :func:`simulate_dual_buffer` alone, in half the time."""
    clock = _clock(times, plan, num_batches, durations)
    clock.run()
    return clock.now


def _clock(times: StageTimes, plan: CollectivePlan, num_batches: int, durations: Durations) -> _VirtualClock:
    return _VirtualClock(plan.schedule(num_batches, times.cpu_workers), times.cpu_workers, durations)


def drawn_durations(times: StageTimes, num_batches: int, seed: int) -> Durations:
    """Draw the durations of an epoch from normal distributions, at least 1% of the mean, for any plan."""
    generator = np.random.default_rng(seed)
    drawn = {}
    for stage in PREPARATION_STAGES:
        duration = getattr(times, stage)
        normal = generator.normal(duration.mean, duration.spread, num_batches)
        drawn[stage] = np.maximum(normal, LEAST * duration.mean).tolist()
    return lambda stage, number: drawn[stage][number]


@dataclass
class _VirtualClock:
    """Drives the buffers: CPU workers, PCIe and the training thread, whose time is ``now``."""

    buffer: BatchSchedule
    workers: int
    durations: Durations
    recorded: bool = False
    now: float = 0.0
    pcie_free: float = 0.0
    on_cpu: int = 0
    working: list[tuple[float, int, int]] = field(default_factory=list)
    """A heap of when, what number and which worker."""
    idle: list[tuple[int, float]] = field(default_factory=list)
    """Workers that found nothing to claim, and since when."""
    arrival: dict[int, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    steps: list[ScheduleAction] = field(default_factory=list)

    def run(self) -> None:
        self.idle = [(worker, 0.0) for worker in range(self.workers)]
        self._claim(0.0)
        self._until(0.0)
        take = {"batch": self._batch, "transfer": self._transfer, "train": self._train, "wait": self._wait}
        while (step := self._step()).kind != "end":
            take[step.kind](step)
            if self.working and self.working[0][0] <= self.now:
                self._until(self.now)

    def _step(self) -> ScheduleAction:
        step = self.buffer.next()
        if self.recorded:
            self.steps.append(step)
        if self.idle:
            self._claim(self.now)  # the step may have made room
        return step

    # -- CPU workers

    def _until(self, time: float) -> None:
        """Let the workers come as far as ``time``."""
        while self.working and self.working[0][0] <= time:
            finished, number, worker = heappop(self.working)
            self.buffer.ready(number)
            self.idle.append((worker, finished))
            self._claim(finished)

    def _claim(self, time: float) -> None:
        while self.idle and (number := self.buffer.claim()) is not None:
            self.idle.sort()
            worker, _ = self.idle.pop(0)
            end = time + self.durations("cpu_batching", number)
            if self.recorded:
                self._occupy("CPU", "cpu_batching", number, time, end, worker)
            heappush(self.working, (end, number, worker))

    # -- the training thread

    def _wait(self, step: ScheduleAction) -> None:
        if not self.working:
            raise RuntimeError("the training thread waits for CPU workers that have nothing to do")
        self.now = max(self.now, self.working[0][0])

    def _batch(self, step: ScheduleAction) -> None:
        start = max(self.now, self.pcie_free)  # never together with a transfer: they would share PCIe
        middle = start + self.durations("gpu_batching", step.number)
        self.now = self.pcie_free = middle + self.durations("uva", step.number)
        if not self.recorded:
            return
        resources: tuple[Resource, ...] = ("GPU", "PCIe")
        for resource in resources:
            self._occupy(resource, "gpu_batching", step.number, start, middle)
            self._occupy(resource, "uva", step.number, middle, self.now)

    def _transfer(self, step: ScheduleAction) -> None:
        self.on_cpu += 1
        start = max(self.now, self.pcie_free)
        self.pcie_free = self.arrival[step.number] = start + self.durations("dma", step.number)
        if self.recorded:
            self._occupy("PCIe", "dma", step.number, start, self.pcie_free)

    def _train(self, step: ScheduleAction) -> None:
        start = max(self.now, self.arrival.pop(step.number, 0.0))
        self.now = start + self.durations("model", step.number)
        if self.recorded:
            self._occupy("GPU", "model", step.number, start, self.now)

    # -- records

    def _occupy(self, resource: Resource, stage: str, number: int, start: float, end: float, lane: int = 0) -> None:
        self.intervals.append(Interval(resource, stage, number, start, end, lane))
