"""Batches of whole graphs as a device or rank wants them: cut to what the rank owns, moved, and prepared once."""

import copy
import hashlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.full_graph.exchange import all_gather_rows
from lightning_gnn.full_graph.plan import Ownership, share_rows
from lightning_gnn.full_graph.shard import RowShard
from lightning_gnn.nn.conv.graph import keep_constant
from lightning_gnn.runtime.memory_info import available_bytes
from lightning_gnn.runtime.store import checksum

SPLITS = ("train", "val", "test")
_KEPT = 4


@dataclass(frozen=True, eq=False)
class ShardedBatch:
    """One rank's part of a batch."""

    data: Data  # the rank's rows of every tensor of nodes; its edge_index is graph
    graph: RowShard  # the rank's part of the graph
    counts: dict[str, tuple[int, int]]
    """For each split, how many nodes the rank has and how many there are; ``"all"`` for all nodes."""
    predicted: list[int]  # for each rank, how many rows it predicts
    places: Tensor  # where these rows, one rank after the other, are in the whole prediction, int64

    def share(self, split: str) -> tuple[int, int]:
        """Return how many nodes of a split this rank has, and how many there are."""
        return self.counts.get(split, self.counts["all"])

    def gather(self, values: Tensor) -> Tensor:
        """Return what all ranks predicted, in the order of the nodes; a tensor that is not of rows stays as it is."""
        rows = self.predicted[self.graph.rank]
        fits = torch.tensor(int(values.dim() > 0 and values.size(0) == rows), device=self.graph.device)
        dist.all_reduce(fits, dist.ReduceOp.MIN, group=self.graph.process_group)
        if not int(fits):
            return values
        gathered = all_gather_rows(values, self.predicted, self.graph.process_group)
        out = torch.empty_like(gathered)
        out[self.places.to(out.device)] = gathered
        return out


def split_masks(batch: Data) -> dict[str, Tensor]:
    """Return the masks of a batch by split, on the CPU: those that are bool, one per node."""
    masks = {split: batch.get(f"{split}_mask") for split in SPLITS}
    return {
        split: mask.detach().cpu()
        for split, mask in masks.items()
        if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 1
    }


def agree(graph: CompressedGraph, masks: dict[str, Tensor], memory_limit: int | None, rank: int) -> int | None:
    """Check that all ranks have the same graph and splits, and return the least of their memory limits."""
    mine = (
        f"{graph.num_targets} nodes, {graph.num_edges} edges",
        graph.checksum(),
        checksum(*masks.values(), sorted(masks)),
        memory_limit,
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for kind, part in (("graph", 1), ("splits", 2)):
        different = [other for other, theirs in enumerate(everyone) if theirs[part] != everyone[0][part]]
        if different:
            listed = ", ".join(map(str, different))
            raise ValueError(
                f"all ranks must have the same {kind}, but rank {listed} has another one than rank 0 "
                f"({everyone[different[0]][0]} against {everyone[0][0]}): make it from a fixed seed, or read it from "
                "one file"
            )
    limits = [theirs[3] for theirs in everyone if theirs[3] is not None]
    return min(limits, default=None)


def shard_batch(batch: Data, graph: RowShard, owners: Ownership, masks: dict[str, Tensor]) -> ShardedBatch:
    """Cut a batch: of every tensor with one row per node, the rows that the rank owns."""
    # Tensors with a row per node have that length and no "edge" in their name. Tensors of edges stay whole, in the
    # order of the user's edge_index. n_id names the rows, and pred_nodes become places in them.
    # The ends of a labeled edge may belong to different ranks, which no loss can handle.
    if "edge_label_index" in batch:
        raise ValueError(
            f"edge_label_index names nodes of the whole graph, of which each of {owners.num_ranks} ranks has a part: "
            "predict edges on one device, or with LinkDataModule and another strategy, or delete edge_label_index"
        )
    # Keep the owned rows of every tensor by node, and the topology as a shard.
    rows = owners.rows(graph.rank)
    num_nodes = owners.order.numel()
    data = copy.copy(batch)
    data.edge_index = graph
    for key, value in batch.to_dict().items():
        if key in ("edge_index", "pred_nodes"):
            continue
        if isinstance(value, Tensor) and value.dim() and value.size(0) == num_nodes and "edge" not in key:
            data[key] = value[rows.to(value.device)].to(graph.device)
    if "num_nodes" in batch:
        data.num_nodes = rows.numel()
    data.n_id = rows.to(graph.device)
    keep_constant(graph, data.get("x"))
    # Without `pred_nodes` predictions are gathered for all nodes, in the order of their owners.
    predicted, places = owners.counts, owners.order
    if (nodes := batch.get("pred_nodes")) is not None:
        # Group the predicted nodes by owner, and express this rank's as places in its own rows.
        position = owners.position[nodes.cpu()]
        places = position.argsort(stable=True)
        bounds = torch.searchsorted(position[places], torch.tensor(owners.offsets)).tolist()
        predicted = [stop - start for start, stop in pairwise(bounds)]
        mine = position[places[bounds[graph.rank] : bounds[graph.rank + 1]]] - owners.offsets[graph.rank]
        data.pred_nodes = mine.to(graph.device)
    # Losses and metrics are weighted by how many rows of a split are here and everywhere.
    counts = {split: (int(mask[rows].sum()), int(mask.sum())) for split, mask in masks.items()}
    counts = {split: (here, everywhere) for split, (here, everywhere) in counts.items() if everywhere}
    counts["all"] = (rows.numel(), num_nodes)
    return ShardedBatch(data, graph, counts, predicted, places)


@dataclass(eq=False)
class BatchCache:
    """Prepares full-graph batches, and keeps the last few."""

    settings: PlanSettings  # who executes the aggregations; with several ranks, their groups are those of the ranks
    rank: int
    num_ranks: int
    local_ranks: int  # ranks on this machine
    device: torch.device
    memory_limit: int | Literal["auto"] | None
    """Bytes that a rank may use, None for no limit, or ``"auto"`` for what is free."""
    _batches: dict[Any, tuple[ShardedBatch | Data, Any]] = field(default_factory=dict)
    _shards: dict[Any, tuple[RowShard, Any]] = field(default_factory=dict)

    def prepare(self, batch: object) -> Data:
        """Return a batch on the device; with several ranks, this rank's part of it."""
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

    def sharded(self, data: object) -> ShardedBatch | None:
        """Return what a batch was cut from, if it was cut here; the user may have copied it since."""
        graph = data.get("edge_index") if isinstance(data, Data) else None
        batches = (batch for batch, _ in self._batches.values() if isinstance(batch, ShardedBatch))
        return next((batch for batch in batches if batch.graph is graph), None)

    def large_arrays(self) -> dict[str, object]:
        """Return what takes memory of the graphs, by name."""
        return {f"shard {number}": shard.large_arrays() for number, (shard, _) in enumerate(self._shards.values())}

    def _plan(self, batch: Data) -> Data:
        """Tell the graph who executes its aggregations."""
        planned = copy.copy(batch)
        planned.edge_index = batch.edge_index.replace_settings(self.settings)
        moved: Data = move_data_to_device(planned, self.device)
        if moved.get("inference") is None:  # else memory may be what is short
            keep_constant(moved.edge_index, moved.get("x"))
        return moved

    def _shard(self, batch: Data) -> ShardedBatch:
        masks = split_masks(batch)
        shard = self._shard_of(batch, masks)
        return shard_batch(batch, shard, shard.owners, masks)

    def _shard_of(self, batch: Data, masks: dict[str, Tensor]) -> RowShard:
        # A shard is cached by the identity of its graph, and by the identity and version of its masks.
        graph: CompressedGraph = batch.edge_index
        named = [batch[f"{split}_mask"] for split in masks]
        key = (id(graph), *((id(mask), _version(mask)) for mask in named))
        if key not in self._shards:
            # The oldest shard makes way, as each one holds a part of a graph.
            while len(self._shards) >= _KEPT:
                self._shards.pop(next(iter(self._shards)))
            # The ranks agree on one memory limit, so that all of them make the same plan.
            limit = self.memory_limit
            if limit == "auto":
                limit = available_bytes(self.device, self.local_ranks)
            limit = agree(graph, masks, limit, self.rank)
            # Share out the rows, and lay out this rank's part of the graph for the width of its features.
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
            # The cache keeps the graph and the masks alive, as their ids could otherwise be reused.
            self._shards[key] = (shard, (graph, named))
        return self._shards[key][0]


def _version(value: object) -> int | bytes | None:
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
