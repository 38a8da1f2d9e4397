from itertools import product
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.hyscale.costs import Cost, split_evenly

costs = st.builds(Cost, st.sampled_from([0.0, 0.5, 3.0, 20.0]), st.floats(0.05, 2.0))


def compute_slowest(seeds, costs):
    return max(cost.seconds(n) for n, cost in zip(seeds, costs, strict=True))


@given(st.lists(costs, min_size=2, max_size=3), st.integers(6, 24))
def test_no_split_of_whole_seeds_is_faster(costs, total):
    best = inf
    for others in product(range(total + 1), repeat=len(costs) - 1):
        rest = total - sum(others)
        if rest >= 0:
            best = min(best, compute_slowest((rest, *others), costs))
    whole = split_evenly(total, costs)
    assert sum(whole) == total
    assert min(whole) >= 0
    # Fractions are rounded up or down to whole numbers of seeds.
    assert compute_slowest(whole, costs) <= best * (1 + 1e-9) + max(cost.per_unit for cost in costs)


def test_all_are_done_at_the_same_time():
    assert split_evenly(1000, [Cost(0, 1.0), Cost(20.0, 0.25)]) == (216, 784)  # 216 s and 20 s + 784 / 4 s
    # A trainer with an overhead longer than the total of the others gets nothing.
    assert split_evenly(10, [Cost(50.0, 1.0), Cost(0.0, 1.0)]) == (0, 10)


def test_fewer_seeds_than_trainers():
    assert sorted(split_evenly(2, [Cost(0, 1.0)] * 3)) == [0, 1, 1]
