"""The batches of a run as its device or rank wants them: a full graph comes again and again, and is prepared once."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.full_graph.ownership import share_rows
from lightning_gnn.full_graph.row_shard import RowShard
from lightning_gnn.full_graph.shard_batch import ShardedBatch, agree, free_memory, shard_batch, split_masks
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.hybrid_plan import PlanSettings

_KEPT = 4


@dataclass(eq=False)
class BatchCache:
    """Prepares full-graph batches, and keeps the last few.

    Args:
        settings: Who executes the aggregations; with several ranks, their groups are those of the ranks.
        rank: This rank.
        num_ranks: N.
        local_ranks: Ranks on this machine.
        device: Where to compute.
        memory_limit: Bytes that a rank may use, None for no limit, or ``"auto"`` for what is free.
    """

    settings: PlanSettings
    rank: int
    num_ranks: int
    local_ranks: int
    device: torch.device
    memory_limit: int | Literal["auto"] | None
    _batches: dict[Any, tuple[ShardedBatch | Data, Any]] = field(default_factory=dict)
    _shards: dict[Any, tuple[RowShard, Any]] = field(default_factory=dict)

    def prepare(self, batch: Any) -> Data:
        """Return a batch on the device; with several ranks, this rank's part of it.

        Raises:
            TypeError: It is not a full graph.
            ValueError: As :class:`~lightning_gnn.full_graph.AscendHybridParallelStrategy` says.
        """
        if not isinstance(batch, Data) or not isinstance(batch.get("edge_index"), CompressedGraph):
            kind = type(batch.get("edge_index") if isinstance(batch, Data) else batch).__name__
            raise TypeError(
                f"strategy='ascend_hybrid' trains on full graphs, batches whose edge_index is a CompressedGraph, but "
                f"got a {kind}; use FullGraphDataModule(compress=True) with the layers of lightning_gnn.nn, or another "
                "strategy for mini-batches and for models of other layers"
            )
        parts = batch.to_dict()
        key = tuple((name, id(value), _version(value)) for name, value in parts.items())
        if key not in self._batches:
            while len(self._batches) >= _KEPT:
                self._batches.pop(next(iter(self._batches)))
            # Made while validating, it must be good for training too.
            with torch.inference_mode(False), torch.no_grad():
                plain = _without_inference(batch)
                made = self._plan(plain) if self.num_ranks == 1 else self._shard(plain)
            self._batches[key] = (made, parts)  # what an id names must live
        made = self._batches[key][0]
        return made if isinstance(made, Data) else made.data

    def sharded(self, data: Any) -> ShardedBatch | None:
        """Return what a batch was cut from, if it was cut here; the user may have copied it since."""
        graph = data.get("edge_index") if isinstance(data, Data) else None
        batches = (batch for batch, _ in self._batches.values() if isinstance(batch, ShardedBatch))
        return next((batch for batch in batches if batch.graph is graph), None)

    def _plan(self, batch: Data) -> Data:
        """Tell the graph who executes its aggregations."""
        planned = copy.copy(batch)
        planned.edge_index = batch.edge_index.replace_settings(self.settings)
        moved: Data = move_data_to_device(planned, self.device)
        return moved

    def _shard(self, batch: Data) -> ShardedBatch:
        masks = split_masks(batch)
        shard = self._shard_of(batch, masks)
        return shard_batch(batch, shard, shard.owners, masks)

    def _shard_of(self, batch: Data, masks: dict[str, Tensor]) -> RowShard:
        graph: CompressedGraph = batch.edge_index
        named = [batch[f"{split}_mask"] for split in masks]
        key = (id(graph), *((id(mask), _version(mask)) for mask in named))
        if key not in self._shards:
            while len(self._shards) >= _KEPT:
                self._shards.pop(next(iter(self._shards)))
            limit = self.memory_limit
            if limit == "auto":
                limit = free_memory(self.device, self.local_ranks)
            limit = agree(graph, masks, limit, self.rank)
            owners = share_rows(graph.num_targets, self.num_ranks, masks)
            x = batch.get("x")
            shard = RowShard(
                graph,
                owners,
                self.rank,
                1 if x is None else max(1, x[:1].numel()),
                self.settings.num_groups,
                PlanSettings(self.settings.num_workers, "auto", self.settings.bandwidth_ratio),
                self.device,
                limit,
                4 if x is None else x.element_size(),
            )
            self._shards[key] = (shard, (graph, named))
        return self._shards[key][0]


def _version(value: Any) -> Any:
    """Return what changes with the content of a tensor, None for anything else."""
    if not isinstance(value, Tensor):
        return None
    if not value.is_inference():
        return value._version
    # Nobody counts the changes of a tensor that was made in inference mode.
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(content.data, digest_size=16).digest()


def _without_inference(batch: Data) -> Data:
    """Return the batch with copies of tensors that were made in inference mode, which autograd would refuse."""
    made = {
        name: value for name, value in batch.to_dict().items() if isinstance(value, Tensor) and value.is_inference()
    }
    if not made:
        return batch
    plain = copy.copy(batch)
    for name, value in made.items():
        plain[name] = value.clone()
    return plain
