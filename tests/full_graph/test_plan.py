"""Predicted costs of grouping ranks are exact, and every rank owns nodes of each split."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.full_graph.plan import plan_devices, shard_rows

LOADS = np.random.default_rng(0).integers(50, 400, 48)


def count_volume(plan, num_rows, element_size=4):
    """Count the bytes between ranks, message by message, for equal row ranges; forward and backward."""
    ranks = plan.num_workers
    total = 0.0
    for index in range(ranks):
        group, member = plan.worker(index)
        width = plan.slices[group][1] - plan.slices[group][0]
        rows_needed = min(num_rows, plan.loads[member])
        rows_made = num_rows / plan.group_size
        for other in range(ranks):
            if other != index:
                total += 2 * (rows_needed + rows_made) / ranks * width * element_size
    return total


@pytest.mark.parametrize("columns", [7, 16, 41, 100, 256, 602])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 20])
def test_volumes_are_those_of_the_messages_and_the_least_is_taken(ranks, columns):
    costs = {}
    for groups in (groups for groups in range(1, min(ranks, columns) + 1) if ranks % groups == 0):
        plan = plan_devices(columns, 5000, LOADS, ranks, groups)
        assert plan.candidates[0].cost == pytest.approx(count_volume(plan, 5000))
        costs[groups] = plan.candidates[0].cost
    plan = plan_devices(columns, 5000, LOADS, ranks)
    assert {candidate.num_groups: candidate.cost for candidate in plan.candidates} == costs
    assert plan.num_groups == max(groups for groups, cost in costs.items() if cost == min(costs.values()))
    assert plan.num_groups == max(costs)


def test_memory_takes_members_where_every_rank_cannot_hold_every_edge():
    free = plan_devices(64, 1000, LOADS * 1000, 4)
    assert free.num_groups == 4
    memory = {candidate.num_groups: candidate.terms["bytes per rank"] for candidate in free.candidates}
    assert memory[4] > memory[2] > memory[1]
    plan = plan_devices(64, 1000, LOADS * 1000, 4, memory_limit=int(memory[2]) + 1)
    assert plan.num_groups == 2
    assert "too large" in str(plan)


@pytest.mark.parametrize(("num_groups", "advice"), [("auto", "features$"), (1, "features or num_groups='auto'$")])
def test_too_large_a_graph_says_how_much_memory_it_needs(num_groups, advice):
    with pytest.raises(ValueError, match=f"on 2 ranks.* only 0.08 GB are available; use more ranks, narrower {advice}"):
        plan_devices(64, 100_000, LOADS * 1000, 2, num_groups, memory_limit=80_000_000)
    assert plan_devices(64, 100_000, LOADS * 1000, 64, num_groups, memory_limit=80_000_000).num_workers == 64


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="num_groups=2 does not divide the 3 workers"):
        plan_devices(64, 10, [1], 3, 2)
    with pytest.raises(ValueError, match="features narrower than the groups"):
        plan_devices(3, 10, [1], 4, 4)
    with pytest.raises(ValueError, match="num_rows must not be negative"):
        plan_devices(3, -1, [1], 4)
    with pytest.raises(ValueError, match="num_groups must be at least 1"):
        plan_devices(3, 1, [1], 4, 0)
    with pytest.raises(ValueError, match="num_groups must be a number or 'auto'"):
        plan_devices(3, 1, [1], 4, "many")
    with pytest.raises(ValueError, match="num_workers must be at least 1"):
        plan_devices(3, 1, [1], 0)


@given(kinds=st.lists(st.integers(0, 3), min_size=1, max_size=60), num_ranks=st.integers(1, 6))
def test_every_rank_owns_its_share_of_every_split(kinds, num_ranks):
    kinds = torch.tensor(kinds)
    splits = {name: kinds == kind for kind, name in enumerate(("train", "val", "test"))}
    sizes = {name: int(mask.sum()) for name, mask in splits.items()}
    if any(0 < size < num_ranks for size in sizes.values()):
        with pytest.raises(ValueError, match=r"the (train|val|test) split has \d+ nodes, but there are"):
            shard_rows(kinds.numel(), num_ranks, splits)
        return
    owners = shard_rows(kinds.numel(), num_ranks, splits)
    assert torch.equal(owners.order[owners.position], torch.arange(kinds.numel()))
    for values in ([int(splits[name][owners.rows(r)].sum()) for r in range(num_ranks)] for name in splits):
        assert max(values) - min(values) <= 1
    assert max(owners.counts) - min(owners.counts) <= 1
