"""The lists and rows of a partitioned graph, wherever they are, as one machine would read them."""

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
from lightning_gnn.partitioned.shard import Shard, holders


class Remote:
    """All parts of a graph, read from one rank."""

    def __init__(self, partition: Partition, shard: Shard, exchange: RankRPC) -> None:
        self.partition, self.shard, self.exchange = partition, shard, exchange
        held = holders(partition.parts, exchange.ranks)
        # Ranks that share a part are asked in turns, oneself first.
        self.server = np.array(
            [exchange.rank if exchange.rank in ranks else ranks[exchange.rank % len(ranks)] for ranks in held]
        )
        self.rows_read: Counter[str] = Counter()  # rows of nodes that were read here, asked of other ranks, or kept
        self._kept: list[tuple[np.ndarray, dict[str, Tensor]]] = [(np.empty(0, np.int64), {}) for _ in partition.nodes]

    def picks(
        self, relations: Sequence[Relation], key: int, rule: PickOptions, times: TimeWindow | None, weighted: bool
    ) -> Fetch:
        """Return what brings the picks of each hop: one question to each rank that has some of the frontier."""

        def fetch(hop: int, frontier: list[tuple[np.ndarray, np.ndarray]]) -> list[Picks]:
            questions: dict[int, list[Any]] = {}
            asked: dict[int, list[tuple[int, np.ndarray]]] = {}
            # Split the frontier of each relation by the rank that holds its nodes.
            for number, relation in enumerate(relations):
                nodes, trees = frontier[relation.target]
                fanout = relation.fanouts[hop]
                if not nodes.size or not fanout:
                    continue
                # Keys do not depend on the partition, so that any number of ranks picks the same edges.
                own_key = stage_key(key, hop, number, relation.source, rule.labor)
                for part, where in _by_part(self.partition.owner[relation.target].numpy()[nodes]):
                    of_trees = trees[where] if rule.disjoint else trees
                    rank = int(self.server[part])
                    questions.setdefault(rank, []).append((part, number, nodes[where], of_trees, fanout, own_key))
                    asked.setdefault(rank, []).append((number, where))
            # Ask all ranks at once; their answers hold the picks of each relation.
            answers = self.exchange.ask(
                "picks", {rank: (weighted, listed, rule, times) for rank, listed in questions.items()}
            )
            found: list[list[tuple[np.ndarray, Picks]]] = [[] for _ in relations]
            for rank, picks in answers.items():
                for (number, where), answer in zip(asked[rank], picks, strict=True):
                    found[number].append((where, answer))
            # Put the picks back into the order of the frontier.
            return [
                _joined(frontier[relation.target][0].size, parts)
                for relation, parts in zip(relations, found, strict=True)
            ]

        return fetch

    def node_rows(self, node_type: int, ids: np.ndarray, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return rows of attributes of nodes, in the order of ``ids``, int64 ``[n]``."""
        kind = self.partition.nodes[node_type]
        if ids.size and not 0 <= ids.min() <= ids.max() < kind.count:
            raise IndexError(f"node ids must be in [0, {kind.count})")
        out = {key: torch.empty((ids.size, *kind.shape(key)[1:]), dtype=kind.dtype(key)) for key in keys}
        owner = self.partition.owner[node_type].numpy()[ids]
        asked = np.arange(ids.size)
        nodes, rows = self._kept[node_type]
        if nodes.size and not set(keys) - rows.keys():
            at = np.minimum(np.searchsorted(nodes, ids), nodes.size - 1)
            hit = nodes[at] == ids
            found, places = torch.from_numpy(np.flatnonzero(hit)), torch.from_numpy(at[hit])
            for key in keys:
                out[key][found] = rows[key][places]
            asked = np.flatnonzero(~hit)
            self.rows_read["cached"] += int(hit.sum())
        here = int((self.server[owner[asked]] == self.exchange.rank).sum())
        self.rows_read.update(here=here, elsewhere=asked.size - here)
        self._read("node_rows", node_type, owner, ids, asked, list(keys), [out[key] for key in keys])
        return out

    def row_bytes(self, node_type: int) -> int:
        """Return the bytes of all attributes of one node."""
        kind = self.partition.nodes[node_type]
        return sum(math.prod(kind.shape(key)[1:]) * kind.dtype(key).itemsize for key in kind.attributes)

    def keep(self, nodes: Sequence[np.ndarray]) -> None:
        """Read rows of other parts now, and keep them; ``nodes``: whose, ascending, int64, by node type."""
        for node_type, ids in enumerate(nodes):
            keys = list(self.partition.nodes[node_type].attributes)
            self._kept[node_type] = ids, self.node_rows(node_type, ids, keys)

    @property
    def kept_rows(self) -> int:
        """How many rows of other parts are kept."""
        return sum(ids.size for ids, _ in self._kept)

    def edge_rows(self, edge_type: int, places: np.ndarray, keys: Sequence[str | None]) -> dict[Any, Tensor]:
        """Return rows of attributes of edges, by their places among all edges; the key None gives their ids."""
        first = self.partition.first_edges(edge_type)
        owner = np.searchsorted(first, places, side="right") - 1
        kind, size = self.partition.edges[edge_type], places.size
        shapes = {key: (torch.int64, []) if key is None else (kind.dtype(key), kind.shape(key)[1:]) for key in keys}
        out = {key: torch.empty((size, *shape), dtype=dtype) for key, (dtype, shape) in shapes.items()}
        into = [out[key] for key in keys]
        self._read("edge_rows", edge_type, owner, places - first[owner], np.arange(size), list(keys), into)
        return out

    def _read(
        self, handler: str, number: int, owner: np.ndarray, ids: np.ndarray, asked: np.ndarray, keys: list[Any],
        into: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Write the rows at the places ``asked`` of ``ids``; ``owner`` says for each in which part it is."""
        questions: dict[int, list[tuple[int, np.ndarray]]] = {}
        places: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for part, group in _by_part(owner[asked]):
            where, rank = asked[group], int(self.server[part])
            # Each row crosses the network once, also where trees have nodes in common.
            distinct, again = np.unique(ids[where], return_inverse=True)
            questions.setdefault(rank, []).append((part, distinct))
            places.setdefault(rank, []).append((where, again))
        flat = [_as_bytes(rows) for rows in into]
        answers = self.exchange.ask(handler, {rank: (number, listed, keys) for rank, listed in questions.items()})
        for rank, parts in answers.items():
            for (where, again), rows in zip(places[rank], parts, strict=True):
                for out, given in zip(flat, rows, strict=True):
                    out[where] = given[again]


def _by_part(owner: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return the parts that own anything, and the places of what they own, in order."""
    order = np.argsort(owner, kind="stable")
    parts, starts = np.unique(owner[order], return_index=True)
    return list(zip(parts.tolist(), np.split(order, starts[1:]), strict=True)) if parts.size else []


def _joined(count: int, found: Sequence[tuple[np.ndarray, Picks]]) -> Picks:
    """Return the picks of a frontier in its order, from those of the parts."""
    counts = np.zeros(count, np.int64)
    for where, picks in found:
        counts[where] = picks.counts
    ends = np.cumsum(counts)
    source, place = np.empty((2, int(ends[-1]) if count else 0), np.int64)
    for where, picks in found:
        begins = (ends - counts)[where]
        own = np.cumsum(picks.counts) - picks.counts
        at = np.repeat(begins - own, picks.counts) + np.arange(picks.source.size)
        source[at], place[at] = picks.source, picks.place
    return Picks(counts, source, place)


def _as_bytes(rows: Tensor) -> np.ndarray:
    flat = rows.view(rows.size(0), -1) if rows.numel() else rows.new_empty((rows.size(0), 0))
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty((rows.size(0), 0), np.uint8)
