"""Random graphs for hypothesis: empty, one node, isolated nodes, self-loops, duplicate edges, hubs."""

import torch
from hypothesis import strategies as st

from lightning_gnn.graph import CSCGraph, HeteroCSCGraph


@st.composite
def edge_indices(draw, max_nodes=24, max_edges=120):
    """Draw (num_nodes, edge_index) with few targets, so that there are hubs and isolated nodes."""
    num_nodes = draw(st.integers(1, max_nodes))
    num_edges = draw(st.integers(0, max_edges))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    hubs = draw(st.integers(1, num_nodes))
    row = torch.randint(num_nodes, (num_edges,), generator=generator)
    col = torch.randint(hubs, (num_edges,), generator=generator)
    return num_nodes, torch.stack([row, col])


@st.composite
def graphs(draw, **sizes):
    """Draw a CSCGraph."""
    num_nodes, edge_index = draw(edge_indices(**sizes))
    return CSCGraph.from_edge_index(edge_index, num_nodes)


def seeds_of(num_nodes, max_size=8):
    """Draw seeds, possibly with duplicates."""
    return st.lists(st.integers(0, num_nodes - 1), max_size=max_size).map(lambda s: torch.tensor(s, dtype=torch.int64))


fanouts = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 5, 9]), min_size=1, max_size=4)
keys = st.integers(-(2**63), 2**63 - 1)


@st.composite
def typed_graphs(draw, temporal=False, weighted=False):
    """Draw a HeteroCSCGraph of up to four node types and six edge types.

    Includes types without nodes or edges, edges within one type, several edge types between the same node types, and
    duplicate edges. With ``temporal`` or ``weighted``, some edge types have times or weights.
    """
    names = draw(st.lists(st.sampled_from("dbca"), min_size=1, max_size=4, unique=True))
    sizes = {name: draw(st.integers(0, 12)) for name in names}
    relations = {}
    for _ in range(draw(st.integers(0, 6))):
        source, target = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        num_edges = draw(st.integers(0, 60)) if sizes[source] and sizes[target] else 0
        hubs = draw(st.integers(1, max(sizes[target], 1)))
        row = torch.randint(max(sizes[source], 1), (num_edges,), generator=generator)
        col = torch.randint(hubs, (num_edges,), generator=generator)
        graph = CSCGraph.from_edge_index(torch.stack([row, col]), sizes[target], sizes[source])
        if temporal and draw(st.booleans()):
            graph = graph.with_time(torch.randint(-3, 9, (num_edges,), generator=generator))
        if weighted and draw(st.booleans()):
            weight = 10.0 ** (12 * torch.rand(num_edges, generator=generator, dtype=torch.float64) - 6)
            graph = graph.with_weight(weight * (torch.rand(num_edges, generator=generator) < 0.8))
        relations[source, draw(st.sampled_from("xyz")), target] = graph
    return HeteroCSCGraph.build(sizes, relations)


@st.composite
def typed_seeds(draw, graph):
    """Draw seeds of some node types in any order, possibly with duplicates."""
    names = draw(st.permutations(graph.node_types))[: draw(st.integers(0, len(graph.node_types)))]
    return {name: draw(seeds_of(graph.sizes[name])) if graph.sizes[name] else torch.empty(0).long() for name in names}
