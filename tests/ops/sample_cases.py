"""Cases for the tests of sampling on every backend."""

import itertools
from contextlib import contextmanager

import torch
from hypothesis import strategies as st
from scipy.stats import chi2

from lightning_gnn.graph import CSCGraph, HeteroCSCGraph
from lightning_gnn.ops import Labor, sample_hetero_neighbors, sample_neighbors
from lightning_gnn.ops.sample import numba as sample_numba
from tests.strategies import fanouts, graphs, keys, seeds_of, typed_graphs, typed_seeds

KINDS = ("plain", "types", "times", "weights", "labor", "one type with times", "with weights", "with labor")
"""Uniform picks, disjoint or not, homogeneous or heterogeneous; non-uniform picks, homogeneous and heterogeneous."""
few = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 5]), min_size=1, max_size=2)
labors = st.builds(Labor, st.booleans(), st.sampled_from([1, 2, 7]), st.integers(0, 20))


def sample(graph, *args, **options):
    """Sample from a homogeneous or heterogeneous graph."""
    return (sample_hetero_neighbors if isinstance(graph, HeteroCSCGraph) else sample_neighbors)(graph, *args, **options)


def draw_times(draw, ids):
    return torch.tensor(draw(st.lists(st.integers(-5, 10), min_size=len(ids), max_size=len(ids)))).long()


def _draw_homogeneous(draw, kind):
    """Draw (graph, seeds, options); indices may be int64, and tree numbers may start anywhere."""
    graph = draw(graphs())
    if draw(st.booleans()):
        graph = CSCGraph.from_csc(graph.indptr, graph.indices.long())
    seeds = draw(seeds_of(graph.num_nodes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    options = {}
    if "times" in kind:
        graph = graph.with_time(torch.randint(-3, 9, (graph.num_edges,), generator=generator))
        options["seed_time"] = draw_times(draw, seeds)
    elif "weights" in kind:
        graph = graph.with_weight(torch.rand(graph.num_edges, generator=generator))
    return graph, seeds, options


@st.composite
def samples(draw, kind, hops=fanouts):
    """Draw (graph, seeds, fanouts, key, options) of a kind."""
    if kind in ("types", "times", "weights", "labor"):
        graph = draw(typed_graphs(temporal=kind in ("times", "labor"), weighted=kind == "weights"))
        seeds, options = draw(typed_seeds(graph)), {}
        if graph.is_temporal:
            options["seed_time"] = {name: draw_times(draw, ids) for name, ids in seeds.items()}
    else:
        graph, seeds, options = _draw_homogeneous(draw, kind)
    hops = draw(hops)
    if isinstance(graph, HeteroCSCGraph) and graph.relations and draw(st.booleans()):
        one = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 5]), min_size=len(hops), max_size=len(hops))
        hops = {name: draw(one) for name in graph.relations}
    options["first_tree"] = draw(st.sampled_from([0, 1, 977, 2**62]))
    if "labor" in kind:
        options["labor"] = draw(labors)
    else:
        options["replace"] = draw(st.booleans())
    if "times" in kind:
        options["temporal_strategy"] = draw(st.sampled_from(["uniform", "last"]))
        if "seed_time" in options:
            options["time_window"] = draw(st.sampled_from([None, 1, 4]))
    else:
        options["disjoint"] = draw(st.booleans())
    return graph, seeds, hops, draw(keys), options


@contextmanager
def hashing():
    """Treat every graph as too large for a table of its nodes."""
    limit, sample_numba.TABLE_LIMIT = sample_numba.TABLE_LIMIT, 0
    try:
        yield
    finally:
        sample_numba.TABLE_LIMIT = limit


def long_lists(count, length, seed, dtype=torch.int32):
    """Return a graph of 50 nodes, ``count`` of them with long adjacency lists."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(50, (count * length,), generator=generator).to(dtype)
    return CSCGraph.from_csc(torch.arange(51).clamp(max=count) * length, indices)


def skewed_weights(graph, seed):
    """Return weights with nearly the whole sum in a few of them, so that most picks come from the rest."""
    generator = torch.Generator().manual_seed(seed)
    return graph.with_weight(10.0 ** (24 * torch.rand(graph.num_edges, generator=generator, dtype=torch.float64) - 12))


def hub(count):
    """Return edges to node 0 from each of the others."""
    return CSCGraph.from_edge_index(torch.stack([torch.arange(1, count + 1), torch.zeros(count).long()]), count + 1)


def random_types(sizes, num_edges, ends=None, seed=0):
    """Return a graph with random edges between all pairs of types, or between those in ``ends``."""
    generator = torch.Generator().manual_seed(seed)
    relations = {}
    for source, target in ends or itertools.product(sizes, repeat=2):
        edges = [torch.randint(sizes[name], (num_edges,), generator=generator) for name in (source, target)]
        graph = CSCGraph.from_edge_index(torch.stack(edges), sizes[target], sizes[source])
        relations[source, "x", target] = graph
    return HeteroCSCGraph.build(sizes, relations)


COPIES = 1000


def copy_graph(edge_index, num_nodes):
    """Return COPIES disjoint copies of a graph, so that one mini-batch makes as many trials, and their first nodes.

    The edges of each copy are in CSC order.
    """
    first = num_nodes * torch.arange(COPIES)
    edges = (edge_index[:, None] + first[:, None]).reshape(2, -1)
    return CSCGraph.from_edge_index(edges, num_nodes * COPIES), first


def list_picks(out, num_edges):
    """Return the picks of each copy in a mini-batch of one hop, as edges of the copy."""
    picks = out.edge.view(COPIES, -1) - num_edges * torch.arange(COPIES)[:, None]
    return map(tuple, picks.tolist())


def check_chi_square(counts, expected):
    """Compare observed counts with expected ones, both by cell; cells with small expected counts are merged."""
    rare = [cell for cell, count in expected.items() if count < 5]
    cells = {cell: (counts[cell], count) for cell, count in expected.items() if count >= 5}
    if sum(expected[cell] for cell in rare) >= 5:
        cells["rare"] = sum(counts[cell] for cell in rare), sum(expected[cell] for cell in rare)
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells.values())
    assert set(counts) <= set(expected)
    assert statistic < chi2.ppf(0.9999, len(cells) - 1)
