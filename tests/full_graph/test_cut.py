"""A rank's part of a graph has the right entries, also with self-loops, and needs memory for this part only."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import PlanSettings, balance_ranges
from lightning_gnn.compressed.self_loops import pick
from lightning_gnn.full_graph.cut import (
    RowEntries,
    count_self_loops,
    extract_row_range,
    iter_row_blocks,
    sum_in_weights,
)
from lightning_gnn.full_graph.plan import shard_rows
from lightning_gnn.graph import CSCGraph


@st.composite
def graphs(draw):
    num_nodes = draw(st.integers(1, 12))
    vertex = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(vertex, vertex), max_size=50))
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()
    if draw(st.booleans()):  # symmetric: both directions share their arrays
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    return CompressedGraph.from_edge_index(edge_index, num_nodes)


def list_entries(direction, ends, starts, places):
    """Return the entries of a direction as (row, column, position), in stored order."""
    columns = [ends[direction.entry_rows()], starts[direction.indices], places]
    return torch.stack([part.long() for part in columns])


@given(graph=graphs(), num_ranks=st.integers(1, 4), members=st.integers(1, 4), looped=st.booleans(), seed=st.integers())
def test_a_part_is_that_of_the_whole_graph_in_order(graph, num_ranks, members, looped, seed):
    num_nodes = graph.num_targets
    owners = shard_rows(num_nodes, num_ranks, {})
    whole = graph.with_self_loops() if looped else graph
    loops = count_self_loops(graph.forward)
    sources, targets = graph.to_edge_index()
    assert torch.equal(loops.long(), torch.bincount(targets[sources == targets], minlength=num_nodes))
    loads = graph.in_degrees + 1 - loops if looped else graph.in_degrees
    assert torch.equal(loads, whole.in_degrees)
    everything = torch.arange(num_nodes)
    forward = list_entries(whole.forward, everything, everything, torch.arange(whole.num_edges))
    backward = list_entries(whole.backward, everything, everything, whole.backward.edge_ids)
    weight = torch.rand(graph.num_user_edges, generator=torch.Generator().manual_seed(seed % 1000))
    ids = torch.arange(whole.num_edges) if whole.edge_ids is None else whole.edge_ids
    start = 0
    for first, last in balance_ranges(loads.numpy(), members):
        part = extract_row_range(graph, owners.position.numpy(), (first, last), looped, members == 1, PlanSettings())
        stop = start + part.graph.num_edges
        assert stop - start == loads[first:last].sum()
        sources, targets = (owners.order[torch.from_numpy(side)] for side in (part.sources, part.targets))
        rows = torch.arange(first, last)
        assert torch.equal(targets, rows[part.row_of])
        mine = list_entries(part.graph.forward, rows, sources, torch.arange(start, stop))
        assert torch.equal(mine, forward[:, start:stop])
        back = part.graph.backward
        mine = list_entries(back, sources, rows, start + back.edge_ids)
        by_source = mine[:, mine[0].argsort(stable=True)]
        assert torch.equal(by_source, backward[:, (backward[2] >= start) & (backward[2] < stop)])
        assert sources.numel() == num_nodes if members == 1 else set(sources.tolist()) == set(mine[0].tolist())
        user = RowEntries.of(graph, (first, last), looped).user
        assert torch.equal(user.values(weight, 0.5), pick(weight, ids, 0.5)[start:stop])
        if looped:
            of_whole = pick(weight, whole.cache["weight_ids"], 2.0)[start:stop]
            assert torch.equal(user.values(weight, 2.0, weights=True), of_whole)
        start = stop
    assert start == whole.num_edges


@pytest.mark.parametrize("looped", [False, True])
@given(graph=graphs(), size=st.integers(1, 20))
def test_weights_are_added_up_block_by_block_as_at_once(looped, graph, size, monkeypatch_module):
    blocks = list(iter_row_blocks(graph.forward, size))
    assert [start for start, _ in blocks[1:]] == [stop for _, stop in blocks[:-1]]
    assert sum(stop - start for start, stop in blocks) == graph.num_targets
    monkeypatch_module.setattr("lightning_gnn.full_graph.cut._EDGES_PER_BLOCK", size)
    weight = torch.rand(graph.num_user_edges, generator=torch.Generator().manual_seed(size))
    whole = graph.with_self_loops() if looped else graph
    values = pick(weight, whole.cache["weight_ids"], 2.0) if looped else graph.edge_order(weight)
    expected = values.new_zeros(graph.num_targets).index_add(0, whole.forward.entry_rows(), values)
    assert torch.equal(sum_in_weights(graph, weight, looped, looped, 2.0), expected)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("looped", [False, True])
def test_a_part_of_n_takes_an_nth_of_the_memory(looped, tmp_path):
    """The graph is mapped; peak and final memory of a part are proportional to its edges, plus some per vertex."""
    num_nodes, num_edges = 2_000, 400_000
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(0))
    folder = CSCGraph.from_edge_index(edge_index, num_nodes).save(tmp_path)
    graph = CompressedGraph.from_graph(CSCGraph.load(folder))
    position, loads = np.arange(num_nodes), graph.in_degrees.numpy()
    final_sizes, peaks = {}, {}
    for members in (1, 2, 4, 8):
        rows = balance_ranges(loads, members)[-1]
        extract_row_range(graph, position, (0, rows[0] or 1), looped, False, PlanSettings())  # compile
        tracemalloc.start()
        part = extract_row_range(graph, position, rows, looped, False, PlanSettings())
        # tracemalloc counts arrays of NumPy; temporary tensors of torch cover only the edges of the range.
        peaks[members] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        part.graph.backward.degrees()  # created when a gradient needs it
        final_sizes[members] = part.graph.num_bytes + part.sources.nbytes + part.targets.nbytes
    # Each direction stores a column and the position of the edge in the other direction: 12 bytes per edge. Per vertex
    # and direction, at most the offset of a row and its position.
    per_edge, per_vertex = 12, 2 * (8 + 4)
    for members in final_sizes:
        edges = per_edge * num_edges / members
        assert abs(final_sizes[members] - edges) < 0.15 * edges + per_vertex * num_nodes
        assert peaks[members] < 50 * num_edges / members + 40 * num_nodes
    for fewer, more in pairwise(sorted(peaks)):
        assert peaks[more] - 40 * num_nodes < 0.6 * peaks[fewer]
