from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.hyscale.split import TrainerCost, split_evenly_in_time, whole_seeds

costs = st.builds(TrainerCost, st.sampled_from([0.0, 0.5, 3.0, 20.0]), st.floats(0.05, 2.0), st.just(1))


def slowest(seeds, costs, shared, per_seed):
    times = [cost.seconds(n) for n, cost in zip(seeds, costs, strict=True)]
    return max(*times, per_seed * sum(seeds[index] for index in shared))


@given(st.lists(costs, min_size=2, max_size=3), st.integers(6, 24), st.booleans(), st.sampled_from([0.0, 0.1, 1.0]))
def test_no_split_of_whole_seeds_is_faster(costs, total, grouped, per_seed):
    shared = list(range(1, len(costs))) if grouped else []
    seeds = split_evenly_in_time(total, costs, shared, per_seed)
    assert sum(seeds) == pytest.approx(total)
    best = inf
    for others in product(range(1, total), repeat=len(costs) - 1):
        rest = total - sum(others)
        if rest >= 1:
            best = min(best, slowest((rest, *others), costs, shared, per_seed))
    # Every trainer keeps at least one seed, which the fractions may undercut by a rounding.
    assert (
        slowest(seeds, costs, shared, per_seed) <= best * (1 + 1e-9) + max(cost.per_seed for cost in costs) + per_seed
    )
    whole = whole_seeds(total, seeds, costs)
    assert sum(whole) == total
    assert min(whole) >= 1


def test_all_are_done_at_the_same_time():
    found = split_evenly_in_time(100, [TrainerCost(0, 1.0), None, TrainerCost(2.0, 0.25)])
    assert found[1] == 0
    assert found[0] * 1.0 == pytest.approx(2.0 + found[2] * 0.25)
    # An overhead longer than all the others need: nothing but the least.
    assert split_evenly_in_time(10, [TrainerCost(50.0, 1.0), TrainerCost(0.0, 1.0)]) == pytest.approx([0, 10])
    # A transfer of 2 s a seed holds the group back: 1 / (1 + 1/2) of the seeds stay with the other.
    group = split_evenly_in_time(30, [TrainerCost(0, 1.0), TrainerCost(0, 0.1), TrainerCost(0, 0.3)], [1, 2], 2.0)
    assert group == pytest.approx([20, 7.5, 2.5])
    with pytest.raises(ValueError, match="no trainer"):
        split_evenly_in_time(10, [None, None])


def test_fewer_seeds_than_trainers():
    trainers = [TrainerCost(0, 1.0, 1)] * 3
    assert sorted(whole_seeds(2, split_evenly_in_time(2, trainers), trainers)) == [0, 1, 1]
