import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.compressed import locality_aware_partition
from lightning_gnn.compressed import locality_partition as partition
from lightning_gnn.graph import CSCGraph
from tests.strategies import graphs


def list_in_neighbors(graph):
    return [set(graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist()) for v in range(graph.num_nodes)]


def count_loaded_rows(graph, order, bounds):
    lists = list_in_neighbors(graph)
    chunks = [order[begin:end].tolist() for begin, end in itertools.pairwise(bounds)]
    return sum(len(set().union(*(lists[v] for v in chunk))) for chunk in chunks)


def choose_seeds(lists, num_chunks):
    """Phase 1, literally: the unvisited vertex with the most in-neighbors in each interval, ties by the lowest id."""
    num_nodes, seeds = len(lists), []
    for chunk in range(num_chunks):
        interval = set(range(chunk * num_nodes // num_chunks, (chunk + 1) * num_nodes // num_chunks))
        counts = {v: len(lists[v] & interval) for v in range(num_nodes) if v not in seeds}
        best = max(counts, key=lambda v: (counts[v], -v), default=None)
        seeds.append(best if best is not None and counts[best] > 0 else None)
    return seeds


def check_greedy(graph, num_chunks, order, bounds):
    """Check that each vertex of the first sweep shares the most in-neighbors with its predecessors in the chunk."""
    lists, order = list_in_neighbors(graph), order.tolist()
    seeds = choose_seeds(lists, num_chunks)
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
                break  # the rest was left over
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
    # 8 vertices, 2 chunks, seeds V2 and V6, as in the paper; V4 and V5 are on the wrong side in the order of the ids.
    lists = {1: [3, 4], 2: [1, 3, 4], 3: [1, 4], 4: [7, 8], 5: [1, 3], 6: [5, 7, 8], 7: [5, 8], 8: [5, 7]}
    edge_index = torch.tensor([(source - 1, target - 1) for target, list_ in lists.items() for source in list_]).T
    graph = CSCGraph.from_edge_index(edge_index, 8)
    order, bounds = locality_aware_partition(graph, 2)
    chunks = [(order[begin:end] + 1).tolist() for begin, end in ((0, 4), (4, 8))]
    assert bounds.tolist() == [0, 4, 8]
    assert [chunk[0] for chunk in chunks] == [2, 6]
    assert [set(chunk) for chunk in chunks] == [{1, 2, 3, 5}, {4, 6, 7, 8}]
    assert count_loaded_rows(graph, order, bounds) == 6
    assert count_loaded_rows(graph, torch.arange(8), bounds) == 10
    assert check_greedy(graph, 2, order, bounds) == 6


def run_algorithm_2(neighbors, k):
    """Algorithm 2 of the paper, line by line; ties go to the lowest id; a repeated seed stays in its first chunk."""
    vertices = range(len(neighbors))
    chunk_size = -(-len(vertices) // k)
    intervals = [set(range(i * len(vertices) // k, (i + 1) * len(vertices) // k)) for i in range(k)]  # line 2
    chunks, visited = [], set()
    for i in range(k):  # lines 3 to 6
        seed = max(vertices, key=lambda v: (len(neighbors[v] & intervals[i]), -v))
        chunks.append([seed])
        visited.add(seed)
    for i in range(k):  # lines 7 to 11
        free = [u for u in vertices if not any(u in chunk for chunk in chunks)]
        union = set().union(*(neighbors[v] for v in chunks[i]))
        top = sorted(free, key=lambda u: (-len(neighbors[u] & union), u))[: chunk_size - 1]
        chunks[i] = chunks[i] + top
        visited |= set(top)
    chunks = [[v for v in chunk if not any(v in earlier for earlier in chunks[:i])] for i, chunk in enumerate(chunks)]
    for u in vertices:  # lines 12 and 13
        if u not in visited:
            min(chunks, key=len).append(u)
    return chunks


@settings(deadline=None)
@given(graph=graphs(max_nodes=30, max_edges=120), data=st.data())
def test_the_published_algorithm_runs_line_by_line(graph, data):
    num_chunks = data.draw(st.integers(1, graph.num_nodes))
    order, bounds = locality_aware_partition(graph, num_chunks, kind="paper")
    chunks = [order[begin:end].tolist() for begin, end in itertools.pairwise(bounds)]
    assert chunks == run_algorithm_2(list_in_neighbors(graph), num_chunks)
    assert sorted(order.tolist()) == list(range(graph.num_nodes))


def test_wrong_arguments():
    for num_chunks in (0, 4):
        with pytest.raises(ValueError, match="from 1 to the number of vertices, 3"):
            locality_aware_partition(CSCGraph.from_edge_index(torch.tensor([[0], [1]]), 3), num_chunks)
    with pytest.raises(TypeError, match="must be a CSCGraph, but is Tensor"):
        locality_aware_partition(torch.tensor([[0], [1]]), 1)


@pytest.mark.parametrize("kind", ["balanced", "paper"])
def test_no_vertices(kind):
    order, bounds = locality_aware_partition(CSCGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 0), 1, kind)
    assert order.numel() == 0
    assert bounds.tolist() == [0, 0]
