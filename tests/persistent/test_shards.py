"""Tables dealt out to processes: the same mini-batches, whoever holds the rows, and however many each process makes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.persistent import PersistentNeighborSampler, PersistentSamplerDataModule
from lightning_gnn.persistent.shards import Dealt
from tests.batching_data import small_data
from tests.full_graph.launch import observe, run
from tests.persistent import shard_rank

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs")


@given(st.integers(0, 300), st.integers(1, 5), st.integers(0, 4))
def test_every_row_is_dealt_to_one_place(num_rows, num_shards, shift):
    dealt = Dealt(num_rows, num_shards, shift)
    table = torch.arange(num_rows).view(-1, 1)
    parts = torch.full((num_shards, max(dealt.size, 1), 1), -1)
    for shard in range(num_shards):
        dealt.deal(table, shard, parts[shard])
    rows = torch.arange(num_rows)
    assert torch.equal(parts[dealt.owner(rows), dealt.place(rows)], table)
    assert int((parts >= 0).sum()) == num_rows
    assert dealt.size * num_shards < num_rows + (num_shards << shift)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [["both"], ["features", "both", "types", "links"], ["both", "topology", "all neighbours"]], ids=str
)
def test_rows_that_are_sent_are_those_of_the_cpu(tmp_path, kinds):
    num_ranks = {1: 1, 4: 2, 3: 3}[len(kinds)]
    outcomes = run(shard_rank.batches_of, num_ranks, str(tmp_path), kinds)
    for kind in kinds:
        for counts, places, _ in (outcome[kind] for outcome in outcomes):
            assert all(counts)
            assert ("shard" in places.values()) is (num_ranks > 1)
        counts = {tuple(outcome[kind][0]) for outcome in outcomes}
        assert len(counts) == num_ranks or kind == "links"  # not all have as many mini-batches


@pytest.mark.slow
def test_mini_batches_that_are_sampled_together_share_the_exchanges_of_a_hop(tmp_path):
    bulks = {"bulk": 4, "one by one": 1, "bulk, in turn": 4}
    outcomes = run(shard_rank.batches_of, 2, str(tmp_path), list(bulks))
    for kind, bulk in bulks.items():
        counts = [outcome[kind][0] for outcome in outcomes]
        assert [train for train, _ in counts] == [3, 6]  # all were equal to those of one process
        most = [max(stage) for stage in zip(*counts, strict=True)]
        for *_, exchanges in (outcome[kind] for outcome in outcomes):
            assert exchanges == [2 * -(-number // bulk) + number for number in most]  # two hops; rows of each


@pytest.mark.slow
def test_rows_that_are_read_where_they_lie_are_those_of_the_cpu(tmp_path):
    kinds = ["both", "all neighbours", "quantised", "types"]
    for outcome in run(shard_rank.peers_of, 2, str(tmp_path), kinds):
        assert all("shard" in places.values() for _, places, _ in outcome.values())


@pytest.mark.slow
def test_ranks_that_are_out_of_step_are_told_so(tmp_path):
    for said in run(shard_rank.out_of_step, 2, str(tmp_path)):
        assert "out of step (rank 0 begins pass 3, rank 1 makes mini-batch 1 of pass 2)" in said


@pytest.mark.slow
def test_ranks_with_empty_mini_batches_stay_in_step(tmp_path):
    kinds = ["empty, bulk", "empty, one by one", "empty trees"]
    outcomes = run(shard_rank.batches_of, 2, str(tmp_path), kinds)
    for kind in kinds:
        assert [outcome[kind][0][0] for outcome in outcomes] == [4, 6]


@pytest.mark.slow
def test_a_loader_that_all_ranks_leave_is_begun_again(tmp_path):
    assert run(shard_rank.left, 2, str(tmp_path)) == [[2, 1, 3], [2, 1, 6]]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(tmp_path):
    failed, other = observe(shard_rank.faulty, 2, str(tmp_path)).errors
    assert "a fault of the user's own" in failed
    assert "RuntimeError" in other


@pytest.mark.slow
def test_ddp_with_a_validation_in_the_middle_is_that_of_the_cpu():
    assert run(shard_rank.fitted, 2, True) == run(shard_rank.fitted, 2, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "shard", "sampler": "labor"}, "topology='shard' does not go with sampler='labor'"),
        ({"topology": "shard", "eval_loader_kwargs": {"subgraph_type": "induced"}}, "does not go with subgraph_type"),
        ({"features": "shard", "cache_rows": 5}, "every row is at hand"),
        ({"gpus": 0}, "gpus must be at least 1"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PersistentSamplerDataModule(small_data(), num_neighbors=[2], **options)


def test_a_sampler_alone_has_nobody_to_share_with():
    with pytest.raises(ValueError, match="use PersistentSamplerDataModule"):
        PersistentNeighborSampler(small_data(), [2], device="cpu", topology="shard")


def test_a_single_process_has_all_of_it():
    options = {"num_neighbors": [2], "batch_size": 40, "seed": 3}
    ours = PersistentSamplerDataModule(small_data(), **options, device="cpu", topology="shard", features="shard")
    ours.train_dataloader()
    assert {part.place for part in ours.placement.parts} == {"device"}
    ours = PersistentSamplerDataModule(small_data(), **options, device="cpu", gpus=2)
    with pytest.raises(ValueError, match="gpus=2, but the run has 1 on this node"):
        ours.train_dataloader()
