"""Topology of a heterogeneous graph: one CSC graph per edge type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.data.storage import EdgeStorage
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.csc import CSCGraph, unexpected_graph


@dataclass(frozen=True, eq=False)
class HeteroCSCGraph:
    """A directed heterogeneous graph with one :class:`CSCGraph` per edge type.

    Args:
        sizes: Number of nodes of each node type, sorted by name.
        relations: Edges of each edge type, sorted by triple.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import HeteroData
        >>> from lightning_gnn import HeteroCSCGraph
        >>> data = HeteroData()
        >>> data["author"].num_nodes, data["paper"].num_nodes = 2, 3
        >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1], [0, 0, 2]])
        >>> HeteroCSCGraph.from_data(data)
        HeteroCSCGraph(num_nodes={'author': 2, 'paper': 3}, num_edges={('author', 'writes', 'paper'): 3})
    """

    sizes: dict[NodeType, int]
    relations: dict[EdgeType, CSCGraph]

    @property
    def node_types(self) -> list[NodeType]:
        """Node types, sorted."""
        return list(self.sizes)

    @property
    def edge_types(self) -> list[EdgeType]:
        """Edge types, sorted."""
        return list(self.relations)

    @property
    def num_nodes(self) -> dict[NodeType, int]:
        """Number of nodes of each type."""
        return dict(self.sizes)

    @property
    def num_edges(self) -> dict[EdgeType, int]:
        """Number of edges of each type."""
        return {edge_type: graph.num_edges for edge_type, graph in self.relations.items()}

    @property
    def is_temporal(self) -> bool:
        """Whether any edge type has times."""
        return any(graph.time is not None for graph in self.relations.values())

    @classmethod
    def build(cls, sizes: Mapping[NodeType, int], relations: Mapping[EdgeType, CSCGraph]) -> HeteroCSCGraph:
        """Check that sizes and edges are consistent, and sort the types.

        Raises:
            TypeError: An edge type is not a triple of names.
            ValueError: An edge type has an unknown node type, or its number of nodes differs from ``sizes``.
        """
        for edge_type, graph in relations.items():
            if not (isinstance(edge_type, tuple) and len(edge_type) == 3):
                raise TypeError(f"an edge type is a triple (source, name, target), but one is {edge_type!r}")
            source, _, target = edge_type
            for name, count in ((source, graph.num_sources), (target, graph.num_nodes)):
                if sizes.get(name) != count:
                    problem = f"has {sizes[name]} nodes" if name in sizes else "is not a node type"
                    raise ValueError(f"edges of {edge_type} are between {count} nodes of {name!r}, which {problem}")
        return cls(dict(sorted(sizes.items())), dict(sorted(relations.items())))

    @classmethod
    def from_data(cls, data: HeteroData) -> HeteroCSCGraph:
        """Convert the topology of a PyG ``HeteroData``: ``graph``, ``adj_t`` or ``edge_index`` of each edge type.

        Raises:
            TypeError: ``data`` is not a ``HeteroData``, or an ``edge_index`` is not an integer tensor.
            ValueError: The number of nodes of a type is unknown, or edges are invalid.
        """
        if not isinstance(data, HeteroData):
            raise unexpected_graph(data, "a torch_geometric.data.HeteroData")
        sizes = {}
        for node_type in data.metadata()[0]:
            count = data[node_type].num_nodes
            if count is None:
                raise ValueError(f"the number of nodes of {node_type!r} is unknown: set data[…].num_nodes")
            sizes[node_type] = int(count)
        relations = {}
        for edge_type in data.edge_types:
            if unknown := [name for name in (edge_type[0], edge_type[2]) if name not in sizes]:
                name = repr(unknown[0])
                raise ValueError(f"edges of {edge_type}: unknown node type {name}; set data[{name}].num_nodes")
            try:
                relations[edge_type] = _convert_store(data[edge_type], sizes[edge_type[0]], sizes[edge_type[2]])
            except (TypeError, ValueError) as error:
                raise type(error)(f"edges of {edge_type}: {error}") from None
        return cls.build(sizes, relations)

    @property
    def num_bytes(self) -> int:
        """Total bytes of all arrays."""
        return sum(graph.num_bytes for graph in self.relations.values())

    def to(self, device: torch.device | str) -> HeteroCSCGraph:
        """Return a copy on a device."""
        return self.map_relations(lambda _, graph: graph.to(device))

    def pin_memory(self) -> HeteroCSCGraph:
        """Return the graph in page-locked host memory, locked in place if possible, otherwise copied."""
        return self.map_relations(lambda _, graph: graph.pin_memory())

    def share_memory_(self) -> HeteroCSCGraph:
        """Move the arrays to shared memory, so that other processes map them instead of copying; returns self."""
        for graph in self.relations.values():
            graph.share_memory_()
        return self

    def map_relations(self, function: Callable[[EdgeType, CSCGraph], CSCGraph]) -> HeteroCSCGraph:
        """Return the graph with ``function`` applied to the edges of each type."""
        return HeteroCSCGraph(self.sizes, {name: function(name, graph) for name, graph in self.relations.items()})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_nodes={self.num_nodes}, num_edges={self.num_edges})"


def edges_of(data: HeteroData, edge_type: EdgeType) -> Tensor:
    """Return the edges of one type in the user's order, int64 ``[2, E]``, from any representation."""
    store = data[edge_type]
    edge_index = store.get("edge_index")
    if edge_index is not None:
        return edge_index  # type: ignore[no-any-return]
    return _convert_store(store, data[edge_type[0]].num_nodes, data[edge_type[2]].num_nodes).to_edge_index()


def _convert_store(store: EdgeStorage, num_sources: int, num_targets: int) -> CSCGraph:
    graph = store.get("graph")
    if isinstance(graph, CSCGraph):
        return graph
    if store.get("adj_t") is not None:
        return CSCGraph.from_adj_t(store.adj_t, num_sources)
    edge_index = store.get("edge_index")
    if edge_index is None:
        edge_index = torch.empty((2, 0), dtype=torch.int64)
    return CSCGraph.from_edge_index(edge_index, num_targets, num_sources)
