"""The features of all node types, and what of a mini-batch of a graph with types each layer reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

Counts = Mapping[NodeType, int]


@dataclass
class TypedRows:
    """Features of several node types; types of one width stand in one table, one after the other."""

    tables: list[Tensor]  # [N, F] each
    counts: list[dict[NodeType, int]]  # for each table, the types in it and their numbers of rows

    @classmethod
    def of(cls, x_dict: Mapping[NodeType, Tensor], counts: Counts) -> TypedRows:
        """Put the first ``counts`` rows of each type, ``[N_t, F_t]``, into the table of their width."""
        by_width: dict[int, dict[NodeType, int]] = {}
        for name, count in counts.items():
            by_width.setdefault(x_dict[name].size(1), {})[name] = count
        tables = [_joined([x_dict[name][:count] for name, count in part.items()]) for part in by_width.values()]
        return cls(tables, list(by_width.values()))

    def to_dict(self) -> dict[NodeType, Tensor]:
        """Return the rows of each type, as views."""
        return {
            name: rows
            for table, counts in zip(self.tables, self.counts, strict=True)
            for name, rows in zip(counts, torch.split(table, list(counts.values())), strict=True)
        }


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class LayerInput:
    """What one layer reads and computes."""

    sources: dict[NodeType, int]  # how many nodes of each type it reads
    targets: dict[NodeType, int]  # how many of them, the first ones, it computes
    edges: dict[EdgeType, Tensor]  # the edges between these, [2, E]


def parts(
    x_dict: Mapping[NodeType, Tensor],
    edge_index_dict: Mapping[EdgeType, Tensor],
    layers: Sequence[Sequence[EdgeType]],
    every: bool,
    num_nodes: Mapping[NodeType, Sequence[int]] | None,
    num_edges: Mapping[EdgeType, Sequence[int]] | None,
) -> list[LayerInput]:
    """Say what each layer reads of a graph, or of a mini-batch with nodes and edges by hop for its seeds."""
    # Trimming needs counts for at least as many hops as there are layers.
    read = {name: x.size(0) for name, x in x_dict.items()}
    hops = 0 if num_edges is None else min((len(numbers) for numbers in num_edges.values()), default=0)
    trims = num_nodes is not None and hops >= len(layers)
    found = []
    # The first layer reads as many hops as there are layers, and each further one a hop less.
    for depth, types in zip(range(len(layers), 0, -1), layers, strict=True):
        edges, targets = {}, {}
        for kind in types:
            if kind not in edge_index_dict:
                raise ValueError(f"the batch has no edges of {kind}, which the model reads")
            if missing := [end for end in (kind[0], kind[2]) if end not in x_dict]:
                raise ValueError(f"the batch has no features of {missing[0]!r}, which the model reads")
            edges[kind] = edge_index_dict[kind]
            if trims and num_edges is not None:
                edges[kind] = edges[kind][:, : sum(num_edges[kind][:depth])]
        # Compute the targets that a relation reaches, or those of all types if the layers keep them.
        reached = {kind[2] for kind in types}
        for name in x_dict:
            if not every and name not in reached:
                continue
            targets[name] = sum(num_nodes[name][:depth]) if trims and num_nodes is not None else x_dict[name].size(0)
        # Rows beyond the hops that the layers need are left out from the first layer on.
        if trims and num_nodes is not None and depth == len(layers):
            read = {name: sum(num_nodes[name][: depth + 1]) for name in x_dict}
        found.append(LayerInput(read, targets, edges))
        read = targets
    return found
