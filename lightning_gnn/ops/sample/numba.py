"""Neighbor sampling on the CPU, compiled, outside the GIL.

A block of edges of a type is picked (``picks``), then relabeled (``relabel``), while what later ones read is on its
way. What is written is the mini-batch itself, int64, in memory of the pool.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from lightning_gnn.features.memory_pool import pool
from lightning_gnn.graph.prefetch_lists import read_lists_ahead
from lightning_gnn.ops.sample.eligible import count_eligible
from lightning_gnn.ops.sample.labor_picks import pick_labor
from lightning_gnn.ops.sample.picks import hop_size, lane_scratch, pick_edges
from lightning_gnn.ops.sample.relabel import (
    FAR,
    FIRST_SLOTS,
    LAST_STAMP,
    begin_reading,
    enter_all,
    enter_forest,
    enter_hashed,
    forest_with_room,
    relabel_by_hash,
    relabel_by_table,
    relabel_forest,
    relabel_trees,
)
from lightning_gnn.ops.sample.relation import Frontier, PickOptions, Relation, Sampled, TimeWindow, stage_key
from lightning_gnn.ops.sample.weighted_picks import pick_weighted

TABLE_LIMIT = 1 << 29
"""Largest node table a thread may hold, in bytes (4 per node); larger graphs are relabeled by hashing."""
_BLOCK = 128  # about how many edges are picked before as many are relabeled
_FIRST_BITS = 20
_TABLE, _HASH, _TREES, _FOREST = range(4)  # how nodes get local ids: see relabel
_NONE = np.zeros(0, np.int64)
_NO_PARALLEL = np.zeros(0, np.int32)
_NO_TIMES = (False, 0, _NONE, _NONE)  # all in-edges count: see Frontier.times


@dataclass
class _Slots:
    """A hash table of the nodes of one type."""

    words: np.ndarray = field(default_factory=lambda: np.zeros(FIRST_SLOTS, np.int64))  # the slots, int64
    stamp: int = 0  # of what was last entered

    def begin(self) -> None:
        """Begin a mini-batch."""
        self.stamp += 1
        if self.stamp > LAST_STAMP:
            self.words[:] = 0
            self.stamp = 1


@dataclass
class _Edges:
    """What a thread keeps for the edges of one type: a guess at the size of the next mini-batch, and scratch memory."""

    room: int = 0  # edges that the next mini-batch begins with room for
    ends: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # ends of the targets' edges, int64


@dataclass
class _Scratch(threading.local):
    """What one thread keeps between batches: 4 bytes per node, or hash tables, and guesses at the next batch's size."""

    table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))  # the table of nodes, uint32 [num_nodes]
    bits: int = _FIRST_BITS  # of a local id in it
    stamp: int = 0  # of the last mini-batch in it
    slots: defaultdict[int, _Slots] = field(default_factory=lambda: defaultdict(_Slots))  # hash tables, by node type
    edges: defaultdict[int, _Edges] = field(default_factory=lambda: defaultdict(_Edges))
    nodes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # room of the next, by node type
    lanes: tuple[np.ndarray, ...] = field(default_factory=lane_scratch)  # of rows whose picks are drawn together

    def begin_table(self, num_nodes: int) -> None:
        """Begin a mini-batch in the table."""
        if self.table.size < num_nodes:
            self.table, self.stamp = np.zeros(num_nodes, np.uint32), 0
        self.stamp += 1
        if self.stamp >> (32 - self.bits):
            self.table[:] = 0
            self.stamp = 1

    @property
    def own(self) -> int:
        """The stamp, in its place."""
        return self.stamp << self.bits


_scratch = _Scratch()


class _Found:
    """The nodes of one type that a mini-batch has found so far; ``seeds``: int64 ``[n]``."""

    def __init__(self, seeds: np.ndarray, start: int, size: int, first: int, how: int, room: int) -> None:
        self.num_seeds = self.count = seeds.size
        self.needed = seeds.size + 1
        room = max(room, self.needed)
        self.size, self.first, self.how = size, first, how
        self.low = self.high = 0
        self.node = _room(room)
        self.node[: seeds.size] = seeds
        self.tree = _room(room) if how >= _TREES else _NONE
        if how >= _TREES:
            self.tree[: seeds.size] = np.arange(start, start + seeds.size)
        self.used = 0
        self.counts = [seeds.size]

    def enter(self, scratch: _Scratch, number: int) -> None:
        """Enter the seeds; of equal ones the first is what edges will refer to."""
        slots = scratch.slots[number]
        if self.how == _TABLE:
            enter_all(self.entries(scratch), scratch.own, self.node, self.count)
        elif self.how == _HASH:
            slots.begin()
            slots.words, self.used = enter_hashed(slots.words, slots.stamp, 0, self.node, 0, self.count)
        elif self.how == _FOREST:
            slots.begin()
            slots.words = forest_with_room(slots.words, slots.stamp, self.node, self.tree, self.count)
            enter_forest(slots.words, slots.stamp, self.node, self.tree, self.count)

    @property
    def new(self) -> tuple[np.ndarray, np.ndarray]:
        """The nodes that the hop before has found, and their trees, if disjoint."""
        return self.node[self.low : self.high], self.tree[self.low : self.high]

    def entries(self, scratch: _Scratch) -> np.ndarray:
        """Its part of the table."""
        return scratch.table[self.first : self.first + self.size]

    def make_room(self, new: int) -> int:
        """Make room for that many new nodes, and one that is written behind them; return the most there can be."""
        most = self.count + new
        if self.how < _TREES:
            most = min(most, self.size + self.num_seeds)
        self.needed = max(self.needed, most + 1)
        self.node = _grown(self.node, self.count, most + 1)
        if self.how >= _TREES:
            self.tree = _grown(self.tree, self.count, most + 1)
        return most


class Picks(NamedTuple):
    """What the new nodes of a hop have picked along one edge type."""

    counts: np.ndarray  # how many edges each of them, int64 [n]
    source: np.ndarray  # where these come from, int64 [m]
    place: np.ndarray  # where they are, int64 [m]


Fetch = Callable[[int, list[tuple[np.ndarray, np.ndarray]]], list[Picks]]
"""Takes the hop, and the new nodes and their trees of each node type; returns the picks along each edge type."""


def sample_relations(
    relations: Sequence[Relation],
    num_nodes: Sequence[int],
    seeds: Sequence[np.ndarray],  # of each node type, int64, checked
    starts: Sequence[int],
    key: int,
    rule: PickOptions,
    times: TimeWindow | None = None,
    fetch: Fetch | None = None,  # brings the picks of a hop from where the lists are, if relations do not have them
) -> Sampled:
    """Sample one mini-batch of a graph of any number of types."""
    scratch, total = _scratch, sum(num_nodes)
    alone = len(relations) == len(num_nodes) == 1
    how = (_TREES if alone else _FOREST) if rule.disjoint else _HASH if 4 * total > TABLE_LIMIT else _TABLE
    first, found = 0, []
    for number, (ids, start, size) in enumerate(zip(seeds, starts, num_nodes, strict=True)):
        found.append(_Found(ids, start, size, first, how, scratch.nodes[number]))
        first += size
    if how == _TABLE:
        scratch.begin_table(total)
        _widen(scratch, found, 1 + max((nodes.count for nodes in found), default=0), False)
    for number, nodes in enumerate(found):
        nodes.enter(scratch, number)
    hows = [_How(relation, rule, times) for relation in relations]
    picked = [_Picked(scratch.edges[number], how) for number, how in enumerate(hows)]
    begins = _NONE.reshape(1, 0)
    if how == _TREES:  # the first node of each tree among those that a hop found
        begins = np.zeros((len(relations[0].fanouts) + 1, found[0].count + 1), np.int64)
        begins[0] = np.arange(found[0].count + 1)
    for hop in range(max((len(relation.fanouts) for relation in relations), default=0)):
        # The frontier of a type are its new nodes of the hop before.
        for nodes in found:
            nodes.low, nodes.high = nodes.high, nodes.count
        brought = None if fetch is None else fetch(hop, [nodes.new for nodes in found])
        for number, relation in enumerate(relations):
            source, target = found[relation.source], found[relation.target]
            own_key = stage_key(key, hop, number, relation.source, rule.labor)
            edges = picked[number]
            begin = edges.count
            if target.low < target.high:
                here = None if brought is None else brought[number]
                bound = edges.make_room(target, hop, rule.replace, None if here is None else here.source.size)
                most = source.make_room(bound)
                if how == _TABLE:
                    _widen(scratch, found, most + 1, True)
                if here is None:
                    read_lists_ahead(relation.indptr, relation.indices, target.new[0], relation.fanouts[hop])
                edges.expand(scratch, source, target, hop, own_key, begins, here)
            edges.counts.append(edges.count - begin)
        for nodes in found:
            nodes.counts.append(nodes.count - nodes.high)
    scratch.nodes.update((number, nodes.needed * 9 // 8) for number, nodes in enumerate(found))
    edge_index = []
    for edges, relation in zip(picked, relations, strict=True):
        edges.kept.room = edges.needed * 9 // 8
        edge_index.append(edges.row[: 2 * edges.count].reshape(2, edges.count))
        write_targets(edges.kept.ends, found[relation.target].high if edges.counts else 0, edge_index[-1][1])
    return Sampled(
        [nodes.node[: nodes.count] for nodes in found],
        [nodes.tree[: nodes.count if rule.disjoint else 0] for nodes in found],
        [nodes.counts for nodes in found],
        edge_index,
        [edges.edge[: edges.count] for edges in picked],
        [edges.counts for edges in picked],
    )


def pick_from_lists(
    relation: Relation,  # the edges; indptr need not have the lists of all nodes. Its fanouts are not looked at
    node: np.ndarray,  # ids, int64 [n]
    place: np.ndarray,  # where in indptr their lists are, int64 [n]
    tree: np.ndarray,  # their trees, int64 [n] if disjoint
    fanout: int,
    key: int,  # of the hop and the edge type (~lightning_gnn.ops.sample.relation.stage_key)
    rule: PickOptions,
    times: TimeWindow | None,
) -> Picks:
    """Pick in-edges of some nodes, without relabeling, at places of ``relation.indices``: for another rank."""
    room = hop_size(relation.indptr, place, 0, node.size, fanout, rule.replace)
    edge, ends = np.empty(room, np.int64), np.empty(node.size, np.int64)
    how = _How(relation, rule, times)
    frontier = _frontier(how, place, node, tree, (0, node.size), fanout, key)
    if rule.labor is not None or relation.weight is not None:
        total = _pick_all(how, frontier, edge, ends, 0)
    else:
        _, total = pick_edges(relation.indptr, frontier, 0, edge, ends, 0, room + 1, _scratch.lanes)
    edge = edge[:total]
    return Picks(np.diff(ends, prepend=0), relation.indices[edge].astype(np.int64), edge)


class _How(NamedTuple):
    """The edges of a type and how they are picked."""

    relation: Relation
    rule: PickOptions
    times: TimeWindow | None


def _frontier(
    how: _How, place: np.ndarray, node: np.ndarray, tree: np.ndarray, span: tuple[int, int], fanout: int, key: int
) -> Frontier:
    """Return what nodes pick, with the in-edges that the times of their trees allow, where both have times."""
    (relation, rule, times), (low, high), limits = how, span, _NO_TIMES
    if relation.time is not None and times is not None:
        eligible, counts = np.empty((2, high - low), np.int64)
        count_eligible(
            relation.indptr, relation.time, relation.coarse_time, place, tree, low, high, times.until,
            _NONE if times.after is None else times.after, times.after is not None, fanout if rule.last else -1,
            eligible, counts,
        )  # fmt: skip
        limits = True, low, eligible, counts
    own_key, first_tree = np.uint64(key & (2**64 - 1)), np.uint64(rule.first_tree)
    return Frontier(place, node, tree, low, high, fanout, rule.replace, rule.disjoint, own_key, first_tree, limits)


def _pick_all(how: _How, frontier: Frontier, edge: np.ndarray, ends: np.ndarray, m: int) -> int:
    """Write what all nodes pick by variates of the sources, or by weight; return the position behind it."""
    relation, rule, _ = how
    if rule.labor is None:
        by_weight: int = pick_weighted(relation.indptr, relation.weight, relation.prefix, frontier, edge, ends, m)
        return by_weight
    parallel = _NO_PARALLEL if relation.parallel is None else relation.parallel
    renewed = np.uint64(rule.labor.batch_dependency), np.uint64(rule.labor.batch)
    by_variate: int = pick_labor(relation.indptr, relation.indices, parallel, *renewed, frontier, edge, ends, m)
    return by_variate


class _Picked:
    """The edges of one type that a mini-batch has so far."""

    def __init__(self, kept: _Edges, how: _How) -> None:
        self.kept, self.how, self.relation = kept, how, how.relation
        # Rows first: where the targets go, behind them, is known once the edges are counted.
        self.room, self.count, self.needed = kept.room, 0, 0
        self.row, self.edge = _room(2 * self.room), _room(self.room)
        self.counts: list[int] = []

    def make_room(self, target: _Found, hop: int, replace: bool, known: int | None) -> int:
        """Make room for the edges of a hop, of which the number may be known; return how many there are at most."""
        # An upper bound is at hand; edges are counted only where that bound does not fit, or there is none.
        fanout, m = self.relation.fanouts[hop], self.count
        size = (target.high - target.low) * fanout if known is None else known
        if known is None and (fanout < 0 or m + size > self.room):
            size = hop_size(self.relation.indptr, target.node, target.low, target.high, fanout, replace)
        self.needed = m + size
        if self.needed > self.room:
            self.room = self.needed * 9 // 8
            self.row, self.edge = _grown(self.row, m, 2 * self.room), _grown(self.edge, m, self.room)
        if self.kept.ends.size < target.high:
            room = np.empty(2 * target.high - target.low, np.int64)
            self.kept.ends = np.concatenate([self.kept.ends[: target.low], room])
        return size

    def expand(
        self,
        scratch: _Scratch,
        source: _Found,
        target: _Found,
        hop: int,
        key: int,
        begins: np.ndarray,
        brought: Picks | None,
    ) -> None:
        """Sample one hop."""
        relation, ends, first, m = self.relation, self.kept.ends, target.low, self.count
        how, indices = self.how if brought is None else self.how._replace(times=None), relation.indices
        span, fanout = (target.low, target.high), relation.fanouts[hop]
        frontier = _frontier(how, target.node, target.node, target.tree, span, fanout, key)
        if brought is not None:
            first, indices, start = target.high, brought.source, m
            m += indices.size
            ends[target.low : target.high] = start + np.cumsum(brought.counts)
            self.edge[start:m] = np.arange(indices.size)  # for the time being, places among what was brought
        elif how.rule.labor is not None or relation.weight is not None:
            first, m = target.high, _pick_all(how, frontier, self.edge, ends, m)
        slots = scratch.slots[relation.source]
        slots.words, slots.stamp, source.used, source.count, self.count = _expand(
            relation.indptr, indices, frontier, source.node, source.tree, source.count, hop, self.row, self.edge, ends,
            self.count, first, m, source.how, source.entries(scratch) if source.how == _TABLE else scratch.table,
            scratch.own, scratch.bits, slots.words, slots.stamp, source.used, begins, scratch.lanes,
        )  # fmt: skip
        if brought is not None:
            self.edge[start:m] = brought.place


def _widen(scratch: _Scratch, found: Sequence[_Found], count: int, entered: bool) -> None:
    """Make room in the table's entries for ``count`` local ids of a type; nodes may be entered already."""
    bits = (count - 1).bit_length()
    if bits > scratch.bits:
        scratch.table[:] = 0
        scratch.bits, scratch.stamp = bits, 1
        if entered:
            for nodes in found:
                enter_all(nodes.entries(scratch), scratch.own, nodes.node, nodes.count)


def _room(size: int) -> np.ndarray:
    """Return memory of the pool, which goes back by itself once nothing looks at it."""
    return pool.empty((size,), torch.int64).numpy()


def _grown(array: np.ndarray, count: int, needed: int) -> np.ndarray:
    """Return the array, or a larger one that begins with ``count`` of its numbers."""
    if array.size >= needed:
        return array
    larger = _room(needed)
    larger[:count] = array[:count]
    return larger


@numba.njit(nogil=True, cache=True)
def write_targets(ends: np.ndarray, count: int, col: np.ndarray) -> None:
    """Write the target of each edge."""
    begin = 0
    for t in range(count):
        for q in range(begin, ends[t]):
            col[q] = t
        begin = ends[t]


@numba.njit(nogil=True, cache=True)
def _expand(
    indptr: np.ndarray, indices: np.ndarray, frontier: Frontier, found: np.ndarray, found_tree: np.ndarray, k: int,
    hop: int, row: np.ndarray, edge: np.ndarray, ends: np.ndarray, m: int, t: int, picked: int, how: int,
    table: np.ndarray, own: int, bits: int, slots: np.ndarray, stamp: int, used: int, begins: np.ndarray, lanes: Any,
) -> tuple[np.ndarray, int, int, int, int]:  # fmt: skip
    """Sample one hop of an edge type; targets before t have picked, their edges end before ``picked``."""
    tree, low, high, fanout = frontier.tree, frontier.low, frontier.high, frontier.fanout
    tree_slots, current = slots, np.int64(-1)
    # Edges before `picked` are picked, of targets before t; those before `done` are relabeled, of targets before t0.
    done, t0 = m, low
    while t < high or done < picked:
        if t < high:
            t, picked = pick_edges(indptr, frontier, t, edge, ends, picked, _BLOCK, lanes)
        if done == m:
            if t < high and picked - m < FAR:
                continue
            begin_reading(indices, edge, row, m, picked)
        # What is asked for far ahead is picked by then.
        limit = picked - FAR if t < high else picked
        if how >= _TREES:
            first = t0
            while t0 < t and ends[t0] <= limit:
                t0 += 1
            end = ends[t0 - 1] if t0 > low else m
            if how == _TREES:
                slots, tree_slots, stamp, used, current, k = relabel_trees(
                    slots, tree_slots, stamp, used, current, found, found_tree, k, indices, edge, row, ends, first, t0,
                    done, picked, hop, begins, fanout,
                )  # fmt: skip
            else:
                slots = forest_with_room(slots, stamp, found, found_tree, k + end - done)
                k = relabel_forest(
                    slots, stamp, found, found_tree, k, indices, edge, row, tree, ends, first, t0, done, picked
                )
            done = end
        elif how == _HASH:
            slots, used, k = relabel_by_hash(slots, stamp, used, found, k, indices, edge, row, done, limit, picked)
            done = limit
        else:
            k = relabel_by_table(table, own, bits, found, k, indices, edge, row, done, limit, picked)
            done = limit
    if how == _TREES:
        begins[hop + 1, current + 1 :] = k
    return slots, stamp, used, k, picked
