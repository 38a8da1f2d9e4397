"""Access to the stores of PyG graphs: one for a homogeneous graph, one per type for a heterogeneous graph."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage, EdgeStorage
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.csc import CSCGraph

StoreType: TypeAlias = NodeType | EdgeType | None  # None in a homogeneous graph
AttributeName: TypeAlias = str | tuple[NodeType | EdgeType, str]  # with the type in a heterogeneous graph


def stores_of(data: Data | HeteroData) -> list[tuple[StoreType, BaseStorage]]:
    """Return node and edge stores with their types; the type of a homogeneous graph's store is None."""
    if isinstance(data, Data):
        return [(None, data._store)]
    return [(store._key, store) for store in (*data.node_stores, *data.edge_stores)]


def name_of(store: BaseStorage, key: str) -> AttributeName:
    """Return an attribute's name, which is (type, attribute) in a heterogeneous graph."""
    return key if store._key is None else (store._key, key)


def of_nodes(store: BaseStorage, key: str) -> bool:
    """Return whether an attribute has one row per node."""
    return key != "adj_t" and hasattr(store, "is_node_attr") and bool(store.is_node_attr(key))


def of_edges(store: BaseStorage, key: str) -> bool:
    """Return whether an attribute has one row per edge."""
    if key == "adj_t":  # PyG cannot compare the dimensions of a SparseTensor
        return False
    # PyG does not know the edges of a CSCGraph.
    if isinstance(store, EdgeStorage) and isinstance(graph := store.get("graph"), CSCGraph):
        value = store[key]
        return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == graph.num_edges
    return hasattr(store, "is_edge_attr") and bool(store.is_edge_attr(key))
