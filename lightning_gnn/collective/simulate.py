"""Simulation of the schedule with a virtual clock (MorphGL, section 4.2.3, performance model)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from lightning_gnn.collective.batch_schedule import Schedule, ScheduleAction
from lightning_gnn.collective.plan import PREPARATION_STAGES, CollectivePlan, StageTimes
from lightning_gnn.runtime.timeline import Interval, Resource, Timeline

Durations = Callable[[str, int], float]  # seconds of a stage, given its name and the mini-batch's number

MIN_DURATION_FRACTION = 0.01  # lower bound of random durations, relative to the mean


@dataclass
class Simulation:
    """Result of a simulated epoch."""

    makespan: float  # seconds until the last mini-batch is trained
    timeline: Timeline
    """All stages of all mini-batches, with CPU stages in their worker's lane; batching on the GPU appears twice, as it
    occupies the GPU and PCIe (equation 1)."""
    steps: list[ScheduleAction]  # actions of the training thread, in order
    on_cpu: int  # number of mini-batches prepared by the CPU


def simulate_dual_buffer(
    times: StageTimes,
    plan: CollectivePlan,
    num_batches: int,
    *,
    durations: Durations | None = None,
    seed: int | None = None,
) -> Simulation:
    """Simulate an epoch under a plan.

    Args:
        times: Stage times and number of CPU workers.
        plan: The plan to simulate.
        num_batches: Number of mini-batches in the epoch.
        durations: Seconds of each stage and mini-batch; by default the means of ``times``.
        seed: Without ``durations``, draw them from normal distributions with the means and spreads of ``times``.

    Raises:
        ValueError: ``num_batches`` is less than 1.
    """
    if num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, but is {num_batches}")
    if durations is None:
        means = {stage: getattr(times, stage).mean for stage in PREPARATION_STAGES}
        drawn = None if seed is None else draw_durations(times, num_batches, seed)
        durations = drawn or (lambda stage, number: means[stage])
    return run_schedule(plan.create_schedule(num_batches, times.cpu_workers), times.cpu_workers, durations)


def run_schedule(schedule: Schedule, workers: int, durations: Durations) -> Simulation:
    """Simulate an epoch under any schedule, with a number of CPU workers and the seconds of each stage."""
    clock = VirtualClock(schedule, workers, durations, is_recording=True)
    clock.run()
    return Simulation(clock.now, Timeline(clock.intervals), clock.steps, clock.on_cpu)


def makespan(times: StageTimes, plan: CollectivePlan, num_batches: int, durations: Durations) -> float:
    """Return only the makespan of :func:`simulate_dual_buffer`, in half the time."""
    clock = VirtualClock(plan.create_schedule(num_batches, times.cpu_workers), times.cpu_workers, durations)
    clock.run()
    return clock.now


def draw_durations(times: StageTimes, num_batches: int, seed: int) -> Durations:
    """Draw an epoch's durations from normal distributions, bounded below by 1% of the mean."""
    generator = np.random.default_rng(seed)
    drawn = {}
    for stage in PREPARATION_STAGES:
        duration = getattr(times, stage)
        normal = generator.normal(duration.mean, duration.spread, num_batches)
        drawn[stage] = np.maximum(normal, MIN_DURATION_FRACTION * duration.mean).tolist()
    return lambda stage, number: drawn[stage][number]


@dataclass
class VirtualClock:
    """Simulates CPU workers, PCIe and the training thread, whose current time is ``now``, on a schedule."""

    schedule: Schedule
    workers: int
    durations: Durations
    is_recording: bool = False
    now: float = 0.0
    pcie_free: float = 0.0
    on_cpu: int = 0
    working: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (end time, mini-batch, worker)
    idle: list[tuple[int, float]] = field(default_factory=list)  # (worker, time since which it is idle)
    arrival: dict[int, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    steps: list[ScheduleAction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.idle = [(worker, 0.0) for worker in range(self.workers)]
        self._claim(0.0)
        self._run_workers_until(0.0)

    def run(self) -> None:
        """Simulate until the schedule ends."""
        while self.train_next():
            pass

    def train_next(self) -> bool:
        """Simulate until the next mini-batch is trained; return False if the schedule ends before."""
        execute = {"batch": self._batch, "transfer": self._transfer, "train": self._train, "wait": self._wait}
        while True:
            if self.working and self.working[0][0] <= self.now:
                self._run_workers_until(self.now)
            step = self._step()
            if step.kind == "end":
                return False
            execute[step.kind](step)
            if step.kind == "train":
                return True

    def _step(self) -> ScheduleAction:
        step = self.schedule.next()
        if self.is_recording:
            self.steps.append(step)
        if self.idle:
            self._claim(self.now)  # the step may have freed a slot
        return step

    # -- CPU workers

    def _run_workers_until(self, time: float) -> None:
        """Process the workers' events up to ``time``."""
        while self.working and self.working[0][0] <= time:
            finished, number, worker = heappop(self.working)
            self.schedule.ready(number)
            self.idle.append((worker, finished))
            self._claim(finished)

    def _claim(self, time: float) -> None:
        while self.idle and (number := self.schedule.claim()) is not None:
            self.idle.sort()
            worker, _ = self.idle.pop(0)
            end = time + self.durations("cpu_batching", number)
            if self.is_recording:
                self._record_interval("CPU", "cpu_batching", number, time, end, worker)
            heappush(self.working, (end, number, worker))

    # -- the training thread

    def _wait(self, step: ScheduleAction) -> None:
        if not self.working:
            raise RuntimeError("deadlock: the training thread waits for CPU workers, but all of them are idle")
        self.now = max(self.now, self.working[0][0])

    def _batch(self, step: ScheduleAction) -> None:
        start = max(self.now, self.pcie_free)  # not concurrent with a transfer, which also uses PCIe
        middle = start + self.durations("gpu_batching", step.number)
        self.now = self.pcie_free = middle + self.durations("uva", step.number)
        if not self.is_recording:
            return
        resources: tuple[Resource, ...] = ("GPU", "PCIe")
        for resource in resources:
            self._record_interval(resource, "gpu_batching", step.number, start, middle)
            self._record_interval(resource, "uva", step.number, middle, self.now)

    def _transfer(self, step: ScheduleAction) -> None:
        self.on_cpu += 1
        start = max(self.now, self.pcie_free)
        self.pcie_free = self.arrival[step.number] = start + self.durations("dma", step.number)
        if self.is_recording:
            self._record_interval("PCIe", "dma", step.number, start, self.pcie_free)

    def _train(self, step: ScheduleAction) -> None:
        start = max(self.now, self.arrival.pop(step.number, 0.0))
        self.now = start + self.durations("model", step.number)
        if self.is_recording:
            self._record_interval("GPU", "model", step.number, start, self.now)

    # -- records

    def _record_interval(
        self, resource: Resource, stage: str, number: int, start: float, end: float, lane: int = 0
    ) -> None:
        self.intervals.append(Interval(resource, stage, number, start, end, lane))
