"""Features on disk under HyScale: each rank reads its share, and mini-batches and weights are those of memory."""

import pytest
import torch

from lightning_gnn.features import DiskFeatures, FeatureTable
from lightning_gnn.hyscale.costs import split_seeds
from lightning_gnn.hyscale.sharded_loader import ShardedBatchSampler
from lightning_gnn.hyscale.staged_prefetcher import PipelineSettings
from tests.hyscale.staging import make_staged_loader
from tests.hyscale.training import make_data

F32 = {"dtype": torch.float32, "batch_size": 20, "num_neighbors": (3, 2)}


@pytest.fixture
def store(tmp_path):
    return FeatureTable(make_data(**F32).data.x).save(tmp_path / "x.npy")


@pytest.mark.medium
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_batches_are_those_of_memory(store, prefetch):
    def batches(**options):
        loader, shares = make_data(**F32, **options).train_dataloader(), []
        made = make_staged_loader(
            loader,
            ShardedBatchSampler(loader, lambda n, number: split_seeds(n, [1, 2])[1], 1),
            PipelineSettings(prefetch, (2, 1)),
            shares.append,
        )
        found = [batch for _ in range(2) for batch in made]
        return loader, shares, found

    disk, shares, ours = batches(memory="3MB", store=store)
    _, others, theirs = batches()
    assert [(share.seeds, share.total) for share in shares] == [(share.seeds, share.total) for share in others]
    assert len(ours) == len(theirs) == 20
    for batch, expected in zip(ours, theirs, strict=True):
        assert [*batch.keys()] == [*expected.keys()]
        for name, value in expected.to_dict().items():
            equal = torch.equal(batch[name], value) if isinstance(value, torch.Tensor) else batch[name] == value
            assert equal, name
    table = disk.pipeline.tables["x"]
    assert isinstance(table, DiskFeatures)
    assert table.counts.rows == sum(batch.num_nodes for batch in theirs)
    assert table.claim(), "no loader announces reads"


def test_shares_that_change_are_sampled_again(store):
    def batches(**options):
        share = [0.5]
        loader = make_data(**F32, **options).train_dataloader()
        shared = ShardedBatchSampler(loader, lambda n, number: split_seeds(n, [share[0], 1])[0])
        for number, batch in enumerate(make_staged_loader(loader, shared, PipelineSettings(0), lambda share: None)):
            share[0] = 0.5 if number % 4 else 2.0
            yield batch
        table = loader.pipeline.tables.get("x")
        read.append(table and (table.counts.rows, table._cache.announced))

    read = []
    for batch, expected in zip(batches(memory="3MB", store=store), batches(), strict=True):
        assert torch.equal(batch.n_id, expected.n_id)
        assert torch.equal(batch.edge_index, expected.edge_index)
        assert torch.equal(batch.x, expected.x)
    assert read[0][0] > 0
    assert read[0][1] == 0


@pytest.mark.medium
@pytest.mark.parametrize("prefetch", [0, 2])
def test_looking_ahead_reads_less(store, prefetch, record_calls):
    read = {}
    for lookahead in (None, 0):
        loader = make_data(**F32, memory="3MB", store=store, lookahead=lookahead).train_dataloader()
        file = loader.pipeline.tables["x"].file
        table = DiskFeatures(file, DiskFeatures.least_bytes(file))  # room for 64 rows
        asked = record_calls(table, "announce")
        loader.pipeline.tables["x"] = table
        shared = ShardedBatchSampler(loader, lambda n, number: split_seeds(n, [1, 2])[1], 1)
        rows = [batch.n_id.numel() for batch in make_staged_loader(loader, shared, PipelineSettings(prefetch))]
        assert [n_id.numel() for (n_id,) in asked] == ([] if lookahead == 0 else rows)
        read[lookahead] = table.counts.hits
    assert read[None] > read[0]
