"""Attaches times and weights from the user's graph attributes to the topology, for sampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.adjacency import with_adj_t_values
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.edge_attributes import as_times
from lightning_gnn.graph.hetero import HeteroCSCGraph

Graph = CSCGraph | HeteroCSCGraph
NodeTime = Tensor | dict[NodeType, Tensor] | None


def with_times(graph: Graph, data: object, name: str | None) -> tuple[Graph, NodeTime]:
    """Attach times to edges; also return node times on the CPU, or None if edges have their own times."""
    if name is None:
        return graph, None
    # In a homogeneous graph, the times belong either to the nodes or to the edges.
    if isinstance(data, Data) and isinstance(graph, CSCGraph):
        time = as_times(_get_attribute(data, name), f"data.{name}").cpu()
        if data.is_node_attr(name):
            return graph.with_source_time(time), time
        if data.is_edge_attr(name) or time.numel() == graph.num_edges:
            return graph.with_time(time), None
        raise ValueError(f"data.{name} is neither a node nor an edge attribute: it has the shape {list(time.shape)}")
    # In a heterogeneous graph, either nodes or edges must have the attribute, but not both.
    if not isinstance(data, HeteroData) or not isinstance(graph, HeteroCSCGraph):
        raise ValueError(f"time_attr={name!r} needs the graph as Data or HeteroData, which have attributes")
    of_nodes = {store._key: store[name] for store in data.node_stores if name in store}
    of_edges = {store._key: store[name] for store in data.edge_stores if name in store}
    if not of_nodes and not of_edges:
        raise ValueError(f"no node type and no edge type has the times {name!r}: add them to nodes or to edges")
    if of_nodes and of_edges:
        node, edge = repr(next(iter(of_nodes))), repr(next(iter(of_edges)))
        raise ValueError(
            f"nodes of {node} and edges of {edge} both have the times {name!r}: rename those not used for sampling, as "
            f"data[{node}].node_{name} = data[{node}].pop({name!r}) or data[{edge}].edge_{name} = "
            f"data[{edge}].pop({name!r})"
        )
    # Times are compared across relations, so all of them need the same kind of number.
    times_by_key = {key: as_times(time, f"{name!r} of {key}").cpu() for key, time in {**of_nodes, **of_edges}.items()}
    of_nodes = {key: times_by_key[key] for key in of_nodes}
    floating = any(time.is_floating_point() for time in times_by_key.values())

    # Relations whose source nodes or edges have no times stay unchanged.
    def add_times(edge_type: EdgeType, relation: CSCGraph) -> CSCGraph:
        key = edge_type[0] if of_nodes else edge_type
        if key not in times_by_key:
            return relation
        try:
            if of_nodes:
                return relation.with_source_time(times_by_key[key], floating)
            return relation.with_time(times_by_key[key], floating)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name!r} of {key}: {error}") from None

    return graph.map_relations(add_times), of_nodes or None


def with_weights(graph: Graph, data: object, name: str | None) -> Graph:
    """Attach weights to edges; edge types without the attribute are sampled uniformly."""
    if name is None:
        return graph
    if graph.is_temporal:
        raise ValueError(f"weighted temporal sampling is not supported: remove weight_attr={name!r} or time_attr")
    if isinstance(data, Data | HeteroData):
        data = with_adj_t_values(data)
    if isinstance(data, Data) and isinstance(graph, CSCGraph):
        return graph.with_weight(torch.as_tensor(_get_attribute(data, name)))
    if not isinstance(data, HeteroData) or not isinstance(graph, HeteroCSCGraph):
        raise ValueError(f"weight_attr={name!r} needs the graph as Data or HeteroData, which have attributes")
    weights = {store._key: store[name] for store in data.edge_stores if name in store}
    if not weights:
        raise ValueError(f"no edge type has the weights {name!r}")

    def add_weights(edge_type: EdgeType, relation: CSCGraph) -> CSCGraph:
        try:
            return relation.with_weight(weights[edge_type]) if edge_type in weights else relation
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name!r} of {edge_type}: {error}") from None

    return graph.map_relations(add_weights)


def _get_attribute(data: Data, name: str) -> Any:
    value = data.get(name)
    if value is None:
        raise ValueError(f"data has no attribute {name!r}; it has {', '.join(sorted(data.keys()))}")
    return value
