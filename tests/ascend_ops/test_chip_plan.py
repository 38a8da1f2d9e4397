"""The plan of a chip's cores: its costs are the twin's, its choice the best of all, and it loses to no other kernel."""

import importlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.ascend_ops.cost_model import atlas_a2, chunk_cycles, hbm_bytes
from lightning_gnn.ascend_ops.twin import Twin
from lightning_gnn.graph import CSCGraph
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.hybrid_plan import PlanSettings, divisors
from lightning_gnn.graph.synthetic import planted_power_law
from lightning_gnn.ops.aggregate import ascend_twin
from lightning_gnn.ops.aggregate.backends import bounds, chunk_tensors
from lightning_gnn.ops.aggregate.chip_plan import HEIGHTS, count_chunks, hbm_rate, plan_chip
from tests.strategies import edge_indices


def graph_of(nodes, edges, order="natural", exponent=2.2, seed=0):
    data = planted_power_law(nodes, edges, 4, 1, exponent=exponent, homophily=0.0, seed=seed)
    return CompressedGraph.from_graph(CSCGraph.from_edge_index(data.edge_index, nodes), num_chunks=8, order=order)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "nodes", "edges", "columns", "groups", "cores", "order"),
    [
        ("vector", 400, 6000, 256, 1, 4, "natural"),
        ("vector", 700, 3000, 100, 1, 6, "natural"),
        ("vector", 300, 3000, 602, 3, 3, "natural"),
        ("vector", 900, 9000, 192, 1, 4, "locality"),
        ("cube", 600, 9000, 256, 1, 3, "natural"),
        ("cube", 900, 5000, 256, 2, 4, "natural"),
        ("cube", 500, 9000, 100, 1, 2, "natural"),
        ("cube", 400, 6000, 602, 3, 3, "natural"),
        ("cube", 1200, 9000, 192, 1, 3, "locality"),
        ("cube", 800, 12000, 64, 1, 4, "locality"),
        ("cube", 500, 2500, 1200, 1, 3, "locality"),
    ],
)
def test_a_plan_costs_what_the_twin_takes(kernel, nodes, edges, columns, groups, cores, order, monkeypatch):
    chunks = graph_of(nodes, edges, order, exponent=2.6, seed=3).forward
    # HBM costs nothing here: the twin's first core would pay for rows that on a chip whoever comes first does.
    flat, launch = {"hbm_bytes": 1e9}, Twin.launch
    monkeypatch.setattr(Twin, "launch", lambda *args, **how: launch(*args, **how, parameters=flat))
    plan = plan_chip(
        columns, {"": chunks}, PlanSettings(num_groups=groups), cores, atlas_a2() | flat, kernels=(kernel,)
    )
    aggregate = ascend_twin.aggregate_chunks if kernel == "cube" else ascend_twin.aggregate_vector
    cut, x = chunk_tensors(chunks.recut(plan.height)), torch.ones(nodes, 1, columns).half()
    weight = torch.ones(chunks.num_edges, 1).half()
    with ascend_twin.record_launches() as launches:
        aggregate(cut, nodes, x, weight, "sum", bounds(plan.slices), bounds(plan.chunk_ranges))
    assert plan.candidates[0].cost == pytest.approx(launches[0].makespan, rel=0.1)


@pytest.mark.campaign(parts=4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "edges", "columns", "heads", "groups", "cores", "static"),
    [
        (600, 9000, 256, 1, 1, 3, False),
        (1500, 15000, 602, 1, 1, 4, True),
        (1500, 15000, 602, 1, 4, 8, False),
        (300, 30000, 64, 8, 1, 2, False),
    ],
)
def test_a_plan_in_waves_costs_what_the_twin_takes(nodes, edges, columns, heads, groups, cores, static):
    chunks = graph_of(nodes, edges, exponent=2.6, seed=3).forward
    how = {"kernels": ("gathered",), "heads": heads, "static": static}
    plan = plan_chip(columns, {"": chunks}, PlanSettings(num_groups=groups), cores, atlas_a2(), **how)
    assert plan.waves[0] == 0
    assert plan.waves[-1] == chunks.recut(plan.height).num_chunks
    x, weight = torch.ones(nodes, heads, columns // heads).half(), torch.ones(edges, heads).half()
    cut = bounds(plan.slices), list(plan.waves), plan.group_size, plan.kept
    with ascend_twin.record_launches() as launches:
        ascend_twin.aggregate_gathered(
            chunk_tensors(chunks.recut(plan.height)), nodes, x, weight[: chunks.num_edges], "sum", *cut
        )
    assert plan.candidates[0].cost == pytest.approx(launches[0].makespan, rel=0.2)


@pytest.mark.parametrize(
    ("heads", "columns", "nodes", "edges"), [(1, 100, 1000, 30000), (1, 3703, 300, 2500), (8, 64, 1000, 30000)]
)
def test_the_choice_is_the_best_of_each_kernel_alone(heads, columns, nodes, edges):
    offered = {"": graph_of(nodes, edges).forward}

    def least(*kernels, **how):
        plan = plan_chip(columns, offered, PlanSettings(), 12, atlas_a2(), kernels=kernels, heads=heads, **how)
        return min(candidate.cost for candidate in plan.candidates)

    for static in (False, True):
        alone = [least(kernel, static=static) for kernel in HEIGHTS]
        assert least(*HEIGHTS, static=static) == min(alone)
    assert least("gathered", static=True) <= least("gathered")


def lightest(loads, parts):
    """The least maximum over contiguous cuts of so many parts, by dynamic programming."""
    prefix = np.concatenate([[0], np.cumsum(loads)])
    best = np.where(np.arange(prefix.size) == 0, 0.0, np.inf)
    for _ in range(parts):
        best = np.array([
            min(max(best[start], prefix[stop] - prefix[start]) for start in range(stop + 1))
            for stop in range(prefix.size)
        ])  # fmt: skip
    return best[-1]


@pytest.mark.parametrize(("columns", "cores", "seed"), [(100, 6, 0), (256, 4, 1), (602, 3, 2), (16, 2, 3)])
def test_the_choice_equals_brute_force(columns, cores, seed):
    graphs = {order: graph_of(300, 2500, order, seed=seed).forward for order in ("natural", "locality")}
    plan = plan_chip(columns, graphs, PlanSettings(), cores, atlas_a2())
    costs = {}
    for order, kernel in itertools.product(graphs, ("cube", "vector")):
        workers = 2 * cores if kernel == "vector" else cores
        for height, groups in itertools.product(HEIGHTS[kernel], divisors(workers)):
            if groups > -(-columns // 16):
                continue
            counts = count_chunks(graphs[order], height)
            cycles, start = chunk_cycles(kernel, counts, columns, groups, atlas_a2())
            slowest = lightest(np.ceil(cycles), workers // groups) + start
            supply = hbm_bytes(kernel, counts, columns, atlas_a2()) / hbm_rate(atlas_a2())
            costs[order, kernel, height, groups] = max(slowest, supply)
    chosen = plan.order, plan.kernel, plan.height, plan.num_groups
    assert costs[chosen] == pytest.approx(min(costs.values()))
    by_groups = {candidate.num_groups: candidate.cost for candidate in plan.candidates}
    assert 1 in by_groups  # one group is always considered
    for groups, cost in by_groups.items():
        assert cost == pytest.approx(min(cost for (*_, m), cost in costs.items() if m == groups))
    # what was counted is the whole matrix, once
    assert sum(plan.loads) == graphs["natural"].num_edges
    assert plan.chunk_ranges[-1][1] == graphs[plan.order].recut(plan.height).num_chunks


@given(edge_indices(), st.integers(1, 40))
def test_rows_cut_anew_are_the_same_matrix(drawn, height):
    nodes, edge_index = drawn
    chunks = CompressedGraph.from_edge_index(edge_index, nodes, local_bytes=6 * 32, num_columns_hint=8).forward
    cut = chunks.recut(height)
    cut._check("")
    for name in ("rows", "indptr"):
        assert torch.equal(getattr(cut, name), getattr(chunks, name))
    assert torch.equal(cut.entry_columns(), chunks.entry_columns())
    assert torch.equal(cut.row_ptr.diff()[:-1], torch.full((max(cut.num_chunks - 1, 0),), height))


def test_counts_are_those_of_the_chunks():
    chunks = graph_of(200, 1500, "locality").forward
    cut, counts = chunks.recut(32), count_chunks(chunks, 32)
    np.testing.assert_array_equal(counts.columns, cut.column_ptr.diff())
    np.testing.assert_array_equal(counts.entries, cut.loads)
    assert counts.rows.sum() == int((chunks.degrees() > 0).sum())
    tables = importlib.import_module("lightning_gnn.ascend_ops.tiling").cube_tables(
        [tensor.numpy() for name, tensor in cut.tensors().items() if name != "edge_ids"], [(0, cut.num_chunks)], 1, 16
    )
    assert counts.runs.sum() == len(tables.runs)


def test_each_further_group_gathers_every_row_again():
    # Whatever the imbalance of a hub, one group is among the candidates, and an even graph keeps it.
    plan = plan_chip(256, {"": graph_of(2000, 20000).forward}, PlanSettings(), 4, atlas_a2(), kernels=("cube",))
    assert plan.num_groups == 1
    rows = {candidate.num_groups: candidate.terms["rows loaded"] for candidate in plan.candidates}
    assert rows[4] >= 3.9 * min(rows.values())
    assert plan.candidates[0].terms["imbalance"] < 1.1
    assert "rows loaded" in str(plan)
    assert "chosen cube, " in str(plan)


@pytest.mark.parametrize("nodes", [3, 1])
def test_graphs_without_edges_have_a_plan(nodes):
    graph = CompressedGraph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), nodes)
    plan = plan_chip(33, {"": graph.forward}, PlanSettings(), 6, atlas_a2())
    assert sum(plan.loads) == 0
    with pytest.raises(ValueError, match="num_groups=5 does not divide the"):
        plan_chip(133, {"": graph.forward}, PlanSettings(num_groups=5), 6, atlas_a2())
