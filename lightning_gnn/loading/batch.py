"""What passes from stage to stage of a mini-batch: a task, its sampled subgraph, and the batch that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput
from torch_geometric.typing import NodeType

from lightning_gnn.graph.stores import StoreType

Batch: TypeAlias = Data | HeteroData
Positions: TypeAlias = Tensor | Sequence[int]  # of seeds among those of a stage, int64 [n]
Attribute = tuple[StoreType, str]  # the type that has an attribute, None in a homogeneous graph, and its name
NO_NODES = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class BatchTask:
    """A mini-batch to make.

    Args:
        seeds: Positions among the pipeline's seeds, int64 ``[n]``. A list is converted, which takes longer than
            sampling can.
        seed_offset: Position of the first of these seeds in the whole mini-batch, where ranks share one.
        shard: Which part of a shared mini-batch this is.
    """

    epoch: int
    index: int  # of the mini-batch in the epoch
    seeds: Positions
    seed_offset: int = 0
    shard: int = 0

    def is_same(self, other: BatchTask) -> bool:
        """Return whether two tasks ask for the same seeds of the same mini-batch."""
        if (self.epoch, self.index, self.seed_offset) != (other.epoch, other.index, other.seed_offset):
            return False
        if isinstance(self.seeds, Tensor) and isinstance(other.seeds, Tensor):
            return torch.equal(self.seeds, other.seeds)
        return type(self.seeds) is type(other.seeds) and bool(self.seeds == other.seeds)


@dataclass
class LoaderStats:
    """What preparing mini-batches has cost since the last reset, in thread-seconds; ``wait_s`` is the consumer's."""

    batches: int = 0
    nodes: int = 0
    edges: int = 0
    sampling_s: float = 0.0
    features_s: float = 0.0
    wait_s: float = 0.0

    def add(self, more: LoaderStats) -> None:
        """Add the figures of other mini-batches."""
        for name, value in vars(more).items():
            setattr(self, name, getattr(self, name) + value)

    def reset(self) -> None:
        """Set all figures to zero."""
        self.__init__()  # type: ignore[misc]


@dataclass(frozen=True)
class SampledBatch:
    """A sampled subgraph, without features.

    Args:
        out: PyG's output of the sampler.
        key: The key of the mini-batch, from which all its random numbers follow.
        seconds: Thread-seconds of sampling.
    """

    task: BatchTask
    out: SamplerOutput | HeteroSamplerOutput
    key: int
    seconds: float = 0.0

    def nodes(self, node_type: NodeType | None) -> Tensor:
        """Return the nodes of a type (None in a homogeneous graph), int64 ``[n]``."""
        node = self.out.node.get(node_type) if isinstance(self.out.node, dict) else self.out.node
        return NO_NODES if node is None else node


@dataclass
class PreparedBatch:
    """A mini-batch with its features, which the training thread has to ``finish``.

    Args:
        batch: PyG's mini-batch, without the rows in ``deferred``.
        stats: What it has cost so far.
        deferred: Rows that are gathered when the mini-batch is trained on, as training changes them, int64 ``[n]``.
    """

    batch: Batch
    task: BatchTask
    key: int
    stats: LoaderStats
    deferred: dict[Attribute, Tensor] = field(default_factory=dict)
