"""What mini-batches read of graph and features, counted for caches of what is read most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.ops import batch_key, sample_neighbors
from lightning_gnn.sampling.neighbor import NeighborSampler


@dataclass(frozen=True, eq=False)
class AccessCounts:
    """What some mini-batches touched.

    Args:
        features: Times that the feature row of each node was read, int64 ``[num_nodes]``.
        adjacency: Entries read from the adjacency list of each node, int64 ``[num_nodes]``.
        num_batches: Mini-batches counted.
    """

    features: Tensor
    adjacency: Tensor
    num_batches: int


def count_accesses(
    graph: CSCGraph,
    seeds: Tensor,
    fanouts: Sequence[int],
    batch_size: int,
    num_batches: int,
    *,
    seed: int = 0,
    replace: bool = False,
    disjoint: bool = False,
    backend: str | None = None,
) -> AccessCounts:
    """Sample mini-batches of shuffled seeds and count what they read from host memory.

    Args:
        graph: The topology.
        seeds: The training nodes, int64 ``[n]``.
        fanouts: In-edges to pick per node and hop; -1 takes all.
        batch_size: Seeds per mini-batch.
        num_batches: How many mini-batches; seeds are shuffled anew when they run out.
        seed: Start of the random stream.
        replace: Draw with replacement.
        disjoint: One tree per seed.
        backend: ``"numba"``, ``"pyg_lib"`` or ``"reference"``; by default the one for the device.

    Raises:
        IndexError: A seed outside the graph.
        ValueError: No seeds, or a batch size or number of batches below 1.

    Source: the pre-sampling of GNNLab (Yang et al., EuroSys 2022), which DUCATI extends to adjacency lists.
    """
    if batch_size < 1 or num_batches < 1 or seeds.numel() == 0:
        raise ValueError(
            f"pre-sampling needs seeds, a batch size and a number of batches, but got {seeds.numel()} seeds, "
            f"batch_size={batch_size}, num_batches={num_batches}"
        )
    features = torch.zeros(graph.num_nodes, dtype=torch.int64)
    adjacency = torch.zeros(graph.num_nodes, dtype=torch.int64)
    for index, key in _shuffled(seeds.numel(), batch_size, range(num_batches), seed):
        out = sample_neighbors(graph, seeds[index], fanouts, key, replace=replace, disjoint=disjoint, backend=backend)
        # A node can stand in a batch more than once: a seed given twice, or once per tree of a disjoint sample.
        features.index_add_(0, out.node, torch.ones_like(out.node))
        targets = out.node[out.edge_index[1]]
        adjacency.index_add_(0, targets, torch.ones_like(targets))
    return AccessCounts(features, adjacency, num_batches)


@dataclass(frozen=True, eq=False)
class Reads:
    """What some mini-batches of any kind read.

    Args:
        rows: Times that the row of each node was read, int64 ``[num_nodes]``, by type; None names the only one.
        edges: Edges of each type in these mini-batches; None names the only one.
        lists: Entries read from the adjacency list of each node, int64 ``[num_nodes]``; None in graphs with types.
    """

    rows: dict[NodeType | None, Tensor]
    edges: dict[EdgeType | None, int]
    lists: Tensor | None
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
    """Sample mini-batches of shuffled seeds in any way and count what they read.

    Args:
        inputs: The training nodes, or edges, with their type and times; without any, nothing is read.
        batches: The numbers of the mini-batches; seeds are shuffled anew when they run out.
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
