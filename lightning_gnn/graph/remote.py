"""Topologies with adjacency lists in other processes: sizes of the graph, and a callback that picks edges remotely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph

RemotePicker = Callable[..., Any]
"""Callback with the edge types (:class:`~lightning_gnn.ops.sample.relation.Relation`), key, pick options and times of a
mini-batch; returns a function that fetches the picks of each hop (:data:`~lightning_gnn.ops.sample.numba.Fetch`)."""


@dataclass(frozen=True, eq=False)
class RemoteCSCGraph(CSCGraph):
    """Edges of one type with remote adjacency lists; ``time`` and ``weight`` are empty tensors if edges have them."""

    targets: int = 0  # number of target nodes
    edges: int = 0  # number of edges
    number: int = 0  # index of the edge type
    remote_picker: RemotePicker | None = None  # in a heterogeneous graph, RemoteHeteroCSCGraph has it

    @classmethod
    def describe(
        cls, sources: int, targets: int, edges: int, number: int = 0, timed: bool = False, floating: bool = False,
        weighted: bool = False, remote_picker: RemotePicker | None = None,
    ) -> RemoteCSCGraph:  # fmt: skip
        """Return a graph of these sizes; its empty ``edge_ids`` indicates that edge ids must be looked up."""
        empty = torch.empty(0, dtype=torch.int64)
        return cls(
            torch.zeros(1, dtype=torch.int64), empty, edge_ids=empty, time=empty if timed else None,
            weight=empty.double() if weighted else None, prefix=empty.double() if weighted else None,
            floating_time=floating, source_count=sources, targets=targets, edges=edges, number=number,
            remote_picker=remote_picker,
        )  # fmt: skip

    @property
    def num_nodes(self) -> int:
        """Number of target nodes."""
        return self.targets

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.edges

    @property
    def parallel(self) -> Tensor | None:
        """None: only the processes with the adjacency lists count parallel edges."""
        return None


@dataclass(frozen=True, eq=False)
class RemoteHeteroCSCGraph(HeteroCSCGraph):
    """Heterogeneous graph with remote adjacency lists."""

    remote_picker: RemotePicker | None = None
