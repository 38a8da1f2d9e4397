"""Tables sharded over GPUs with peer access yield the same mini-batches as on one device."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.gpu_sampling.shards import BlockCyclicLayout, find_obstacle
from tests.full_graph.launch import run
from tests.gpu_sampling import shard_rank

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs")


@given(st.integers(0, 300), st.integers(1, 5), st.integers(0, 4))
def test_every_row_is_dealt_to_one_place(num_rows, num_shards, shift):
    dealt = BlockCyclicLayout(num_rows, num_shards, shift)
    table = torch.arange(num_rows).view(-1, 1)
    parts = torch.full((num_shards, max(dealt.size, 1), 1), -1)
    for shard in range(num_shards):
        dealt.copy_shard(table, shard, parts[shard])
    in_turn = parts.view(num_shards, -1, 1 << shift).transpose(0, 1) if dealt.size else parts[:0]
    assert torch.equal(in_turn.reshape(-1, 1)[:num_rows], table)
    assert int((parts >= 0).sum()) == num_rows
    assert dealt.size * num_shards < num_rows + (num_shards << shift)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "kinds"),
    [(2, ["features", "types", "links"]), (2, ["topology", "bulk", "quantised"]), (3, ["both", "all neighbours"])],
)
def test_rows_that_are_read_where_they_lie_are_those_of_the_cpu(tmp_path, num_ranks, kinds):
    outcomes = run(shard_rank.compare_batches, num_ranks, str(tmp_path), kinds)
    for kind in kinds:
        for counts, places in (outcome[kind] for outcome in outcomes):
            assert all(counts)
            assert "shard" in places.values()
        # Ranks may have different numbers of mini-batches.
        assert len({tuple(outcome[kind][0]) for outcome in outcomes}) == num_ranks or kind == "links"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "why"), [(False, "sample on the CPU, with Triton's interpreter"), (True, "but reads across them fail")]
)
@pytest.mark.filterwarnings("ignore:.*no table is sharded")
def test_gpus_that_do_not_read_each_other_share_no_table(tmp_path, fails, why):
    both = "topology='shard', features='shard'"
    asked = {"both": both, "features": "features='shard'", "topology": "topology='shard'", "links": both}
    for refused, places in run(shard_rank.explain_unsharded, 2, str(tmp_path), fails):
        assert refused.keys() == asked.keys()
        for kind, said in refused.items():
            assert said.startswith(f"cannot use {asked[kind]}: ")
            assert said.endswith(f"{why}; use 'auto', 'device' or 'pinned'")
        assert {*places.values()} == {"pinned"}  # as for one GPU


@pytest.mark.medium
@pytest.mark.parametrize("step", ["empty", "rendezvous", "copy_shard", "take"])
@pytest.mark.filterwarnings("ignore:.*no table is sharded")
def test_a_failure_on_one_rank_ends_on_all(tmp_path, step):
    for obstacle, error, gathered in run(shard_rank.share_with_failing_step, 2, str(tmp_path), step):
        assert "reads across them fail" in obstacle
        assert error == ("" if step == "take" else "planted")
        assert gathered == [0, 1]  # later collectives still match


@pytest.mark.parametrize(
    ("devices", "reads", "message"),
    [
        ([0, 1], True, "^$"),
        ([0, 1], False, "no peer access"),
        ([0, 0], True, "CUDA_VISIBLE_DEVICES must list all"),
        ([0, 2], True, "CUDA_VISIBLE_DEVICES must list all"),
        ([None, None], True, "interpreter"),
    ],
)
def test_it_is_said_why_gpus_do_not_read_each_other(monkeypatch, devices, reads, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: reads)
    assert re.search(message, find_obstacle(devices[0], devices))


@pytest.mark.slow
def test_ddp_with_a_validation_in_the_middle_is_that_of_the_cpu():
    assert run(shard_rank.fit_model, 2, True) == run(shard_rank.fit_model, 2, False)
