"""Mini-batches of clusters: their nodes, all edges into them, and the direct neighbors outside."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling, NodeSamplerInput, SamplerOutput

from lightning_gnn import NeighborSampler
from lightning_gnn.partitioned import assign_nodes


class ClusterSampler(BaseSampler):
    """Samples clusters: the "nodes" of its input are numbers of clusters.

    The nodes of a mini-batch are the training nodes of the clusters, which are its seeds, then their other nodes
    (``num_sampled_nodes[0]`` together), then the neighbors outside. Its edges are all edges into the clusters.

    Args:
        data: The graph, homogeneous.
        seeds: Training nodes, int64 ``[num_seeds]``, at least one.
        parts: Number of clusters. Clusters without training nodes are merged with others, so there can be fewer.
        method: ``"ldg"``, ``"metis"`` or ``"random"``; see :func:`~lightning_gnn.partitioned.assign_nodes`.
        seed: Random seed of the assignment.

    Raises:
        ValueError: ``parts`` is not from 1 to the number of nodes, or ``method`` is unknown.
    """

    def __init__(self, data: Data, seeds: Tensor, parts: int, method: str = "ldg", seed: int = 0) -> None:
        self._neighbors = NeighborSampler(data, [-1])
        self.graph = self._neighbors.graph
        self._position = torch.full((self.graph.num_nodes,), -1)  # of each node among the seeds
        self._position[seeds] = torch.arange(seeds.numel())
        (part,) = assign_nodes(self.graph, parts, method, {None: seeds}, seed).values()
        self.assign(part)

    def assign(self, part: Tensor) -> None:
        """Set the cluster of each node.

        Args:
            part: Numbers of clusters, integers ``[num_nodes]``; those without training nodes are merged with others.

        Raises:
            ValueError: It is not one number per node.
        """
        if part.numel() != self._position.numel():
            raise ValueError(
                f"the clusters are those of {part.numel()} nodes, but the graph has {self._position.numel()}"
            )
        self.part = part
        cluster = _merge_unseeded(part.long(), self._position >= 0)
        # Order nodes by cluster.
        self._members = torch.argsort(cluster, stable=True)
        sizes = torch.bincount(cluster)
        self._ends = sizes.cumsum(0)
        self._begins = self._ends - sizes

    @property
    def num_clusters(self) -> int:
        """Number of clusters."""
        return self._begins.numel()

    def nodes(self, clusters: Tensor) -> Tensor:
        """Return the nodes of some clusters, training nodes first, int64 ``[n]``."""
        bounds = zip(self._begins[clusters].tolist(), self._ends[clusters].tolist(), strict=True)
        nodes = torch.cat([self._members[begin:end] for begin, end in bounds])
        return nodes[torch.argsort((self._position[nodes] < 0).long(), stable=True)]

    def sample_from_nodes(self, inputs: NodeSamplerInput, key: int) -> SamplerOutput:
        """Return the subgraph of the clusters ``inputs.node``; the key has no effect."""
        nodes = self.nodes(inputs.node)
        out = self._neighbors.sample_from_nodes(NodeSamplerInput(None, nodes), key)
        positions = self._position[nodes]
        out.metadata = (positions[positions >= 0], None)
        return out

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput:
        """Raise an error: clusters have no labeled edges."""
        raise NotImplementedError("clusters are for the prediction of nodes; use LinkDataModule for links")


def _merge_unseeded(part: Tensor, is_seed: Tensor) -> Tensor:
    """Number the clusters from 0, and merge those without training nodes with those that have some, in turn."""
    seeded = torch.zeros(int(part.max()) + 1, dtype=torch.bool)
    seeded[part[is_seed]] = True
    count = int(seeded.sum())
    number = torch.arange(seeded.numel()) % count
    number[seeded] = torch.arange(count)
    return number[part]
