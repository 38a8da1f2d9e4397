import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.graph import CSCGraph, locality_aware_partition, partition
from lightning_gnn.graph.synthetic import planted_power_law, power_law_graph
from tests.strategies import graphs


def in_neighbours(graph):
    return [set(graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist()) for v in range(graph.num_nodes)]


def rows_loaded(graph, order, bounds):
    lists = in_neighbours(graph)
    chunks = [order[begin:end].tolist() for begin, end in itertools.pairwise(bounds)]
    return sum(len(set().union(*(lists[v] for v in chunk))) for chunk in chunks)


def chosen_seeds(lists, num_chunks):
    """Phase 1 word for word: the unvisited vertex with the most in-neighbours in each interval, the lowest id first."""
    num_nodes, seeds = len(lists), []
    for chunk in range(num_chunks):
        interval = set(range(chunk * num_nodes // num_chunks, (chunk + 1) * num_nodes // num_chunks))
        counts = {v: len(lists[v] & interval) for v in range(num_nodes) if v not in seeds}
        best = max(counts, key=lambda v: (counts[v], -v), default=None)
        seeds.append(best if best is not None and counts[best] > 0 else None)
    return seeds


def check_greedy(graph, num_chunks, order, bounds):
    """Each vertex of the first sweep must share the most in-neighbours with those before it in its chunk."""
    lists, order = in_neighbours(graph), order.tolist()
    seeds = chosen_seeds(lists, num_chunks)
    visited = {seed for seed in seeds if seed is not None}
    steps = 0
    for chunk, seed in enumerate(seeds):
        if seed is None:
            continue
        members = order[bounds[chunk] : bounds[chunk + 1]]
        assert members[0] == seed
        union = set(lists[seed])
        for vertex in members[1:]:
            shared = {v: len(lists[v] & union) for v in range(graph.num_nodes) if v not in visited}
            most = max(shared.values(), default=0)
            if most == 0:
                break  # what follows was left over
            assert shared[vertex] == most
            visited.add(vertex)
            union |= lists[vertex]
            steps += 1
    return steps


@settings(deadline=None)
@given(graph=graphs(), data=st.data())
def test_every_vertex_is_in_one_chunk_of_floor_or_ceil(graph, data):
    num_chunks = data.draw(st.integers(1, graph.num_nodes))
    order, bounds = locality_aware_partition(graph, num_chunks)
    assert order.dtype == torch.int32
    assert bounds.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(graph.num_nodes, dtype=torch.int32))
    assert bounds[0] == 0
    assert bounds[-1] == graph.num_nodes
    assert bounds.numel() == num_chunks + 1
    assert set(bounds.diff().tolist()) <= {graph.num_nodes // num_chunks, -(-graph.num_nodes // num_chunks)}


@settings(deadline=None)
@given(graph=graphs(max_nodes=40, max_edges=160), num_chunks=st.integers(1, 6))
def test_chunks_take_those_that_share_most(graph, num_chunks):
    num_chunks = min(num_chunks, graph.num_nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "WORK_PER_EDGE", 10**6)
        order, bounds = locality_aware_partition(graph, num_chunks)
    check_greedy(graph, num_chunks, order, bounds)


def test_the_toy_graph_of_figure_8():
    # 8 vertices, 2 chunks, seeds V2 and V6, as the text says; V4 and V5 are on the wrong side in the order of the ids.
    lists = {1: [3, 4], 2: [1, 3, 4], 3: [1, 4], 4: [7, 8], 5: [1, 3], 6: [5, 7, 8], 7: [5, 8], 8: [5, 7]}
    edge_index = torch.tensor([(source - 1, target - 1) for target, list_ in lists.items() for source in list_]).T
    graph = CSCGraph.from_edge_index(edge_index, 8)
    order, bounds = locality_aware_partition(graph, 2)
    chunks = [(order[begin:end] + 1).tolist() for begin, end in ((0, 4), (4, 8))]
    assert bounds.tolist() == [0, 4, 8]
    assert [chunk[0] for chunk in chunks] == [2, 6]
    assert [set(chunk) for chunk in chunks] == [{1, 2, 3, 5}, {4, 6, 7, 8}]
    assert rows_loaded(graph, order, bounds) == 6
    assert rows_loaded(graph, torch.arange(8), bounds) == 10
    assert check_greedy(graph, 2, order, bounds) == 6


def test_a_hub_is_the_seed_of_one_chunk_only():
    # Vertex 7 has the most in-neighbours in every interval; as published it would be the seed of each.
    everyone = torch.stack([torch.arange(16), torch.full((16,), 7)])
    others = torch.tensor([[0, 4, 5, 8, 9, 12], [1, 6, 6, 10, 10, 14]])
    graph = CSCGraph.from_edge_index(torch.cat([everyone, others], 1), 16)
    order, bounds = locality_aware_partition(graph, 4)
    assert order[bounds[:-1]].tolist() == [7, 6, 10, 14]


def test_what_is_left_over_is_grown_too():
    # Cliques far smaller than a chunk, with their ids spread out: each must stay whole although no seed reaches it.
    num_cliques, size = 40, 5
    clique = torch.arange(num_cliques * size) % num_cliques
    edge_index = (clique[:, None] == clique).nonzero().T
    graph = CSCGraph.from_edge_index(edge_index)
    order, bounds = locality_aware_partition(graph, 4)
    assert rows_loaded(graph, order, bounds) == graph.num_nodes
    assert rows_loaded(graph, torch.arange(graph.num_nodes), bounds) == 4 * graph.num_nodes


def test_communities_and_power_laws_load_fewer_rows():
    data = planted_power_law(2000, 30_000, 40, 1, homophily=0.8)
    for graph in (
        CSCGraph.from_edge_index(data.edge_index, 2000),
        CSCGraph.from_csc(*power_law_graph(2000, 30_000)),
    ):
        order, bounds = locality_aware_partition(graph, 40)
        assert rows_loaded(graph, order, bounds) < 0.9 * rows_loaded(graph, torch.arange(2000), bounds)


def test_the_work_is_bounded_by_the_edges():
    # Every vertex has the same hubs as in-neighbours: without a bound each chunk would walk through all of the lists.
    hubs = torch.arange(30).repeat(3000)
    graph = CSCGraph.from_edge_index(torch.stack([hubs, torch.arange(3000).repeat_interleave(30)]), 3000)
    order, _ = locality_aware_partition(graph, 1000)
    assert torch.equal(order.sort().values, torch.arange(3000, dtype=torch.int32))
    # A chunk may take 16 * 90,000 / 1000 = 1440 steps, fewer than one list holds: none is read, nothing is shared.
    seeds = order[torch.arange(1000) * 3]
    rest = order[(torch.arange(3000) % 3) != 0]
    assert torch.equal(rest, torch.tensor(sorted(set(range(3000)) - set(seeds.tolist())), dtype=torch.int32))


def test_progress_rises_to_one_and_the_result_is_the_same_each_time():
    graph = CSCGraph.from_csc(*power_law_graph(500, 4000))
    seen = []
    first = locality_aware_partition(graph, 20, lambda step, fraction: seen.append((step, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert {step for step, _ in seen} == {"partition"}
    assert fractions == sorted(fractions)
    assert fractions[0] > 0
    assert fractions[-1] == pytest.approx(1)
    assert all(torch.equal(a, b) for a, b in zip(first, locality_aware_partition(graph, 20), strict=True))


@pytest.mark.parametrize("num_chunks", [0, 4, -1])
def test_a_wrong_number_of_chunks(num_chunks):
    graph = CSCGraph.from_edge_index(torch.tensor([[0], [1]]), 3)
    with pytest.raises(ValueError, match="from 1 to the number of vertices, 3"):
        locality_aware_partition(graph, num_chunks)


def test_it_needs_a_graph():
    with pytest.raises(TypeError, match="must be a CSCGraph, but is Tensor"):
        locality_aware_partition(torch.tensor([[0], [1]]), 1)


def test_no_vertices():
    order, bounds = locality_aware_partition(CSCGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 0), 1)
    assert order.numel() == 0
    assert bounds.tolist() == [0, 0]
