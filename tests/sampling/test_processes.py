"""Samplers in other processes: fork, pickling, and different random numbers per rank and worker."""

import os
import pickle
import signal
import threading
import time

import numba
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn.gpu_sampling.sampler import PersistentNeighborSampler
from lightning_gnn.pyg import LoaderNeighborSampler, enable_pyg_sampling
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.full_graph.launch import run
from tests.patience import PATIENCE

SEEDS = NodeSamplerInput(None, torch.arange(80))
RANK_SEEDS = torch.arange(60)


def compile_function(number):
    scope = {}
    exec(f"def add(x):\n    for k in range(x):\n        x += k * {number}\n    return x", scope)
    return numba.njit(nogil=True)(scope["add"])


@pytest.mark.medium
def test_a_fork_while_another_thread_compiles_does_not_hang_the_child():
    stop = threading.Event()
    started = threading.Event()

    def compile_on():
        number = 0
        while not stop.is_set():
            compile_function(number)(3)
            number += 1
            started.set()
            time.sleep(0.01)  # the lock is not fair: without a pause the fork might wait for a long time

    thread = threading.Thread(target=compile_on)
    thread.start()
    try:
        assert started.wait(PATIENCE)
        for number in range(3):
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # kill a child that hangs
                compile_function(1000 + number)(3)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join(PATIENCE)


@pytest.mark.medium
def test_workers_forked_while_threads_sample_draw_the_same_samples():
    data = small_data(5000, 60_000)
    sampler = NeighborSampler(data, [10, 10], seed=1)
    torch.manual_seed(0)
    loader = NodeLoader(data, sampler, batch_size=200, input_nodes=torch.arange(1000), num_workers=2)
    torch.manual_seed(3)
    expected = [batch.e_id for batch in loader]
    stop = threading.Event()

    def busy(number):
        while not stop.is_set():
            sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(number, 5000, 7)), key=number)

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        torch.manual_seed(3)
        for batch, edges in zip(loader, expected, strict=True):
            assert torch.equal(batch.e_id, edges)
            assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_samplers_that_are_sent_to_another_process():
    pytest.importorskip("triton")
    data = small_data()
    samplers = NeighborSampler(data, [3], seed=1), LoaderNeighborSampler(data, [3])
    samplers[1]._gpu_sampler = threading.Lock()  # stands in for an object that cannot be pickled
    for sampler in samplers:
        torch.manual_seed(0)
        expected = sampler.sample_from_nodes(SEEDS)
        torch.manual_seed(0)
        assert torch.equal(pickle.loads(pickle.dumps(sampler)).sample_from_nodes(SEEDS).edge, expected.edge)
    on_device = PersistentNeighborSampler(data, [3], device="cpu")
    if on_device.device is not None:  # with the interpreter
        with pytest.raises(TypeError, match="cannot be copied or sent to another process"):
            pickle.dumps(on_device)


# -- ranks and their worker processes


def make_loaders(num_workers, early):
    """Return PyG's loaders over each of our samplers; ``early`` samplers were created before the process group."""
    options = {"input_nodes": RANK_SEEDS, "batch_size": 20, "num_workers": num_workers}
    yield from (NodeLoader(small_data(), sampler, **options) for sampler in early)
    yield NodeLoader(small_data(), NeighborSampler(small_data(), [2, 2]), **options)
    with enable_pyg_sampling():
        yield NeighborLoader(small_data(), [2, 2], **options)


def draw_on_rank(rank, num_ranks=2):
    pl.seed_everything(7, verbose=False)  # as every rank of a Lightning run does
    data = small_data()
    early = [NeighborSampler(data, [2, 2]), PersistentNeighborSampler(data, [2, 2])]
    if num_ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    try:
        found = []
        for loader in (*make_loaders(0, early), *make_loaders(2, early)):
            pl.seed_everything(7, verbose=False)
            found.append([batch.e_id.tolist() for batch in loader])
        return found
    finally:
        if num_ranks > 1:
            dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_draw_differently_also_in_worker_processes():
    first, second = run(draw_on_rank, 2)
    for a, b, c in zip(first, second, draw_on_rank(0, num_ranks=1), strict=True):
        assert all(x != y for x, y in zip(a, b, strict=True))
        assert a == c  # the first rank draws the same as a single process


def test_a_sampler_that_is_sent_to_a_worker_knows_the_rank_of_its_parent(monkeypatch):
    sampler = NeighborSampler(small_data(), [2])
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_rank", lambda: 3)
        sent = pickle.dumps(sampler)
        torch.manual_seed(0)
        key = sampler._next_key()
    torch.manual_seed(0)
    assert pickle.loads(sent)._next_key() == key
    torch.manual_seed(0)
    assert sampler._next_key() != key
