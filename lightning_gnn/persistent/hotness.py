"""Counting what sampling touches, to decide what is worth a place on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.ops import batch_key, sample_neighbors


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
        backend: As for :func:`~lightning_gnn.ops.sample_neighbors`.

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
    generator = torch.Generator().manual_seed(seed % 2**63)
    per_epoch = -(-seeds.numel() // batch_size)
    for number in range(num_batches):
        epoch, batch = divmod(number, per_epoch)
        if batch == 0:
            order = seeds[torch.randperm(seeds.numel(), generator=generator)]
        key = batch_key(seed, epoch=epoch, batch=batch)
        out = sample_neighbors(
            graph,
            order[batch * batch_size : (batch + 1) * batch_size],
            fanouts,
            key,
            replace=replace,
            disjoint=disjoint,
            backend=backend,
        )
        # A node can stand in a batch more than once: a seed given twice, or once per tree of a disjoint sample.
        features.index_add_(0, out.node, torch.ones_like(out.node))
        targets = out.node[out.edge_index[1]]
        adjacency.index_add_(0, targets, torch.ones_like(targets))
    return AccessCounts(features, adjacency, num_batches)
