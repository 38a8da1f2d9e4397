from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn.datasets.synthetic import power_law_graph
from lightning_gnn.features import FeatureTable
from lightning_gnn.features.hot_cache import SECTOR_BYTES, Cacheable, CacheOrder, RowCache, row_cost
from lightning_gnn.gpu_sampling.placement import count_reads
from lightning_gnn.graph import CSCGraph
from lightning_gnn.ops import batch_key, sample_neighbors
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.strategies import graphs


def look_up_sources(cached, targets, positions):
    """Look up sources of edges like a kernel: from in-edge ``positions`` of ``targets``, int64 ``[n]``."""
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
    """Draw up to three kinds of small entries, and a budget."""
    kinds = []
    for _ in range(draw(st.integers(0, 3))):
        entries = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=4))
        reads, sizes = np.array(entries, dtype=np.int64).reshape(-1, 2).T
        kinds.append(
            Cacheable(reads, sizes, draw(st.sampled_from([0.0, 0.5, 3.0])), draw(st.sampled_from([0, 7, 1000])))
        )
    return kinds, draw(st.integers(0, 150))


def find_best_gain(found, budget, lookup_bytes):
    best = 0.0
    for count in range(len(found) + 1):
        for chosen in combinations(found, count):
            tables = sum(lookup_bytes[kind] for kind in {kind for kind, *_ in chosen})
            if sum(size for _, _, size, _ in chosen) + tables <= budget:
                best = max(best, sum(gain for *_, gain in chosen))
    return best


@settings(max_examples=300)
@given(workloads())
def test_chosen_entries_against_all_choices(workload):
    kinds, budget = workload
    choice = CacheOrder(kinds).best(budget)
    found = [
        (number, node, int(size), float(reads * kind.cost))
        for number, kind in enumerate(kinds)
        for node, (reads, size) in enumerate(zip(kind.reads, kind.sizes, strict=True))
        if size and reads * kind.cost
    ]
    entries = {(number, node): (size, gain) for number, node, size, gain in found}
    for number, (nodes, nbytes, gain) in enumerate(zip(choice.nodes, choice.nbytes, choice.gains, strict=True)):
        chosen = [entries[number, node] for node in nodes.tolist()]
        assert nodes.unique().numel() == nodes.numel()
        assert nbytes == sum(size for size, _ in chosen) + (kinds[number].lookup_bytes if chosen else 0)
        assert gain == pytest.approx(sum(gain for _, gain in chosen))
    assert sum(choice.nbytes) <= budget
    best = find_best_gain(found, budget, [kind.lookup_bytes for kind in kinds])
    largest = max((gain for *_, gain in found), default=0.0)
    assert best - largest <= sum(choice.gains) <= best
    if len({size for _, _, size, _ in found}) <= 1:
        assert sum(choice.gains) == pytest.approx(best)  # for entries of equal size, greedy is exact
    again = CacheOrder(kinds).best(budget)
    assert all(torch.equal(one, other) for one, other in zip(choice.nodes, again.nodes, strict=True))


def make_counts(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@given(graphs(), st.integers(0, 2**32))
def test_cached_lists_decode_to_the_graph(graph, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(graph.num_nodes, generator=generator)
    targets = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.in_degrees)
    positions = torch.arange(graph.num_edges) - graph.indptr[targets]
    for count in {0, graph.num_nodes // 2, graph.num_nodes}:
        nodes = order[:count]
        cached = graph.cache_adjacency(nodes, "cpu")
        assert torch.equal(look_up_sources(cached, targets, positions), graph.indices.to(torch.int64))
        assert cached.cached_indices.numel() == graph.in_degrees[nodes].sum()
        assert cached.cached_indices.dtype == graph.indices.dtype
        assert torch.equal(cached.offset >= 0, torch.zeros(graph.num_nodes).index_fill(0, nodes, 1) > 0)
        # Each list is stored at its offset.
        away = type(cached)(cached.indptr, torch.full_like(graph.indices, -7), cached.offset, cached.cached_indices)
        expected = torch.where(cached.offset[targets] >= 0, graph.indices, torch.full_like(graph.indices, -7))
        assert torch.equal(look_up_sources(away, targets, positions), expected.to(torch.int64))


def test_bad_nodes_to_cache(tmp_path):
    graph = CSCGraph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
    with pytest.raises(IndexError, match="cannot cache node 3: the graph has 3 nodes"):
        graph.cache_adjacency(make_counts(0, 3), "cpu")
    with pytest.raises(ValueError, match="contain duplicates"):
        RowCache.build(torch.ones(3, 2), make_counts(1, 1), "cpu")
    # A memory-mapped graph is cached from its files.
    mapped = CSCGraph.load(graph.save(tmp_path))
    assert mapped.cache_adjacency(make_counts(2), "cpu").cached_indices.tolist() == [1]


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"disjoint": True}], ids=["uniform", "replace", "disjoint"])
def test_counts_are_those_of_the_mini_batches(options):
    graph = CSCGraph.from_csc(*power_law_graph(300, 3000, seed=1))
    seeds, sampler = torch.arange(0, 300, 3), NeighborSampler(graph, [4, 3], **options)
    rows, lists, edges = np.zeros(300, int), np.zeros(300, int), 0
    order = seeds[torch.randperm(100, generator=torch.Generator().manual_seed(7))]
    for number in range(1, 5):
        chosen = order[torch.arange(40 * number, 40 * number + 40) % 100]
        out = sample_neighbors(graph, chosen, [4, 3], batch_key(7, epoch=0, batch=number), **options)
        np.add.at(rows, out.node.numpy(), 1)
        np.add.at(lists, out.node[out.edge_index[1]].numpy(), 1)
        edges += out.edge_index.size(1)
    found = count_reads(sampler, NodeSamplerInput(None, seeds), 40, range(1, 5), seed=7)
    assert found.rows[None].tolist() == rows.tolist()
    assert found.lists.tolist() == lists.tolist()
    assert (found.edges, found.num_batches) == ({None: edges}, 4)


def test_from_counts_to_caches_within_the_budget():
    graph = CSCGraph.from_csc(*power_law_graph(2000, 30_000))
    table = FeatureTable(torch.randn(2000, 16))
    inputs = NodeSamplerInput(None, torch.arange(0, 2000, 5))
    seen = count_reads(NeighborSampler(graph, [10, 5]), inputs, 50, range(8))
    sizes = graph.in_degrees.numpy() * graph.indices.element_size()
    of_lists = Cacheable(seen.lists.numpy(), sizes, SECTOR_BYTES, 16 * 2000 + 8)
    for quantized in (False, True):
        table = table.quantized() if quantized else table
        width = np.full(2000, table.row_bytes)
        of_rows = Cacheable(seen.rows[None].numpy(), width, row_cost(table.row_bytes), (8 if quantized else 4) * 2000)
        choice = CacheOrder([of_rows, of_lists]).best(200_000)
        rows, lists = table.cached(choice.nodes[0], "cpu"), graph.cache_adjacency(choice.nodes[1], "cpu")
        scales = table.scales.nbytes if quantized else 0
        assert [rows.cache.nbytes + scales, lists.nbytes] == choice.nbytes
        assert sum(choice.nbytes) <= 200_000
        # Skewed access: the cache serves more than its share of the edges.
        hits = seen.lists[choice.nodes[1]].sum() / seen.lists.sum()
        assert hits > 1.2 * lists.cached_indices.numel() / graph.num_edges
        n_id = torch.randint(2000, (500,))
        assert torch.equal(rows.gather(n_id), table.gather(n_id))
