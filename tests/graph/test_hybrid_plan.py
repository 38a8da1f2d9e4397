from fractions import Fraction
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.compressed.hybrid_plan import PlanSettings, balance_ranges, plan_cores, slice_columns

COLUMNS = [7, 16, 41, 100, 256, 602]
WORKERS = [1, 2, 3, 8, 20, 30, 32]


def draw_skewed_loads(num_chunks=400, seed=0):
    """Return edges per chunk with a power law, as in degree-clustered chunks."""
    return (np.random.default_rng(seed).pareto(1.2, num_chunks) * 1000).astype(np.int64) + 1


def compute_padded_width(columns, groups):
    """Return the columns of the widest slice that the cube unit computes, block by block."""
    blocks = [[] for _ in range(groups)]
    widths = [columns // groups + (group < columns % groups) for group in range(groups)]
    for group, width in enumerate(widths):
        while width > 0:
            blocks[group].append(16)
            width -= 16
    return max(sum(block) for block in blocks)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_costs_and_the_choice_equal_algorithm_1_in_exact_arithmetic(columns, workers):
    loads = draw_skewed_loads(24, seed=columns + workers)
    settings = PlanSettings(grouping="paper", bandwidth_ratio=20)
    time, costs = Fraction(int(loads.sum()) * columns, workers), {}
    for groups in (groups for groups in range(1, min(workers, columns) + 1) if workers % groups == 0):
        idle = Fraction(compute_padded_width(columns, groups) * groups, columns) - 1
        costs[groups] = time * (idle - (1 - Fraction(1, 1 + (workers // groups - 1) * 19)))
    plan = plan_cores(columns, loads, settings, workers)
    assert {candidate.num_groups: candidate.cost for candidate in plan.candidates} == pytest.approx(
        {groups: float(cost) for groups, cost in costs.items()}
    )
    assert plan.num_groups == min(costs, key=lambda groups: (costs[groups], groups)) == 1


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_slices_are_aligned_and_as_narrow_as_can_be(columns, workers):
    for groups in range(1, min(workers, columns) + 1):
        slices = slice_columns(columns, groups)
        assert slices[0][0] == 0
        assert slices[-1][1] == columns
        assert all(start < stop for start, stop in slices)
        assert all(before[1] == after[0] for before, after in pairwise(slices))
        if ceil(columns / 16) >= groups:
            assert all(start % 16 == 0 for start, _ in slices)
        widest = max(ceil((stop - start) / 16) * 16 for start, stop in slices)
        assert widest == 16 * ceil(ceil(columns / groups) / 16) == compute_padded_width(columns, groups)


def test_every_edge_and_column_is_one_workers():
    loads = draw_skewed_loads(37)
    for columns in COLUMNS:
        for workers in WORKERS:
            groups = max(m for m in range(1, workers + 1) if workers % m == 0 and m <= columns)
            plan = plan_cores(columns, loads, PlanSettings(num_groups=groups), workers)
            done = np.zeros((37, columns), int)
            for index in range(workers):
                group, member = plan.worker(index)
                done[slice(*plan.chunk_ranges[member]), slice(*plan.slices[group])] += 1
                edges = int(loads[slice(*plan.chunk_ranges[member])].sum())
                assert plan.work[index] == edges * (plan.slices[group][1] - plan.slices[group][0])
            assert (done == 1).all()
            assert plan.balance == pytest.approx(plan.work.max() / plan.work.mean())
            assert (plan.num_groups, plan.group_size) == (len(plan.slices), len(plan.chunk_ranges))
    with pytest.raises(IndexError, match="worker must be from 0 to 31, but is 32"):
        plan.worker(32)


@pytest.mark.parametrize("loads", [[], [0, 0, 0], [5]])
def test_graphs_without_edges_or_with_one_chunk_have_a_plan(loads):
    plan = plan_cores(33, np.array(loads, np.int64), PlanSettings(), 6)
    assert plan.chunk_ranges[-1][1] == len(loads)
    assert sum(plan.loads) == sum(loads)
    assert plan.balance >= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_cores(64, [1], PlanSettings(num_groups=3), 8), r"num_groups=3 does not divide the 8 .* 1, 2, 4"),
        (lambda: plan_cores(7, [1], PlanSettings(num_groups=8), 8), "features narrower than the groups: 7 columns"),
        (lambda: plan_cores(0, [1], PlanSettings(), 8), "num_columns must be at least 1"),
        (lambda: plan_cores(7, [4, -2], PlanSettings(), 1), r"loads\[1\] = -2"),
        (lambda: plan_cores(7, [[4]], PlanSettings(), 1), "one dimension"),
        (lambda: PlanSettings(bandwidth_ratio=0.5), "bandwidth_ratio must be at least 1, but is 0.5"),
        (lambda: PlanSettings(num_workers=0), "num_workers must be at least 1"),
        (lambda: PlanSettings(num_groups="many"), "num_groups must be a number or 'auto'"),
        (lambda: PlanSettings(grouping="fast"), "grouping='fast' is unknown"),
        (lambda: PlanSettings(chunks="fast"), "chunks='fast' is unknown"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def find_least_maximum(loads, parts):
    """Return the least possible maximum load, by dynamic programming over (items used, parts used)."""
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
    assert max(sum(loads[start:stop]) for start, stop in ranges) == find_least_maximum(loads, parts)
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
