"""A batch that holds a whole graph, cut to what one rank owns of it."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.full_graph.exchange import gather_rows
from lightning_gnn.full_graph.ownership import Ownership
from lightning_gnn.full_graph.row_shard import RowShard
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.runtime.store import checksum

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class ShardedBatch:
    """One rank's part of a batch.

    Args:
        data: The rank's rows of every tensor of nodes; its ``edge_index`` is ``graph``.
        graph: The rank's part of the graph.
        counts: For each split, how many nodes the rank has and how many there are; ``"all"`` for all nodes.
        predicted: For each rank, how many rows it predicts.
        places: Where these rows, one rank after the other, are in the whole prediction, int64.
    """

    data: Data
    graph: RowShard
    counts: dict[str, tuple[int, int]]
    predicted: list[int]
    places: Tensor

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
        gathered = gather_rows(values, self.predicted, self.graph.process_group)
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
    """Check that all ranks have the same graph and splits, and return the least of their memory limits.

    Args:
        graph: The whole graph.
        masks: The splits.
        memory_limit: Bytes that this rank may use, or None.
        rank: This rank.

    Raises:
        ValueError: Names a rank whose graph or splits differ from rank 0's.
    """
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
    """Cut a batch: of every tensor with one row per node, the rows that the rank owns.

    Tensors are taken for such if their length is the number of nodes and their name does not contain "edge". Tensors of
    edges stay whole, in the order of the user's ``edge_index``. ``n_id`` names the rows, and ``pred_nodes``, if there
    are any, become places in them.

    Args:
        batch: The whole graph's.
        graph: The rank's part of the graph.
        owners: Who owns which rows.
        masks: Its splits.
    """
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
    predicted, places = owners.counts, owners.order
    if (nodes := batch.get("pred_nodes")) is not None:
        position = owners.position[nodes.cpu()]
        places = position.argsort(stable=True)
        bounds = torch.searchsorted(position[places], torch.tensor(owners.offsets)).tolist()
        predicted = [stop - start for start, stop in pairwise(bounds)]
        mine = position[places[bounds[graph.rank] : bounds[graph.rank + 1]]] - owners.offsets[graph.rank]
        data.pred_nodes = mine.to(graph.device)
    counts = {split: (int(mask[rows].sum()), int(mask.sum())) for split, mask in masks.items()}
    counts = {split: (here, everywhere) for split, (here, everywhere) in counts.items() if everywhere}
    counts["all"] = (rows.numel(), num_nodes)
    return ShardedBatch(data, graph, counts, predicted, places)


def free_memory(device: torch.device, local_ranks: int) -> int | None:
    """Return the bytes that a rank can count on, None where that is not known.

    Args:
        device: Where the rank computes.
        local_ranks: Ranks on this machine, which share the host's memory.
    """
    if device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_ranks
    except (AttributeError, ValueError, OSError):
        return None
