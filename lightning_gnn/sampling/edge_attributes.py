"""From attributes of the user's graph to what edges carry for sampling: times, and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.edge_attributes import as_times
from lightning_gnn.graph.hetero import HeteroCSCGraph

Graph = CSCGraph | HeteroCSCGraph
NodeTime = Tensor | dict[NodeType, Tensor] | None


def with_times(graph: Graph, data: object, name: str | None) -> tuple[Graph, NodeTime]:
    """Give edges their times, and return those of nodes too, on the CPU; None where edges have times of their own."""
    if name is None:
        return graph, None
    # With one type, the times belong either to the nodes or to the edges.
    if isinstance(data, Data) and isinstance(graph, CSCGraph):
        time = as_times(_attribute(data, name), f"data.{name}").cpu()
        if data.is_node_attr(name):
            return graph.with_source_time(time), time
        if data.is_edge_attr(name) or time.numel() == graph.num_edges:
            return graph.with_time(time), None
        raise ValueError(f"data.{name} is neither of nodes nor of edges: it has the shape {list(time.shape)}")
    # With several types, the name must be found at nodes or at edges, but not at both.
    if not isinstance(data, HeteroData) or not isinstance(graph, HeteroCSCGraph):
        raise ValueError(f"time_attr={name!r} needs the graph as Data or HeteroData, which have attributes")
    of_nodes = {store._key: store[name] for store in data.node_stores if name in store}
    of_edges = {store._key: store[name] for store in data.edge_stores if name in store}
    if not of_nodes and not of_edges:
        raise ValueError(f"no node type and no edge type has times called {name!r}: give those of nodes, or of edges")
    if of_nodes and of_edges:
        node, edge = repr(next(iter(of_nodes))), repr(next(iter(of_edges)))
        raise ValueError(
            f"nodes of {node} and edges of {edge} have times called {name!r}: rename what is not to be sampled by, as "
            f"data[{node}].node_{name} = data[{node}].pop({name!r}) or data[{edge}].edge_{name} = "
            f"data[{edge}].pop({name!r})"
        )
    # Relations of a sample are compared by time, so that all of them need one kind of number.
    given = {key: as_times(time, f"{name!r} of {key}").cpu() for key, time in {**of_nodes, **of_edges}.items()}
    of_nodes = {key: given[key] for key in of_nodes}
    floating = any(time.is_floating_point() for time in given.values())

    # Relations whose source nodes or edges have no times stay as they are.
    def timed(edge_type: EdgeType, relation: CSCGraph) -> CSCGraph:
        key = edge_type[0] if of_nodes else edge_type
        if key not in given:
            return relation
        try:
            if of_nodes:
                return relation.with_source_time(given[key], floating)
            return relation.with_time(given[key], floating)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name!r} of {key}: {error}") from None

    return graph.map_relations(timed), of_nodes or None


def with_weights(graph: Graph, data: object, name: str | None) -> Graph:
    """Give edges their weights; those of types without the attribute have none, and are picked uniformly."""
    if name is None:
        return graph
    if graph.is_temporal:
        raise ValueError(f"there is no weighted temporal sampling: leave out weight_attr={name!r}, or time_attr")
    if isinstance(data, Data) and isinstance(graph, CSCGraph):
        return graph.with_weight(torch.as_tensor(_attribute(data, name)))
    if not isinstance(data, HeteroData) or not isinstance(graph, HeteroCSCGraph):
        raise ValueError(f"weight_attr={name!r} needs the graph as Data or HeteroData, which have attributes")
    given = {store._key: store[name] for store in data.edge_stores if name in store}
    if not given:
        raise ValueError(f"no edge type has weights called {name!r}")

    def weighted(edge_type: EdgeType, relation: CSCGraph) -> CSCGraph:
        try:
            return relation.with_weight(given[edge_type]) if edge_type in given else relation
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name!r} of {edge_type}: {error}") from None

    return graph.map_relations(weighted)


def _attribute(data: Data, name: str) -> Any:
    value = data.get(name)
    if value is None:
        raise ValueError(f"data has no attribute {name!r}; it has {', '.join(sorted(data.keys()))}")
    return value
