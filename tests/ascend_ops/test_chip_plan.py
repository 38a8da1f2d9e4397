"""The plan for a chip's cores: its costs are close to the twin's, and its choice is the best candidate."""

import numpy as np
import pytest
import torch

from lightning_gnn.ascend_ops.twin import Twin
from lightning_gnn.compressed.builder import build_layout
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import PlanSettings, divisors
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.ops.aggregate import ascend_twin
from lightning_gnn.ops.aggregate.chip import bounds
from lightning_gnn.ops.aggregate.chip_plan import HEIGHT, count_chunks, estimate_cycles, plan_chip


def draw_graph(nodes, edges, order="natural", exponent=2.2, seed=0):
    data = planted_power_law(nodes, edges, 4, 1, exponent=exponent, homophily=0.0, seed=seed)
    graph = CompressedGraph.from_edge_index(data.edge_index, nodes)
    return (graph.chunked() if order == "natural" else build_layout(graph.forward, nodes // 2)).chunks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "nodes", "edges", "columns", "heads", "groups", "cores", "order"),
    [
        ("vector", 400, 6000, 256, 1, 1, 4, "natural"),
        ("vector", 300, 3000, 602, 1, 3, 3, "natural"),
        ("vector", 900, 9000, 192, 1, 1, 4, "locality"),
        ("vector", 700, 3000, 64, 8, 2, 3, "natural"),
        ("cube", 900, 9000, 256, 1, 1, 3, "natural"),
        ("cube", 900, 9000, 602, 1, 3, 3, "natural"),
        ("cube", 1200, 9000, 192, 1, 1, 3, "locality"),
        ("cube", 800, 12000, 64, 8, 2, 4, "natural"),
    ],
)
def test_a_plan_costs_about_what_the_twin_takes(
    kernel, nodes, edges, columns, heads, groups, cores, order, monkeypatch
):
    chunks = draw_graph(nodes, edges, order, exponent=2.6, seed=3)
    # HBM costs nothing here: on the twin the first core would always pay for shared rows, on a chip any core may.
    flat, launch = {"hbm_bytes": 1e9}, Twin.launch
    monkeypatch.setattr(Twin, "launch", lambda *args, **how: launch(*args, **how, parameters=flat))
    settings = PlanSettings(num_groups=groups)
    plan = plan_chip(columns, chunks, settings, cores, kernels=(kernel,), heads=heads)
    aggregate = ascend_twin.aggregate_chunks if kernel == "cube" else ascend_twin.aggregate_vector
    cut, x = chunks.recut(HEIGHT[kernel]).tensors(), torch.ones(nodes, heads, columns // heads).half()
    weight = torch.ones(chunks.num_edges, heads).half()
    with ascend_twin.record_launches() as launches:
        aggregate(cut, nodes, x, weight, "sum", bounds(plan.slices), bounds(plan.chunk_ranges))
    assert plan.candidates[0].cost == pytest.approx(launches[0].makespan, rel=0.25)


def find_least_maximum(loads, parts):
    """Return the least maximum over contiguous partitions into ``parts`` parts, by dynamic programming."""
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
    chunks = draw_graph(300, 2500, seed=seed)
    plan = plan_chip(columns, chunks, PlanSettings(), cores)
    costs = {}
    for kernel in ("cube", "vector"):
        workers = 2 * cores if kernel == "vector" else cores
        for groups in divisors(workers):
            if groups <= -(-columns // 16):
                cycles = estimate_cycles(kernel, count_chunks(chunks, HEIGHT[kernel]), columns, groups)
                costs[kernel, groups] = find_least_maximum(cycles, workers // groups)
    assert costs[plan.kernel, plan.num_groups] == min(costs.values())
    by_groups = {candidate.num_groups: candidate.cost for candidate in plan.candidates}
    assert 1 in by_groups  # one group is always a candidate
    for groups, cost in by_groups.items():
        assert cost == min(cost for (_, m), cost in costs.items() if m == groups)
    # counts add up to the whole matrix
    assert sum(plan.loads) == chunks.num_edges
    assert plan.chunk_ranges[-1][1] == chunks.recut(HEIGHT[plan.kernel]).num_chunks


@pytest.mark.parametrize(
    ("degree", "spread", "kernel"), [(40, 50, "cube"), (40, 2000, "cube"), (3, 2000, "vector"), (4, 6000, "vector")]
)
def test_the_cube_takes_full_tiles_and_the_vector_cores_thin_ones(degree, spread, kernel):
    draw = torch.Generator().manual_seed(0)
    target = torch.randint(6000, (6000 * degree,), generator=draw)
    source = (target + torch.randint(spread, target.shape, generator=draw)) % 6000
    chunks = CompressedGraph.from_edge_index(torch.stack([source, target]), 6000).chunked().chunks
    assert plan_chip(256, chunks, PlanSettings(), 24).kernel == kernel


@pytest.mark.parametrize("nodes", [3, 1])
def test_graphs_without_edges_have_a_plan(nodes):
    chunks = CompressedGraph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), nodes).chunked().chunks
    plan = plan_chip(33, chunks, PlanSettings(), 6)
    assert sum(plan.loads) == 0
    with pytest.raises(ValueError, match="num_groups=5 does not divide the"):
        plan_chip(133, chunks, PlanSettings(num_groups=5), 6)
