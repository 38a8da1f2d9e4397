"""Scheduling of an epoch: mini-batches are prepared out of order and trained in order (after MorphGL, section 4.2.3).

The simulator and the loader drive the same object, one with a virtual clock, the other with threads and a device.
"""

from __future__ import annotations

import sys
from bisect import insort
from typing import Literal, NamedTuple, Protocol

Route = Literal["cpu", "gpu"]
ActionKind = Literal["batch", "transfer", "train", "wait", "end"]
Sizes = tuple[int, int, int, int, int]  # arguments of BatchSchedule.resize


class ScheduleAction(NamedTuple):
    """Next action of the training thread."""

    kind: ActionKind
    """``"batch"``: prepare a mini-batch on the GPU; ``"transfer"``: start transferring one from the CPU; ``"train"``;
    ``"wait"``: wait until a CPU worker has finished; ``"end"``: the epoch is over."""
    number: int = -1  # position of the mini-batch in the epoch
    route: Route = "gpu"  # processor that prepares it


class Schedule(Protocol):
    """Protocol of schedules; callers must hold a lock."""

    def claim(self) -> int | None:
        """Assign a mini-batch to a CPU worker; return None if nothing can be assigned now."""

    def ready(self, number: int) -> object:
        """Add a mini-batch that a CPU worker has finished."""

    def next(self) -> ScheduleAction:
        """Return the next action of the training thread."""


class BatchSchedule:
    """Two buffers of mini-batches, in host and device memory, filled by CPU workers and GPU (MorphGL's reorder buffer).

    The training thread repeatedly calls :meth:`next`; CPU workers :meth:`claim` mini-batches and report them as
    :meth:`ready`. Not thread-safe; callers must hold a lock.

    A CPU worker claims the first free mini-batch that is at least ``lead`` mini-batches ahead of training. The GPU
    prepares free mini-batches when they are due, up to ``gpu_buffer_size`` in a row, and looks further ahead while a
    worker is late. If PCIe is the bottleneck, the two alternate: after a run of ``row`` mini-batches, the CPU leaves
    the next ``gpu_buffer_size`` to the GPU, which overlaps with the transfers.

    Args:
        num_batches: Number of mini-batches in the epoch.
        gpu_buffer_size: ``gbs``, mini-batches that the GPU prepares in a row; 0 disables the GPU.
        cpu_buffer_size: ``cbs``, mini-batches in host memory; 0 disables the CPU.
        cpu_workers: Number of CPU workers; up to ``cpu_workers - 1`` further mini-batches may be in progress.
        lead: Minimum distance from training at which the CPU starts; ignored without a GPU.
        row: Length of the CPU's runs of consecutive mini-batches; 0 disables alternation.
        first: Number of mini-batches of the epoch that are already trained.
        most_ahead: Maximum distance from training of the mini-batches in preparation; limits ``lead``.

    Raises:
        ValueError: Both buffers have size 0, or a number is negative.
    """

    AHEAD = 2
    """Maximum number of transferred mini-batches on the device that wait for training."""

    def __init__(
        self,
        num_batches: int,
        gpu_buffer_size: int,
        cpu_buffer_size: int,
        cpu_workers: int = 1,
        lead: int = 0,
        row: int = 0,
        *,
        first: int = 0,
        most_ahead: int = sys.maxsize,
    ) -> None:
        if min(num_batches, first) < 0 or cpu_workers < 1:
            raise ValueError(
                f"num_batches={num_batches} and first={first} must not be negative, and cpu_workers={cpu_workers} not 0"
            )
        self.num_batches, self.head, self._most_ahead = num_batches, first, most_ahead
        self.resize(gpu_buffer_size, cpu_buffer_size, cpu_workers, lead, row)
        self.cpu_buffer: list[int] = []  # mini-batches in host memory, in epoch order
        self.gpu_buffer: dict[int, Route] = {}  # those on the device or in transfer, with the processor that prepares
        self._in_progress: set[int] = set()  # on CPU workers
        self._assigned: set[int] = set()  # to CPU or GPU, and not trained yet
        self._gpu_run_left = 0  # mini-batches left in the GPU's current run
        self._must_train = False  # whether training is next, while a transfer runs

    def resize(self, gpu_buffer_size: int, cpu_buffer_size: int, cpu_workers: int, lead: int = 0, row: int = 0) -> None:
        """Change the sizes; prepared mini-batches are retained."""
        if min(gpu_buffer_size, cpu_buffer_size, lead, row) < 0 or gpu_buffer_size + cpu_buffer_size < 1:
            raise ValueError(
                f"gpu_buffer_size={gpu_buffer_size}, cpu_buffer_size={cpu_buffer_size}, lead={lead}, row={row} must "
                "not be negative, and at least one buffer size must be positive"
            )
        self.gpu_buffer_size, self.cpu_buffer_size = min(gpu_buffer_size, self._most_ahead), cpu_buffer_size
        self.lead, self.row = (min(lead, self._most_ahead - 1), row) if gpu_buffer_size else (0, 0)
        self._next_claim = self._cpu_run_length = 0
        self._host_capacity = cpu_buffer_size + cpu_workers - 1 if cpu_buffer_size else 0

    # -- called for CPU workers

    def claim(self) -> int | None:
        """Assign the next mini-batch to a CPU worker; return None if the buffer is full or none is left."""
        is_full = len(self.cpu_buffer) + len(self._in_progress) >= self._host_capacity
        if is_full and (self.gpu_buffer_size or self.head in self._assigned):
            return None  # without a GPU, which was there before a resize, the CPU must fill the gap at the head
        number = self._first_free(max(self.head + self.lead, self._next_claim))
        if number >= min(self.num_batches, self.head + self._most_ahead):
            return None
        if self.row:
            self._cpu_run_length = 1 + (self._cpu_run_length if number == self._next_claim else 0)
            self._next_claim = number + 1
            if self._cpu_run_length == self.row:
                self._next_claim, self._cpu_run_length = self._next_claim + self.gpu_buffer_size, 0
        self._in_progress.add(number)
        self._assigned.add(number)
        return number

    def ready(self, number: int) -> None:
        """Add a mini-batch that a CPU worker has finished to the host buffer."""
        self._in_progress.remove(number)
        insort(self.cpu_buffer, number)

    # -- called by the training thread

    def next(self) -> ScheduleAction:
        """Return the next action and record it as done, except for ``"wait"``."""
        head = self.head
        if head == self.num_batches:
            return ScheduleAction("end")
        if self._gpu_run_left:
            self._gpu_run_left -= 1
            number = self._first_free(head)
            if number < min(head + self.gpu_buffer_size, self.num_batches):
                return self._prepare_on_gpu(number)
            self._gpu_run_left = 0
        if head in self.gpu_buffer:
            limit = head + self.gpu_buffer_size + self.AHEAD
            if not self._must_train and self.cpu_buffer and self.cpu_buffer[0] < limit:
                return self._transfer()
            return self._train()
        if self.cpu_buffer and self.cpu_buffer[0] == head:
            return self._transfer()
        if self.gpu_buffer_size:
            if head not in self._in_progress:
                self._gpu_run_left = self.gpu_buffer_size - 1
                return self._prepare_on_gpu(head)
            number = self._first_free(head)
            if number < min(head + self.gpu_buffer_size, self.num_batches):
                return self._prepare_on_gpu(number)
        return ScheduleAction("wait")

    def _prepare_on_gpu(self, number: int) -> ScheduleAction:
        self.gpu_buffer[number] = "gpu"
        self._assigned.add(number)
        return ScheduleAction("batch", number, "gpu")

    def _transfer(self) -> ScheduleAction:
        """Transfer the first mini-batch of the host buffer while the device trains another one (algorithm 4)."""
        number = self.cpu_buffer.pop(0)
        self._must_train = number != self.head
        self.gpu_buffer[number] = "cpu"
        return ScheduleAction("transfer", number, "cpu")

    def _train(self) -> ScheduleAction:
        self._must_train = False
        number = self.head
        self.head += 1
        self._assigned.remove(number)
        return ScheduleAction("train", number, self.gpu_buffer.pop(number))

    def _first_free(self, number: int) -> int:
        """Return the first unassigned mini-batch from ``number`` on, or ``num_batches``."""
        while number in self._assigned:
            number += 1
        return min(number, self.num_batches)
