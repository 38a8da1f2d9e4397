"""The decisions of dual-buffer scheduling (MorphGL, algorithms 1 to 4), without anything that takes time.

The simulator and the loader drive the same object: one with a virtual clock, the other with threads and a device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

Route = Literal["cpu", "gpu"]
Phase = Literal["filling", "blocking", "flushing"]
Kind = Literal["batch", "transfer", "train", "wait", "end"]


@dataclass(frozen=True)
class Step:
    """What the training thread does next.

    Args:
        kind: ``"batch"``: the GPU prepares a mini-batch; ``"transfer"``: one that the CPU has prepared sets out for the
            GPU, and nobody waits for its arrival; ``"train"``; ``"wait"``: until a CPU worker has finished;
            ``"end"``: of the epoch.
        number: Of the mini-batch, its position in the epoch.
        route: Who has prepared it.
        phase: Of the schedule.
    """

    kind: Kind
    number: int = -1
    route: Route = "gpu"
    phase: Phase = "filling"


@dataclass(frozen=True)
class Overlap:
    """A cycle of the three phases: mini-batches ``[first, middle)`` by the GPU, ``[middle, stop)`` by the CPU."""

    first: int
    middle: int
    stop: int


def overlaps(num_batches: int, gpu_buffer_size: int, cpu_buffer_size: int) -> list[Overlap]:
    """Cut an epoch into overlaps; the last one shares out what remains in the same proportion.

    Args:
        num_batches: Mini-batches of the epoch.
        gpu_buffer_size: Those of the GPU in each; 0: the CPU prepares all.
        cpu_buffer_size: Those of the CPU in each; 0: the GPU prepares all.
    """
    size = gpu_buffer_size + cpu_buffer_size
    found = []
    for first in range(0, num_batches, size):
        stop = min(first + size, num_batches)
        on_gpu = gpu_buffer_size if stop - first == size else round((stop - first) * gpu_buffer_size / size)
        found.append(Overlap(first, first + on_gpu, stop))
    return found


class DualBuffer:
    """A CPU buffer and a GPU buffer, and the three phases: filling, blocking, flushing.

    The training thread asks for :meth:`next` step after step; CPU workers :meth:`claim` mini-batches and report them
    :meth:`ready`. It holds no lock: who calls it from several threads must.

    With ``deterministic`` each overlap is ``gpu_buffer_size`` mini-batches of the GPU, then ``cpu_buffer_size`` of the
    CPU, in the order of the epoch, whatever the clock says: training is that of a plain loader. Without, both take the
    next mini-batch of the epoch when they have room, and while only the CPU lags, one of the GPU's is trained and
    replaced (section 4.2.3, in the text alone).

    At the end of the epoch the last overlap is smaller; without ``deterministic`` the CPU leaves the last few to the
    GPU, and whatever is in the buffers is flushed.

    Args:
        num_batches: Mini-batches of the epoch.
        gpu_buffer_size: ``gbs``, mini-batches in device memory; 0 for a plain pipeline of what the CPU prepares.
        cpu_buffer_size: ``cbs``, mini-batches in host memory; 0 to leave the CPU out.
        cpu_workers: So many more may be under way on the CPU, less one.
        first: Mini-batches of the epoch that were trained before.
        done: Further mini-batches that are to be left out.
        deterministic: Whether the order is that of the epoch.

    Raises:
        ValueError: Both buffers have no place, or a number is negative.
    """

    AHEAD = 2
    """Mini-batches that a plain pipeline brings to the device before they are trained."""

    def __init__(
        self,
        num_batches: int,
        gpu_buffer_size: int,
        cpu_buffer_size: int,
        cpu_workers: int = 1,
        first: int = 0,
        done: frozenset[int] = frozenset(),
        deterministic: bool = True,
    ) -> None:
        if min(num_batches, gpu_buffer_size, cpu_buffer_size, first) < 0 or gpu_buffer_size + cpu_buffer_size < 1:
            raise ValueError(
                f"num_batches={num_batches}, gpu_buffer_size={gpu_buffer_size}, cpu_buffer_size={cpu_buffer_size}, "
                f"first={first}: none may be negative, and a buffer needs a place"
            )
        if cpu_workers < 1:
            raise ValueError(f"cpu_workers must be at least 1, but is {cpu_workers}")
        self.gpu_buffer_size = gpu_buffer_size
        self.cpu_buffer_size = cpu_buffer_size
        self.deterministic = deterministic
        self.phase: Phase = "filling"
        self.cpu_buffer: list[int] = []
        """Mini-batches in host memory."""
        self.gpu_buffer: deque[tuple[int, Route]] = deque()
        """Mini-batches in device memory, or on their way there."""
        self._in_flight: set[int] = set()
        self._cpu_workers = cpu_workers
        self._room = cpu_buffer_size + cpu_workers - 1
        self._flushing: deque[int] = deque()  # what this flush brings to the device
        self._train_now = False
        self._for_gpu: deque[int] = deque()
        self._for_cpu: deque[int] = deque()
        self._shares: deque[tuple[deque[int], deque[int]]] = deque()  # of the overlaps to come
        self._seen = 0  # so many of the CPU's share of this overlap have been found in host memory
        if not deterministic:
            self._for_gpu = self._for_cpu = deque(n for n in range(first, num_batches) if n not in done)
            return  # both take from the same
        for overlap in overlaps(num_batches, gpu_buffer_size, cpu_buffer_size):
            on_gpu = deque(n for n in range(overlap.first, overlap.middle) if n >= first and n not in done)
            on_cpu = deque(n for n in range(overlap.middle, overlap.stop) if n >= first and n not in done)
            self._for_cpu.extend(on_cpu)
            if on_gpu or on_cpu:
                self._shares.append((on_gpu, on_cpu))

    # -- the CPU's side

    def claim(self) -> int | None:
        """Give a CPU worker its next mini-batch; None while the buffer has no room, or when nothing is left for it."""
        if not self._cpu_may_claim():
            return None
        number = self._for_cpu.popleft()
        self._in_flight.add(number)
        return number

    def ready(self, number: int) -> None:
        """Take a mini-batch that a CPU worker has finished."""
        self._in_flight.remove(number)
        self.cpu_buffer.append(number)

    @property
    def cpu_blocked(self) -> bool:
        """Whether the CPU could go on, if only its buffer had room."""
        return self._left_for_cpu() and not self._has_room()

    # -- the training thread's side

    def next(self) -> Step:
        """Decide the next step; it counts as taken, unless it is to wait."""
        if not self.gpu_buffer_size:
            return self._pipe()
        if self._train_now or (self.phase == "flushing" and self.gpu_buffer and not self._flushing):
            return self._train()
        if self._flushing:
            return self._transfer(self._flushing.popleft())
        return self._fill_in_order() if self.deterministic else self._fill_as_ready()

    def _fill_in_order(self) -> Step:
        if not self._shares:
            return Step("end", phase=self.phase)
        on_gpu, on_cpu = self._shares[0]
        while self._seen < len(on_cpu) and on_cpu[self._seen] in self.cpu_buffer:
            self._seen += 1
        full = self._seen == len(on_cpu)
        if on_gpu:
            return self._batch(on_gpu.popleft(), "blocking" if full else "filling")
        if not full:
            return self._wait()
        self._shares.popleft()
        self._seen = 0
        return self._flush(on_cpu)

    def _fill_as_ready(self) -> Step:
        full = len(self.cpu_buffer) >= self.cpu_buffer_size
        if len(self.gpu_buffer) < self.gpu_buffer_size and self._for_gpu:
            return self._batch(self._for_gpu.popleft(), "blocking" if full else "filling")
        if self._for_gpu and not full and (self._in_flight or self._cpu_may_claim()):
            self.phase = "blocking"  # only the CPU lags: train one, and replace it
            return self._train()
        if self.cpu_buffer or self.gpu_buffer:
            return self._flush(deque(self.cpu_buffer))
        return self._wait() if self._in_flight or self._cpu_may_claim() else Step("end", phase=self.phase)

    def _pipe(self) -> Step:
        """Nothing is prepared by the GPU: bring each mini-batch over as soon as it is ready, a few ahead."""
        while self.deterministic and self._shares and not self._shares[0][1]:
            self._shares.popleft()
        self.phase = "flushing"
        if len(self.gpu_buffer) < self.AHEAD:
            if not self.deterministic and self.cpu_buffer:
                return self._transfer(self.cpu_buffer[0])
            if self.deterministic and self._shares and self._shares[0][1][0] in self.cpu_buffer:
                return self._transfer(self._shares[0][1].popleft())
        if self.gpu_buffer:
            return self._train()
        left = self._shares if self.deterministic else self._in_flight or self._for_cpu
        return Step("wait", phase="blocking") if left else Step("end", phase="flushing")

    def _flush(self, numbers: deque[int]) -> Step:
        self.phase = "flushing"
        self._flushing = numbers
        return self.next()

    def _batch(self, number: int, phase: Phase) -> Step:
        self.phase = phase
        self.gpu_buffer.append((number, "gpu"))
        return Step("batch", number, "gpu", phase)

    def _transfer(self, number: int) -> Step:
        """Send one on its way while the head of the GPU's buffer is trained, whose place it takes (algorithm 4)."""
        self._train_now = True
        self.cpu_buffer.remove(number)
        self.gpu_buffer.append((number, "cpu"))
        return Step("transfer", number, "cpu", self.phase)

    def _train(self) -> Step:
        self._train_now = False
        number, route = self.gpu_buffer.popleft()
        return Step("train", number, route, self.phase)

    def _wait(self) -> Step:
        self.phase = "blocking"
        return Step("wait", phase="blocking")

    def _cpu_may_claim(self) -> bool:
        return self._left_for_cpu() and self._has_room()

    def _has_room(self) -> bool:
        return len(self.cpu_buffer) + len(self._in_flight) < self._room

    def _left_for_cpu(self) -> bool:
        if not self.cpu_buffer_size or not self._for_cpu:
            return False
        # At the end of the epoch the GPU would be done before a mini-batch that the CPU begins now, for which a worker
        # takes as long as all of them for one each, and the GPU for gbs / cbs times as many.
        return (
            self.deterministic or len(self._for_cpu) * self.cpu_buffer_size >= self.gpu_buffer_size * self._cpu_workers
        )
