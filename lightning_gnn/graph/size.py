"""How large a graph is, however its topology is kept."""

from __future__ import annotations

from torch_geometric.data import Data


def count_edges(data: Data) -> int:
    """Return the number of edges; PyG's ``data.num_edges`` is 0 where ``graph``, a :class:`CSCGraph`, holds them."""
    graph = data.get("graph")
    return int(data.num_edges if graph is None else graph.num_edges)
