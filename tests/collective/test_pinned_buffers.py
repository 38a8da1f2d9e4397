import threading

import torch
from torch_geometric.data import Data

from lightning_gnn.collective.routes import PinnedBuffer, PinnedBufferRing
from tests.patience import PATIENCE
from tests.sampling.test_loader import assert_same

CPU = torch.device("cpu")


def slot():
    return PinnedBuffer(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))


class ReadEvent:
    """Stands in for the event of a device that reads a slot."""

    def __init__(self):
        self.done = threading.Event()

    def query(self):
        return self.done.is_set()

    def synchronize(self):
        assert self.done.wait(PATIENCE)


def test_buffers_of_different_names_do_not_overlap_and_are_used_again():
    memory = slot()
    a, b = memory.empty("a", [100], torch.int64), memory.empty("b", [100], torch.int64)
    a.fill_(1)
    b.fill_(2)
    assert bool((a == 1).all())
    again = memory.empty("a", [105], torch.int64)  # slightly more than before
    assert again.data_ptr() == a.data_ptr()
    assert memory.empty("a", [1000], torch.int64).numel() == 1000


def test_a_batch_is_brought_into_the_slot_whole():
    def batch():
        return Data(
            x=torch.arange(12.0).view(4, 3).t(),
            edge_index=torch.tensor([[0, 1], [1, 2]]),
            nothing=None,
            empty=torch.empty(0, 3),
            number=torch.tensor(3),
            nested=[torch.ones(2), {"a": torch.zeros(1)}],
            sparse=torch.eye(3).to_sparse(),
            names=["a", "b"],
            batch_size=2,
        )

    memory = slot()
    mine = memory.empty("x", [3, 4], torch.float32).copy_(batch().x)
    given_batch = batch()
    given_batch.x = mine
    held = memory.hold(given_batch)
    assert held.x is mine
    for tensor in (held.edge_index, held.nested[0], held.nested[1]["a"], held.number):
        assert memory.owns(tensor)
    sparse = held.sparse, batch().sparse
    assert torch.equal(sparse[0].to_dense(), sparse[1].to_dense())
    expected = batch()
    del held.sparse, expected.sparse, held.nested, expected.nested
    assert_same(held, expected)


def test_a_slot_goes_round_once_it_has_been_read():
    ring = PinnedBufferRing(CPU, capacity=2)
    first, second = ring.take(), ring.take()
    assert first is not second
    reads = ReadEvent(), ReadEvent()
    ring.give_back(first, reads[0])
    ring.give_back(second, reads[1])
    reads[1].done.set()
    assert ring.take() is second  # the other one is still being read
    threading.Timer(0.05, reads[0].done.set).start()
    assert ring.take() is first  # it waited, since no further slot is allowed
    assert reads[0].query()


def test_a_ring_never_waits_for_a_slot_that_is_taken():
    ring = PinnedBufferRing(CPU, capacity=1)
    slots = [ring.take() for _ in range(3)]
    assert len(set(map(id, slots))) == ring.num_slots == 3
    for taken in slots:
        ring.give_back(taken)
    assert ring.num_slots == 1
