"""Pages are locked in place, with a simulated runtime that records registrations."""

import ctypes
import gc
import mmap

import pytest
import torch
import torch.distributed as dist

from lightning_gnn.features import FeatureTable
from lightning_gnn.features import pinned_memory as module
from lightning_gnn.features.pinned_memory import pin_host_memory
from lightning_gnn.graph import CSCGraph
from lightning_gnn.runtime.shared_arrays import share_equal_arrays, which_machine
from tests.full_graph.launch import run
from tests.runtime.test_shared_arrays import count_mapped_bytes, count_own_bytes, draw_numbers, join

MIB = 1 << 20
LARGE = 40 * MIB
"""Size of an array that has its own pages."""


class Runtime:
    """Records registered ranges; rejects overlaps, and the flags in ``refused``."""

    def __init__(self):
        self.ranges, self.flags, self.refused, self.forgotten = {}, [], set(), 0

    def cudaHostRegister(self, address, size, flags):
        assert address % 4096 == size % 4096 == 0
        if flags in self.refused:
            return 801
        if any(start < address + size and address < end for start, end in self.ranges.items()):
            return 712
        self.ranges[address] = address + size
        self.flags.append(flags)
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.ranges.pop(address, None) else 713

    def cudaGetErrorString(self, error):
        return {712: "already registered", 801: "operation not supported"}[error]


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(module, "_cuda_runtime", lambda: made)
    monkeypatch.setattr(module, "_clear_cuda_error", lambda: setattr(made, "forgotten", made.forgotten + 1))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    # CUDA reports this for the first byte, also for memory that was registered earlier.
    monkeypatch.setattr(
        torch.Tensor, "is_pinned", lambda self: any(s <= self.data_ptr() < e for s, e in made.ranges.items())
    )
    yield made
    gc.collect()
    assert made.ranges == module._users == module._range_ends == {}


def is_locked(runtime, tensor):
    """Return whether all pages of a tensor are registered, in one range or several."""
    pages = range(tensor.data_ptr() // 4096, (tensor.data_ptr() + tensor.nbytes - 1) // 4096 + 1)
    return all(any(s <= page * 4096 < e for s, e in runtime.ranges.items()) for page in pages)


def test_memory_is_locked_where_it_is_and_for_as_long_as_it_is_used(runtime):
    tensor = torch.arange(LARGE // 8)
    pinned = pin_host_memory(tensor)
    assert pinned.data_ptr() == tensor.data_ptr()
    assert is_locked(runtime, tensor)
    view = pinned[10:].detach()
    del pinned, tensor
    gc.collect()
    assert len(runtime.ranges) == 1  # the view is still in use
    assert view[0] == 10
    del view


def test_what_lies_in_pages_of_others_stays_locked_when_they_are_gone(runtime):
    whole = torch.zeros(LARGE // 4)
    # Each begins in a page that another one has locked; one of them is small.
    large, small = whole[2 * MIB + 7 :], whole[2 * MIB + 8 : 2 * MIB + 2000]
    first, second, third = pin_host_memory(whole[: 2 * MIB + 7]), pin_host_memory(large), pin_host_memory(small)
    assert large.is_pinned()
    del first
    assert is_locked(runtime, large)
    del second
    assert third.data_ptr() == small.data_ptr()
    assert is_locked(runtime, small)
    del third
    assert runtime.ranges == {}


def test_memory_that_may_not_be_written_is_locked_for_reading_and_else_copied_and_it_is_said(runtime):
    runtime.refused = {1}
    pinned = pin_host_memory(torch.zeros(LARGE // 4))
    assert runtime.flags == [1 | 8]
    assert runtime.forgotten == 1
    assert pinned.shape == (LARGE // 4,)
    runtime.refused = {1, 9}
    tensor = torch.arange(LARGE // 8)
    with pytest.warns(UserWarning, match=r"0\.04 GB of host memory cannot be page-locked in place \(operation not"):
        pinned = pin_host_memory(tensor)
    assert pinned.data_ptr() != tensor.data_ptr()
    assert torch.equal(pinned, tensor)
    assert runtime.forgotten == 3


@pytest.mark.medium
def test_tables_and_graphs_are_locked_in_place(runtime):
    values = torch.rand(LARGE // 4, 2).to(torch.bfloat16)
    table = FeatureTable(values).pin_memory()
    edges = torch.randint(1000, (2, LARGE // 4))
    graph = CSCGraph.from_edge_index(edges, 1000)
    pinned = graph.pin_memory()
    assert table.values.data_ptr() == values.data_ptr()
    assert pinned.indices.data_ptr() == graph.indices.data_ptr()
    assert is_locked(runtime, values)
    assert is_locked(runtime, graph.indices)


def test_what_shares_pages_with_other_memory_is_copied(runtime):
    small = torch.arange(3 * MIB)
    assert pin_host_memory(small).data_ptr() != small.data_ptr()
    assert runtime.ranges == {}
    # Two storages over one array, as from two `torch.from_numpy`: the second one begins in a page of the first.
    array = torch.arange(2 * LARGE // 8).numpy()
    half = len(array) // 2 + 7
    first, second = torch.from_numpy(array[:half]), torch.from_numpy(array[half:])
    pinned = pin_host_memory(first)
    assert second.is_pinned()
    with pytest.warns(UserWarning, match="some pages are locked for another array"):
        other = pin_host_memory(second)
    assert other.data_ptr() != second.data_ptr()
    assert torch.equal(other, second)
    assert pinned.data_ptr() == first.data_ptr()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_beside_locked_arrays_can_be_copied():
    arrays = [torch.full((size,), size) for size in (7, 1000, 9000, 200_000, MIB, 3 * MIB, 6 * MIB) for _ in range(6)]
    held = [pin_host_memory(array) for array in arrays[::2]]
    for array in [*arrays, *held]:
        for part in (array, array[3:], array[:-3]):
            assert torch.equal(part.cuda().cpu(), part)
    assert all(tensor.is_pinned() for tensor in held)


class Driver(Runtime):
    """Locks pages like a driver, which may write to them."""

    def cudaHostRegister(self, address, size, flags):
        for page in range(address, address + size, mmap.PAGESIZE):
            word = ctypes.c_char.from_address(page)
            word.value = word.value
        return super().cudaHostRegister(address, size, flags)


def share_and_lock(rank, num_ranks, shares):
    """Lock arrays that ranks have in common; return this rank's own bytes, and the number of locked bytes."""
    join(rank, num_ranks)
    runtime = Driver()
    module._cuda_runtime, module._clear_cuda_error = lambda: runtime, lambda: None
    torch.Tensor.is_pinned = lambda tensor: False
    module._OWN_PAGES_BYTES = MIB  # the mapped file gives an array of any size its own pages
    x, indices = draw_numbers(), torch.arange(3 << 18)
    before = x.clone()
    assert share_equal_arrays({"x": x, "indices": indices})
    dist.barrier()
    assert count_own_bytes() == 0
    if not shares:  # as if the file were unknown
        module.shared_view = lambda tensor: None
    pinned = [pin_host_memory(x.view(-1, 8)), pin_host_memory(indices), pin_host_memory(indices[:-7])]
    num_locked = sum(end - start for start, end in runtime.ranges.items())
    assert torch.equal(pinned[0].view(-1), before)
    assert torch.equal(pinned[1], indices)
    assert torch.equal(pinned[2], indices[:-7])
    dist.barrier()
    own = count_own_bytes()
    if shares:
        assert count_mapped_bytes(pinned[0]) >= x.nbytes - 2 * mmap.PAGESIZE
        x[9] = 3.0  # written pages become private to the writer
        assert torch.equal(pinned[0].view(-1), before)
        again = pin_host_memory(x)
        assert torch.equal(again, x)
        del again
    dist.barrier()
    del pinned
    gc.collect()
    assert runtime.ranges == {}
    address = x.data_ptr()
    del x, indices
    gc.collect()
    module._unlock_released()
    from lightning_gnn.runtime import shared_arrays

    assert shared_arrays._files == {}
    assert address
    return own, num_locked


@pytest.mark.slow
@pytest.mark.skipif(which_machine() is None, reason="for Linux with memory that is not reserved")
def test_ranks_lock_the_one_copy_that_they_share():
    size = draw_numbers().nbytes + 8 * (3 << 18)
    for own, num_locked in run(share_and_lock, 2, 2, True):
        assert own == 0
        assert size <= num_locked <= 2 * size + 6 * mmap.PAGESIZE
    for own, _ in run(share_and_lock, 2, 2, False):
        assert own >= size - 4 * mmap.PAGESIZE  # each rank has a copy, which the file avoids
