"""Both routes to the device: it prepares mini-batches itself (1), or fetches the CPU's from page-locked memory (0).

The page-locked memory goes round in a ring: torch's own allocator of such memory rounds sizes up to powers of two,
hands nothing back, and bounds nothing.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TypeGuard

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import BaseData

from lightning_gnn.graph.stores import AttributeName
from lightning_gnn.loading.batch import BatchTask, PreparedBatch
from lightning_gnn.loading.collate import Allocator
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch.lookahead import LookaheadWindow
from lightning_gnn.nn.sampled_edges import moved
from lightning_gnn.runtime.devices import record_stream, works
from lightning_gnn.runtime.timeline import Clock, Recorder, profiled

_SPARE = 8  # buffers are so many parts larger by one than what they are made for: mini-batches differ a little in size
_STEPS_AHEAD = 2  # steps that the host may queue: torch's allocator keeps a mini-batch until it has seen its step end


class PinnedBuffer:
    """The memory of one mini-batch: a buffer for each of its attributes, which grows when it must."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate  # returns that many bytes, uint8 [n]
        self._blocks: dict[AttributeName, Tensor] = {}
        self.read_until: torch.Event | None = None
        """Event after which a device no longer reads it."""

    def empty(self, name: AttributeName, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in the buffer of that name, whose content is lost."""
        size = math.prod(shape) * dtype.itemsize
        block = self._blocks.get(name)
        if block is None or block.numel() < size:
            self._blocks.pop(name, None)
            del block
            block = self._blocks[name] = self._allocate(size + size // _SPARE)
        return block[:size].view(dtype).view(tuple(shape))

    def owns(self, tensor: Tensor) -> bool:
        """Whether a strided tensor lies in one of the buffers."""
        address = tensor.untyped_storage().data_ptr()
        return any(block.untyped_storage().data_ptr() == address for block in self._blocks.values())

    def hold(self, batch: BaseData) -> BaseData:
        """Bring those tensors of a mini-batch into the buffers that are not there yet."""
        numbers = count()

        def held(tensor: Tensor) -> Tensor:
            number = next(numbers)
            if not _is_plain(tensor) or tensor.requires_grad or not tensor.numel() or self.owns(tensor):
                return tensor
            return self.empty(f"#{number}", tensor.shape, tensor.dtype).copy_(tensor)

        return batch.apply(held)


class PinnedBufferRing:
    """Slots that go round: a worker fills one, the device reads it, the next worker gets it; safe across threads."""

    def __init__(self, device: torch.device, capacity: int = 1) -> None:
        self.device = device
        self._capacity = capacity
        self.pins = device.type != "cpu" and works(lambda: torch.empty(1, pin_memory=True))
        self._lock = threading.Lock()
        self._idle: deque[PinnedBuffer] = deque()
        self._taken = 0

    @property
    def capacity(self) -> int:
        """Slots beyond which no more are made; where it gets smaller, idle ones are freed once they have been read."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        with self._lock:
            self._capacity = capacity
            surplus = [self._idle.popleft() for _ in range(min(len(self._idle), self.num_slots - capacity))]
        for slot in surplus:
            if slot.read_until is not None:
                slot.read_until.synchronize()

    @property
    def num_slots(self) -> int:
        """Slots that exist."""
        return len(self._idle) + self._taken

    def take(self) -> PinnedBuffer:
        """Return a slot that is not being read; it never waits for one that is taken, which could be for ever."""
        with self._lock:
            self._taken += 1
            slot = next((slot for slot in self._idle if _is_read(slot)), None)
            if slot is None and self._idle and self.num_slots > self.capacity:
                slot = self._idle[0]
            if slot is not None:
                self._idle.remove(slot)
        if slot is None:
            return PinnedBuffer(self._allocate)
        if slot.read_until is not None:
            slot.read_until.synchronize()
            slot.read_until = None
        return slot

    def give_back(self, slot: PinnedBuffer, read_until: torch.Event | None = None) -> None:
        """Return a slot, which a device may read until an event."""
        slot.read_until = read_until
        with self._lock:
            self._taken -= 1
            if self.num_slots < self.capacity:
                self._idle.append(slot)

    def clear(self) -> None:
        """Free the idle slots, once they have been read; one that is given back later is freed too."""
        self.capacity = 0  # the next epoch sets it

    def _allocate(self, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pins)
        except RuntimeError as error:
            raise RuntimeError(
                f"page-locked memory for mini-batches, {num_bytes / 1e6:.1f} MB more, was refused "
                f"({str(error).splitlines()[0]}); lower gpu_buffer_size, num_workers or batch_size"
            ) from error


@dataclass
class HostBatch:
    """A mini-batch that a CPU worker has prepared."""

    prepared: PreparedBatch
    slot: PinnedBuffer | None = None  # the memory that it lies in; None if it is its own


class HostRoute:
    """Route 0's first half: mini-batches that CPU threads make in memory which the device can fetch."""

    def __init__(
        self, pipeline: MiniBatchPipeline, ring: PinnedBufferRing | None, window: LookaheadWindow | None
    ) -> None:
        # Without a ring they need not move; a window has sampled them ahead, where rows are on disk.
        self._pipeline, self._ring, self._window = pipeline, ring, window

    def prepare(self, task: BatchTask) -> HostBatch:
        """Make a mini-batch; safe in any thread."""
        if self._ring is None:
            return HostBatch(self._gathered(task, None))
        slot = self._ring.take()
        try:
            prepared = self._gathered(task, slot.empty)
            return HostBatch(replace(prepared, batch=slot.hold(prepared.batch)), slot)
        except BaseException:
            self._ring.give_back(slot)
            raise

    def drop(self, batch: HostBatch) -> None:
        """Take back the memory of a mini-batch that is not needed."""
        if batch.slot is not None and self._ring is not None:
            self._ring.give_back(batch.slot)

    def _gathered(self, task: BatchTask, allocate: Allocator | None) -> PreparedBatch:
        if self._window is not None:
            return self._window.prepare(task.index, task, allocate)
        return self._pipeline.gather(self._pipeline.sample(task), allocate)


@dataclass
class DeviceBatch:
    """A mini-batch that is on the device, or on its way."""

    prepared: PreparedBatch
    arrival: torch.Event | None = None  # after which it has come; None where nothing is to be waited for


class DeviceRoutes:
    """Prepares mini-batches on the device, and brings over those of the CPU, on a stream of their own.

    A transfer waits for the device's reads of host memory that have been queued, and the next such reads wait for it:
    both use the same bus (constraint 2). Nothing waits on the host. All calls come from the training thread.
    """

    def __init__(self, device: torch.device, ring: PinnedBufferRing | None) -> None:
        self.device = device
        self.ring = ring
        self.recorder = Recorder(Clock(device))
        self._stream: torch.Stream | None = None
        if device.type != "cpu" and works(lambda: torch.Stream(device).record_event().synchronize()):
            self._stream = torch.Stream(device)
        self._steps: deque[torch.Event] = deque()
        self._last_read: torch.Event | None = None
        self._last_transfer: torch.Event | None = None

    def prepare(self, route: MiniBatchPipeline, task: BatchTask) -> DeviceBatch:
        """Route 1: sample and gather a mini-batch on the device, in the caller's thread."""
        if self._last_transfer is not None:
            self._current().wait_event(self._last_transfer)
            self._last_transfer = None
        start = self.recorder.now()
        sampled = route.sample(task)
        between = self.recorder.now()
        prepared = route.gather(sampled)
        end = self.recorder.now()
        # Both occupy the bus (equation 1).
        self.recorder.add(("GPU", "PCIe"), "gpu_batching", task.index, start, between)
        self.recorder.add(("GPU", "PCIe"), "uva", task.index, between, end)
        if self._stream is not None:
            self._last_read = self._current().record_event()
        return DeviceBatch(prepared)

    @profiled("transfer")
    def transfer(self, number: int, source: HostBatch) -> DeviceBatch:
        """Route 0: send a mini-batch of the CPU on its way; its memory goes back to the ring once it has arrived."""
        slot, ring = source.slot, self.ring
        if slot is None or ring is None:
            batch = source.prepared.batch
            if self.device.type != "cpu":
                batch = moved(batch, lambda batch: batch.to(self.device))
            return DeviceBatch(replace(source.prepared, batch=batch))
        # A batch of PyG changes in place, and this one is still needed if the device has no room.
        batch = copy.copy(source.prepared.batch)
        if self._stream is None:
            start = self.recorder.now()
            batch = self._moved(batch, slot, non_blocking=False)
            self.recorder.add("PCIe", "dma", number, start, self.recorder.now())
            ring.give_back(slot)
            return DeviceBatch(replace(source.prepared, batch=batch))
        if self._last_read is not None:
            self._stream.wait_event(self._last_read)
            self._last_read = None
        with self._stream:
            start = self.recorder.now(self._stream)
            batch = self._moved(batch, slot, non_blocking=True)
            self.recorder.add("PCIe", "dma", number, start, self.recorder.now(self._stream))
            arrival = self._stream.record_event()
        self._last_transfer = arrival
        ring.give_back(slot, arrival)
        return DeviceBatch(replace(source.prepared, batch=batch), arrival)

    def arrive(self, entry: DeviceBatch) -> PreparedBatch:
        """Return a mini-batch for use on the current stream, when the steps on those before it have been queued."""
        if self._stream is None:
            return entry.prepared
        consumer = self._current()
        self._steps.append(consumer.record_event())
        if len(self._steps) > _STEPS_AHEAD:
            self._steps.popleft().synchronize()
        if entry.arrival is not None:
            consumer.wait_event(entry.arrival)
            entry.prepared.batch.apply(lambda value: record_stream(value, consumer))
        return entry.prepared

    def _moved(self, batch: Data, slot: PinnedBuffer, non_blocking: bool) -> Data:
        if self.device.type == "cpu":
            # Sparse tensors and subclasses are not looked into.
            return batch.apply(lambda value: value.clone() if not _is_plain(value) or slot.owns(value) else value)
        there = partial(Tensor.to, device=self.device, non_blocking=non_blocking)
        return moved(batch, lambda batch: batch.apply(there))

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)


def _is_plain(value: object) -> TypeGuard[Tensor]:
    return type(value) is Tensor and value.is_cpu and value.layout == torch.strided


def _is_read(slot: PinnedBuffer) -> bool:
    return slot.read_until is None or bool(slot.read_until.query())
