"""What mini-batches read of graph and features, counted for caches of what is read most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.ops import batch_key
from lightning_gnn.sampling.neighbor import NeighborSampler


@dataclass(frozen=True, eq=False)
class Reads:
    """What some mini-batches of any kind read."""

    rows: dict[NodeType | None, Tensor]  # reads of each node's row, int64 [num_nodes], by type; None: the only one
    edges: dict[EdgeType | None, int]  # edges of each type in these mini-batches
    lists: Tensor | None  # entries read of each node's adjacency list, int64 [num_nodes]; None in graphs with types
    num_batches: int

    def __add__(self, other: Reads) -> Reads:
        rows = {name: own + other.rows[name] for name, own in self.rows.items()}
        edges = {name: own + other.edges[name] for name, own in self.edges.items()}
        lists = None if self.lists is None or other.lists is None else self.lists + other.lists
        return Reads(rows, edges, lists, self.num_batches + other.num_batches)


def count_reads(
    sampler: NeighborSampler,
    inputs: NodeSamplerInput | EdgeSamplerInput,
    batch_size: int,
    batches: range,
    seed: int = 0,
    neg_sampling: NegativeSampling | None = None,
) -> Reads:
    """Sample mini-batches of shuffled seeds in any way and count what they read; seeds are shuffled again at their end.

    Source: the pre-sampling of GNNLab (Yang et al., EuroSys 2022), which DUCATI extends to adjacency lists.
    """
    graph = sampler.graph
    typed = not isinstance(graph, CSCGraph)
    sizes: dict[NodeType | None, int] = graph.num_nodes if typed else {None: graph.num_nodes}
    rows = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
    edges: dict[EdgeType | None, int] = dict.fromkeys(graph.relations if typed else [None], 0)
    lists = None if typed else torch.zeros(graph.num_nodes, dtype=torch.int64)
    count = (inputs.row if isinstance(inputs, EdgeSamplerInput) else inputs.node).numel()
    for index, key in _shuffled(count, batch_size, batches, seed) if count else ():
        if isinstance(inputs, EdgeSamplerInput):
            out = sampler.sample_from_edges(inputs[index], neg_sampling, key=key)
        else:
            out = sampler.sample_from_nodes(inputs[index], key=key)
        for name, ids in (out.node if typed else {None: out.node}).items():
            # A node can stand in a batch more than once: a seed given twice, or once per tree of a disjoint sample.
            rows[name].index_add_(0, ids, torch.ones_like(ids))
        for name, targets in (out.col if typed else {None: out.col}).items():
            edges[name] += 0 if targets is None else targets.numel()
        if lists is not None:
            targets = out.node[out.col]
            lists.index_add_(0, targets, torch.ones_like(targets))
    return Reads(rows, edges, lists, len(batches))


def _shuffled(num_seeds: int, batch_size: int, batches: range, seed: int) -> Iterator[tuple[Tensor, int]]:
    """Give the positions of the seeds of each mini-batch, int64 ``[batch_size]`` or fewer, and its key."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    per_epoch = -(-num_seeds // batch_size)
    for number in range(batches.stop):
        epoch, batch = divmod(number, per_epoch)
        if batch == 0:
            order = torch.randperm(num_seeds, generator=generator)
        if number >= batches.start:
            yield order[batch * batch_size : (batch + 1) * batch_size], batch_key(seed, epoch=epoch, batch=batch)
