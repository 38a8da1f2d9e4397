import itertools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from lightning_gnn.compressed import CompressedGraph
from lightning_gnn.compressed.builder import build_layout, chunk_rows
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.graph import CSCGraph
from tests.strategies import edge_indices


@st.composite
def compressed(draw):
    """Draw (num_nodes, edge_index, graph); some of the graphs are symmetric."""
    num_nodes, edge_index = draw(edge_indices())
    if draw(st.booleans()):
        edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    edge_index = edge_index[:, torch.randperm(edge_index.size(1), generator=torch.Generator().manual_seed(0))]
    return num_nodes, edge_index, CompressedGraph.from_edge_index(edge_index, num_nodes)


def check_directions(graph):
    forward, backward = graph.forward, graph.backward
    ids = backward.edge_ids.long()
    assert torch.equal(ids.sort().values, torch.arange(graph.num_edges))
    assert torch.equal(backward.entry_rows(), forward.indices[ids])
    assert torch.equal(backward.indices, forward.entry_rows()[ids])
    assert bool((backward.edge_ids.diff() > 0)[backward.entry_rows().diff() == 0].all())  # in forward order
    assert backward is graph.backward


def sum_weights(graph, weight):
    out = torch.zeros(graph.num_targets, graph.num_sources, dtype=weight.dtype)
    where = graph.forward.entry_rows().long(), graph.forward.indices.long()
    return out.index_put(where, weight, accumulate=True)


@settings(deadline=None)
@given(drawn=compressed())
def test_compression_loses_nothing(drawn):
    num_nodes, edge_index, graph = drawn
    assert (graph.num_sources, graph.num_targets, graph.num_edges) == (num_nodes, num_nodes, edge_index.size(1))
    assert torch.equal(graph.to_edge_index(), edge_index)
    assert torch.equal(graph.in_degrees, torch.bincount(edge_index[1], minlength=num_nodes))
    assert torch.equal(graph.out_degrees, torch.bincount(edge_index[0], minlength=num_nodes))
    assert torch.equal(graph.backward.degrees(), graph.out_degrees)
    check_directions(graph)
    ends = torch.stack([graph.forward.indices, graph.forward.entry_rows()], 1).long()
    assert torch.equal(graph.edge_order(edge_index.T), ends)


@settings(deadline=None)
@given(drawn=compressed())
def test_self_loops_and_gcn_norm_are_those_of_pyg(drawn):
    num_nodes, edge_index, graph = drawn
    weight = torch.rand(edge_index.size(1), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    looped = graph.with_self_loops()
    assert looped is graph.with_self_loops()
    check_directions(looped)
    loops = looped.forward.entry_rows() == looped.forward.indices
    ids = torch.arange(looped.num_edges) if looped.edge_ids is None else looped.edge_ids
    assert torch.equal(ids < 0, loops)
    for given_weight, improved, add_self_loops in itertools.product((None, weight), (False, True), (False, True)):
        expected_index, expected = gcn_norm(
            edge_index, given_weight, num_nodes, improved, add_self_loops, dtype=torch.float64
        )
        whole = looped if add_self_loops else graph
        assert torch.equal(whole.to_edge_index(), expected_index)
        found = graph.gcn_weight(given_weight, improved, add_self_loops, dtype=torch.float64)
        reference = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
        reference.index_put_((expected_index[1], expected_index[0]), expected, accumulate=True)
        torch.testing.assert_close(sum_weights(whole, found), reference, rtol=1e-12, atol=1e-13)


def test_gcn_norm_is_differentiable_and_kept_without_weights():
    edge_index = torch.tensor([[0, 1, 1, 3, 2, 4], [1, 0, 1, 2, 2, 1]])
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    graph = CompressedGraph.from_edge_index(edge_index, 6)
    assert torch.autograd.gradcheck(graph.gcn_weight, (weight,))
    (expected,) = torch.autograd.grad(gcn_norm(edge_index, weight, 6)[1].pow(2).sum(), weight)
    (found,) = torch.autograd.grad(graph.gcn_weight(weight).pow(2).sum(), weight)
    torch.testing.assert_close(found, expected)
    assert graph.gcn_weight() is graph.gcn_weight()
    assert graph.gcn_weight().dtype == torch.float32
    assert graph.gcn_weight(dtype=torch.float64).dtype == torch.float64


@settings(deadline=None)
@given(drawn=edge_indices(), extra=st.integers(0, 9))
def test_bipartite_graphs(drawn, extra):
    num_targets, edge_index = drawn
    row = edge_index[0] + extra  # the sources are other nodes; some have no edge
    by_target = torch.sort(edge_index[1], stable=True).indices
    indptr = torch.bincount(edge_index[1] + 1, minlength=num_targets + 1).cumsum(0)
    num_sources = num_targets + extra + 1
    graph = CompressedGraph.from_csc(indptr, row[by_target], num_sources, by_target)
    assert (graph.num_sources, graph.num_targets) == (num_sources, num_targets)
    assert torch.equal(graph.to_edge_index(), torch.stack([row, edge_index[1]]))
    check_directions(graph)
    for refused in (graph.with_self_loops, graph.gcn_weight):
        with pytest.raises(ValueError, match=f"same vertices on both sides, but the graph has {num_sources} sources"):
            refused()


@pytest.mark.parametrize("num_nodes", [0, 1, 5])
def test_graphs_without_edges(num_nodes):
    graph = CompressedGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), num_nodes)
    assert (graph.num_targets, graph.num_edges, graph.chunked().chunks.num_chunks) == (num_nodes, 0, 1)
    assert torch.equal(graph.gcn_weight(), torch.ones(num_nodes))
    assert graph.chunked().chunks.columns.numel() == 0


def test_arrays_are_shared_with_the_topology_and_the_transpose_is_made_when_asked_for():
    topology = CSCGraph.from_edge_index(torch.randint(50, (2, 400)), 50)
    graph = CompressedGraph.from_graph(topology)
    assert graph.forward.indices.data_ptr() == topology.indices.data_ptr()
    assert graph.num_bytes == topology.num_bytes
    graph.backward.degrees()
    assert graph.num_bytes == topology.num_bytes + 51 * 8 + 400 * (4 + 4)


def test_it_rides_in_a_pyg_data():
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graph = CompressedGraph.from_edge_index(edge_index, 3)
    graph.gcn_weight()
    data = Data(x=torch.randn(3, 4), edge_index=graph)
    assert data.to("cpu").edge_index is graph
    moved = data.clone().to("meta", non_blocking=True).edge_index
    assert isinstance(moved, CompressedGraph)
    assert moved.forward.indices.is_meta
    assert moved.gcn_weight().is_meta
    assert moved.with_self_loops().device.type == "meta"
    assert graph.device.type == "cpu"


def test_a_graph_made_in_inference_mode_can_be_trained_on():
    with torch.inference_mode():
        graph = CompressedGraph.from_edge_index(torch.tensor([[0, 2, 1], [1, 0, 0]]), 3)
    tensors = graph.forward.indptr, graph.forward.indices, graph.edge_ids, graph.backward.edge_ids
    assert not any(tensor.is_inference() for tensor in tensors)


def test_wrong_graphs_and_values():
    with pytest.raises(TypeError, match="use from_edge_index for a tensor"):
        CompressedGraph.from_graph(torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match="indices holds node 3, but the graph has 3 nodes"):
        CompressedGraph.from_csc(torch.tensor([0, 1]), torch.tensor([3]), 3)
    with pytest.raises(ValueError, match=r"edge_index\[1\] holds node 2"):
        CompressedGraph.from_edge_index(torch.tensor([[0], [2]]), 2)
    graph = CompressedGraph.from_edge_index(torch.tensor([[0], [1]]), 2)
    with pytest.raises(ValueError, match=r"values must have one entry per edge of the graph, 1, but has the shape \[2"):
        graph.edge_order(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="edge_weight must have one entry"):
        graph.gcn_weight(torch.zeros(2))


# Chunks for NPUs.


def check_chunks(layout, direction):
    """Check the documented properties for each chunk, and the position of every entry."""
    chunks = layout.chunks
    rows, indptr, columns = chunks.rows.tolist(), chunks.indptr.tolist(), chunks.columns
    assert [vertex for vertex, _ in itertools.groupby(rows)] == list(dict.fromkeys(rows))  # parts are adjacent
    assert sorted(set(rows)) == list(range(direction.num_rows))
    assert chunks.row_ptr[0] == chunks.column_ptr[0] == 0
    assert chunks.row_ptr[-1] == len(rows)
    assert chunks.column_ptr[-1] == columns.numel()
    assert len(chunks.row_ptr) == len(chunks.column_ptr)
    for chunk in range(chunks.num_chunks):
        entries = slice(indptr[chunks.row_ptr[chunk]], indptr[chunks.row_ptr[chunk + 1]])
        own = columns[chunks.column_ptr[chunk] : chunks.column_ptr[chunk + 1]]
        assert torch.equal(own, own.unique())
        assert torch.equal(chunks.local[entries].unique(), torch.arange(own.numel(), dtype=torch.int32))
    parts = torch.tensor(rows[:-1]) == torch.tensor(rows[1:])
    first = chunks.row_ptr[:-1]
    assert all(i + 1 in first for i in parts.nonzero().view(-1).tolist())  # a part starts a chunk
    places = torch.arange(direction.num_edges) if layout.places is None else layout.places
    assert torch.equal(places.sort().values, torch.arange(direction.num_edges))
    assert torch.equal(chunks.entry_columns(), direction.indices[places])
    entry_rows = torch.repeat_interleave(chunks.rows, chunks.indptr.diff())
    assert torch.equal(entry_rows, direction.entry_rows()[places])
    assert layout.order == "natural" or layout.places is not None


@pytest.mark.slow
@settings(deadline=None)
@given(drawn=compressed(), vertices=st.sampled_from([3, 4, 7, 20, 2048]), transposed=st.booleans())
def test_chunks_hold_every_entry_once_and_load_no_more_than_the_natural_order(drawn, vertices, transposed):
    graph = drawn[2]
    rows = graph.backward if transposed else graph.forward
    layout = build_layout(rows, vertices)
    check_chunks(layout, rows)
    chunks, indptr = layout.chunks, rows.indptr.numpy()
    assert (chunks.row_ptr.diff() + chunks.column_ptr.diff()).max() <= vertices
    ids = np.arange(rows.num_rows, dtype=np.int32)
    natural = chunk_rows(ids, indptr[:-1], indptr[1:], rows.indices.numpy(), rows.num_columns, vertices)
    assert chunks.columns.numel() <= natural.rows_loaded
    assert graph.chunked(transposed=transposed) is graph.chunked(transposed=transposed)


def test_a_hub_is_split_and_few_chunks_do_for_a_small_graph():
    star = torch.stack([torch.arange(1, 1000), torch.zeros(999, dtype=torch.int64)])
    graph = CompressedGraph.from_edge_index(star, 1000)
    chunks = build_layout(graph.forward, 102).chunks
    hub = chunks.rows == 0
    assert hub.sum() == 10
    assert chunks.indptr.diff()[hub].sum() == 999
    assert graph.chunked().chunks.num_chunks == 1


def test_rows_that_share_neighbours_stand_together():
    data = planted_power_law(600, 6000, 30, 1, homophily=0.9)
    graph = CompressedGraph.from_edge_index(data.edge_index, 600)
    layout, rows = build_layout(graph.forward, 180), graph.forward
    ids = np.arange(600, dtype=np.int32)
    indptr = rows.indptr.numpy()
    natural = chunk_rows(ids, indptr[:-1], indptr[1:], rows.indices.numpy(), 600, 180)
    assert layout.order == "locality"
    assert layout.chunks.columns.numel() < 0.8 * natural.rows_loaded


def test_a_natural_order_that_loads_fewer_rows_is_kept(caplog):
    # A band matrix has optimal locality in its natural order; choosing the best vertex greedily leaves gaps.
    vertex = torch.arange(240)
    edge_index = torch.cat([torch.stack([vertex, (vertex + step) % 240]) for step in (-3, -2, -1, 1, 2, 3, 7)], 1)
    with caplog.at_level(logging.INFO):
        layout = build_layout(CompressedGraph.from_edge_index(edge_index, 240).forward, 40)
    assert layout.order == "natural"
    assert layout.places is None
    assert "in natural order" in caplog.text
