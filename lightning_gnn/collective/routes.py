"""Two routes of mini-batches to the device: prepared on the device (1), or on the CPU and transferred (0).

Route 0 uses a ring of reusable pinned buffers, because torch's pinned-memory allocator rounds sizes up to powers of
two, never frees memory, and has no limit.
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
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor

from lightning_gnn.graph.stores import AttributeName
from lightning_gnn.loading.batch import BatchTask, PreparedBatch
from lightning_gnn.loading.collate import Allocator
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch.lookahead import LookaheadWindow
from lightning_gnn.nn.sampled_edges import moved
from lightning_gnn.runtime.any_batch import copy_to, map_tensors
from lightning_gnn.runtime.devices import new_stream, on_stream, record_stream, works
from lightning_gnn.runtime.timeline import Clock, Recorder, profiled

_HEADROOM_DIVISOR = 8  # buffers are allocated an eighth larger than needed, since mini-batches differ slightly in size
_MAX_QUEUED_STEPS = 2  # limits the memory of mini-batches, which torch's allocator reuses only after their step ends


class PinnedBuffer:
    """Memory of one mini-batch: a buffer per attribute, which grows on demand."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate  # returns n bytes, uint8 [n]
        self._blocks: dict[AttributeName, Tensor] = {}
        self.read_until: torch.Event | None = None  # event after which the device has finished reading

    def empty(self, name: AttributeName, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in the buffer ``name``, overwriting its previous content."""
        size = math.prod(shape) * dtype.itemsize
        block = self._blocks.get(name)
        if block is None or block.numel() < size:
            self._blocks.pop(name, None)
            del block
            block = self._blocks[name] = self._allocate(size + size // _HEADROOM_DIVISOR)
        return block[:size].view(dtype).view(tuple(shape))

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a strided tensor is stored in one of the buffers."""
        address = tensor.untyped_storage().data_ptr()
        return any(block.untyped_storage().data_ptr() == address for block in self._blocks.values())

    def hold(self, batch: Any) -> Any:
        """Copy the tensors of a mini-batch that are not in the buffers yet into them."""
        numbers = count()

        def copy_in(tensor: Tensor) -> Tensor:
            number = next(numbers)
            if not _is_strided_cpu(tensor) or tensor.requires_grad or not tensor.numel() or self.owns(tensor):
                return tensor
            return self.empty(f"#{number}", tensor.shape, tensor.dtype).copy_(tensor)

        return map_tensors(batch, copy_in)


class PinnedBufferRing:
    """Pool of reusable slots, each filled by a worker and then read by the device. Thread-safe."""

    def __init__(self, device: torch.device, capacity: int = 1) -> None:
        self.device = device
        self._capacity = capacity
        self.pins = device.type != "cpu" and works(lambda: torch.empty(1, pin_memory=True))
        self._lock = threading.Lock()
        self._idle: deque[PinnedBuffer] = deque()
        self._taken: WeakSet[PinnedBuffer] = WeakSet()  # a collected epoch does not return its slots

    @property
    def capacity(self) -> int:
        """Maximum number of slots to retain; lowering it frees idle slots after the device has read them."""
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
        """Number of existing slots."""
        return len(self._idle) + len(self._taken)

    def take(self) -> PinnedBuffer:
        """Return a slot. Waits for the device at most, never for another worker, which could deadlock."""
        with self._lock:
            slot = next((one for one in self._idle if one.read_until is None or one.read_until.query()), None)
            if slot is None and self._idle and self.num_slots >= self.capacity:
                slot = self._idle[0]
            if slot is None:
                slot = PinnedBuffer(self._allocate)
            else:
                self._idle.remove(slot)
            self._taken.add(slot)
        if slot.read_until is not None:
            slot.read_until.synchronize()
            slot.read_until = None
        return slot

    def give_back(self, slot: PinnedBuffer, read_until: torch.Event | None = None) -> None:
        """Return a slot to the ring; the device may read it until ``read_until``."""
        slot.read_until = read_until
        with self._lock:
            self._taken.discard(slot)
            if self.num_slots < self.capacity:
                self._idle.append(slot)

    def clear(self) -> None:
        """Free idle slots after the device has read them; slots returned later are freed too."""
        self.capacity = 0  # the next epoch sets it again

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
    """A mini-batch prepared by a CPU worker."""

    prepared: PreparedBatch
    slot: PinnedBuffer | None = None  # its slot of the ring; None if it has its own memory


class HostRoute:
    """First half of route 0: preparation by CPU threads in pinned memory."""

    def __init__(
        self, pipeline: MiniBatchPipeline, ring: PinnedBufferRing | None, window: LookaheadWindow | None
    ) -> None:
        # The ring is None if mini-batches are trained on the CPU; the window samples ahead for features on disk.
        self._pipeline, self._ring, self._window = pipeline, ring, window

    def prepare(self, task: BatchTask) -> HostBatch:
        """Prepare a mini-batch. Thread-safe."""
        if self._ring is None:
            return HostBatch(self._prepare(task, None))
        slot = self._ring.take()
        try:
            prepared = self._prepare(task, slot.empty)
            return HostBatch(replace(prepared, batch=slot.hold(prepared.batch)), slot)
        except BaseException:
            self._ring.give_back(slot)
            raise

    def drop(self, batch: HostBatch) -> None:
        """Return the slot of a discarded mini-batch to the ring."""
        if batch.slot is not None and self._ring is not None:
            self._ring.give_back(batch.slot)

    def _prepare(self, task: BatchTask, allocate: Allocator | None) -> PreparedBatch:
        if self._window is not None:
            return self._window.prepare(task.index, task, allocate)
        return self._pipeline.gather(self._pipeline.sample(task), allocate)


@dataclass
class DeviceBatch:
    """A mini-batch on the device or in transfer."""

    prepared: PreparedBatch
    arrival: torch.Event | None = None  # end of its transfer; None without an asynchronous transfer


class DeviceRoutes:
    """Prepares mini-batches on the device, and transfers those of the CPU on a separate stream.

    Transfers and the device's own reads of host memory wait for each other on the device, as they share PCIe
    (constraint 2). The host does not wait. Not thread-safe; call it from the training thread.
    """

    def __init__(self, device: torch.device, ring: PinnedBufferRing | None) -> None:
        self.device = device
        self.ring = ring
        self.recorder = Recorder(Clock(device))
        self._stream = new_stream(device)
        self._steps: deque[torch.Event] = deque()
        self._last_read: torch.Event | None = None
        self._last_transfer: torch.Event | None = None

    def prepare(self, route: MiniBatchPipeline, task: BatchTask) -> DeviceBatch:
        """Route 1: sample and gather a mini-batch on the device."""
        if self._last_transfer is not None:
            self._current_stream().wait_event(self._last_transfer)
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
            self._last_read = self._current_stream().record_event()
        return DeviceBatch(prepared)

    @profiled("transfer")
    def transfer(self, number: int, source: HostBatch) -> DeviceBatch:
        """Route 0: start the transfer of a CPU mini-batch; its slot can be reused when the transfer has ended."""
        slot, ring = source.slot, self.ring
        if slot is None or ring is None:
            batch = source.prepared.batch
            if self.device.type != "cpu":
                batch = moved(batch, lambda batch: copy_to(batch, self.device))
            return DeviceBatch(replace(source.prepared, batch=batch))
        # PyG's apply works in place, and the original is needed for a retry if the device is out of memory.
        batch = copy.copy(source.prepared.batch)
        if self._stream is None:
            start = self.recorder.now()
            batch = self._copy_to_device(batch, slot, non_blocking=False)
            self.recorder.add("PCIe", "dma", number, start, self.recorder.now())
            ring.give_back(slot)
            return DeviceBatch(replace(source.prepared, batch=batch))
        if self._last_read is not None:
            self._stream.wait_event(self._last_read)
            self._last_read = None
        with on_stream(self._stream):
            start = self.recorder.now(self._stream)
            batch = self._copy_to_device(batch, slot, non_blocking=True)
            self.recorder.add("PCIe", "dma", number, start, self.recorder.now(self._stream))
            arrival = self._stream.record_event()
        self._last_transfer = arrival
        ring.give_back(slot, arrival)
        return DeviceBatch(replace(source.prepared, batch=batch), arrival)

    def arrive(self, entry: DeviceBatch) -> PreparedBatch:
        """Return a mini-batch for use on the current stream, after the steps of earlier ones have been queued."""
        if self._stream is None:
            return entry.prepared
        consumer = self._current_stream()
        self._steps.append(consumer.record_event())
        if len(self._steps) > _MAX_QUEUED_STEPS:
            self._steps.popleft().synchronize()
        if entry.arrival is not None:
            consumer.wait_event(entry.arrival)
            map_tensors(entry.prepared.batch, lambda value: record_stream(value, consumer))
        return entry.prepared

    def _copy_to_device(self, batch: Any, slot: PinnedBuffer, non_blocking: bool) -> Any:
        if self.device.type == "cpu":
            # Sparse tensors and subclasses are always cloned, as their storage is not inspected.
            return map_tensors(
                batch, lambda value: value.clone() if not _is_strided_cpu(value) or slot.owns(value) else value
            )
        to_device = partial(Tensor.to, device=self.device, non_blocking=non_blocking)
        return moved(batch, lambda batch: map_tensors(batch, to_device))

    def _current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)


def _is_strided_cpu(value: object) -> TypeGuard[Tensor]:
    return type(value) is Tensor and value.is_cpu and value.layout == torch.strided
