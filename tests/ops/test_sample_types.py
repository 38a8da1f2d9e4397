"""Times, weights and LABOR: probabilities of picks, valid times, and errors."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from lightning_gnn.graph import CSCGraph, HeteroCSCGraph
from lightning_gnn.ops import Labor, batch_key, sample_hetero_neighbors, sample_neighbors
from lightning_gnn.ops.sample.eligible import count_eligible
from tests.ops.sample_cases import COPIES, check_chi_square, copy_graph, hub, list_picks


@pytest.mark.parametrize("degrees", [[], [0, 3, 0, 1], [15, 16, 17, 1, 31, 0, 33], [5000, 1, 300, 257, 256, 40] * 20])
@pytest.mark.parametrize("newest", [-1, 0, 7])
def test_times_are_searched_in_lists_of_any_length(degrees, newest):
    generator = np.random.default_rng(len(degrees))
    extremes = np.iinfo(np.int64)
    indptr = np.cumsum([0, *degrees])
    values = generator.choice([extremes.min, -3, *range(200), extremes.max], size=indptr[-1])
    lists = [np.sort(part) for part in np.split(values, indptr[1:-1])]
    time = np.concatenate(lists)
    node = generator.permutation(np.repeat(np.arange(len(degrees)), 3))
    until = generator.choice([extremes.min, -3, 0, 57, 100, 199, extremes.max], size=node.size)
    after = generator.choice([extremes.min, -4, 20, 150, extremes.max], size=node.size)
    for window in (False, True):
        first, count = np.full((2, node.size), -7)
        count_eligible(
            indptr, time, time[::16].copy(), node, np.arange(node.size), 0, node.size, until, after, window, newest,
            first, count,
        )  # fmt: skip
        for t, v in enumerate(node):
            end = np.searchsorted(lists[v], until[t], side="right")
            begin = min(np.searchsorted(lists[v], after[t], side="right") if window else 0, end)
            begin = max(begin, end - newest) if newest >= 0 else begin
            assert (first[t] - indptr[v], count[t]) == (begin, end - begin)


@pytest.mark.parametrize("fanout", [1, 2, 3, 4])
def test_successive_picks_have_the_chance_of_their_weights(fanout):
    weight, trials = [0.5, 3.0, 1e-6, 1.0, 6.0], 40_000
    graph, centres = copy_graph(torch.tensor([[1, 2, 3, 4, 5], [0] * 5]), 6)
    graph = graph.with_weight(torch.tensor(weight * COPIES, dtype=torch.float64))
    counts = Counter()
    for batch in range(trials // COPIES):
        counts.update(list_picks(sample_neighbors(graph, centres, [fanout], batch_key(3, batch=batch)), 5))
    expected = {}
    for picks in itertools.permutations(range(5), fanout):  # determines marginals, pairs and all other probabilities
        chance, left = 1.0, sum(weight)
        for pick in picks:
            chance *= weight[pick] / left
            left -= weight[pick]
        expected[picks] = chance * trials
    check_chi_square(counts, expected)


def test_weights_over_twelve_orders_of_magnitude():
    weight, trials = [10.0**-power for power in range(13)], 20_000
    graph, centres = copy_graph(torch.stack([torch.arange(1, 14), torch.zeros(13).long()]), 14)
    graph = graph.with_weight(torch.tensor(weight * COPIES, dtype=torch.float64))
    counts, pairs = Counter(), Counter()
    for batch in range(trials // COPIES):
        for picks in list_picks(sample_neighbors(graph, centres, [12], batch_key(8, batch=batch)), 13):
            assert len(set(picks)) == 12
            counts[picks[0]] += 1
            pairs[picks[:2]] += 1
    check_chi_square(counts, {edge: trials * w / sum(weight) for edge, w in enumerate(weight)})
    check_chi_square(
        pairs,
        {
            (a, b): trials * weight[a] / sum(weight) * weight[b] / (sum(weight) - weight[a])
            for a, b in itertools.permutations(range(13), 2)
        },
    )


def test_picks_by_time_are_uniform_in_their_range():
    trials, times = 30_000, torch.tensor([5, 1, 3, 2, 9, 3, 7])
    graph, centres = copy_graph(torch.stack([torch.arange(1, 8), torch.zeros(7).long()]), 8)
    graph, now = graph.with_time(times.repeat(COPIES)), torch.full((COPIES,), 5)
    counts = Counter()
    for batch in range(trials // COPIES):
        out = sample_neighbors(graph, centres, [2], batch_key(1, batch=batch), seed_time=now, time_window=4)
        picks = graph.edge_ids[out.edge].view(COPIES, 2) % 7
        counts.update(map(tuple, picks.tolist()))
    allowed = [edge for edge, time in enumerate(times.tolist()) if 1 < time <= 5]
    assert len(allowed) == 4
    check_chi_square(counts, dict.fromkeys(itertools.permutations(allowed, 2), trials / 12))


def test_the_last_edges_are_the_newest():
    times = torch.tensor([5, 1, 3, 2, 9, 3, 7])
    graph = hub(7).with_time(times)
    options = {"seed_time": torch.tensor([8]), "temporal_strategy": "last"}
    out = sample_neighbors(graph, torch.tensor([0]), [4], **options)
    assert graph.edge_ids[out.edge].tolist() == [2, 5, 0, 6]  # edges of equal times in the user's order


@pytest.mark.parametrize("duplicates", [False, True])
def test_labor_picks_every_subset_alike_and_shares_sources(duplicates):
    # Two targets with the same sources: each picks uniformly, and both pick the same.
    trials, sources = 24_000, [2, 3, 4, 4] if duplicates else [2, 3, 4, 5]
    graph, first = copy_graph(torch.tensor([sources * 2, [0] * 4 + [1] * 4]), 6)
    seeds = torch.stack([first, first + 1], dim=1).flatten()
    counts = Counter()
    for batch in range(trials // COPIES):
        out = sample_neighbors(graph, seeds, [2], batch_key(4, batch=batch), labor=Labor())
        picks = out.edge.view(COPIES, 4) - 8 * torch.arange(COPIES)[:, None]
        assert torch.equal(picks[:, 2:] - 4, picks[:, :2])
        counts.update(map(tuple, picks[:, :2].tolist()))
    check_chi_square(counts, dict.fromkeys(itertools.combinations(range(4), 2), trials / 6))


def test_hops_share_variates_only_if_layers_depend_on_each_other():
    # 0 and 1 have the same sources; 1 is found in the first hop and expanded in the second.
    sources = list(range(2, 22))
    edges = [(u, t) for t in (0, 1) for u in sources] + [(1, 22)]
    graph = CSCGraph.from_edge_index(torch.tensor(edges).t(), 23)
    same = {True: 0, False: 0}
    for depends, trial in itertools.product([True, False], range(50)):
        out = sample_neighbors(
            graph, torch.tensor([0, 22]), [5, 5], batch_key(1, batch=trial), labor=Labor(layer_dependency=depends)
        )
        picks = [set(out.node[out.edge_index[0, out.node[out.edge_index[1]] == t]].tolist()) for t in (0, 1)]
        same[depends] += picks[0] == picks[1]
    assert same[True] == 50
    assert same[False] < 5


@pytest.mark.parametrize("often", [2, 5])
def test_a_batch_renews_a_fraction_of_the_variates(often):
    from lightning_gnn.ops.sample.reference import variate

    sources, key = range(4000), batch_key(6, epoch=1)
    before = [variate(key, u, 0, Labor(batch_dependency=often, batch=10)) for u in sources]
    for step in range(1, often + 1):
        now = [variate(key, u, 0, Labor(batch_dependency=often, batch=10 + step)) for u in sources]
        share = sum(a == b for a, b in zip(before, now, strict=True)) / len(sources)
        assert math.isclose(share, 1 - step / often, abs_tol=0.05)


@pytest.mark.parametrize("seed_dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("edge_dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 2, 1.5])
def test_times_of_any_dtype(seed_dtype, edge_dtype, window):
    times = torch.tensor([-3.0, -1.0, -0.0, 0.0, 1.0, 2.0, 4.0]).to(edge_dtype)
    graph = hub(7).with_time(times)
    for seed_time in (-4, -2.5, -1, 0, 0.5, 1.5, 2, 9):
        now = torch.tensor([seed_time]).to(seed_dtype)
        out = sample_neighbors(graph, torch.tensor([0]), [-1], seed_time=now, time_window=window)
        limit = float(now)
        wanted = [e for e, t in enumerate(times.tolist()) if t <= limit and (window is None or t > limit - window)]
        assert out.edge.tolist() == wanted


def test_nanoseconds_are_exact():
    times = 1_700_000_000_000_000_000 + torch.arange(5)
    graph = hub(5).with_time(times)
    out = sample_neighbors(graph, torch.tensor([0]), [-1], seed_time=times[3:4], time_window=2)
    assert out.edge.tolist() == [2, 3]


HUGE = torch.tensor([1e308, 1e308], dtype=torch.float64)


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        (lambda: hub(3).with_time(torch.tensor([0.0, math.nan, 1.0])), ValueError, "times of edges hold NaN, at 1"),
        (lambda: hub(3).with_time(torch.tensor([1, 2])), ValueError, "got 2 times, but the graph has 3 edges"),
        (lambda: hub(3).with_time([1, 2, 3]), TypeError, "must be an integer or floating-point tensor, but are list"),
        (lambda: hub(3).with_weight(torch.tensor([1.0, -1, 2])), ValueError, "that of edge 1 is -1.0"),
        (lambda: hub(3).with_weight(torch.tensor([1.0, math.nan, 2])), ValueError, "that of edge 1 is nan"),
        (lambda: hub(2).with_weight(HUGE), ValueError, "add up to infinity"),
        (lambda: hub(1).with_weight(torch.ones(1)).with_time(torch.ones(1)), ValueError, "weighted temporal sampling"),
        (lambda: hub(1).with_time(torch.ones(1)).with_weight(torch.ones(1)), ValueError, "weighted temporal sampling"),
    ],
)
def test_bad_attributes(action, kind, message):
    with pytest.raises(kind, match=message):
        action()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"seeds": torch.tensor([0])}, TypeError, "seeds of a heterogeneous graph must be a mapping by node type"),
        ({"seeds": {"c": torch.tensor([0])}}, ValueError, "unknown node type of seeds 'c': the node types are a, b"),
        ({"seeds": {"b": torch.tensor([0, 3])}}, IndexError, "node type 'b': seeds hold node 3"),
        ({"seeds": {"a": torch.tensor([0])}}, IndexError, "node type 'a': seeds hold node 0, but the graph has 0"),
        ({"fanouts": {("a", "x", "c"): [1]}}, ValueError, r"unknown edge type in num_neighbors \('a', 'x', 'c'\)"),
        ({"fanouts": {("b", "x", "b"): [1]}}, ValueError, r"no fanouts for \('b', 'y', 'b'\)"),
        ({"fanouts": {("b", "x", "b"): [1], ("b", "y", "b"): [1, 2]}}, ValueError, "the same hops for all edge types"),
        ({"seed_time": {"b": torch.tensor([1])}}, ValueError, "edges have no times"),
        ({"time_window": 3}, ValueError, "edges have no times"),
        ({"temporal_strategy": "first"}, ValueError, "unknown temporal_strategy 'first'"),
        ({"labor": Labor(), "replace": True}, ValueError, "LABOR does not support replace"),
        ({"labor": Labor(), "temporal_strategy": "last"}, ValueError, "LABOR does not support temporal_strategy="),
        ({"labor": Labor(batch_dependency=0)}, ValueError, "batch_dependency is 0"),
    ],
)
def test_bad_arguments(change, kind, message):
    loops = CSCGraph.from_edge_index(torch.tensor([[0, 1], [0, 1]]), 3, 3)
    graph = HeteroCSCGraph.build({"a": 0, "b": 3}, {("b", "x", "b"): loops, ("b", "y", "b"): loops})
    arguments = {"seeds": {"b": torch.tensor([0])}, "fanouts": [1], **change}
    with pytest.raises(kind, match=message):
        sample_hetero_neighbors(graph, **arguments)


def test_seeds_need_times_where_edges_have_them():
    graph = hub(2).with_time(torch.arange(2))
    with pytest.raises(ValueError, match="seeds need times too"):
        sample_neighbors(graph, torch.tensor([0]), [1])
    with pytest.raises(ValueError, match="seed_time has 1 times for 2 seeds"):
        sample_neighbors(graph, torch.tensor([0, 1]), [1], seed_time=torch.ones(1))
    with pytest.raises(ValueError, match="times of seeds hold NaN"):
        sample_neighbors(graph, torch.tensor([0]), [1], seed_time=torch.tensor([math.nan]))


def test_edges_of_the_weight_0_are_never_picked():
    graph = hub(5).with_weight(torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0]))
    for fanout, replace in itertools.product((-1, 1, 2, 5, 9), (False, True)):
        out = sample_neighbors(graph, torch.tensor([0]), [fanout], replace=replace)
        assert set(graph.edge_ids[out.edge].tolist()) <= {1, 3}
    assert sample_neighbors(graph, torch.tensor([0]), [-1]).edge.numel() == 2
