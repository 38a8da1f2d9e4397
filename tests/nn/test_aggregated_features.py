"""Aggregated features equal PyG's operators on the whole graph, in any pieces, and follow what they are made from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import scatter

from lightning_gnn.graph import CSCGraph
from lightning_gnn.graph.arrays import load_array
from lightning_gnn.nn import aggregated_features as module
from lightning_gnn.nn.aggregated_features import aggregated_features
from lightning_gnn.nn.first_layer import NAMED, StaticAggregation
from lightning_gnn.runtime import store
from tests.strategies import edge_indices

HOW = {
    **NAMED,
    "weighted": StaticAggregation("sum", weighted=True),
    "no loops": StaticAggregation("sum", True, True, False),
    "improved": StaticAggregation("sum", True, True, True, True),
}


def reference(how, edge_index, x, edge_weight=None):
    edge_weight = edge_weight if how.weighted else None
    if how.normalize:
        edge_index, edge_weight = gcn_norm(
            edge_index, edge_weight, x.size(0), how.improved, how.add_self_loops, dtype=x.dtype
        )
    messages = x[edge_index[0]]
    if edge_weight is not None:
        messages = messages * edge_weight[:, None]
    return scatter(messages, edge_index[1], 0, x.size(0), how.reduce)


@settings(max_examples=60, deadline=None)
@given(
    edge_indices(),
    st.sampled_from(sorted(HOW)),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from([float("inf"), 0, 7000]),
    st.integers(1, 40),
    st.integers(1, 3),
)
def test_it_is_what_pyg_computes_in_any_pieces(drawn, how, columns, weighted, limit, block, threads):
    num_nodes, edge_index = drawn
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(num_nodes, columns, dtype=torch.float64, generator=generator)
    weight = None
    if weighted:  # PyG keeps any one of several self-loops' weights, so all of a node have the same
        weight = torch.rand(edge_index.size(1), dtype=torch.float64, generator=generator) + 0.1
        loops = edge_index[0] == edge_index[1]
        weight[loops] = 1 + edge_index[0][loops].double() / 7
    expected = reference(HOW[how], edge_index, x, weight)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_EDGES", block)
        patch.setattr(module, "_BLOCK_ROWS", block)
        patch.setattr(module, "_SMALL", 0)
        torch.set_num_threads(threads)
        try:
            found = aggregated_features(CSCGraph.from_edge_index(edge_index, num_nodes), x, HOW[how], weight, limit)
        finally:
            torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def graph_and_features(dtype=torch.float32, num_nodes=300, num_edges=3000, columns=20):
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    x = torch.randn(num_nodes, columns, generator=generator).to(dtype)
    return CSCGraph.from_edge_index(edge_index, num_nodes), edge_index, x


def test_of_several_self_loops_the_last_one_counts():
    edge_index = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]])
    weight = torch.tensor([5.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    x = torch.tensor([[1.0], [10.0]], dtype=torch.float64)
    graph = CSCGraph.from_edge_index(edge_index)
    found = aggregated_features(graph, x, NAMED["gcn"], weight)
    first, second = 1 + 4.0, 3 + 2.0  # degrees
    expected = [[1 / first + 10 * 4 / (first * second) ** 0.5], [10 * 3 / second + 2 / (first * second) ** 0.5]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("how", ["mean", "gcn", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_added_up_in_float32_at_least(how, dtype):
    graph, edge_index, x = graph_and_features(dtype)
    found = aggregated_features(graph, x, NAMED[how])
    assert found.dtype == dtype
    exact = reference(NAMED[how], edge_index, x.double())
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_it_is_the_same_for_any_number_of_threads():
    graph, _, x = graph_and_features(num_nodes=2000, num_edges=100_000)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(aggregated_features(graph, x, NAMED["gcn"]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_features_of_more_dimensions_and_not_contiguous_ones():
    graph, edge_index, x = graph_and_features(torch.float64)
    found = aggregated_features(graph, x.view(300, 5, 4), NAMED["mean"])
    torch.testing.assert_close(found, reference(NAMED["mean"], edge_index, x).view(300, 5, 4))
    turned = x.t().contiguous().t()
    torch.testing.assert_close(aggregated_features(graph, turned, NAMED["mean"]), found.view(300, 20))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "KEPT_FROM", 0)
    calls = []
    monkeypatch.setattr(module, "_aggregate", lambda *args, run=module._aggregate: (calls.append(1), run(*args)))
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_kept_is_found_again_by_content(cache, dtype):
    graph, edge_index, x = graph_and_features(dtype)
    first = aggregated_features(graph, x, NAMED["mean"])
    again = aggregated_features(CSCGraph.from_edge_index(edge_index, 300), x.clone(), NAMED["mean"])
    assert len(cache) == 1
    assert torch.equal(first, again)
    assert again.dtype == dtype
    torch.testing.assert_close(
        again.double(), reference(NAMED["mean"], edge_index, x.double()), rtol=torch.finfo(dtype).eps, atol=1e-9
    )
    assert len(store.entries(store.cache_root(), "first_layer")) == 1


def test_another_graph_features_weights_or_aggregation_are_computed_anew(cache):
    _, edge_index, x = graph_and_features(torch.float64)
    weight = torch.rand(3000, dtype=torch.float64)
    other_graph = edge_index.clone()
    other_graph[0, 17] = (other_graph[0, 17] + 1) % 300
    other_x, other_weight = x.clone(), weight.clone()
    other_x[3, 3] += 1e-9
    other_weight[2999] += 1e-9
    cases = [
        (edge_index, x, "mean", None),
        (other_graph, x, "mean", None),
        (edge_index, other_x, "mean", None),
        (edge_index, x, "gcn", None),
        (edge_index, x, "gcn", weight),
        (edge_index, x, "gcn", other_weight),
        (edge_index, x, "improved", weight),
    ]
    for number, (edges, features, how, weights) in enumerate(cases):
        found = aggregated_features(CSCGraph.from_edge_index(edges, 300), features, HOW[how], weights)
        assert len(cache) == number + 1
        expected = reference(HOW[how], edges, features, weights)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # The order of the edges decides which of them a weight belongs to.
    turned = CSCGraph.from_edge_index(edge_index.flip(1), 300)
    found = aggregated_features(turned, x, NAMED["gcn"], weight)
    torch.testing.assert_close(found, reference(NAMED["gcn"], edge_index.flip(1), x, weight))


def test_weights_that_are_not_asked_for_do_not_count(cache):
    graph, _, x = graph_and_features()
    aggregated_features(graph, x, NAMED["mean"], torch.rand(3000))
    aggregated_features(graph, x, NAMED["mean"])
    assert len(cache) == 1


def test_damage_on_the_disk_is_noticed(cache):
    graph, _, x = graph_and_features()
    first = aggregated_features(graph, x, NAMED["sum"]).clone()
    (entry,) = store.entries(store.cache_root(), "first_layer")
    rows = bytearray((entry / "rows.npy").read_bytes())
    rows[-3] ^= 1
    (entry / "rows.npy").write_bytes(rows)
    with pytest.warns(UserWarning, match="damaged"):
        assert torch.equal(aggregated_features(graph, x, NAMED["sum"]), first)
    assert len(cache) == 2


def test_memory_mapped_features_and_graph(tmp_path):
    graph, _, x = graph_and_features()
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = CSCGraph.load(graph.save(tmp_path / "graph"))
    found = aggregated_features(mapped, load_array(tmp_path / "x.npy"), NAMED["gcn"], memory_limit=20_000)
    assert torch.equal(found, aggregated_features(graph, x, NAMED["gcn"]))


def test_a_store_that_cannot_be_used_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "file" / "cache"))
    graph, edge_index, x = graph_and_features(torch.float64)
    monkeypatch.setattr(module, "KEPT_FROM", 0)
    found = aggregated_features(graph, x, NAMED["mean"])
    torch.testing.assert_close(found, reference(NAMED["mean"], edge_index, x))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.int(), TypeError, "dense floating"),
        (lambda x: x.to_sparse(), TypeError, "dense floating"),
        (lambda x: x.requires_grad_(), ValueError, "trained"),
        (lambda x: x[:5], ValueError, r"must be \[300, F\]"),
        (lambda x: x[:, 0], ValueError, r"must be \[300, F\]"),
    ],
)
def test_features_that_cannot_be_aggregated_are_refused(change, error, message):
    graph, _, x = graph_and_features()
    with pytest.raises(error, match=message):
        aggregated_features(graph, change(x), NAMED["mean"])


@pytest.mark.parametrize(
    ("weight", "message"), [(torch.rand(5), "3000"), (torch.rand(3000, requires_grad=True), "trained")]
)
def test_weights_that_cannot_be_used_are_refused(weight, message):
    graph, _, x = graph_and_features()
    with pytest.raises(ValueError, match=message):
        aggregated_features(graph, x, NAMED["gcn"], weight)
