from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn.graph import CSCGraph, FeatureTable
from lightning_gnn.graph.cache import (
    SECTOR_BYTES,
    RowCache,
    hottest,
    hottest_of_types,
    plan_dual_cache,
    plan_row_caches,
)
from lightning_gnn.graph.synthetic import power_law_graph
from lightning_gnn.ops import batch_key, sample_neighbors
from lightning_gnn.persistent import count_accesses
from lightning_gnn.persistent.access_counts import count_reads
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.strategies import graphs


def sources(cached, targets, positions):
    """Look up sources of edges the way a kernel does: from in-edge ``positions`` of ``targets``, int64 ``[n]``."""
    device = cached.offset.device
    targets, positions = targets.to(device), positions.to(device)
    offset = cached.offset[targets]
    is_cached = offset >= 0
    out = torch.empty_like(targets, dtype=torch.int64)
    out[is_cached] = cached.cached_indices[offset[is_cached] + positions[is_cached]].to(torch.int64)
    edges = cached.indptr[targets[~is_cached]] + positions[~is_cached]
    out[~is_cached] = cached.indices[edges.to(cached.indices.device)].to(device, torch.int64)
    return out


@st.composite
def workloads(draw):
    """Draw (feature_counts, adjacency_counts, degrees, row_bytes, index_bytes, budget, costs, lookup_bytes)."""
    nodes = draw(st.integers(0, 5))
    numbers = st.lists(st.integers(0, 9), min_size=nodes, max_size=nodes).map(torch.tensor)
    return (
        *(draw(numbers).to(torch.int64) for _ in range(3)),
        draw(st.sampled_from([0, 4, 10])),
        draw(st.sampled_from([4, 8])),
        draw(st.integers(0, 150)),
        {
            "feature_cost": draw(st.sampled_from([0.5, 3.0])),
            "adjacency_cost": draw(st.sampled_from([0.0, 1.0])),
            "lookup_bytes": draw(st.sampled_from([(0, 0), (7, 20), (1000, 0)])),
        },
    )


def entries(feature_counts, adjacency_counts, degrees, row_bytes, index_bytes, options):
    """List (kind, node, bytes, gain) of what may be cached."""
    found = []
    for node, (reads, picks, degree) in enumerate(
        zip(feature_counts.tolist(), adjacency_counts.tolist(), degrees.tolist(), strict=True)
    ):
        for kind, size, gain in (
            (0, row_bytes, reads * options["feature_cost"]),
            (1, degree * index_bytes, picks * options["adjacency_cost"]),
        ):
            if size and gain:
                found.append((kind, node, size, gain))
    return found


def best_gain(found, budget, lookup_bytes):
    best = 0.0
    for count in range(len(found) + 1):
        for chosen in combinations(found, count):
            tables = sum(lookup_bytes[kind] for kind in {kind for kind, *_ in chosen})
            if sum(size for _, _, size, _ in chosen) + tables <= budget:
                best = max(best, sum(gain for *_, gain in chosen))
    return best


@settings(max_examples=300)
@given(workloads())
def test_plan_against_all_plans(workload):
    *arguments, options = workload
    budget = arguments[-1]
    plan = plan_dual_cache(*arguments, **options)
    found = entries(*arguments[:-1], options)
    by_place = {(kind, node): (size, gain) for kind, node, size, gain in found}
    chosen = [
        (kind, node) for kind, nodes in enumerate((plan.feature_nodes, plan.adjacency_nodes)) for node in nodes.tolist()
    ]
    assert len(set(chosen)) == len(chosen)
    for kind, total in enumerate((plan.feature_bytes, plan.adjacency_bytes)):
        sizes = [by_place[place][0] for place in chosen if place[0] == kind]
        assert total == sum(sizes) + (options["lookup_bytes"][kind] if sizes else 0)
    assert plan.nbytes <= budget
    assert plan.gain == pytest.approx(sum(by_place[place][1] for place in chosen))
    best = best_gain(found, budget, options["lookup_bytes"])
    largest = max((gain for *_, gain in found), default=0.0)
    assert best - largest <= plan.gain <= best
    if len({size for _, _, size, _ in found}) <= 1:
        assert plan.gain == pytest.approx(best)  # entries of one size: greedy is exact
    again = plan_dual_cache(*arguments, **options)
    assert torch.equal(again.feature_nodes, plan.feature_nodes)
    assert torch.equal(again.adjacency_nodes, plan.adjacency_nodes)


def counts(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def test_ties_budgets_and_lookup_tables():
    same = counts(1, 1, 1)
    free = {"feature_cost": 1, "adjacency_cost": 1, "lookup_bytes": (0, 0)}
    plan = plan_dual_cache(same, same, same, 8, 8, 4 * 8, **free)
    assert plan.feature_nodes.tolist() == [0, 1, 2]  # rows before lists, then lower ids
    assert plan.adjacency_nodes.tolist() == [0]
    assert plan_dual_cache(same, same, same, 8, 8, 6 * 8, **free).nbytes == 48
    assert plan_dual_cache(same, same, same, 8, 8, 7, **free).nbytes == 0
    # By default the lookup tables count: 4 bytes a node for rows, 16 and 8 more for lists.
    assert plan_dual_cache(same, 0 * same, same, 8, 8, 4 * 3 + 7).nbytes == 0
    assert plan_dual_cache(same, 0 * same, same, 8, 8, 4 * 3 + 8).feature_nodes.tolist() == [0]
    assert plan_dual_cache(0 * same, same, same, 8, 8, 16 * 3 + 8 + 8).adjacency_nodes.tolist() == [0]
    # A node that was never touched is not cached, however large the budget.
    plan = plan_dual_cache(counts(0, 5, 0), counts(0, 0, 2), counts(3, 0, 3), 8, 4, 10**9)
    assert (plan.feature_nodes.tolist(), plan.adjacency_nodes.tolist()) == ([1], [2])
    assert (plan.feature_hit_rate, plan.adjacency_hit_rate) == (1.0, 1.0)
    assert "100.0%" in str(plan)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 100)), max_size=3), st.integers(0, 600)
)
def test_rows_of_types_against_all_plans(types, budget):
    reads = {number: counts(*read) for number, (read, _) in enumerate(types)}
    widths = {number: width for number, (_, width) in enumerate(types)}
    chosen = plan_row_caches(reads, widths, budget)
    assert all(nodes.numel() and nodes.unique().numel() == nodes.numel() for nodes in chosen.values())
    assert sum(nodes.numel() * widths[name] + 4 * reads[name].numel() for name, nodes in chosen.items()) <= budget

    def gain(name, node):
        return int(reads[name][node]) * -(-widths[name] // SECTOR_BYTES) * SECTOR_BYTES

    found = [
        (name, node, widths[name], gain(name, node))
        for name, read in reads.items()
        for node in range(read.numel())
        if read[node]
    ]
    total = sum(gain(name, node) for name, nodes in chosen.items() for node in nodes.tolist())
    best = best_gain(found, budget, {name: 4 * read.numel() for name, read in reads.items()})
    assert total <= best
    if len(types) == 1:
        alone = plan_dual_cache(reads[0], 0 * reads[0], reads[0], widths[0], 8, budget)
        assert chosen.get(0, counts()).tolist() == alone.feature_nodes.tolist()
    if budget >= sum(4 * read.numel() + widths[name] * read.numel() for name, read in reads.items()):
        assert total == best  # there is room for all


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=3), st.integers(0, 16))
def test_the_hottest_of_all_types(scores, count):
    chosen = hottest_of_types({number: counts(*part) for number, part in enumerate(scores)}, count)
    order = sorted((-score, name, node) for name, part in enumerate(scores) for node, score in enumerate(part))
    assert sorted((name, node) for name, nodes in chosen.items() for node in nodes.tolist()) == sorted(
        entry[1:] for entry in order[:count]
    )


def test_measured_costs_move_the_split():
    reads, picks, degrees = counts(*range(1, 101)), counts(*range(100, 0, -1)), counts(*[20] * 100)
    budget = 12_000
    for cost, rows_win in ((1e-9, False), (1e-3, True)):
        plan = plan_dual_cache(reads, picks, degrees, 80, 4, budget, feature_cost=cost, adjacency_cost=1e-6)
        assert (plan.feature_nodes.numel() > plan.adjacency_nodes.numel()) is rows_win
        assert plan.nbytes <= budget
    default = plan_dual_cache(reads, 0 * picks, degrees, 80, 4, budget)
    assert default.gain == reads[default.feature_nodes].sum() * 96  # 80 bytes touch three sectors of 32
    assert SECTOR_BYTES == 32


def test_bad_workloads():
    same = counts(1, 1)
    with pytest.raises(ValueError, match=r"one count per node, 2, but got the shape \[3\]"):
        plan_dual_cache(counts(1, 1, 1), same, same, 8, 8, 100)
    with pytest.raises(ValueError, match="counts must be finite"):
        plan_dual_cache(same, torch.tensor([1.0, float("nan")]), same, 8, 8, 100)
    with pytest.raises(ValueError, match="the budget must be finite and not negative, but one is -1"):
        plan_dual_cache(same, same, same, 8, 8, -1)
    with pytest.raises(ValueError, match="degrees must not be negative"):
        plan_dual_cache(same, same, -same, 8, 8, 100)


def test_hottest_nodes():
    assert hottest(counts(3, 9, 3, 9, 1), 3).tolist() == [1, 3, 0]
    assert hottest(counts(3, 9), 5).tolist() == [1, 0]
    assert hottest(counts(3, 9), 0).tolist() == []


@given(graphs(), st.integers(0, 2**32))
def test_cached_lists_decode_to_the_graph(graph, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(graph.num_nodes, generator=generator)
    targets = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.in_degrees)
    positions = torch.arange(graph.num_edges) - graph.indptr[targets]
    for count in {0, graph.num_nodes // 2, graph.num_nodes}:
        nodes = order[:count]
        cached = graph.cache_adjacency(nodes, "cpu")
        assert torch.equal(sources(cached, targets, positions), graph.indices.to(torch.int64))
        assert cached.cached_indices.numel() == graph.in_degrees[nodes].sum()
        assert cached.cached_indices.dtype == graph.indices.dtype
        assert torch.equal(cached.offset >= 0, torch.zeros(graph.num_nodes).index_fill(0, nodes, 1) > 0)
        # Each list lies where its offset says, and is read from there.
        away = type(cached)(cached.indptr, torch.full_like(graph.indices, -7), cached.offset, cached.cached_indices)
        expected = torch.where(cached.offset[targets] >= 0, graph.indices, torch.full_like(graph.indices, -7))
        assert torch.equal(sources(away, targets, positions), expected.to(torch.int64))


def test_bad_nodes_to_cache(tmp_path):
    graph = CSCGraph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
    with pytest.raises(IndexError, match="cannot cache node 3: the graph has 3 nodes"):
        graph.cache_adjacency(counts(0, 3), "cpu")
    with pytest.raises(ValueError, match="given twice"):
        RowCache.build(torch.ones(3, 2), counts(1, 1), "cpu")
    # A memory-mapped graph is cached from its files.
    mapped = CSCGraph.load(graph.save(tmp_path))
    assert mapped.cache_adjacency(counts(2), "cpu").cached_indices.tolist() == [1]


def test_counts_are_those_of_the_mini_batches():
    graph = CSCGraph.from_csc(*power_law_graph(300, 3000, seed=1))
    seeds = torch.arange(0, 300, 3)
    result = count_accesses(graph, seeds, [4, 3], batch_size=40, num_batches=5, seed=7)
    features, adjacency = np.zeros(300, int), np.zeros(300, int)
    generator = torch.Generator().manual_seed(7)
    for epoch, batches in ((0, 3), (1, 2)):
        order = seeds[torch.randperm(100, generator=generator)]
        for batch in range(batches):
            key = batch_key(7, epoch=epoch, batch=batch)
            out = sample_neighbors(graph, order[batch * 40 : batch * 40 + 40], [4, 3], key)
            for node in out.node.tolist():
                features[node] += 1
            for target in out.node[out.edge_index[1]].tolist():
                adjacency[target] += 1
    assert result.features.tolist() == features.tolist()
    assert result.adjacency.tolist() == adjacency.tolist()
    assert result.num_batches == 5
    for arguments in ((seeds[:0], [2], 1, 1), (seeds, [2], 0, 1), (seeds, [2], 1, 0)):
        with pytest.raises(ValueError, match="pre-sampling needs"):
            count_accesses(graph, *arguments)


def test_rows_that_any_sampler_reads_are_counted():
    graph = CSCGraph.from_csc(*power_law_graph(300, 2000))
    seeds = torch.arange(0, 300, 2)
    for options in ({}, {"replace": True}, {"disjoint": True}):
        expected = count_accesses(graph, seeds, [4, 3], batch_size=40, num_batches=5, seed=7, **options)
        sampler = NeighborSampler(graph, [4, 3], **options)
        inputs = NodeSamplerInput(None, seeds)
        found = count_reads(sampler, inputs, 40, range(2), seed=7) + count_reads(
            sampler, inputs, 40, range(2, 5), seed=7
        )
        assert list(found.rows) == list(found.edges) == [None]
        assert torch.equal(found.rows[None], expected.features)
        assert torch.equal(found.lists, expected.adjacency)
        assert (found.edges[None], found.num_batches) == (int(expected.adjacency.sum()), 5)


def test_from_counts_to_caches_within_the_budget():
    graph = CSCGraph.from_csc(*power_law_graph(2000, 30_000))
    table = FeatureTable(torch.randn(2000, 16))
    seen = count_accesses(graph, torch.arange(0, 2000, 5), [10, 5], batch_size=50, num_batches=8)
    index_bytes = graph.indices.element_size()
    for quantised in (False, True):
        table = table.quantized() if quantised else table
        lookup = (4 * 2000 + (4 * 2000 if quantised else 0), 16 * 2000 + 8)
        budget = 200_000
        plan = plan_dual_cache(
            seen.features, seen.adjacency, graph.in_degrees, table.row_bytes, index_bytes, budget, lookup_bytes=lookup
        )
        assert plan.feature_nodes.numel()
        assert plan.adjacency_nodes.numel()
        rows, lists = table.cached(plan.feature_nodes, "cpu"), graph.cache_adjacency(plan.adjacency_nodes, "cpu")
        scales = table.scales.nbytes if quantised else 0
        assert rows.cache.nbytes + scales == plan.feature_bytes
        assert lists.nbytes == plan.adjacency_bytes
        assert plan.nbytes <= budget
        # Skewed access: the cache serves more than its share of the edges.
        assert plan.adjacency_hit_rate > 1.2 * lists.cached_indices.numel() / graph.num_edges
        n_id = torch.randint(2000, (500,))
        assert torch.equal(rows.gather(n_id), table.gather(n_id))


def test_degrees():
    graph = CSCGraph.from_edge_index(torch.tensor([[0, 0, 0, 2], [1, 2, 2, 1]]), 4)
    assert graph.in_degrees.tolist() == [0, 2, 2, 0]
    assert graph.out_degrees.tolist() == [3, 0, 1, 0]
