"""PyG's own loaders in distributed runs: each rank, and each of its worker processes, draws for itself."""

import pickle

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch_geometric.loader import NeighborLoader, NodeLoader

from lightning_gnn.persistent.sampler import PersistentNeighborSampler
from lightning_gnn.pyg import enable_pyg_sampling
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.full_graph.launch import run

SEEDS = torch.arange(60)


def loaders(num_workers, early):
    """PyG's loaders over each of our samplers; those of ``early`` samplers were made before the group."""
    options = {"input_nodes": SEEDS, "batch_size": 20, "num_workers": num_workers}
    yield from (NodeLoader(small_data(), sampler, **options) for sampler in early)
    yield NodeLoader(small_data(), NeighborSampler(small_data(), [2, 2]), **options)
    with enable_pyg_sampling():
        yield NeighborLoader(small_data(), [2, 2], **options)


def picks(rank, num_ranks=2):
    pl.seed_everything(7, verbose=False)  # as every rank of a run of Lightning does
    data = small_data()
    early = [NeighborSampler(data, [2, 2]), PersistentNeighborSampler(data, [2, 2])]
    if num_ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    try:
        found = []
        for loader in (*loaders(0, early), *loaders(2, early)):
            pl.seed_everything(7, verbose=False)
            found.append([batch.e_id.tolist() for batch in loader])
        return found
    finally:
        if num_ranks > 1:
            dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_draw_differently_also_in_worker_processes():
    first, second = run(picks, 2)
    for a, b, c in zip(first, second, picks(0, num_ranks=1), strict=True):
        assert all(x != y for x, y in zip(a, b, strict=True))
        assert a == c  # the first rank draws what a run without others draws


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


def test_two_samplers_with_one_seed_draw_differently_in_one_process():
    data = small_data()
    loaders = [
        NodeLoader(data, NeighborSampler(data, [2, 2], seed=1), input_nodes=SEEDS, batch_size=60) for _ in range(2)
    ]
    first, second = (next(iter(loader)).e_id.tolist() for loader in loaders)
    assert first != second
