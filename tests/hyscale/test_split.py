from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.hyscale.resource_manager.mapping import Cost, split_evenly

costs = st.builds(Cost, st.sampled_from([0.0, 0.5, 3.0, 20.0]), st.floats(0.05, 2.0))


def compute_slowest(seeds, costs, shared, per_seed):
    times = [cost.seconds(n) for n, cost in zip(seeds, costs, strict=True)]
    return max(*times, per_seed * sum(seeds[index] for index in shared))


@given(st.lists(costs, min_size=2, max_size=3), st.integers(6, 24), st.booleans(), st.sampled_from([0.0, 0.1, 1.0]))
def test_no_split_of_whole_seeds_is_faster(costs, total, grouped, per_seed):
    shared = list(range(1, len(costs))) if grouped else []
    best = inf
    for others in product(range(1, total), repeat=len(costs) - 1):
        rest = total - sum(others)
        if rest >= 1:
            best = min(best, compute_slowest((rest, *others), costs, shared, per_seed))
    whole = split_evenly(total, costs, shared, per_seed)
    assert sum(whole) == total
    assert min(whole) >= 1
    # Fractions are rounded up or down to whole numbers of seeds.
    rounding = max(cost.per_unit for cost in costs) + len(shared) * per_seed
    assert compute_slowest(whole, costs, shared, per_seed) <= best * (1 + 1e-9) + rounding


def test_all_are_done_at_the_same_time():
    found = split_evenly(1000, [Cost(0, 1.0), None, Cost(20.0, 0.25)])
    assert found == (216, 0, 784)  # 216 s and 20 s + 784 / 4 s
    # With an overhead longer than the total of the others, a trainer gets the minimum.
    assert split_evenly(10, [Cost(50.0, 1.0), Cost(0.0, 1.0)]) == (1, 9)
    # A transfer of 2 s per seed limits the group: 1 / (1 + 1/2) of the seeds stay with the other.
    group = split_evenly(300, [Cost(0, 1.0), Cost(0, 0.1), Cost(0, 0.3)], [1, 2], 2.0)
    assert group[0] == 200
    with pytest.raises(ValueError, match="no trainer"):
        split_evenly(10, [None, None])


def test_fewer_seeds_than_trainers():
    assert sorted(split_evenly(2, [Cost(0, 1.0)] * 3)) == [0, 1, 1]
