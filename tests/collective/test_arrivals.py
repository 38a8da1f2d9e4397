"""Device memory of mini-batches from the CPU is bounded, used in order, and never reused while the user holds it."""

import pytest
import torch

pytest.importorskip("triton", reason="the simulator stands in for Triton's device")

from lightning_gnn.collective import routes as module
from lightning_gnn.collective.routes import DeviceRoutes, HostBatch, PinnedBufferRing
from lightning_gnn.loading import BatchTask, NodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.event_simulator import Simulator
from tests.sampling.test_loader import assert_same

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
CPU = torch.device("cpu")
READY = 5


class Allocator(Simulator):
    """Like torch's allocator, holds freed blocks until a recorded stream has finished its work."""

    def __init__(self):
        super().__init__()
        self.held, self.most = [], 0

    def _release(self, address, size, memory):
        super()._release(address, size, memory)
        ends = [stream.end for stream in self.streams if stream.name in memory.recorded]
        if memory.owner == "stream 1" and ends:
            self.held.append((max(ends), size))

    def look(self):
        held_bytes = sum(size for end, size in self.held if end > self.now)
        self.most = max(self.most, self.live["stream 1"] + held_bytes)


def train_simulated(monkeypatch, keep=(), record_stream=None, steps=30, step_s=400.0):
    """Train with ``READY`` batches from the CPU ahead; return the simulator and the peak memory in mini-batches."""
    data = small_data()
    loader = NodeLoader(data, NeighborSampler(data, [3]), batch_size=20, seed=1)
    simulator, ring = Allocator(), PinnedBufferRing(CPU, capacity=steps)
    monkeypatch.setattr(module, "record_stream", record_stream or simulator.record_stream)
    routes = DeviceRoutes(CPU, ring)
    routes._stream, routes._current_stream = simulator.new_stream(), simulator.current_stream
    ready, held_batches, sizes = [], [], []

    def transfer(number):
        slot = ring.take()
        with simulator.pause():
            prepared = loader.pipeline.prepare(BatchTask(0, number, list(range(number, number + 20))))
            prepared.batch = slot.hold(prepared.batch)
        ready.append(routes.transfer(number, HostBatch(prepared, slot)))

    with simulator.install(monkeypatch):
        for number in range(READY):
            transfer(number)
        for number in range(steps):
            prepared = routes.arrive(ready.pop(0))
            tensors = [value for _, value in prepared.batch if isinstance(value, torch.Tensor)]
            simulator.now += 30.0
            simulator.work(tensors, [], step_s)
            sizes.append(sum(value.untyped_storage().nbytes() for value in tensors))
            with simulator.pause():
                plain = loader.pipeline.prepare(BatchTask(0, number, list(range(number, number + 20))))
                assert_same(prepared.batch, plain.batch)
            if number in keep:
                held_batches.append(prepared.batch)
            for batch in held_batches:
                simulator.work([batch.x], [], 5.0)
            if len(held_batches) > 2:
                held_batches.pop(0)
            del prepared, tensors
            if number + READY < steps:
                transfer(number + READY)
            simulator.look()
    return simulator, simulator.most / max(sizes)


@pytest.mark.medium
def test_memory_is_bounded_and_in_order(monkeypatch):
    simulator, most = train_simulated(monkeypatch)
    assert simulator.errors == []
    assert most <= READY + 4


@pytest.mark.medium
def test_what_the_user_keeps_stays(monkeypatch):
    simulator, _ = train_simulated(monkeypatch, keep={3, 4, 9, 12, 13, 14, 20})
    assert simulator.errors == []


@pytest.mark.medium
def test_a_stream_that_is_not_recorded_is_found(monkeypatch):
    simulator, _ = train_simulated(monkeypatch, keep={3, 4, 9}, record_stream=lambda tensor, stream: tensor)
    assert any("is freed, but main may still use it" in error for error in simulator.errors)
