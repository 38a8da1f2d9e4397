import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.graph.hybrid_plan import balance_ranges


def least_maximum(loads, parts):
    """Dynamic programming over (items used, parts used)."""
    best = [0] + [float("inf")] * len(loads)
    for _ in range(parts):
        best = [
            min(max(best[start], sum(loads[start:stop])) for start in range(stop + 1)) for stop in range(len(loads) + 1)
        ]
    return best[-1]


@given(st.lists(st.integers(0, 50), max_size=14), st.integers(1, 16))
def test_no_cut_is_lighter(loads, parts):
    ranges = balance_ranges(np.array(loads, np.int64), parts)
    assert len(ranges) == parts
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == len(loads)
    assert max(sum(loads[start:stop]) for start, stop in ranges) == least_maximum(loads, parts)
    sizes = [stop - start for start, stop in ranges]
    assert min(sizes) >= (1 if len(loads) >= parts else 0)
    if len(loads) < parts:
        assert sizes == [1] * len(loads) + [0] * (parts - len(loads))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_a_million_chunks_of_any_integer_type(dtype):
    loads = np.random.default_rng(0).integers(0, 200, 1_000_000).astype(dtype)
    ranges = balance_ranges(loads, 30)
    heaviest = max(int(loads[start:stop].sum(dtype=np.int64)) for start, stop in ranges)
    mean = int(loads.sum(dtype=np.int64)) / 30
    assert mean <= heaviest <= mean + 200
    assert ranges == balance_ranges(loads, 30)


def test_ranges_without_load_share_the_items():
    assert balance_ranges([0] * 6, 3) == ((0, 2), (2, 4), (4, 6))
    assert balance_ranges([], 2) == ((0, 0), (0, 0))


def test_what_a_hub_leaves_is_shared_evenly():
    # The hub alone is the maximum; a greedy cut would pack the rest into one range and leave two workers idle.
    assert balance_ranges([100, *[1] * 30], 4) == ((0, 1), (1, 11), (11, 21), (21, 31))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="parts must be at least 1"):
        balance_ranges([1], 0)
    with pytest.raises(ValueError, match=r"loads\[2\] = -1"):
        balance_ranges([1, 2, -1], 2)
    with pytest.raises(TypeError, match="whole numbers"):
        balance_ranges([1.5], 2)
