import itertools
import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from lightning_gnn.graph import CompressedGraph, CSCGraph
from lightning_gnn.graph.hybrid_plan import PlanSettings
from lightning_gnn.graph.synthetic import planted_power_law, power_law_graph
from tests.strategies import edge_indices

ROW_BYTES = 64 * 4  # of the default num_columns_hint

options = st.one_of(
    st.just({}),
    st.builds(lambda k: {"num_chunks": k}, st.integers(1, 9)),
    st.builds(lambda vertices: {"local_bytes": 2 * vertices * ROW_BYTES}, st.integers(3, 20)),
    st.builds(
        lambda k, vertices: {"num_chunks": k, "local_bytes": 2 * vertices * ROW_BYTES},
        st.integers(1, 4),
        st.integers(3, 12),
    ),
    st.builds(lambda n: {"local_bytes": 2 * 8 * ROW_BYTES, "settings": PlanSettings(num_workers=n)}, st.integers(1, 5)),
).flatmap(lambda chosen: st.sampled_from(["locality", "natural"]).map(lambda order: {**chosen, "order": order}))


@st.composite
def compressed(draw):
    """Draw (num_nodes, edge_index, graph), some of them symmetric."""
    num_nodes, edge_index = draw(edge_indices())
    if draw(st.booleans()):
        edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    edge_index = edge_index[:, torch.randperm(edge_index.size(1), generator=torch.Generator().manual_seed(0))]
    return num_nodes, edge_index, CompressedGraph.from_edge_index(edge_index, num_nodes, **draw(options))


def check_chunks(chunks):
    """Check what the class promises, chunk by chunk."""
    rows, indptr, columns = chunks.rows.tolist(), chunks.indptr.tolist(), chunks.columns
    assert [vertex for vertex, _ in itertools.groupby(rows)] == list(dict.fromkeys(rows))  # parts are neighbours
    assert sorted(set(rows)) == list(range(chunks.num_rows))
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
    assert all(i + 1 in first for i in parts.nonzero().view(-1).tolist())  # a part begins a chunk


def check_directions(graph):
    forward, backward = graph.forward, graph.backward
    ids = backward.edge_ids.long()
    assert torch.equal(ids.sort().values, torch.arange(graph.num_edges))
    assert torch.equal(backward.entry_rows(), forward.entry_columns()[ids])
    assert torch.equal(backward.entry_columns(), forward.entry_rows()[ids])


def dense(graph, weight):
    """Sum the weights of each (target, source)."""
    out = torch.zeros(graph.num_targets, graph.num_sources, dtype=weight.dtype)
    where = graph.forward.entry_rows().long(), graph.forward.entry_columns().long()
    return out.index_put(where, weight, accumulate=True)


@settings(deadline=None)
@given(drawn=compressed())
def test_compression_loses_nothing(drawn):
    num_nodes, edge_index, graph = drawn
    assert (graph.num_sources, graph.num_targets, graph.num_edges) == (num_nodes, num_nodes, edge_index.size(1))
    assert torch.equal(graph.to_edge_index(), edge_index)
    assert torch.equal(graph.in_degrees, torch.bincount(edge_index[1], minlength=num_nodes))
    assert torch.equal(graph.out_degrees, torch.bincount(edge_index[0], minlength=num_nodes))
    for direction in (graph.forward, graph.backward):
        check_chunks(direction)
    check_directions(graph)
    ends = torch.stack([graph.forward.entry_columns(), graph.forward.entry_rows()], 1).long()
    assert torch.equal(graph.edge_order(edge_index.T), ends)


@settings(deadline=None)
@given(drawn=edge_indices(), num_chunks=st.integers(1, 30), order=st.sampled_from(["locality", "natural"]))
def test_chunks_of_equally_many_vertices(drawn, num_chunks, order):
    num_nodes, edge_index = drawn
    graph = CompressedGraph.from_edge_index(edge_index, num_nodes, num_chunks=num_chunks, order=order)
    assert graph.num_chunks == min(num_chunks, num_nodes)
    sizes = graph.forward.row_ptr.diff()
    assert graph.forward.rows.numel() == num_nodes
    assert sizes.max() - sizes.min() <= 1


@settings(deadline=None)
@given(drawn=edge_indices(max_edges=300), vertices=st.integers(3, 16), num_chunks=st.sampled_from(["auto", 2]))
def test_a_chunk_takes_half_the_local_memory_even_with_self_loops(drawn, vertices, num_chunks):
    num_nodes, edge_index = drawn
    given = CompressedGraph.from_edge_index(
        edge_index,
        num_nodes,
        num_chunks=num_chunks,
        local_bytes=2 * vertices * 16 * 2,
        num_columns_hint=16,
        element_size=2,
    )
    for graph in (given, given.with_self_loops()):
        for chunks in (graph.forward, graph.backward):
            check_chunks(chunks)
            assert (chunks.row_ptr.diff() + chunks.column_ptr.diff()).max() <= vertices


def test_a_hub_is_split_and_few_chunks_do_for_a_small_graph():
    star = torch.stack([torch.arange(1, 1000), torch.zeros(999, dtype=torch.int64)])
    graph = CompressedGraph.from_edge_index(star, 1000, local_bytes=2 * 102 * ROW_BYTES)
    hub = graph.forward.rows == 0
    assert hub.sum() == 10
    assert graph.forward.indptr.diff()[hub].sum() == 999
    assert graph.in_degrees[0] == 999
    assert CompressedGraph.from_edge_index(star, 1000).num_chunks == 1


@pytest.mark.parametrize("num_workers", [1, 3, 8, 20])
def test_the_number_of_chunks_is_a_multiple_of_the_workers(num_workers):
    graph = CompressedGraph.from_graph(
        CSCGraph.from_csc(*power_law_graph(500, 4000)),
        local_bytes=2 * 100 * ROW_BYTES,
        settings=PlanSettings(num_workers=num_workers),
    )
    assert graph.num_chunks > 20
    assert graph.num_chunks % num_workers == 0
    assert graph.forward.loads.sum() == 4000
    check_chunks(graph.forward)
    check_directions(graph)


@settings(deadline=None)
@given(drawn=compressed())
def test_self_loops_and_gcn_norm_are_those_of_pyg(drawn):
    num_nodes, edge_index, graph = drawn
    weight = torch.rand(edge_index.size(1), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    looped = graph.with_self_loops()
    assert looped is graph.with_self_loops()
    check_directions(looped)
    for chunks in (looped.forward, looped.backward):
        check_chunks(chunks)
    assert torch.equal(looped.forward.rows, graph.forward.rows)
    assert torch.equal(looped.forward.row_ptr, graph.forward.row_ptr)
    loops = looped.forward.entry_rows() == looped.forward.entry_columns()
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
        torch.testing.assert_close(dense(whole, found), reference, rtol=1e-12, atol=1e-13)


def test_gcn_norm_is_differentiable_and_kept_without_weights():
    edge_index = torch.tensor([[0, 1, 1, 3, 2, 4], [1, 0, 1, 2, 2, 1]])
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    graph = CompressedGraph.from_edge_index(edge_index, 6, num_chunks=2)
    assert torch.autograd.gradcheck(graph.gcn_weight, (weight,))
    (expected,) = torch.autograd.grad(gcn_norm(edge_index, weight, 6)[1].pow(2).sum(), weight)
    (found,) = torch.autograd.grad(graph.gcn_weight(weight).pow(2).sum(), weight)
    torch.testing.assert_close(found, expected)
    assert graph.gcn_weight() is graph.gcn_weight()
    assert graph.gcn_weight().dtype == torch.float32
    assert graph.gcn_weight(dtype=torch.float64).dtype == torch.float64


def test_what_validation_derives_first_can_be_trained_with():
    graph = CompressedGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 2]]), 3)
    with torch.inference_mode():
        weight = graph.gcn_weight()
    scale = torch.ones(5, requires_grad=True)
    (weight * scale).sum().backward()
    assert torch.equal(scale.grad, weight)


def test_added_self_loops_get_the_fill_value():
    graph = CompressedGraph.from_edge_index(torch.tensor([[0, 1, 1], [1, 1, 0]]), 3).with_self_loops()
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    out = graph.edge_order(values, fill=9.0)
    loops = graph.forward.entry_rows() == graph.forward.entry_columns()
    assert out[loops].tolist() == [[9.0, 9.0]] * 3
    out.sum().backward()
    assert values.grad.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert torch.equal(graph.to_edge_index(), torch.tensor([[0, 1, 0, 1, 2], [1, 0, 0, 1, 2]]))


@settings(deadline=None)
@given(drawn=edge_indices(), extra=st.integers(0, 9), kept=options)
def test_bipartite_graphs(drawn, extra, kept):
    num_targets, edge_index = drawn
    row = edge_index[0] + extra  # sources of their own, some of them without an edge
    by_target = torch.sort(edge_index[1], stable=True).indices
    indptr = torch.bincount(edge_index[1] + 1, minlength=num_targets + 1).cumsum(0)
    num_sources = num_targets + extra + 1
    graph = CompressedGraph.from_csc(indptr, row[by_target], num_sources, by_target, **kept)
    assert (graph.num_sources, graph.num_targets) == (num_sources, num_targets)
    assert torch.equal(graph.to_edge_index(), torch.stack([row, edge_index[1]]))
    check_chunks(graph.forward)
    check_chunks(graph.backward)
    check_directions(graph)
    for refused in (graph.with_self_loops, graph.gcn_weight):
        with pytest.raises(ValueError, match=f"same vertices on both sides, but the graph has {num_sources} sources"):
            refused()


@pytest.mark.parametrize("num_nodes", [0, 1, 5])
def test_graphs_without_edges(num_nodes, tmp_path):
    graph = CompressedGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), num_nodes)
    assert (graph.num_targets, graph.num_edges, graph.num_chunks) == (num_nodes, 0, 1)
    assert torch.equal(graph.gcn_weight(), torch.ones(num_nodes))
    assert graph.redundancy().rows_loaded == 0
    assert torch.equal(CompressedGraph.load(graph.save(tmp_path / "graph")).in_degrees, graph.in_degrees)


def test_a_symmetric_graph_has_one_set_of_chunks():
    data = planted_power_law(300, 3000, 10, 1)
    graph = CompressedGraph.from_edge_index(data.edge_index, 300, num_chunks=10)
    directed = CompressedGraph.from_edge_index(data.edge_index[:, :-1], 300, num_chunks=10)
    assert graph.shares_chunks
    assert graph.with_self_loops().shares_chunks
    assert graph.backward.local is graph.forward.local
    assert not directed.shares_chunks
    assert graph.num_bytes < 0.7 * directed.num_bytes
    moved = graph.to("meta")
    assert moved.shares_chunks
    assert moved.device == torch.device("meta")


def test_redundancy_counts_distinct_in_neighbours():
    data = planted_power_law(600, 6000, 30, 1, homophily=0.9)
    graph = CompressedGraph.from_edge_index(data.edge_index, 600, num_chunks=20)
    report = graph.redundancy()
    lists = [set(data.edge_index[0, data.edge_index[1] == v].tolist()) for v in range(600)]

    def loaded(order):
        return sum(len(set().union(*(lists[v] for v in order[30 * c : 30 * c + 30]))) for c in range(20))

    assert report.rows_loaded == loaded(graph.forward.rows.tolist()) == graph.forward.columns.numel()
    assert report.natural_rows_loaded == loaded(range(600))
    assert report.random_rows_loaded == loaded(np.random.default_rng(0).permutation(600).tolist())
    assert report.rows_loaded < 0.6 * report.natural_rows_loaded
    assert graph.order == "locality"
    assert f"{report.rows_loaded:,}" in str(report)
    assert f"{report.rows_loaded / report.natural_rows_loaded:.3f}" in str(report).splitlines()[1]
    assert graph.redundancy("backward") == report  # symmetric
    natural = CompressedGraph.from_edge_index(data.edge_index, 600, num_chunks=20, order="natural")
    assert natural.redundancy().rows_loaded == report.natural_rows_loaded


def test_a_natural_order_that_loads_fewer_rows_is_kept(caplog):
    # A band matrix in order is as local as it gets; to take the best vertex each time leaves gaps.
    vertex = torch.arange(240)
    edge_index = torch.cat([torch.stack([vertex, (vertex + step) % 240]) for step in (-3, -2, -1, 1, 2, 3, 7)], 1)
    with caplog.at_level(logging.INFO):
        graph = CompressedGraph.from_edge_index(edge_index, 240, num_chunks=24)
    assert graph.order == "natural"
    assert "keeps the natural order" in caplog.text
    assert graph.redundancy().rows_loaded == graph.redundancy().natural_rows_loaded
    assert torch.equal(graph.to_edge_index(), edge_index)


@settings(deadline=None)
@given(drawn=compressed())
def test_never_worse_than_the_natural_order(drawn):
    graph = drawn[2]
    for direction in ("forward", "backward"):
        report = graph.redundancy(direction)
        assert report.rows_loaded <= report.natural_rows_loaded


def test_the_same_graph_gives_the_same_chunks():
    def build(**kept):
        return CompressedGraph.from_graph(CSCGraph.from_csc(*power_law_graph(300, 3000)), **kept).checksum()

    assert build(num_chunks=7) == build(num_chunks=7)
    assert len({build(num_chunks=7), build(num_chunks=8), build(num_chunks=7, order="natural")}) == 3


def test_progress_names_steps_with_fractions():
    seen = []
    CompressedGraph.from_graph(
        CSCGraph.from_csc(*power_law_graph(300, 3000)), num_chunks=7, progress=lambda *args: seen.append(args)
    )
    for name in ("partition the forward", "compress the forward", "partition the backward", "compress the backward"):
        fractions = [fraction for step, fraction in seen if step == f"{name} direction"]
        assert fractions == sorted(fractions)
        assert fractions[-1] == pytest.approx(1)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("mmap", [False, True])
def test_save_and_load(tmp_path, symmetric, mmap):
    edge_index = torch.randint(40, (2, 300), generator=torch.Generator().manual_seed(0))
    if symmetric:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    weight = torch.rand(edge_index.size(1))
    given = CompressedGraph.from_edge_index(
        edge_index, 40, num_chunks=4, settings=PlanSettings(num_workers=2, bandwidth_ratio=3.5)
    )
    for name, graph in (("plain", given), ("loops", given.with_self_loops())):
        loaded = CompressedGraph.load(graph.save(tmp_path / name), mmap)
        assert loaded.checksum() == graph.checksum()
        assert loaded.shares_chunks == symmetric
        assert (loaded.settings, loaded.limits, loaded.order) == (graph.settings, graph.limits, graph.order)
        assert torch.equal(loaded.to_edge_index(), graph.to_edge_index())
        assert torch.equal(loaded.edge_order(weight), graph.edge_order(weight))
        assert loaded.redundancy() == graph.redundancy()
    assert torch.equal(CompressedGraph.load(tmp_path / "plain").gcn_weight(weight), given.gcn_weight(weight))
    with pytest.raises(FileExistsError, match="choose another folder"):
        given.save(tmp_path / "plain")


def test_damaged_and_foreign_files(tmp_path):
    graph = CompressedGraph.from_edge_index(torch.randint(40, (2, 300)), 40, num_chunks=4)
    graph.save(tmp_path / "good")
    with pytest.raises(FileNotFoundError, match="holds no compressed graph"):
        CompressedGraph.load(tmp_path)

    def damaged(name, content):
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        if content is None:
            (folder / name).unlink()
        elif isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            np.save(folder / name, content)
        return folder

    with pytest.raises(FileNotFoundError, match=r"forward_local\.npy"):
        CompressedGraph.load(damaged("forward_local.npy", None))
    truncated = (tmp_path / "good" / "forward_local.npy").read_bytes()[:-7]
    with pytest.raises(ValueError, match=r"forward_local\.npy is not a complete"):
        CompressedGraph.load(damaged("forward_local.npy", truncated))
    for name, content, message in (
        ("graph.json", b"{", "does not describe a compressed graph"),
        ("graph.json", b'{"format": "other"}', "format is 'other'"),
        ("forward_local.npy", np.zeros(300), "forward_local is missing or not"),
        ("forward_local.npy", np.full(300, 40, np.int32), "exceeds a chunk's columns"),
        ("forward_local.npy", np.zeros(299, np.int32), "forward_indptr does not ascend from 0 to 299"),
        ("forward_rows.npy", np.zeros(40, np.int32), "does not name every vertex"),
        ("forward_rows.npy", np.full(40, -1, np.int32), r"holds -1, outside \[0, 40\)"),
        ("forward_columns.npy", np.full(graph.forward.columns.numel(), 40, np.int32), "forward_columns holds 40"),
        ("backward_edge_ids.npy", np.full(300, 300, np.int32), "backward_edge_ids holds 300"),
        ("edge_ids.npy", np.full(300, -2, np.int32), "edge_ids holds -2"),
    ):
        with pytest.raises(ValueError, match=message):
            CompressedGraph.load(damaged(name, content))


def test_it_rides_in_a_pyg_data():
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graph = CompressedGraph.from_edge_index(edge_index, 3)
    graph.gcn_weight()
    data = Data(x=torch.randn(3, 4), edge_index=graph)
    assert data.to("cpu").edge_index is graph
    moved = data.clone().to("meta", non_blocking=True).edge_index
    assert isinstance(moved, CompressedGraph)
    assert moved.forward.local.is_meta
    assert moved.backward.edge_ids.is_meta
    assert moved.gcn_weight().is_meta
    assert moved.with_self_loops().device.type == "meta"
    assert graph.device.type == "cpu"


def test_new_settings_share_all_tensors():
    graph = CompressedGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
    weight, looped = graph.gcn_weight(), graph.with_self_loops()
    changed = graph.replace_settings(PlanSettings(num_workers=2))
    assert changed.settings.num_workers == 2
    assert changed.with_self_loops().settings.num_workers == 2
    assert changed.forward is graph.forward
    assert changed.with_self_loops().forward is looped.forward
    assert changed.gcn_weight() is weight
    assert graph.settings.num_workers is None


def test_a_graph_made_by_hand_counts_its_edges():
    graph = CompressedGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
    by_hand = CompressedGraph(graph.forward, replace(graph.backward))
    assert by_hand.num_user_edges == 3
    assert by_hand.redundancy().rows_loaded == 3


@pytest.mark.parametrize(
    ("kept", "error", "message"),
    [
        ({"num_chunks": 0}, ValueError, "num_chunks must be 'auto' or a number of at least 1, but is 0"),
        ({"num_chunks": "many"}, ValueError, "but is 'many'"),
        ({"num_chunks": True}, ValueError, "but is True"),
        ({"order": "random"}, ValueError, "order must be 'auto', 'locality' or 'natural'"),
        ({"local_bytes": 1000}, ValueError, "give at least 1536 or a smaller num_columns_hint"),
        ({"num_columns_hint": 0}, ValueError, "num_columns_hint=0"),
    ],
)
def test_wrong_options(kept, error, message):
    with pytest.raises(error, match=message):
        CompressedGraph.from_edge_index(torch.tensor([[0], [1]]), 2, **kept)


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
    with pytest.raises(ValueError, match="direction must be"):
        graph.redundancy("sideways")
