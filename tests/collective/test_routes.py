"""The order that streams and events keep, seen with streams that only take notes."""

from contextlib import contextmanager

import pytest
import torch

from lightning_gnn.collective.routes import DeviceRoutes, HostBatch, HostRing
from lightning_gnn.loading import BatchTask, NodeLoader
from lightning_gnn.runtime.devices import used_on
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.sampling.test_loader import assert_same

CPU = torch.device("cpu")


class Event(str):
    """Never comes, unless it is waited for."""

    log = None

    def query(self):
        return False

    def synchronize(self):
        self.log.append(("host", "waits for", self))


class Stream:
    """Writes what is queued on it into a log that both streams share."""

    def __init__(self, name, log):
        self.name, self.log, self.events = name, log, 0

    def record_event(self):
        self.events += 1
        self.log.append((self.name, "records", f"{self.name} {self.events}"))
        event = Event(f"{self.name} {self.events}")
        event.log = self.log
        return event

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event))

    def __enter__(self):
        self.log.append((self.name, "begins"))

    def __exit__(self, *error):
        self.log.append((self.name, "ends"))


@pytest.fixture
def loader():
    data = small_data()
    return NodeLoader(data, NeighborSampler(data, [3]), batch_size=20, seed=1)


@contextmanager
def noted(loader):
    log = []
    ring = HostRing(CPU, capacity=4)
    routes = DeviceRoutes(CPU, ring)
    main = Stream("main", log)
    routes._stream, routes._current = Stream("bus", log), lambda: main
    yield routes, ring, log


def on_host(loader, ring, number):
    slot = ring.take()
    prepared = loader.pipeline.prepare(BatchTask(0, number, list(range(number, number + 20))))
    prepared.batch = slot.hold(prepared.batch)
    return HostBatch(prepared, slot)


def test_reads_and_transfers_wait_for_one_another_and_nothing_else(loader):
    with noted(loader) as (routes, ring, log):
        routes.prepare(loader.pipeline, BatchTask(0, 0, [0, 1]))
        routes.prepare(loader.pipeline, BatchTask(0, 1, [2, 3]))
        assert log == [("main", "records", "main 1"), ("main", "records", "main 2")]
        log.clear()
        first = routes.transfer(2, on_host(loader, ring, 2))
        assert log == [
            ("bus", "waits for", "main 2"),
            ("bus", "begins"),
            ("bus", "records", "bus 1"),
            ("bus", "ends"),
        ]
        log.clear()
        second = routes.transfer(3, on_host(loader, ring, 3))  # no read since
        assert log == [("bus", "begins"), ("bus", "records", "bus 2"), ("bus", "ends")]
        log.clear()
        routes.arrive(first)
        assert log == [("main", "records", "main 3"), ("main", "waits for", "bus 1")]
        log.clear()
        gathered = routes.prepare(loader.pipeline, BatchTask(0, 4, [4, 5]))
        assert log == [("main", "waits for", "bus 2"), ("main", "records", "main 4")]
        log.clear()
        routes.arrive(gathered)  # made on the stream that trains
        assert log == [("main", "records", "main 5")]
        log.clear()
        routes.arrive(second)  # the host is two steps ahead
        assert log == [
            ("main", "records", "main 6"),
            ("host", "waits for", "main 3"),
            ("main", "waits for", "bus 2"),
        ]
        log.clear()
        routes.prepare(loader.pipeline, BatchTask(0, 5, [6, 7]))
        assert log == [("main", "records", "main 7")]


def test_the_memory_of_a_transfer_goes_back_with_its_event(loader):
    with noted(loader) as (routes, ring, _):
        source = on_host(loader, ring, 0)
        entry = routes.transfer(0, source)
        assert entry.arrival == "bus 1"
        assert list(ring._idle) == [source.slot]
        assert source.slot.read_until == "bus 1"
        assert_same(entry.prepared.batch, loader.pipeline.prepare(BatchTask(0, 0, list(range(20)))).batch)
        batch = entry.prepared.batch
        assert not any(source.slot.owns(value) for value in (batch.x, batch.edge_index, batch.n_id))


def test_a_transfer_that_fails_leaves_the_mini_batch_as_it_was(loader, monkeypatch):
    with noted(loader) as (routes, ring, _):
        source = on_host(loader, ring, 0)

        def fails(batch, slot, non_blocking):
            batch.apply(lambda tensor: tensor * 0)
            raise torch.OutOfMemoryError("out of memory")

        moved = routes._moved
        monkeypatch.setattr(routes, "_moved", fails)
        with pytest.raises(torch.OutOfMemoryError):
            routes.transfer(0, source)
        assert ring.num_slots == 1
        assert not ring._idle
        monkeypatch.setattr(routes, "_moved", moved)
        assert_same(
            routes.transfer(0, source).prepared.batch, loader.pipeline.prepare(BatchTask(0, 0, list(range(20)))).batch
        )
        assert len(ring._idle) == 1


def test_sparse_matrices_over_the_slots_memory_are_copied(loader):
    with noted(loader) as (routes, ring, _):
        source = on_host(loader, ring, 0)
        memory = source.slot.empty("weight", [2], torch.float32).fill_(1)
        source.prepared.batch.adjacency = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), memory, (2, 2))
        batch = routes.transfer(0, source).prepared.batch
        memory.fill_(7)
        assert batch.adjacency.to_dense().tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("layout", ["strided", "sparse_coo", "sparse_csr", "sparse_csc"])
def test_every_part_of_a_tensor_is_kept_for_the_stream_that_uses_it(layout, monkeypatch):
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append((tensor.layout, stream)))
    dense = torch.eye(3)
    tensor = dense if layout == "strided" else dense.to_sparse(layout=getattr(torch, layout))
    assert used_on(tensor, "main") is tensor
    assert kept == []  # the host's memory needs no stream
    tensor = tensor.to("meta")
    assert used_on(tensor, "main") is tensor
    assert kept == [(torch.strided, "main")] * {"strided": 1, "sparse_coo": 2}.get(layout, 3)
