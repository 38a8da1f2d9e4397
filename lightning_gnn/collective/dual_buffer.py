"""Scheduling as published (MorphGL, algorithms 1 to 4): mini-batches are trained as they become ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from lightning_gnn.collective.batch_schedule import BatchSchedule, Route, ScheduleAction


class DualBuffer:
    """A CPU buffer and a GPU buffer with three phases: filling, blocking, flushing. Not thread-safe.

    Both processors claim the next mini-batch of the epoch when they have a free slot. While only the CPU lags, one of
    the GPU's mini-batches is trained and replaced, as in the text of section 4.2.3. Beyond the paper, several workers
    fill the CPU's buffer, and leave the last few mini-batches to the GPU.

    Args:
        numbers: Mini-batches to train, in the order of the epoch.
        gpu_buffer_size, cpu_buffer_size, cpu_workers: See :class:`BatchSchedule`; without a GPU, a plain pipeline.
    """

    def __init__(
        self, numbers: Iterable[int], gpu_buffer_size: int, cpu_buffer_size: int, cpu_workers: int = 1, *unused: int
    ) -> None:
        self.cpu_buffer: list[int] = []
        self.gpu_buffer: deque[tuple[int, Route]] = deque()
        self._in_progress: set[int] = set()
        self._left = deque(numbers)
        self.resize(gpu_buffer_size, cpu_buffer_size, cpu_workers)

    def resize(self, gpu_buffer_size: int, cpu_buffer_size: int, cpu_workers: int, *unused: int) -> None:
        """Change the sizes and begin with filling, retaining prepared mini-batches; there is neither lead nor row."""
        self.gpu_buffer_size, self.cpu_buffer_size, self._workers = gpu_buffer_size, cpu_buffer_size, cpu_workers
        self.phase = "filling"
        self._to_transfer: deque[int] = deque()  # in this flush
        self._must_train = False  # whether training is next, while a transfer runs

    # -- called for CPU workers

    def claim(self) -> int | None:
        """Assign the next mini-batch to a CPU worker; return None if the buffer is full or none is left."""
        if not self._may_claim:
            return None
        number = self._left.popleft()
        self._in_progress.add(number)
        return number

    def ready(self, number: int) -> None:
        """Add a mini-batch that a CPU worker has finished to the CPU's buffer."""
        self._in_progress.remove(number)
        self.cpu_buffer.append(number)

    # -- called by the training thread

    def next(self) -> ScheduleAction:
        """Return the next action and record it as done, except for ``"wait"``."""
        if not self.gpu_buffer_size:
            return self._next_of_pipeline()
        if self._must_train or (self.phase == "flushing" and self.gpu_buffer and not self._to_transfer):
            return self._train()
        if self._to_transfer:
            return self._transfer(self._to_transfer.popleft())
        full = len(self.cpu_buffer) >= self.cpu_buffer_size
        if len(self.gpu_buffer) < self.gpu_buffer_size and self._left:
            self.phase = "blocking" if full else "filling"
            number = self._left.popleft()
            self.gpu_buffer.append((number, "gpu"))
            return ScheduleAction("batch", number, "gpu")
        if self._left and not full and (self._in_progress or self._may_claim):
            self.phase = "blocking"
            return self._train()
        if self.cpu_buffer or self.gpu_buffer:
            self.phase, self._to_transfer = "flushing", deque(self.cpu_buffer)
            return self.next()
        return ScheduleAction("wait") if self._in_progress or self._may_claim else ScheduleAction("end")

    def _next_of_pipeline(self) -> ScheduleAction:
        self.phase = "flushing"
        if len(self.gpu_buffer) < BatchSchedule.AHEAD and self.cpu_buffer:
            return self._transfer(self.cpu_buffer[0])
        if self.gpu_buffer:
            return self._train()
        return ScheduleAction("wait") if self._in_progress or self._left else ScheduleAction("end")

    def _transfer(self, number: int) -> ScheduleAction:
        self._must_train = True
        self.cpu_buffer.remove(number)
        self.gpu_buffer.append((number, "cpu"))
        return ScheduleAction("transfer", number, "cpu")

    def _train(self) -> ScheduleAction:
        self._must_train = False
        number, route = self.gpu_buffer.popleft()
        return ScheduleAction("train", number, route)

    @property
    def _may_claim(self) -> bool:
        if not self.cpu_buffer_size or not self._left:
            return False
        has_room = len(self.cpu_buffer) + len(self._in_progress) < self.cpu_buffer_size + self._workers - 1
        # Otherwise the GPU would finish the epoch before a worker finishes a mini-batch started now.
        return has_room and len(self._left) * self.cpu_buffer_size >= self.gpu_buffer_size * self._workers
