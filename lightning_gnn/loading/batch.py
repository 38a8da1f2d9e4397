"""Data passed between the stages of the mini-batch pipeline: task, sampled subgraph, prepared batch."""

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
Positions: TypeAlias = Tensor | Sequence[int]  # indices into a stage's (such as training's) seeds, int64 [n]
Attribute = tuple[StoreType, str]  # node or edge type (None in a homogeneous graph) and name of an attribute
NO_NODES = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class BatchTask:
    """A mini-batch to prepare."""

    epoch: int
    index: int  # number of the mini-batch within the epoch
    seeds: Positions  # indices into the pipeline's seeds, int64 [n]; a list is slow to convert
    seed_offset: int = 0  # position of the first of these seeds in the whole mini-batch, if ranks share one
    shard: int = 0  # number of this part of a shared mini-batch

    def is_same(self, other: BatchTask) -> bool:
        """Return whether two tasks have the same mini-batch and the same seeds."""
        if (self.epoch, self.index, self.seed_offset) != (other.epoch, other.index, other.seed_offset):
            return False
        if isinstance(self.seeds, Tensor) and isinstance(other.seeds, Tensor):
            return torch.equal(self.seeds, other.seeds)
        return type(self.seeds) is type(other.seeds) and bool(self.seeds == other.seeds)


@dataclass
class LoaderStats:
    """Totals over prepared mini-batches since the last reset: thread-seconds by stage, and the consumer's wait."""

    batches: int = 0
    nodes: int = 0
    edges: int = 0
    sampling_s: float = 0.0
    features_s: float = 0.0
    wait_s: float = 0.0

    def add(self, more: LoaderStats) -> None:
        """Add the totals of other mini-batches."""
        for name, value in vars(more).items():
            setattr(self, name, getattr(self, name) + value)

    def reset(self) -> None:
        """Set all totals to zero."""
        self.__init__()  # type: ignore[misc]


@dataclass(frozen=True)
class SampledBatch:
    """A sampled subgraph, without features."""

    task: BatchTask
    out: SamplerOutput | HeteroSamplerOutput
    key: int  # random key of the mini-batch, which determines all its random numbers
    seconds: float = 0.0  # sampling time, in thread-seconds

    def nodes(self, node_type: NodeType | None) -> Tensor:
        """Return the nodes of a type (None in a homogeneous graph), int64 ``[n]``."""
        node = self.out.node.get(node_type) if isinstance(self.out.node, dict) else self.out.node
        return NO_NODES if node is None else node


@dataclass
class PreparedBatch:
    """A mini-batch with its features; the training thread must still ``finish`` it."""

    batch: Batch  # without the rows in deferred
    task: BatchTask
    key: int  # random key of the mini-batch
    stats: LoaderStats  # of the stages run so far
    deferred: dict[Attribute, Tensor] = field(default_factory=dict)
    """Row ids of trainable attributes, int64 ``[n]``, gathered just before the training step."""
