"""Counts the accesses of mini-batches to graph and features, to select the hottest entries for caches."""

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
class AccessCounts:
    """Access counts of some mini-batches; the key None stands for the single type of a homogeneous graph."""

    rows: dict[NodeType | None, Tensor]  # reads of each node's feature row, int64 [num_nodes]
    edges: dict[EdgeType | None, int]  # number of edges
    lists: Tensor | None  # reads from each adjacency list, int64 [num_nodes]; None in heterogeneous graphs
    num_batches: int

    def __add__(self, other: AccessCounts) -> AccessCounts:
        rows = {name: own + other.rows[name] for name, own in self.rows.items()}
        edges = {name: own + other.edges[name] for name, own in self.edges.items()}
        lists = None if self.lists is None or other.lists is None else self.lists + other.lists
        return AccessCounts(rows, edges, lists, self.num_batches + other.num_batches)


def count_reads(
    sampler: NeighborSampler,
    inputs: NodeSamplerInput | EdgeSamplerInput,
    batch_size: int,
    batches: range,
    seed: int = 0,
    neg_sampling: NegativeSampling | None = None,
) -> AccessCounts:
    """Count the accesses of pre-sampled mini-batches (GNNLab, Yang et al., EuroSys 2022; DUCATI for lists)."""
    graph = sampler.graph
    hetero = not isinstance(graph, CSCGraph)
    sizes: dict[NodeType | None, int] = graph.num_nodes if hetero else {None: graph.num_nodes}
    rows = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
    edges: dict[EdgeType | None, int] = dict.fromkeys(graph.relations if hetero else [None], 0)
    lists = None if hetero else torch.zeros(graph.num_nodes, dtype=torch.int64)
    num_seeds = (inputs.row if isinstance(inputs, EdgeSamplerInput) else inputs.node).numel()
    for index, key in _shuffle_batches(num_seeds, batch_size, batches, seed) if num_seeds else ():
        if isinstance(inputs, EdgeSamplerInput):
            out = sampler.sample_from_edges(inputs[index], neg_sampling, key=key)
        else:
            out = sampler.sample_from_nodes(inputs[index], key=key)
        for name, ids in (out.node if hetero else {None: out.node}).items():
            # A batch can contain a node several times: a duplicated seed, or once per tree of a disjoint sample.
            rows[name].index_add_(0, ids, torch.ones_like(ids))
        for name, targets in (out.col if hetero else {None: out.col}).items():
            edges[name] += 0 if targets is None else targets.numel()
        if lists is not None:
            targets = out.node[out.col]
            lists.index_add_(0, targets, torch.ones_like(targets))
    return AccessCounts(rows, edges, lists, len(batches))


def _shuffle_batches(num_seeds: int, batch_size: int, batches: range, seed: int) -> Iterator[tuple[Tensor, int]]:
    """Yield each mini-batch's seed positions, int64 ``[batch_size]`` or fewer, and its key."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    per_epoch = -(-num_seeds // batch_size)
    for number in range(batches.stop):
        epoch, batch = divmod(number, per_epoch)
        if batch == 0:
            order = torch.randperm(num_seeds, generator=generator)
        if number >= batches.start:
            yield order[batch * batch_size : (batch + 1) * batch_size], batch_key(seed, epoch=epoch, batch=batch)
