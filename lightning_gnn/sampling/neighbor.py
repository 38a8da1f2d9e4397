"""A PyG sampler on top of :func:`lightning_gnn.ops.sample_neighbors`."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import NumNeighbors
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.memory import pool
from lightning_gnn.ops import NeighborSample, batch_key, sample_neighbors
from lightning_gnn.ops.gather.numba import take
from lightning_gnn.ops.sample.definition import check_backend, check_fanouts, check_flags, check_integer, check_key


class SeedRange(NodeSamplerInput):  # type: ignore[misc]
    """Consecutive seeds of a larger mini-batch, which know where they stand in it.

    A sampler of the user's own that hands its input on to :class:`NeighborSampler` hands this on too.

    Args:
        seeds: Int64 ``[n]``, with what PyG says of them.
        first: Position of the first of them in the whole mini-batch.
    """

    def __init__(self, seeds: NodeSamplerInput, first: int) -> None:
        super().__init__(seeds.input_id, seeds.node, seeds.time, seeds.input_type)
        self.first = first


class NeighborSampler(BaseSampler):  # type: ignore[misc]
    """Uniform neighbour sampling for PyG's ``NodeLoader``, ``LinkLoader`` and ``LightningNodeData``, and for ours.

    The ``edge`` of its output holds positions in the user's ``edge_index``, so it needs no ``edge_permutation``.

    Args:
        data: The graph.
        num_neighbors: In-edges to pick per node, one number per hop; -1 takes all.
        replace: Draw with replacement.
        disjoint: One tree per seed, told apart by ``batch``; trees are drawn independently of each other.
        seed: Start of the random stream; by default torch's initial seed, which ``seed_everything`` sets.
        backend: ``"numba"``, ``"pyg_lib"`` or ``"reference"``; by default the one for the device.

    Raises:
        TypeError: ``data`` is no homogeneous graph, or fanouts or the seed are no integers.
        ValueError: A graph, fanout or backend that is not valid.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from torch_geometric.loader import NodeLoader
        >>> from lightning_gnn import NeighborSampler
        >>> path = Data(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), num_nodes=5)
        >>> sampler = NeighborSampler(path, num_neighbors=[1, 1])
        >>> batch = next(iter(NodeLoader(path, sampler, input_nodes=torch.tensor([4]))))
        >>> batch.n_id, batch.edge_index
        (tensor([4, 3, 2]), tensor([[1, 2],
                [0, 1]]))
    """

    def __init__(
        self,
        data: Data | CSCGraph,
        num_neighbors: Sequence[int] | NumNeighbors,
        replace: bool = False,
        disjoint: bool = False,
        seed: int | None = None,
        backend: str | None = None,
    ) -> None:
        self.graph = data if isinstance(data, CSCGraph) else CSCGraph.from_data(data)
        self.num_neighbors = num_neighbors
        check_flags(replace=replace, disjoint=disjoint)
        self.replace = replace
        self.disjoint = disjoint
        self.seed = torch.initial_seed() if seed is None else check_integer("seed", seed, -(2**63), 2**64 - 1)
        check_backend(backend)
        self.backend = backend
        self._rank = ProcessRank()

    @property
    def num_neighbors(self) -> list[int]:
        """Fanout of each hop."""
        return self._num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, value: Sequence[int] | NumNeighbors) -> None:
        self._num_neighbors = check_fanouts(value.get_mapped_values() if isinstance(value, NumNeighbors) else value)

    def with_options(self, **options: object) -> NeighborSampler:
        """Return a sampler over the same graph with some attributes changed, such as ``num_neighbors``."""
        other = copy.copy(self)
        for name, value in options.items():
            setattr(other, name, value)
        return other

    def sample_from_nodes(self, inputs: NodeSamplerInput, key: int | None = None) -> SamplerOutput:
        """Sample the neighbourhoods of some seeds.

        Args:
            inputs: The seeds, int64 ``[batch_size]``.
            key: The key of the mini-batch; by default one is drawn from torch's global random stream.

        Raises:
            TypeError: The input is no ``NodeSamplerInput``.
            IndexError: A seed outside the graph.
            NotImplementedError: Seeds with timestamps.
            ValueError: Seeds of a node type.
        """
        if not isinstance(inputs, NodeSamplerInput):
            raise TypeError(f"expected NodeSamplerInput(None, seeds), got {type(inputs).__name__}")
        key = self._next_key() if key is None else check_key(key)
        first = inputs.first if isinstance(inputs, SeedRange) else 0
        return node_sample(inputs, lambda seeds, times: self._sample(seeds, times, key, first))

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, key: int | None = None
    ) -> SamplerOutput:
        """Sample the neighbourhoods of both ends of some edges, and of negative edges beside them.

        Disjoint trees are numbered by edge, as PyG does, but each end has a tree of its own, drawn independently.

        Args:
            inputs: Sources and targets, int64 ``[batch_size]`` each, with optional labels.
            neg_sampling: PyG's description of the negative edges; their ends are drawn from the key too.
            key: The key of the mini-batch, as for :meth:`sample_from_nodes`.

        Raises:
            TypeError: The input is no ``EdgeSamplerInput``.
            IndexError: An end outside the graph.
            NotImplementedError: Edges with timestamps.
            ValueError: Edges of an edge type.
        """
        if not isinstance(inputs, EdgeSamplerInput):
            raise TypeError(f"expected EdgeSamplerInput(None, sources, targets), got {type(inputs).__name__}")
        key = self._next_key() if key is None else check_key(key)
        if inputs.time is not None:
            raise NotImplementedError("temporal sampling is not supported: leave out edge_label_time")
        negatives = None if neg_sampling is None else _KeyedNegatives(neg_sampling, key)
        return edge_sample(
            inputs,
            lambda seeds, times: self._sample(seeds, times, key),
            self.graph.num_nodes,
            self.disjoint,
            None,
            negatives,
        )

    def _sample(self, seeds: Tensor, times: Tensor | None, key: int, first: int = 0) -> SamplerOutput:
        if times is not None:
            raise NotImplementedError("temporal sampling is not supported: leave out input_time (times of the seeds)")
        check_untyped(seeds)
        out = self.draw(seeds, key, first) if first and self.disjoint else self.draw(seeds, key)
        return SamplerOutput(
            node=out.node,
            row=out.edge_index[0],
            col=out.edge_index[1],
            edge=self.original_edges(out.edge),
            batch=out.batch,
            num_sampled_nodes=out.num_sampled_nodes,
            num_sampled_edges=out.num_sampled_edges,
        )

    def draw(self, seeds: Tensor, key: int, first_tree: int = 0) -> NeighborSample:
        """Sample a subgraph; what a sampler on another device overrides.

        Args:
            seeds: int64 ``[batch_size]``.
            key: The key of the mini-batch.
            first_tree: Position of the first seed in the whole mini-batch; matters if disjoint.

        Raises:
            IndexError: A seed outside the graph.
        """
        options = {"replace": self.replace, "disjoint": self.disjoint}
        return sample_neighbors(
            self.graph, seeds, self.num_neighbors, key, first_tree=first_tree, backend=self.backend, **options
        )

    def original_edges(self, edge: Tensor) -> Tensor:
        """Turn positions in CSC order into positions in the user's ``edge_index``, int64 ``[m]``."""
        if self.graph.edge_ids is None:
            return edge
        out = pool.empty(edge.shape, torch.int64)
        take(self.graph.edge_ids.numpy(), edge.numpy(), out.numpy())
        return out

    def _next_key(self) -> int:
        # torch seeds its global stream in each worker process anew, in each epoch, but alike on all ranks.
        return batch_key(self.seed, rank=self._rank.get(), batch=int(torch.randint(2**62, ())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.graph}, num_neighbors={self.num_neighbors})"


class ProcessRank:
    """Which process of a distributed run asks, also in worker processes, which are not part of the group themselves.

    A worker that is forked inherits the group. One that is spawned is sent a copy of this by its parent, which notes
    the parent's rank.
    """

    def __init__(self) -> None:
        self._parent = 0

    def get(self) -> int:
        """Return the rank; 0 outside a distributed run."""
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if grouped else self._parent

    def __getstate__(self) -> dict[str, int]:
        return {"_parent": self.get()}


def check_untyped(seeds: object) -> None:
    """Raise a ValueError if seeds come by node type, as those of heterogeneous graphs do."""
    if isinstance(seeds, dict):
        raise ValueError(
            f"seeds of type {', '.join(map(repr, seeds))} were given, but the graph is homogeneous: give the ids or "
            "the mask without a type"
        )


class _KeyedNegatives:
    """PyG's negative sampling, drawn from the key of the mini-batch instead of the process's global stream."""

    def __init__(self, negatives: NegativeSampling, key: int) -> None:
        self._negatives = negatives
        self._generator = torch.Generator().manual_seed(key)
        self.amount = negatives.amount
        self.is_binary = negatives.is_binary
        self.is_triplet = negatives.is_triplet

    def sample(self, num_samples: int, endpoint: str, num_nodes: int) -> Tensor:
        weight = self._negatives.src_weight if endpoint == "src" else self._negatives.dst_weight
        if weight is None:
            return torch.randint(num_nodes, (num_samples,), generator=self._generator)
        if weight.numel() != num_nodes:
            raise ValueError(f"negative sampling has {weight.numel()} weights, but the graph has {num_nodes} nodes")
        return torch.multinomial(weight, num_samples, replacement=True, generator=self._generator)
