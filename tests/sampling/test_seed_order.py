"""Seed orders are those of torch, and mini-batches are those of torch's batch sampler."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from torch_geometric.loader import ImbalancedSampler

from lightning_gnn.loading import NodeLoader
from lightning_gnn.loading.seed_order import EvaluationOrder, TrainingOrder, mini_batches
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data


@given(
    size=st.integers(1, 40),
    replicas=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
    batch_size=st.integers(1, 9),
    first=st.integers(0, 4),
)
def test_orders_are_those_of_torch(size, replicas, shuffle, drop_last, epoch, batch_size, first):
    for rank in range(replicas):
        pairs = []
        if not drop_last or size >= replicas:
            pairs.append((DistributedSampler, TrainingOrder, {"seed": 3, "drop_last": drop_last, "shuffle": shuffle}))
        if size >= replicas:
            pairs.append((UnrepeatedDistributedSampler, EvaluationOrder, {"shuffle": shuffle}))
        for theirs, ours, options in pairs:
            a, b = (kind(range(size), num_replicas=replicas, rank=rank, **options) for kind in (theirs, ours))
            if ours is TrainingOrder:
                a.set_epoch(epoch)
                b.set_epoch(epoch)
            assert list(a) == list(b) == b.positions().tolist()
            expected = list(BatchSampler(a, batch_size, drop_last))
            found = list(mini_batches(BatchSampler(b, batch_size, drop_last), first))
            assert [index.tolist() for index in found] == expected[first:]
            assert all(index.dtype == torch.int64 for index in found)


class Growing:
    """Yields one list that it keeps changing, without end."""

    def __iter__(self):
        seeds = []
        while True:
            seeds.append(len(seeds))
            yield seeds


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_yields_lists_tensors_or_for_ever_is_asked_batch_by_batch(num_workers):
    data = small_data()
    sampler = NeighborSampler(data, [2])

    def positions(batch_sampler, most):
        loader = NodeLoader(data, sampler, batch_sampler=batch_sampler, num_workers=num_workers)
        return [batch.input_id.tolist() for _, batch in zip(range(most), loader, strict=False)]

    assert positions(Growing(), 3) == [[0], [0, 1], [0, 1, 2]]
    assert positions([torch.tensor([4, 2]), (3, 1), [torch.tensor(5), 6]], 9) == [[4, 2], [3, 1], [5, 6]]
    imbalanced = ImbalancedSampler(data.y, num_samples=30)
    assert [len(batch) for batch in positions(BatchSampler(imbalanced, 20, False), 9)] == [20, 10]
    drawn = RandomSampler(range(40), generator=torch.Generator().manual_seed(1))
    again = RandomSampler(range(40), generator=torch.Generator().manual_seed(1))
    assert positions(BatchSampler(drawn, 7, False), 9) == list(BatchSampler(again, 7, False))
