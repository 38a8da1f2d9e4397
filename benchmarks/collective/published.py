"""MorphGL as published, as a baseline: its schedule (algorithms 1 to 4, and the text of section 4.2.3) and planner.

Mini-batches are trained as soon as they are ready, not in epoch order. Equation 6 is repaired, as in the library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import floor

from lightning_gnn.collective.batch_schedule import Route, ScheduleAction
from lightning_gnn.collective.dispatcher import initial_ratio
from lightning_gnn.collective.plan import StageTimes

Simulate = Callable[[int, int], tuple[float, float, float]]


class DualBuffer:
    """A CPU buffer and a GPU buffer with three phases: filling, blocking, flushing.

    Both processors claim the next mini-batch of the epoch when they have a free slot. While only the CPU lags, one of
    the GPU's mini-batches is trained and replaced. The CPU leaves the last few mini-batches to the GPU.
    """

    AHEAD = 2
    """Mini-batches that a plain pipeline transfers to the device ahead of training."""

    def __init__(self, num_batches: int, gpu_buffer_size: int, cpu_buffer_size: int, cpu_workers: int = 1) -> None:
        self.gpu_buffer_size, self.cpu_buffer_size = gpu_buffer_size, cpu_buffer_size
        self.cpu_buffer: list[int] = []
        self.gpu_buffer: deque[tuple[int, Route]] = deque()
        self.phase = "filling"
        self._in_flight: set[int] = set()
        self._workers = cpu_workers
        self._flushing: deque[int] = deque()
        self._train_now = False
        self._left = deque(range(num_batches))

    def claim(self) -> int | None:
        """Assign the next mini-batch to a CPU worker; return None if the buffer is full or none is left."""
        if not self._may_claim():
            return None
        number = self._left.popleft()
        self._in_flight.add(number)
        return number

    def ready(self, number: int) -> None:
        """Add a mini-batch that a CPU worker has finished."""
        self._in_flight.remove(number)
        self.cpu_buffer.append(number)

    @property
    def cpu_blocked(self) -> bool:
        """Whether only a full buffer prevents the CPU from continuing."""
        return self._has_left() and not self._has_room()

    def next(self) -> ScheduleAction:
        """Return the next action of the training thread."""
        if not self.gpu_buffer_size:
            return self._pipe()
        if self._train_now or (self.phase == "flushing" and self.gpu_buffer and not self._flushing):
            return self._train()
        if self._flushing:
            return self._transfer(self._flushing.popleft())
        full = len(self.cpu_buffer) >= self.cpu_buffer_size
        if len(self.gpu_buffer) < self.gpu_buffer_size and self._left:
            self.phase = "blocking" if full else "filling"
            number = self._left.popleft()
            self.gpu_buffer.append((number, "gpu"))
            return ScheduleAction("batch", number, "gpu")
        if self._left and not full and (self._in_flight or self._may_claim()):
            self.phase = "blocking"
            return self._train()
        if self.cpu_buffer or self.gpu_buffer:
            self.phase, self._flushing = "flushing", deque(self.cpu_buffer)
            return self.next()
        return ScheduleAction("wait") if self._in_flight or self._may_claim() else ScheduleAction("end")

    def _pipe(self) -> ScheduleAction:
        self.phase = "flushing"
        if len(self.gpu_buffer) < self.AHEAD and self.cpu_buffer:
            return self._transfer(self.cpu_buffer[0])
        if self.gpu_buffer:
            return self._train()
        return ScheduleAction("wait") if self._in_flight or self._left else ScheduleAction("end")

    def _transfer(self, number: int) -> ScheduleAction:
        self._train_now = True
        self.cpu_buffer.remove(number)
        self.gpu_buffer.append((number, "cpu"))
        return ScheduleAction("transfer", number, "cpu")

    def _train(self) -> ScheduleAction:
        self._train_now = False
        number, route = self.gpu_buffer.popleft()
        return ScheduleAction("train", number, route)

    def _may_claim(self) -> bool:
        return self._has_left() and self._has_room()

    def _has_room(self) -> bool:
        return len(self.cpu_buffer) + len(self._in_flight) < self.cpu_buffer_size + self._workers - 1

    def _has_left(self) -> bool:
        if not self.cpu_buffer_size or not self._left:
            return False
        # The GPU would finish the epoch before a worker finishes a mini-batch started now.
        return len(self._left) * self.cpu_buffer_size >= self.gpu_buffer_size * self._workers


def buffer_size(gpu_buffer_size: int, x: float) -> int:
    """Return ``cbs = floor(gbs / x)``, at least 1."""
    return max(1, floor(min(gpu_buffer_size / x, 1e9)))


def published_plan(times: StageTimes, gpu_buffer_size: int, num_batches: int, simulate: Simulate) -> tuple[int, int]:
    """Return ``gbs`` and ``cbs``: ``floor(gbs / x)``, then adjusted by one according to the simulator."""
    ratio = initial_ratio(times)
    if ratio == 0 or times.model.mean > max(times.cpu, times.dma.mean):
        return 0, max(gpu_buffer_size, times.cpu_workers)
    size = min(buffer_size(gpu_buffer_size, ratio), num_batches)
    seen: dict[int, float] = {}
    while 1 <= size <= num_batches and size not in seen:
        seen[size], cpu_lag, gpu_lag = simulate(gpu_buffer_size, size)
        if abs(cpu_lag - gpu_lag) < times.gpu:
            break
        size += 1 if gpu_lag > cpu_lag else -1
    if size < 1:
        return 1, 0  # the CPU is too slow to contribute
    return gpu_buffer_size, min(seen, key=lambda each: seen[each])
