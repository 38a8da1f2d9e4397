"""Feature tables of all node types, and the input of each layer for a heterogeneous mini-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.ops.aggregate.numba_rows import use_huge_pages
from lightning_gnn.ops.aggregate_update.edge_order import first_edges

Counts = Mapping[NodeType, int]


@dataclass
class TypedRows:
    """Features of several node types; types with the same width are concatenated in one table."""

    tables: list[Tensor]  # [N, F] each
    counts: list[dict[NodeType, int]]  # for each table, its node types and their numbers of rows

    @classmethod
    def of(cls, x_dict: Mapping[NodeType, Tensor], counts: Counts) -> TypedRows:
        """Concatenate the first ``counts`` rows of each type, ``[N_t, F_t]``, by width."""
        by_width: dict[int, dict[NodeType, int]] = {}
        for name, count in counts.items():
            by_width.setdefault(x_dict[name].size(1), {})[name] = count
        tables = [_concatenate([x_dict[name][:count] for name, count in group.items()]) for group in by_width.values()]
        return cls(tables, list(by_width.values()))

    def to_dict(self) -> dict[NodeType, Tensor]:
        """Return the rows of each type, as views."""
        return {
            name: rows
            for table, counts in zip(self.tables, self.counts, strict=True)
            for name, rows in zip(counts, torch.split(table, list(counts.values())), strict=True)
        }


def _concatenate(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    is_plain = all(type(part) is Tensor and part.is_cpu and part.dtype == parts[0].dtype for part in parts)
    if not is_plain or any(part.requires_grad for part in parts) or torch.compiler.is_compiling():
        return torch.cat(parts)
    # Without huge pages, a third of the time of a step is spent on page faults here.
    rows, width = sum(part.size(0) for part in parts), parts[0].size(1)
    return torch.cat(parts, out=use_huge_pages(parts[0].new_empty(rows, width)))


@dataclass
class LayerInput:
    """Inputs of one layer, and the rows that it computes."""

    sources: dict[NodeType, int]  # number of nodes of each type that it reads
    targets: dict[NodeType, int]  # number of them that it computes, the first ones
    edges: dict[EdgeType, Tensor]  # edges from sources to targets, [2, E]


def split_layers(
    x_dict: Mapping[NodeType, Tensor],
    edge_index_dict: Mapping[EdgeType, Tensor],
    layers: Sequence[Sequence[EdgeType]],
    every: bool,
    num_nodes: Mapping[NodeType, Sequence[int]] | None,
    num_edges: Mapping[EdgeType, Sequence[int]] | None,
) -> list[LayerInput]:
    """Return the input of each layer for a graph, or trimmed for a mini-batch with nodes and edges by hop."""
    # Trimming needs counts for at least one hop per layer.
    sources = {name: x.size(0) for name, x in x_dict.items()}
    hops = 0 if num_edges is None else min((len(numbers) for numbers in num_edges.values()), default=0)
    trims = num_nodes is not None and hops >= len(layers)
    blocks = []
    # The first layer reads one hop per layer of the model, and each further layer one hop less.
    for depth, edge_types in zip(range(len(layers), 0, -1), layers, strict=True):
        edges, targets = {}, {}
        for edge_type in edge_types:
            if edge_type not in edge_index_dict:
                raise ValueError(f"the batch has no edges of {edge_type}, which the model reads")
            if missing := [end for end in (edge_type[0], edge_type[2]) if end not in x_dict]:
                raise ValueError(f"the batch has no features of {missing[0]!r}, which the model reads")
            edges[edge_type] = edge_index_dict[edge_type]
            if trims and num_edges is not None:
                edges[edge_type] = first_edges(edges[edge_type], sum(num_edges[edge_type][:depth]))
        # Compute the node types with in-edges, or with `every` all types.
        reached = {edge_type[2] for edge_type in edge_types}
        for name in x_dict:
            if not every and name not in reached:
                continue
            targets[name] = sum(num_nodes[name][:depth]) if trims and num_nodes is not None else x_dict[name].size(0)
        # Drop rows beyond the required hops before the first layer.
        if trims and num_nodes is not None and depth == len(layers):
            sources = {name: sum(num_nodes[name][: depth + 1]) for name in x_dict}
        blocks.append(LayerInput(sources, targets, edges))
        sources = targets
    return blocks
