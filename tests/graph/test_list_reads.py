"""Adjacency lists of a mapped topology are prefetched before a hop; samples equal those in memory."""

import ctypes
import mmap
import os
import sys
import time

import numpy as np
import pytest
import torch

from lightning_gnn.datasets.topology_files import load_topology
from lightning_gnn.graph import CSCGraph
from lightning_gnn.graph import prefetch_lists as list_reads
from lightning_gnn.graph.prefetch_lists import expect_list_reads, read_lists_ahead
from lightning_gnn.ops import sample_neighbors
from tests.patience import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="advice to the system is Linux's")
NODES, DEGREE = 3000, 700


@pytest.fixture(autouse=True)
def forgotten():
    yield
    list_reads._random_read_addresses.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("topology")
    sources = torch.randint(0, NODES, (NODES * DEGREE,), generator=torch.Generator().manual_seed(0))
    CSCGraph.from_csc(torch.arange(NODES + 1) * DEGREE, sources).save(folder)
    return folder


def find_resident_pages(indices):
    """Return which pages of a mapped tensor are in the page cache."""
    begin = indices.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = indices.data_ptr() + indices.nbytes - begin
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)) == 0
    return found & 1 == 1


def reads_ahead_on_advice(path):
    """Return whether the first page of a new file comes into the page cache within seconds of the advice."""
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = torch.from_numpy(
            np.frombuffer(memory := mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        )
    if find_resident_pages(mapped).any():
        return False
    memory.madvise(mmap.MADV_WILLNEED)
    for _ in range(500):
        if find_resident_pages(mapped)[0]:
            return True
        time.sleep(0.01)
    return False


def test_samples_equal_those_from_memory(folder):
    mapped, memory = (load_topology(folder, NODES, mmap, False, "") for mmap in (True, False))
    expect_list_reads(mapped.indices, larger_than=0)
    assert list_reads._random_read_addresses == {mapped.indices.data_ptr()}
    for key, fanouts in enumerate(([5, 3], [-1], [2, -1])):
        seeds = torch.randint(0, NODES, (20,), generator=torch.Generator().manual_seed(key))
        found, expected = (sample_neighbors(graph, seeds, fanouts, key) for graph in (mapped, memory))
        assert torch.equal(found.node, expected.node)
        assert torch.equal(found.edge_index, expected.edge_index)


def test_pages_of_the_frontier_come_and_no_others(folder):
    graph = load_topology(folder, NODES, True, False, "")
    indices = expect_list_reads(graph.indices, larger_than=0)
    with (folder / "indices.npy").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if find_resident_pages(indices).any():
        pytest.skip("this file system keeps its pages")
    if not reads_ahead_on_advice(folder / "another"):
        pytest.skip("this system ignores the advice, as emulators do")
    nodes = np.array([5, 2900, 1200])
    assert read_lists_ahead(graph.indptr.numpy(), indices.numpy(), nodes, -1) == 3
    offset, size = indices.data_ptr() % mmap.PAGESIZE, indices.element_size()
    wanted = {
        page
        for v in nodes
        for page in range(
            (offset + v * DEGREE * size) // mmap.PAGESIZE, (offset + (v + 1) * DEGREE * size - 1) // mmap.PAGESIZE + 1
        )
    }
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not find_resident_pages(indices)[sorted(wanted)].all():
        time.sleep(0.01)
    assert {*np.flatnonzero(find_resident_pages(indices)).tolist()} == wanted


def test_small_topologies_come_as_they_come(folder):
    graph = load_topology(folder, NODES, True, False, "")
    assert not list_reads._random_read_addresses
    assert read_lists_ahead(graph.indptr.numpy(), graph.indices.numpy(), np.arange(9), -1) == 0
