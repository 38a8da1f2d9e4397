"""The device's part of collective batching: where Route 1 prepares mini-batches, and those of Route 0 arrive."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch_geometric.data import Data

from lightning_gnn.collective.host_ring import HostRing, HostSlot
from lightning_gnn.runtime.timeline import Clock, Recorder, Timestamp, profiled
from lightning_gnn.runtime.transfer import used_on, works
from lightning_gnn.sampling.loader import Prepared, ThreadedNodeLoader

Task = tuple[int, int, list[int]]
"""Epoch, number of the mini-batch, positions of its seeds."""


@dataclass
class HostBatch:
    """A mini-batch that a CPU worker has prepared.

    Args:
        prepared: In host memory.
        slot: The memory that it lies in; None if it is its own.
    """

    prepared: Prepared
    slot: HostSlot | None = None


@dataclass
class DeviceBatch:
    """A mini-batch that is on the device, or on its way.

    Args:
        prepared: Where it is trained.
        arrival: Event after which it has come; None where nothing is to be waited for.
    """

    prepared: Prepared
    arrival: Any = None


class DeviceRoutes:
    """Prepares mini-batches on the device, and brings over those of the CPU, on a stream of their own.

    A transfer waits for the device's reads of host memory that have been queued, and the next such reads wait for it:
    both use the same bus (constraint 2). Nothing waits on the host. All calls come from the training thread.

    Args:
        device: Where mini-batches are trained.
        route: Prepares them there, in the caller's thread; None where only the CPU does.
        ring: Memory in which those of the CPU lie; None if they need not move.
    """

    def __init__(self, device: torch.device, route: ThreadedNodeLoader | None, ring: HostRing | None) -> None:
        self.device = device
        self.route = route
        self.ring = ring
        self.recorder = Recorder(Clock(device))
        self._stream: Any = None
        if device.type != "cpu" and works(lambda: torch.Stream(device).record_event().synchronize()):
            self._stream = torch.Stream(device)
        self._last_read: Any = None
        self._last_transfer: Any = None

    def prepare(self, task: Task) -> DeviceBatch:
        """Route 1: sample and gather a mini-batch on the device."""
        if self.route is None:
            raise RuntimeError("there is no device that prepares mini-batches")
        if self._last_transfer is not None:
            self._current().wait_event(self._last_transfer)
            self._last_transfer = None
        ends: list[Timestamp | None] = []
        prepared = self.route.prepare(task, lambda: ends.append(self.recorder.now()))
        for stage, start, end in zip(("gpu_batching", "uva"), ends, ends[1:], strict=False):
            self.recorder.add(("GPU", "PCIe"), stage, task[1], start, end)  # both occupy the bus (equation 1)
        if self._stream is not None:
            self._last_read = self._current().record_event()
        return DeviceBatch(prepared)

    @profiled("transfer")
    def transfer(self, number: int, source: HostBatch) -> DeviceBatch:
        """Route 0: send a mini-batch of the CPU on its way; its memory goes back to the ring once it has arrived."""
        slot, ring = source.slot, self.ring
        if slot is None or ring is None:
            batch = source.prepared.batch if self.device.type == "cpu" else source.prepared.batch.to(self.device)
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

    def arrive(self, entry: DeviceBatch) -> Prepared:
        """Return a mini-batch for use on the current stream."""
        if entry.arrival is None:
            return entry.prepared
        consumer = self._current()
        consumer.wait_event(entry.arrival)
        # Its memory belongs to the other stream.
        return replace(entry.prepared, batch=entry.prepared.batch.apply(lambda tensor: used_on(tensor, consumer)))

    def _moved(self, batch: Data, slot: HostSlot, non_blocking: bool) -> Data:
        if self.device.type == "cpu":
            return batch.apply(lambda tensor: tensor.clone() if slot.may_own(tensor) else tensor)
        return batch.apply(lambda tensor: tensor.to(self.device, non_blocking=non_blocking))

    def _current(self) -> Any:
        return torch.accelerator.current_stream(self.device)
