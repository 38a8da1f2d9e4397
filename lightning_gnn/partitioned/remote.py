"""Access to the neighbor lists and rows of all parts from one rank, local or remote."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.sample.numba import Fetch, Picks
from lightning_gnn.ops.sample.relation import PickOptions, Relation, TimeWindow, stage_key
from lightning_gnn.partitioned.exchange import RankRPC
from lightning_gnn.partitioned.folder import Partition
from lightning_gnn.partitioned.shard import Shard, as_bytes, holders


class Remote:
    """Reads from all parts of a graph: local parts directly, others by calls to their ranks."""

    def __init__(self, partition: Partition, shard: Shard, exchange: RankRPC) -> None:
        self.partition, self.shard, self.exchange = partition, shard, exchange
        # If several ranks have a part, prefer this rank, else balance the requests over them.
        self.server = np.array([
            exchange.rank if exchange.rank in ranks else ranks[exchange.rank % len(ranks)]
            for ranks in holders(partition.parts, exchange.ranks)
        ])  # fmt: skip
        self.rows_read: Counter[str] = Counter()  # node rows read from local parts, other ranks and the cache
        self._cache: list[tuple[np.ndarray, dict[str, Tensor]]] = [(np.empty(0, np.int64), {}) for _ in partition.nodes]

    def picks(
        self, relations: Sequence[Relation], key: int, rule: PickOptions, times: TimeWindow | None, weighted: bool
    ) -> Fetch:
        """Return a function that samples a hop by one call to each rank that owns nodes of the frontier."""

        def fetch(hop: int, frontier: list[tuple[np.ndarray, np.ndarray]]) -> list[Picks]:
            requests: dict[int, list[Any]] = {}
            sent: dict[int, list[tuple[int, np.ndarray]]] = {}
            # Split the frontier of each relation by the rank that owns its nodes.
            for number, relation in enumerate(relations):
                nodes, trees = frontier[relation.target]
                fanout = relation.fanouts[hop]
                if not nodes.size or not fanout:
                    continue
                # Keys do not depend on the partition, so that any number of ranks picks the same edges.
                own_key = stage_key(key, hop, number, relation.source, rule.labor)
                for part, indices in _group_by_part(self.partition.owner[relation.target].numpy()[nodes]):
                    own_trees = trees[indices] if rule.disjoint else trees
                    rank = int(self.server[part])
                    requests.setdefault(rank, []).append((part, number, nodes[indices], own_trees, fanout, own_key))
                    sent.setdefault(rank, []).append((number, indices))
            # Call all ranks in parallel; their responses hold the picks of each relation.
            responses = self.exchange.call(
                "picks", {rank: (weighted, batch, rule, times) for rank, batch in requests.items()}
            )
            picks_of: list[list[tuple[np.ndarray, Picks]]] = [[] for _ in relations]
            for rank, response in responses.items():
                for (number, indices), picks in zip(sent[rank], response, strict=True):
                    picks_of[number].append((indices, Picks(*picks)))
            # Restore the order of the frontier.
            return [
                _concatenate(frontier[relation.target][0].size, picks)
                for relation, picks in zip(relations, picks_of, strict=True)
            ]

        return fetch

    def node_rows(self, node_type: int, ids: np.ndarray, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return rows of node attributes in the order of ``ids``, int64 ``[n]``, from cache, local parts and ranks."""
        info = self.partition.nodes[node_type]
        if ids.size and not 0 <= ids.min() <= ids.max() < info.count:
            raise IndexError(f"node ids must be in [0, {info.count})")
        out = {key: torch.empty((ids.size, *info.shape(key)[1:]), dtype=info.dtype(key)) for key in keys}
        owner = self.partition.owner[node_type].numpy()[ids]
        misses = np.arange(ids.size)
        nodes, rows = self._cache[node_type]
        if nodes.size and not set(keys) - rows.keys():
            slots = np.minimum(np.searchsorted(nodes, ids), nodes.size - 1)
            is_hit = nodes[slots] == ids
            hits, hit_slots = torch.from_numpy(np.flatnonzero(is_hit)), torch.from_numpy(slots[is_hit])
            for key in keys:
                out[key][hits] = rows[key][hit_slots]
            misses = np.flatnonzero(~is_hit)
            self.rows_read["cached"] += int(is_hit.sum())
        num_local = int((self.server[owner[misses]] == self.exchange.rank).sum())
        self.rows_read.update(here=num_local, elsewhere=misses.size - num_local)
        self._read("node_rows", node_type, owner, ids, misses, list(keys), [out[key] for key in keys])
        return out

    def row_bytes(self, node_type: int) -> int:
        """Return the bytes of all attributes of one node."""
        info = self.partition.nodes[node_type]
        return sum(math.prod(info.shape(key)[1:]) * info.dtype(key).itemsize for key in info.attributes)

    def fill_cache(self, nodes: Sequence[np.ndarray]) -> int:
        """Read and cache the rows of nodes of other parts, ascending int64 ids by node type; return their number."""
        for node_type, ids in enumerate(nodes):
            keys = list(self.partition.nodes[node_type].attributes)
            self._cache[node_type] = ids, self.node_rows(node_type, ids, keys)
        return sum(ids.size for ids in nodes)

    def edge_rows(self, edge_type: int, edges: np.ndarray, keys: Sequence[str | None]) -> dict[Any, Tensor]:
        """Return rows of edge attributes by edge number over all parts; the key None returns edge ids."""
        first = self.partition.first_edges(edge_type)
        owner = np.searchsorted(first, edges, side="right") - 1
        info, size = self.partition.edges[edge_type], edges.size
        shapes = {key: (torch.int64, []) if key is None else (info.dtype(key), info.shape(key)[1:]) for key in keys}
        out = {key: torch.empty((size, *shape), dtype=dtype) for key, (dtype, shape) in shapes.items()}
        into = [out[key] for key in keys]
        self._read("edge_rows", edge_type, owner, edges - first[owner], np.arange(size), list(keys), into)
        return out

    def _read(
        self, handler: str, number: int, owner: np.ndarray, ids: np.ndarray, wanted: np.ndarray, keys: list[Any],
        into: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Read the rows of ``ids[wanted]`` to ``into[...][wanted]``; ``owner`` is the part of each id."""
        requests: dict[int, list[tuple[int, np.ndarray]]] = {}
        targets: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for part, group in _group_by_part(owner[wanted]):
            rows, rank = wanted[group], int(self.server[part])
            # Transfer each row once, even if several disjoint trees contain its node.
            distinct, inverse = np.unique(ids[rows], return_inverse=True)
            requests.setdefault(rank, []).append((part, distinct))
            targets.setdefault(rank, []).append((rows, inverse))
        flat = [as_bytes(values) for values in into]
        responses = self.exchange.call(handler, {rank: (number, batch, keys) for rank, batch in requests.items()})
        for rank, parts in responses.items():
            for (rows, inverse), values in zip(targets[rank], parts, strict=True):
                for out, received in zip(flat, values, strict=True):
                    out[rows] = received[inverse]


def _group_by_part(owner: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return each part in ``owner`` with the indices of its entries, in order."""
    order = np.argsort(owner, kind="stable")
    parts, starts = np.unique(owner[order], return_index=True)
    return list(zip(parts.tolist(), np.split(order, starts[1:]), strict=True)) if parts.size else []


def _concatenate(count: int, picks_by_part: Sequence[tuple[np.ndarray, Picks]]) -> Picks:
    """Merge the picks of the parts in the order of a frontier of ``count`` nodes."""
    counts = np.zeros(count, np.int64)
    for indices, picks in picks_by_part:
        counts[indices] = picks.counts
    ends = np.cumsum(counts)
    source, place = np.empty((2, int(ends[-1]) if count else 0), np.int64)
    for indices, picks in picks_by_part:
        begins = (ends - counts)[indices]
        own_begins = np.cumsum(picks.counts) - picks.counts
        position = np.repeat(begins - own_begins, picks.counts) + np.arange(picks.source.size)
        source[position], place[position] = picks.source, picks.place
    return Picks(counts, source, place)
