"""Labeled edges of a sharded graph: each rank scores some, with embeddings that their nodes' owners send."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.compressed.locality_partition import even_bounds
from lightning_gnn.full_graph.exchange import SliceAllToAll, exchange_row_ownership, rows_to_slice
from lightning_gnn.full_graph.plan import Ownership
from lightning_gnn.full_graph.shard import RowShard
from lightning_gnn.runtime.devices import all_gather_objects
from lightning_gnn.runtime.store import checksum

_NODES = ("edge_label_index", "src_index", "dst_pos_index", "dst_neg_index")
_VALUES = ("edge_label", "edge_label_time")


@dataclass(frozen=True, eq=False)
class EndpointGather:
    """Sends embeddings of owned nodes to the ranks whose labeled edges need them; differentiable."""

    rank: int
    owners: dict[str, Any]  # the nodes' owners, arguments of SliceAllToAll

    def __call__(self, z: Tensor) -> Tensor:
        """Return the rows of the nodes of this rank's labeled edges. All ranks must call this."""
        exchange = SliceAllToAll(self.rank, ((0, z[:1].numel()),), **self.owners)
        return rows_to_slice(z.flatten(1), exchange).view(-1, *z.shape[1:])


@dataclass(frozen=True, eq=False)
class LabeledEdges:
    """One rank's labeled edges."""

    values: dict[str, Tensor]  # attributes of these edges; their nodes are rows of what ``gather`` returns
    gather: EndpointGather
    num_scores: list[int]  # number of scores of each rank
    positions: Tensor  # indices of these scores, in rank order, among those of the whole batch, int64


def shard_labeled_edges(batch: Data, graph: RowShard, owners: Ownership) -> LabeledEdges | None:
    """Divide the labeled edges evenly among the ranks; None without any. All ranks must call this.

    Raises a ValueError if there are fewer edges than ranks, a node is out of range, or the ranks' edges differ.
    """
    given = {key: batch[key] for key in (*_NODES, *_VALUES) if isinstance(batch.get(key), Tensor)}
    found = next((key for key in ("edge_label_index", "src_index") if key in given), None)
    if found is None:
        return None
    # Each rank takes a range of the edges.
    num_edges, num_ranks, group = given[found].size(-1), owners.num_ranks, graph.process_group
    if num_edges < num_ranks:
        raise ValueError(
            f"{found} has {num_edges} labeled edges, but there are {num_ranks} ranks, and each needs one; use at most "
            f"{max(num_edges, 1)} devices"
        )
    sums = all_gather_objects(checksum(*(value.cpu() for value in given.values()), sorted(given)), group)
    if different := [other for other, value in enumerate(sums) if value != sums[0]]:
        raise ValueError(
            f"all ranks must have the same labeled edges, but rank {', '.join(map(str, different))} differs from "
            "rank 0: create them from a fixed seed"
        )
    nodes = torch.cat([given[key].flatten() for key in _NODES if key in given]).cpu()
    if wrong := nodes[(nodes < 0) | (nodes >= owners.order.numel())].tolist():
        raise ValueError(f"{found}: nodes are numbered from 0 to {owners.order.numel() - 1}, but one is {wrong[0]}")
    ranges = list(pairwise(even_bounds(num_edges, num_ranks).tolist()))
    start, stop = ranges[graph.rank]
    own = {key: value[..., start:stop] if key == found else value[start:stop] for key, value in given.items()}
    # The nodes of these edges, by position in owner order, are the rows that the rank receives.
    ends = {key: own[key].cpu() for key in _NODES if key in own}
    wanted: Tensor = torch.unique(owners.position[torch.cat([index.flatten() for index in ends.values()])])
    own |= {key: torch.searchsorted(wanted, owners.position[index]) for key, index in ends.items()}
    sent = wanted.to(graph.device, torch.int32)
    rows, counts = exchange_row_ownership(graph.rank, sent, owners.offsets, 1, group)
    exchange = {"own": rows, "counts": counts, "num_rows": graph.num_targets, "group": group}
    # A triplet's scores are those of all positive pairs, followed by those of all negative pairs.
    per_edge = given["dst_neg_index"].numel() // num_edges if found == "src_index" and "dst_neg_index" in given else 0
    scores = [
        torch.cat([torch.arange(first, last), num_edges + torch.arange(first * per_edge, last * per_edge)])
        for first, last in ranges
    ]
    return LabeledEdges(
        {key: value.to(graph.device) for key, value in own.items()},
        EndpointGather(graph.rank, exchange),
        [score.numel() for score in scores],
        torch.cat(scores),
    )
