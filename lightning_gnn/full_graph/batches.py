"""Full-graph batches of a device or rank: sharded, moved and prepared once, then cached."""

import copy
import hashlib
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import PlanSettings, plan_cores
from lightning_gnn.distributed.heartbeat import waiting_for_ranks
from lightning_gnn.full_graph.exchange import all_gather_rows
from lightning_gnn.full_graph.labeled_edges import shard_labeled_edges
from lightning_gnn.full_graph.plan import Ownership, shard_rows
from lightning_gnn.full_graph.shard import RowShard
from lightning_gnn.nn.conv.graph import keep_constant
from lightning_gnn.runtime.devices import all_gather_objects
from lightning_gnn.runtime.lightning import move_data_to_device
from lightning_gnn.runtime.memory_info import available_bytes
from lightning_gnn.runtime.store import checksum

SPLITS = ("train", "val", "test")
_MAX_CACHED = 4


@dataclass(frozen=True, eq=False)
class ShardedBatch:
    """One rank's shard of a batch."""

    data: Data  # the rank's rows of every node tensor; its edge_index is ``graph``
    graph: RowShard  # the rank's shard of the graph
    counts: dict[str, tuple[int, int]]
    """Local and total number of nodes by split; ``"all"`` for all nodes, or for the scores of labeled edges."""
    num_predicted: list[int]  # number of rows that each rank predicts
    positions: Tensor  # indices of these rows, in rank order, in the whole prediction, int64

    def share(self, split: str) -> tuple[int, int]:
        """Return the local and total number of nodes of a split."""
        return self.counts.get(split, self.counts["all"])

    def gather(self, values: Tensor) -> Tensor:
        """Gather rows in node order; other tensors remain unchanged. All ranks must call this."""
        rows = self.num_predicted[self.graph.rank]
        fits = torch.tensor(int(values.dim() > 0 and values.size(0) == rows), device=self.graph.device)
        with waiting_for_ranks():
            dist.all_reduce(fits, dist.ReduceOp.MIN, group=self.graph.process_group)
        if not int(fits):
            return values
        gathered = all_gather_rows(values, self.num_predicted, self.graph.process_group)
        out = torch.empty_like(gathered)
        out[self.positions.to(out.device)] = gathered
        return out


def split_masks(batch: Data) -> dict[str, Tensor]:
    """Return the one-dimensional bool masks of a batch by split, on the CPU."""
    masks = {split: batch.get(f"{split}_mask") for split in SPLITS}
    return {
        split: mask.detach().cpu()
        for split, mask in masks.items()
        if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 1
    }


def check_equal(graph: CompressedGraph, masks: dict[str, Tensor], memory_limit: int | None, rank: int) -> int | None:
    """Check that graph and splits are equal; return the smallest limit. All ranks must call this."""
    own = (
        f"{graph.num_targets} nodes, {graph.num_edges} edges",
        graph.checksum(),
        checksum(*masks.values(), sorted(masks)),
        memory_limit,
    )
    gathered = all_gather_objects(own)
    for name, index in (("graph", 1), ("splits", 2)):
        different = [other for other, values in enumerate(gathered) if values[index] != gathered[0][index]]
        if different:
            listed = ", ".join(map(str, different))
            raise ValueError(
                f"all ranks must have the same {name}, but rank {listed} differs from rank 0 "
                f"({gathered[different[0]][0]}, rank 0: {gathered[0][0]}): create it from a fixed seed, or read it "
                "from one file"
            )
    limits = [values[3] for values in gathered if values[3] is not None]
    return min(limits, default=None)


def shard_batch(batch: Data, graph: RowShard, owners: Ownership, masks: dict[str, Tensor]) -> ShardedBatch:
    """Select the rank's rows of every node tensor; n_id contains their ids, and pred_nodes index into them."""
    # Node tensors have one row per node and no "edge" in their name. Edge tensors remain complete, in the order of the
    # user's edge_index, except those of labeled edges.
    rows = owners.rows(graph.rank)
    num_nodes = owners.order.numel()
    data = copy.copy(batch)
    if getattr(batch.get("runner"), "trains", False):
        raise ValueError(
            f"the batch is run by {type(batch.runner).__name__}, which needs the whole graph, but each device holds "
            "a part of it: use devices=1"
        )
    data.edge_index, data.runner = graph, None  # evaluated as usual: shards fit the memory of the devices
    for key, value in batch.to_dict().items():
        if key in ("edge_index", "pred_nodes"):
            continue
        if isinstance(value, Tensor) and value.dim() and value.size(0) == num_nodes and "edge" not in key:
            data[key] = value[rows.to(value.device)].to(graph.device)
    if "num_nodes" in batch:
        data.num_nodes = rows.numel()
    data.n_id = rows.to(graph.device)
    keep_constant(graph, data.get("x"))
    # Without `pred_nodes`, all nodes are predicted, in owner order.
    num_predicted, positions = owners.counts, owners.order
    if (nodes := batch.get("pred_nodes")) is not None:
        # Sort the predicted nodes by owner, and convert this rank's nodes to indices into its rows.
        position = owners.position[nodes.cpu()]
        positions = position.argsort(stable=True)
        bounds = torch.searchsorted(position[positions], torch.tensor(owners.offsets)).tolist()
        num_predicted = [stop - start for start, stop in pairwise(bounds)]
        own = position[positions[bounds[graph.rank] : bounds[graph.rank + 1]]] - owners.offsets[graph.rank]
        data.pred_nodes = own.to(graph.device)
    # Local and total counts weight the losses and metrics of a split.
    counts = {split: (int(mask[rows].sum()), int(mask.sum())) for split, mask in masks.items()}
    counts = {split: (local, total) for split, (local, total) in counts.items() if total}
    counts["all"] = (rows.numel(), num_nodes)
    if (labeled := shard_labeled_edges(batch, graph, owners)) is not None:
        data.update(labeled.values)
        data.gather_endpoints = labeled.gather
        num_predicted, positions = labeled.num_scores, labeled.positions
        counts = {"all": (num_predicted[graph.rank], sum(num_predicted))}
    return ShardedBatch(data, graph, counts, num_predicted, positions)


@dataclass(eq=False)
class BatchCache:
    """Prepares full-graph batches, and caches the most recent ones."""

    settings: PlanSettings  # workers of the aggregations; with several ranks, the groups are those of the ranks
    rank: int
    num_ranks: int
    local_ranks: int  # number of ranks on this machine
    device: torch.device
    memory_limit: int | Literal["auto"] | None  # bytes that a rank may use; None: no limit, ``"auto"``: free memory
    _batches: dict[Any, tuple[ShardedBatch | Data, Any]] = field(default_factory=dict)
    _shards: dict[Any, tuple[RowShard, Any]] = field(default_factory=dict)

    def prepare(self, batch: object) -> Data:
        """Return a batch on the device, sharded if there are several ranks."""
        if not isinstance(batch, Data) or not isinstance(batch.get("edge_index"), CompressedGraph):
            kind = type(batch.get("edge_index") if isinstance(batch, Data) else batch).__name__
            raise TypeError(
                f"strategy='ascend_hybrid' trains on full graphs, batches with a CompressedGraph as edge_index, but "
                f"got a {kind}; use FullGraphDataModule(compress=True) with the layers of lightning_gnn.nn, or another "
                "strategy for mini-batches and for models with other layers"
            )
        attributes = batch.to_dict()
        key = tuple((name, id(value), _get_version(value)) for name, value in attributes.items())
        if key not in self._batches:
            while len(self._batches) >= _MAX_CACHED:
                self._batches.pop(next(iter(self._batches)))
            # A batch prepared during validation must not contain inference tensors, since training uses it, too.
            with torch.inference_mode(False), torch.no_grad():
                plain = _clone_inference_tensors(batch)
                prepared = self._move(plain) if self.num_ranks == 1 else self._shard(plain)
            self._batches[key] = (prepared, attributes)  # keeps the attributes alive, so that their ids are not reused
        prepared = self._batches[key][0]
        return prepared if isinstance(prepared, Data) else prepared.data

    def find_sharded(self, data: object) -> ShardedBatch | None:
        """Return the cached shard that belongs to a batch or a copy of it, or None."""
        graph = data.get("edge_index") if isinstance(data, Data) else None
        batches = (batch for batch, _ in self._batches.values() if isinstance(batch, ShardedBatch))
        return next((batch for batch in batches if batch.graph is graph), None)

    def large_arrays(self) -> dict[str, object]:
        """Return the large arrays of the cached shards by name."""
        return {f"shard {number}": shard.large_arrays() for number, (shard, _) in enumerate(self._shards.values())}

    def _move(self, batch: Data) -> Data:
        """Return the batch on the device, with the plan settings applied to its graph."""
        planned = copy.copy(batch)
        planned.edge_index = batch.edge_index.replace_settings(self.settings)
        moved: Data = move_data_to_device(planned, self.device)
        if moved.get("runner") is None:  # full inference is used when memory is scarce
            keep_constant(moved.edge_index, moved.get("x"))
        return moved

    def _shard(self, batch: Data) -> ShardedBatch:
        masks = split_masks(batch)
        shard = self._get_shard(batch, masks)
        return shard_batch(batch, shard, shard.owners, masks)

    def _get_shard(self, batch: Data, masks: dict[str, Tensor]) -> RowShard:
        # Shards are cached by the identity of the graph, and by the identity and version of the masks.
        graph: CompressedGraph = batch.edge_index
        mask_tensors = [batch[f"{split}_mask"] for split in masks]
        key = (id(graph), *((id(mask), _get_version(mask)) for mask in mask_tensors))
        if key not in self._shards:
            # Evict the oldest shard, since each one stores a part of a graph.
            while len(self._shards) >= _MAX_CACHED:
                self._shards.pop(next(iter(self._shards)))
            # All ranks use the smallest memory limit, so that they compute the same plan.
            limit = self.memory_limit
            if limit == "auto":
                limit = available_bytes(self.device, self.local_ranks)
            limit = check_equal(graph, masks, limit, self.rank)
            owners = shard_rows(graph.num_targets, self.num_ranks, masks)
            x = batch.get("x")
            num_columns = 1 if x is None else max(1, x[:1].numel())
            num_groups = self.settings.num_groups
            if num_groups == "auto" and self.settings.grouping == "paper":  # algorithm 1, with ranks for cores
                num_groups = plan_cores(num_columns, graph.in_degrees.numpy(), self.settings, self.num_ranks).num_groups
            shard = RowShard(
                graph,
                owners,
                self.rank,
                num_columns,
                num_groups,
                replace(self.settings, num_groups="auto"),
                self.device,
                limit,
                4 if x is None else x.element_size(),
            )
            # Keep the graph and the masks alive, so that their ids are not reused.
            self._shards[key] = (shard, (graph, mask_tensors))
        return self._shards[key][0]


def _get_version(value: object) -> int | bytes | None:
    """Return a value that changes with the content of a tensor, None for other objects."""
    if not isinstance(value, Tensor):
        return None
    if not value.is_inference():
        return value._version
    # Inference tensors have no version counter, so hash their content.
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(content.data, digest_size=16).digest()


def _clone_inference_tensors(batch: Data) -> Data:
    """Return the batch with clones of its inference tensors, which autograd does not accept."""
    inference = {
        name: value for name, value in batch.to_dict().items() if isinstance(value, Tensor) and value.is_inference()
    }
    if not inference:
        return batch
    plain = copy.copy(batch)
    for name, value in inference.items():
        plain[name] = value.clone()
    return plain
