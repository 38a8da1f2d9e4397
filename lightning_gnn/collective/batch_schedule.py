"""Who prepares which mini-batch of an epoch: prepared out of order, trained in order (after MorphGL, section 4.2.3).

The simulator and the loader drive the same object: one with a virtual clock, the other with threads and a device.
"""

from __future__ import annotations

from bisect import insort
from typing import Literal, NamedTuple

Route = Literal["cpu", "gpu"]
ActionKind = Literal["batch", "transfer", "train", "wait", "end"]
Sizes = tuple[int, int, int, int, int]  # what BatchSchedule.resize takes


class ScheduleAction(NamedTuple):
    """What the training thread does next."""

    kind: ActionKind
    """``"batch"``: the GPU prepares a mini-batch; ``"transfer"``: one of the CPU's sets out for the GPU; ``"train"``;
    ``"wait"``: until a CPU worker has finished; ``"end"``: of the epoch."""
    number: int = -1  # of the mini-batch, its position in the epoch
    route: Route = "gpu"  # who has prepared it


class BatchSchedule:
    """Two buffers, in host and in device memory, which CPU workers and the GPU fill and the training thread empties.

    The training thread asks for :meth:`next` step after step; CPU workers :meth:`claim` mini-batches and report them
    :meth:`ready`. It holds no lock: who calls it from several threads must.

    A CPU worker takes the first free mini-batch that is trained ``lead`` mini-batches later or later still; the GPU
    prepares what the CPU has left free once it is to be trained, up to ``gpu_buffer_size`` in a row, and looks further
    ahead while a worker is late. Where PCIe is what limits, the two take turns: after ``row`` mini-batches the CPU
    leaves as many as the GPU prepares in a row, behind which its transfers hide. Training is that of a plain loader.

    Args:
        num_batches: Mini-batches of the epoch.
        gpu_buffer_size: ``gbs``, mini-batches that the GPU prepares in a row; 0 to leave it out.
        cpu_buffer_size: ``cbs``, mini-batches in host memory; 0 to leave the CPU out.
        cpu_workers: So many more may be under way on the CPU, less one.
        lead: How far ahead of training the CPU begins; of no effect where the GPU prepares none.
        row: Mini-batches that the CPU takes one after the other; 0: any number, and it leaves none out.
        first: Mini-batches of the epoch that were trained before.

    Raises:
        ValueError: Both buffers have no place, or a number is negative.
    """

    AHEAD = 2
    """Mini-batches of the CPU that come to the device before they are trained."""

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
    ) -> None:
        if min(num_batches, first) < 0 or cpu_workers < 1:
            raise ValueError(
                f"num_batches={num_batches} and first={first} must not be negative, and cpu_workers={cpu_workers} not 0"
            )
        self.num_batches, self.head = num_batches, first
        self.resize(gpu_buffer_size, cpu_buffer_size, cpu_workers, lead, row)
        self.cpu_buffer: list[int] = []
        """Mini-batches in host memory, in the order of the epoch."""
        self.gpu_buffer: dict[int, Route] = {}
        """Mini-batches in device memory, or on their way there, and who prepared them."""
        self._working: set[int] = set()
        self._taken: set[int] = set()  # by anybody, and not trained
        self._run = 0  # so many more the GPU prepares in this row
        self._train_now = False

    def resize(self, gpu_buffer_size: int, cpu_buffer_size: int, cpu_workers: int, lead: int = 0, row: int = 0) -> None:
        """Go on with other sizes; what is prepared stays so."""
        if min(gpu_buffer_size, cpu_buffer_size, lead, row) < 0 or gpu_buffer_size + cpu_buffer_size < 1:
            raise ValueError(
                f"gpu_buffer_size={gpu_buffer_size}, cpu_buffer_size={cpu_buffer_size}, lead={lead}, row={row}: none "
                "may be negative, and a buffer needs a place"
            )
        self.gpu_buffer_size, self.cpu_buffer_size = gpu_buffer_size, cpu_buffer_size
        self.lead, self.row = (lead, row) if gpu_buffer_size else (0, 0)
        self._next_claim = self._claimed = 0
        self._room = cpu_buffer_size + cpu_workers - 1 if cpu_buffer_size else 0

    # -- the CPU's side

    def claim(self) -> int | None:
        """Give a CPU worker its next mini-batch; None while the buffer has no room, or when nothing is left for it."""
        if len(self.cpu_buffer) + len(self._working) >= self._room:
            return None
        number = self._free_from(max(self.head + self.lead, self._next_claim))
        if number == self.num_batches:
            return None
        if self.row:
            self._claimed = 1 + (self._claimed if number == self._next_claim else 0)
            self._next_claim = number + 1
            if self._claimed == self.row:
                self._next_claim, self._claimed = self._next_claim + self.gpu_buffer_size, 0
        self._working.add(number)
        self._taken.add(number)
        return number

    def ready(self, number: int) -> None:
        """Take a mini-batch that a CPU worker has finished."""
        self._working.remove(number)
        insort(self.cpu_buffer, number)

    # -- the training thread's side

    def next(self) -> ScheduleAction:
        """Decide the next step; it counts as taken, unless it is to wait."""
        head = self.head
        if head == self.num_batches:
            return ScheduleAction("end")
        if self._run:
            self._run -= 1
            number = self._free_from(head)
            if number < min(head + self.gpu_buffer_size, self.num_batches):
                return self._batch(number)
            self._run = 0
        if head in self.gpu_buffer:
            reach = head + self.gpu_buffer_size + self.AHEAD
            if not self._train_now and self.cpu_buffer and self.cpu_buffer[0] < reach:
                return self._transfer()
            return self._train()
        if self.cpu_buffer and self.cpu_buffer[0] == head:
            return self._transfer()
        if self.gpu_buffer_size:
            if head not in self._working:
                self._run = self.gpu_buffer_size - 1
                return self._batch(head)
            number = self._free_from(head)
            if number < min(head + self.gpu_buffer_size, self.num_batches):
                return self._batch(number)
        return ScheduleAction("wait")

    def _batch(self, number: int) -> ScheduleAction:
        self.gpu_buffer[number] = "gpu"
        self._taken.add(number)
        return ScheduleAction("batch", number, "gpu")

    def _transfer(self) -> ScheduleAction:
        """Send the first one on its way, while what is on the device is trained (algorithm 4)."""
        number = self.cpu_buffer.pop(0)
        self._train_now = number != self.head
        self.gpu_buffer[number] = "cpu"
        return ScheduleAction("transfer", number, "cpu")

    def _train(self) -> ScheduleAction:
        self._train_now = False
        number = self.head
        self.head += 1
        self._taken.remove(number)
        return ScheduleAction("train", number, self.gpu_buffer.pop(number))

    def _free_from(self, number: int) -> int:
        """Return the first mini-batch from one on that is free, or ``num_batches``."""
        while number in self._taken:
            number += 1
        return min(number, self.num_batches)
