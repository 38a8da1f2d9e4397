"""Topologies of which the lists lie elsewhere: they say how large the graph is, and whom to ask for picks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph

RemotePicker = Callable[..., Any]
"""Called with the edge types as :class:`~lightning_gnn.ops.sample.relation.Relation`, the key, the rule and the times
of a mini-batch; returns what brings the picks of each hop (:data:`~lightning_gnn.ops.sample.numba.Fetch`)."""


@dataclass(frozen=True, eq=False)
class RemoteCSCGraph(CSCGraph):
    """The edges of one type, whose lists lie elsewhere; ``time`` and ``weight`` only say whether there are any."""

    targets: int = 0  # number of nodes that edges go to
    edges: int = 0
    number: int = 0  # of the edge type
    remote_picker: RemotePicker | None = None  # whom to ask; of a graph with types, that of the whole graph

    @classmethod
    def describe(
        cls, sources: int, targets: int, edges: int, number: int = 0, timed: bool = False, floating: bool = False,
        weighted: bool = False, remote_picker: RemotePicker | None = None,
    ) -> RemoteCSCGraph:  # fmt: skip
        """Return a graph of these sizes; ``edge_ids`` says that ids of edges are looked up."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(
            torch.zeros(1, dtype=torch.int64), none, edge_ids=none, time=none if timed else None,
            weight=none.double() if weighted else None, prefix=none.double() if weighted else None,
            floating_time=floating, source_count=sources, targets=targets, edges=edges, number=number,
            remote_picker=remote_picker,
        )  # fmt: skip

    @property
    def num_nodes(self) -> int:
        """Number of nodes that edges go to."""
        return self.targets

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.edges

    @property
    def parallel(self) -> Tensor | None:
        """Known where the lists are."""
        return None


@dataclass(frozen=True, eq=False)
class RemoteHeteroCSCGraph(HeteroCSCGraph):
    """A graph with types, whose lists lie elsewhere."""

    remote_picker: RemotePicker | None = None
