"""Bipartite blocks of a sampled mini-batch, one per layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

SEMANTICS = ("lowest_hop", "every_hop")


class Block(NamedTuple):
    """The input of one layer: ``conv((x, x[:num_targets]), edge_index, size=(num_sources, num_targets))``.

    Args:
        num_sources: Number of source nodes, the first ones of the mini-batch.
        num_targets: Number of target nodes, the first ones of the sources.
        edge_index: Local ids of sources and targets, int64 ``[2, m]``.
    """

    num_sources: int
    num_targets: int
    edge_index: Tensor


def layer_blocks(batch: Any, every_hop: bool | None = None) -> list[Block]:
    """Split a homogeneous mini-batch into blocks, one per hop, that of the input layer first.

    With ``semantics="every_hop"`` a block has the edges that its hop sampled, like DGL's message flow graphs. Otherwise
    a node is sampled in one hop only, so a block has the edges of its hop and of all hops before.

    Args:
        batch: A mini-batch or the output of a sampler, with ``num_sampled_nodes`` and ``num_sampled_edges``.
        every_hop: Whether it was sampled so. By default known from our loaders and samplers; PyG's loaders lose it.

    Raises:
        ValueError: The counts per hop are missing, as in induced subgraphs.

    Source: PGSampler, section IV-A and figure 6.
    """
    nodes, edges = getattr(batch, "num_sampled_nodes", None), getattr(batch, "num_sampled_edges", None)
    if nodes is None or edges is None:
        raise ValueError("the mini-batch has no counts per hop: sample with subgraph_type='directional'")
    edge_index = getattr(batch, "edge_index", None)
    ends = (batch.row, batch.col) if edge_index is None else edge_index
    every_hop = bool(getattr(batch, "every_hop", False)) if every_hop is None else every_hop
    blocks = []
    for hop in range(len(edges), 0, -1):
        own = slice(sum(edges[: hop - 1]) if every_hop else 0, sum(edges[:hop]))
        blocks.append(Block(sum(nodes[: hop + 1]), sum(nodes[:hop]), torch.stack([ends[0][own], ends[1][own]])))
    return blocks
