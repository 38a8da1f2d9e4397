"""The model of a CPU's caches counts what it says, and the order that it chooses changes no number of a result."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.graph import CSCGraph
from lightning_gnn.graph.cache_model import count_misses, least_cost, order_cost
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.csc import transpose
from lightning_gnn.ops.aggregate.definition import aggregate
from tests.strategies import graphs


def misses_in_plain_python(rows, indptr, indices, popular, size):
    cache, misses = set(), 0
    for row in rows:
        for source in indices[indptr[row] : indptr[row + 1]]:
            if popular[source] or source in cache:
                continue
            misses += 1
            cache.add(source)
            if len(cache) == size:
                cache = set()
    return misses


@settings(max_examples=60)
@given(graphs(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_misses_are_those_of_a_cache_that_is_emptied_when_full(graph, size, random):
    rows = list(range(graph.num_nodes))
    random.shuffle(rows)
    rows = np.array(rows, np.int32)
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    popular = np.array([random.random() < 0.3 for _ in rows], bool)
    expected = misses_in_plain_python(rows, indptr, indices, popular, size)
    assert count_misses(rows, indptr, indices, popular, size) == expected


@settings(max_examples=30)
@given(graphs())
def test_no_order_costs_less_than_the_least(graph):
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    offsets, _, _ = transpose(indptr, indices, graph.num_nodes)
    backwards = np.arange(graph.num_nodes, dtype=np.int32)[::-1].copy()
    # In turn, rows cost less to write than the least allows for: that is for an order of their own.
    assert least_cost(offsets, max(0, graph.num_nodes - 1)) <= order_cost(backwards, indptr, indices, offsets) + 1e-12


def communities(num_nodes, shuffled, degree=12, size=200):
    """A graph whose nodes have most of their in-neighbours among the ``size`` of their community."""
    random = np.random.default_rng(0)
    target = random.integers(0, num_nodes, num_nodes * degree)
    near = target // size * size + random.integers(0, size, target.size)
    source = np.where(random.random(target.size) < 0.9, near, random.integers(0, num_nodes, target.size))
    source = np.minimum(source, num_nodes - 1)
    names = random.permutation(num_nodes) if shuffled else np.arange(num_nodes)
    return CSCGraph.from_edge_index(torch.from_numpy(np.stack([names[source], names[target]])), num_nodes)


@pytest.mark.parametrize(("shuffled", "order"), [(True, "locality"), (False, "natural")])
def test_communities_are_brought_together_where_they_are_scattered(shuffled, order, caplog):
    graph = communities(140_000, shuffled, degree=4)
    with caplog.at_level(logging.INFO, "lightning_gnn.graph.build"):
        chosen = CompressedGraph.from_graph(graph, order="auto")
    assert (chosen.order, chosen.backward_order) == (order, order)
    assert any(f"{order} order of the vertices, for a CPU" in message for message in caplog.messages) == shuffled
    natural = CompressedGraph.from_graph(graph, order="natural")
    x = torch.rand(graph.num_nodes, 3)
    weight = torch.rand(graph.num_edges)
    results = []
    for compressed in (chosen, natural):
        leaf = x.clone().requires_grad_()
        out = aggregate(compressed, leaf, compressed.edge_order(weight))
        out.backward(x)
        results.append((out.detach(), leaf.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_what_fits_the_cache_stays_as_it_is():
    graph = communities(4_000, True)
    assert CompressedGraph.from_graph(graph, order="auto").order == "natural"
