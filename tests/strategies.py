"""Random graphs for hypothesis: empty, one node, isolated nodes, self-loops, duplicate edges, hubs."""

import torch
from hypothesis import strategies as st

from lightning_gnn.graph import CSCGraph


@st.composite
def edge_indices(draw, max_nodes=24, max_edges=120):
    """Draw (num_nodes, edge_index); targets lean towards few nodes, so that there are hubs and isolated nodes."""
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
    """Draw seeds, duplicates allowed."""
    return st.lists(st.integers(0, num_nodes - 1), max_size=max_size).map(lambda s: torch.tensor(s, dtype=torch.int64))


fanouts = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 5, 9]), min_size=1, max_size=4)
keys = st.integers(-(2**63), 2**63 - 1)
