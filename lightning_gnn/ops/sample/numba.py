"""Compiled neighbor sampling on the CPU, outside the GIL.

Blocks of edges are picked (``picks``) and relabeled (``relabel``) directly in the mini-batch's int64 arrays.
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
    INITIAL_SLOTS,
    LAST_STAMP,
    grow_slots,
    insert_hashed,
    insert_into_table,
    relabel_by_hash,
    relabel_by_table,
    relabel_trees,
    start_prefetch,
)
from lightning_gnn.ops.sample.relation import Frontier, PickOptions, Relation, Sampled, TimeWindow, stage_key
from lightning_gnn.ops.sample.weighted_picks import pick_weighted

TABLE_LIMIT = 1 << 29  # maximum bytes of a thread's node table (4 per node); larger graphs are relabeled by hashing
_EDGES_PER_BLOCK = 128  # approximate number of edges that are picked before relabeling continues
_INITIAL_ID_BITS = 20
_EMPTY_INT64 = np.zeros(0, np.int64)
_NO_PARALLEL = np.zeros(0, np.int32)
_NO_TIMES = (False, 0, _EMPTY_INT64, _EMPTY_INT64)  # all in-edges are eligible, see Frontier.times


@dataclass
class _HashTable:
    """A hash table of the nodes of one node type."""

    words: np.ndarray = field(default_factory=lambda: np.zeros(INITIAL_SLOTS, np.int64))  # the slots, int64
    stamp: int = 0  # stamp of the latest insertions

    def begin(self) -> None:
        """Start a mini-batch."""
        self.stamp += 1
        if self.stamp > LAST_STAMP:
            self.words[:] = 0
            self.stamp = 1


@dataclass
class _EdgeScratch:
    """A thread's scratch memory for the edges of one edge type, and the expected size of the next mini-batch."""

    room: int = 0  # edges for which the next mini-batch allocates memory initially
    ends: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # end of each target's edges, int64


@dataclass
class _Scratch(threading.local):
    """A thread's memory between mini-batches: a node table or hash tables, scratch, and expected sizes."""

    table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))  # the node table, uint32 [num_nodes]
    bits: int = _INITIAL_ID_BITS  # bits of a local id in the table
    stamp: int = 0  # stamp of the latest mini-batch in the table
    slots: defaultdict[int, _HashTable] = field(default_factory=lambda: defaultdict(_HashTable))  # by node type
    edges: defaultdict[int, _EdgeScratch] = field(default_factory=lambda: defaultdict(_EdgeScratch))  # by edge type
    nodes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # expected size, by node type
    lanes: tuple[np.ndarray, ...] = field(default_factory=lane_scratch)  # rows that are drawn together

    def begin_table(self, num_nodes: int) -> None:
        """Start a mini-batch in the node table."""
        if self.table.size < num_nodes:
            self.table, self.stamp = np.zeros(num_nodes, np.uint32), 0
        self.stamp += 1
        if self.stamp >> (32 - self.bits):
            self.table[:] = 0
            self.stamp = 1

    @property
    def shifted_stamp(self) -> int:
        """The stamp, shifted to its bits in a table entry."""
        return self.stamp << self.bits


_scratch = _Scratch()


class _SampledNodes:
    """The nodes of one node type in a mini-batch so far; ``seeds`` is int64 ``[n]``."""

    def __init__(
        self, seeds: np.ndarray, start: int, size: int, first: int, slots: _HashTable | None, disjoint: bool,
        by_tree: bool, room: int,
    ) -> None:  # fmt: skip
        self.num_seeds = self.count = seeds.size
        self.needed = seeds.size + 1
        room = max(room, self.needed)
        self.size, self.first, self.disjoint, self.by_tree = size, first, disjoint, by_tree
        self.slots = slots  # or None for the node table
        self.low = self.high = 0
        self.node = _allocate(room)
        self.node[: seeds.size] = seeds
        self.tree = _allocate(room) if disjoint else _EMPTY_INT64
        if disjoint:
            self.tree[: seeds.size] = np.arange(start, start + seeds.size)
        self.counts = [seeds.size]

    def insert_seeds(self, scratch: _Scratch) -> None:
        """Insert the seeds; edges refer to the first of equal seeds."""
        if (slots := self.slots) is None:
            insert_into_table(self.entries(scratch), scratch.shifted_stamp, self.node, self.count)
        elif not self.by_tree:
            slots.begin()
            slots.words = grow_slots(slots.words, slots.stamp, self.node, self.tree, self.count)
            insert_hashed(slots.words, slots.stamp, self.node, self.tree, 0, self.count)

    @property
    def new(self) -> tuple[np.ndarray, np.ndarray]:
        """The new nodes of the previous hop, and their trees, if disjoint."""
        return self.node[self.low : self.high], self.tree[self.low : self.high]

    def entries(self, scratch: _Scratch) -> np.ndarray:
        """Return this node type's slice of the node table."""
        return scratch.table[self.first : self.first + self.size]

    def make_room(self, new: int) -> int:
        """Make room for ``new`` nodes and one extra write; return the maximum number of nodes."""
        max_count = self.count + new
        if not self.disjoint:
            max_count = min(max_count, self.size + self.num_seeds)
        self.needed = max(self.needed, max_count + 1)
        self.node = _grow(self.node, self.count, max_count + 1)
        if self.disjoint:
            self.tree = _grow(self.tree, self.count, max_count + 1)
        return max_count


class Picks(NamedTuple):
    """The picks of a hop's frontier along one edge type."""

    counts: np.ndarray  # number of edges of each node, int64 [n]
    source: np.ndarray  # global ids of the sources, int64 [m]
    place: np.ndarray  # positions of the edges in CSC order, int64 [m]


Fetch = Callable[[int, list[tuple[np.ndarray, np.ndarray]]], list[Picks]]
"""Function of the hop, and of the frontier and its trees by node type, that returns the picks by edge type."""


def sample_relations(
    relations: Sequence[Relation],
    num_nodes: Sequence[int],
    seeds: Sequence[np.ndarray],  # seeds of each node type, int64, checked
    starts: Sequence[int],
    key: int,
    rule: PickOptions,
    times: TimeWindow | None = None,
    fetch: Fetch | None = None,  # fetches the picks of a hop from other ranks, for a partitioned graph
) -> Sampled:
    """Sample one mini-batch of a homogeneous or heterogeneous graph."""
    # Choose the method of relabeling, and insert the seeds.
    scratch, total = _scratch, sum(num_nodes)
    hashed, by_tree = rule.disjoint or 4 * total > TABLE_LIMIT, rule.disjoint and len(relations) == len(num_nodes) == 1
    first, by_type = 0, []
    for number, (ids, start, size) in enumerate(zip(seeds, starts, num_nodes, strict=True)):
        slots = scratch.slots[number] if hashed else None
        by_type.append(_SampledNodes(ids, start, size, first, slots, rule.disjoint, by_tree, scratch.nodes[number]))
        first += size
    if not hashed:
        scratch.begin_table(total)
        _widen_ids(scratch, by_type, 1 + max((nodes.count for nodes in by_type), default=0), False)
    for nodes in by_type:
        nodes.insert_seeds(scratch)
    pickers = [_Picker(relation, rule, times) for relation in relations]
    sampled = [_SampledEdges(scratch.edges[number], picker) for number, picker in enumerate(pickers)]
    begins = None
    if by_tree:  # the first new node of each tree, by hop
        begins = np.zeros((len(relations[0].fanouts) + 1, by_type[0].count + 1), np.int64)
        begins[0] = np.arange(by_type[0].count + 1)
    for hop in range(max((len(relation.fanouts) for relation in relations), default=0)):
        # The frontier of a node type is its new nodes of the previous hop.
        for nodes in by_type:
            nodes.low, nodes.high = nodes.high, nodes.count
        fetched = None if fetch is None else fetch(hop, [nodes.new for nodes in by_type])
        for number, relation in enumerate(relations):
            source, target = by_type[relation.source], by_type[relation.target]
            own_key = stage_key(key, hop, number, relation.source, rule.labor)
            edges = sampled[number]
            begin = edges.count
            if target.low < target.high:
                picks = None if fetched is None else fetched[number]
                bound = edges.make_room(target, hop, rule.replace, None if picks is None else picks.source.size)
                max_nodes = source.make_room(bound)
                if not hashed:
                    _widen_ids(scratch, by_type, max_nodes + 1, True)
                if picks is None:
                    read_lists_ahead(relation.indptr, relation.indices, target.new[0], relation.fanouts[hop])
                edges.expand(scratch, source, target, hop, own_key, begins, picks)
            edges.counts.append(edges.count - begin)
        for nodes in by_type:
            nodes.counts.append(nodes.count - nodes.high)
    # Remember the sizes for the next mini-batch, and write the targets behind the sources.
    scratch.nodes.update((number, nodes.needed * 9 // 8) for number, nodes in enumerate(by_type))
    edge_index = []
    for edges, relation in zip(sampled, relations, strict=True):
        edges.scratch.room = edges.needed * 9 // 8
        edge_index.append(edges.row[: 2 * edges.count].reshape(2, edges.count))
        write_targets(edges.scratch.ends, by_type[relation.target].high if edges.counts else 0, edge_index[-1][1])
    return Sampled(
        [nodes.node[: nodes.count] for nodes in by_type],
        [nodes.tree[: nodes.count if rule.disjoint else 0] for nodes in by_type],
        [nodes.counts for nodes in by_type],
        edge_index,
        [edges.edge[: edges.count] for edges in sampled],
        [edges.counts for edges in sampled],
    )


def pick_from_lists(
    relation: Relation,  # the edges; indptr may lack the lists of some nodes, and fanouts are ignored
    node: np.ndarray,  # global ids, int64 [n]
    lists: np.ndarray,  # index of each node's list in indptr, int64 [n]
    tree: np.ndarray,  # trees of the nodes, int64 [n] if disjoint
    fanout: int,
    key: int,  # key of the hop and the edge type (~lightning_gnn.ops.sample.relation.stage_key)
    rule: PickOptions,
    times: TimeWindow | None,
) -> Picks:
    """Pick in-edges of nodes for another rank, without relabeling; ``place`` is a position in ``relation.indices``."""
    room = hop_size(relation.indptr, lists, 0, node.size, fanout, rule.replace)
    edge, ends = np.empty(room, np.int64), np.empty(node.size, np.int64)
    picker = _Picker(relation, rule, times)
    frontier = _make_frontier(picker, lists, node, tree, (0, node.size), fanout, key)
    if rule.labor is not None or relation.weight is not None:
        total = _pick_all(picker, frontier, edge, ends, 0)
    else:
        _, total = pick_edges(relation.indptr, frontier, 0, edge, ends, 0, room + 1, _scratch.lanes)
    edge = edge[:total]
    return Picks(np.diff(ends, prepend=0), relation.indices[edge].astype(np.int64), edge)


class _Picker(NamedTuple):
    """The edges of an edge type, and the options by which they are picked."""

    relation: Relation
    rule: PickOptions
    times: TimeWindow | None


def _make_frontier(
    picker: _Picker, lists: np.ndarray, node: np.ndarray, tree: np.ndarray, span: tuple[int, int], fanout: int, key: int
) -> Frontier:
    """Return the frontier of nodes, with the eligible in-edges if edges and trees have times."""
    (relation, rule, times), (low, high), limits = picker, span, _NO_TIMES
    if relation.time is not None and times is not None:
        eligible, counts = np.empty((2, high - low), np.int64)
        count_eligible(
            relation.indptr, relation.time, relation.coarse_time, lists, tree, low, high, times.until,
            _EMPTY_INT64 if times.after is None else times.after, times.after is not None, fanout if rule.last else -1,
            eligible, counts,
        )  # fmt: skip
        limits = True, low, eligible, counts
    own_key, first_tree = np.uint64(key & (2**64 - 1)), np.uint64(rule.first_tree)
    return Frontier(lists, node, tree, low, high, fanout, rule.replace, rule.disjoint, own_key, first_tree, limits)


def _pick_all(picker: _Picker, frontier: Frontier, edge: np.ndarray, ends: np.ndarray, m: int) -> int:
    """Write the picks of the whole frontier, by LABOR or by weight; return the end position."""
    relation, rule, _ = picker
    if rule.labor is None:
        by_weight: int = pick_weighted(relation.indptr, relation.weight, relation.prefix, frontier, edge, ends, m)
        return by_weight
    parallel = _NO_PARALLEL if relation.parallel is None else relation.parallel
    renewal = np.uint64(rule.labor.batch_dependency), np.uint64(rule.labor.batch)
    by_variate: int = pick_labor(relation.indptr, relation.indices, parallel, *renewal, frontier, edge, ends, m)
    return by_variate


class _SampledEdges:
    """The edges of one edge type in a mini-batch so far."""

    def __init__(self, scratch: _EdgeScratch, picker: _Picker) -> None:
        self.scratch, self.picker, self.relation = scratch, picker, picker.relation
        # Sources are written first; the targets follow them once the number of edges is known.
        self.room, self.count, self.needed = scratch.room, 0, 0
        self.row, self.edge = _allocate(2 * self.room), _allocate(self.room)
        self.counts: list[int] = []

    def make_room(self, target: _SampledNodes, hop: int, replace: bool, known: int | None) -> int:
        """Make room for the edges of a hop, ``known`` if counted already; return their maximum number."""
        # The fanout gives an upper bound; edges are counted only if that does not fit, or all in-edges are taken.
        fanout, m = self.relation.fanouts[hop], self.count
        size = (target.high - target.low) * fanout if known is None else known
        if known is None and (fanout < 0 or m + size > self.room):
            size = hop_size(self.relation.indptr, target.node, target.low, target.high, fanout, replace)
        self.needed = m + size
        if self.needed > self.room:
            self.room = self.needed * 9 // 8
            self.row, self.edge = _grow(self.row, m, 2 * self.room), _grow(self.edge, m, self.room)
        if self.scratch.ends.size < target.high:
            room = np.empty(2 * target.high - target.low, np.int64)
            self.scratch.ends = np.concatenate([self.scratch.ends[: target.low], room])
        return size

    def expand(
        self,
        scratch: _Scratch,
        source: _SampledNodes,
        target: _SampledNodes,
        hop: int,
        key: int,
        begins: np.ndarray | None,
        picks: Picks | None,
    ) -> None:
        """Sample one hop, with ``picks`` if they were fetched from other ranks."""
        relation, ends, first, m = self.relation, self.scratch.ends, target.low, self.count
        picker, indices = self.picker if picks is None else self.picker._replace(times=None), relation.indices
        span, fanout = (target.low, target.high), relation.fanouts[hop]
        frontier = _make_frontier(picker, target.node, target.node, target.tree, span, fanout, key)
        if picks is not None:
            first, indices, start = target.high, picks.source, m
            m += indices.size
            ends[target.low : target.high] = start + np.cumsum(picks.counts)
            self.edge[start:m] = np.arange(indices.size)  # temporarily, positions in the fetched picks
        elif picker.rule.labor is not None or relation.weight is not None:
            first, m = target.high, _pick_all(picker, frontier, self.edge, ends, m)
        slots = source.slots
        words, stamp, source.count, self.count = _expand(
            relation.indptr, indices, frontier, source.node, source.tree, source.count, hop, self.row, self.edge, ends,
            self.count, first, m, scratch.bits, source.entries(scratch) if slots is None else None,
            None if slots is None else slots.words, scratch.shifted_stamp if slots is None else slots.stamp, begins,
            scratch.lanes,
        )  # fmt: skip
        if slots is not None:
            slots.words, slots.stamp = words, stamp
        if picks is not None:
            self.edge[start:m] = picks.place


def _widen_ids(scratch: _Scratch, by_type: Sequence[_SampledNodes], count: int, is_filled: bool) -> None:
    """Use enough bits for ``count`` local ids in the table; if it ``is_filled``, insert all nodes again."""
    bits = (count - 1).bit_length()
    if bits > scratch.bits:
        scratch.table[:] = 0
        scratch.bits, scratch.stamp = bits, 1
        if is_filled:
            for nodes in by_type:
                insert_into_table(nodes.entries(scratch), scratch.shifted_stamp, nodes.node, nodes.count)


def _allocate(size: int) -> np.ndarray:
    """Return memory of the pool, which is returned automatically when it is no longer referenced."""
    return pool.empty((size,), torch.int64).numpy()


def _grow(array: np.ndarray, count: int, needed: int) -> np.ndarray:
    """Return the array, or a larger one with its first ``count`` elements."""
    if array.size >= needed:
        return array
    larger = _allocate(needed)
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
    indptr: np.ndarray, indices: np.ndarray, frontier: Frontier, node: np.ndarray, tree: np.ndarray, k: int, hop: int,
    row: np.ndarray, edge: np.ndarray, ends: np.ndarray, m: int, t: int, picked: int, bits: int,
    table: np.ndarray | None, slots: Any, stamp: int, begins: np.ndarray | None, lanes: Any,
) -> tuple[Any, int, int, int]:  # fmt: skip
    """Sample one hop of an edge type; targets before t have picked already, and their edges end at ``picked``.

    Relabel by a table of all nodes or by the slots of a hash table, with ``begins`` tree by tree. ``stamp`` is that of
    the mini-batch, in its bits of an entry of the table. Return slots, stamp, and the numbers of nodes and edges.
    """
    low, high, fanout = frontier.low, frontier.high, frontier.fanout
    words, own_slots, used, current = slots, slots, 0, np.int64(-1)
    # Edges before `picked` (of targets before t) are picked; edges before `done` (of targets before t0) are relabeled.
    done, t0 = m, low
    while t < high or done < picked:
        if t < high:
            t, picked = pick_edges(indptr, frontier, t, edge, ends, picked, _EDGES_PER_BLOCK, lanes)
        if done == m:
            if t < high and picked - m < FAR:
                continue
            start_prefetch(indices, edge, row, m, picked)
        # Relabel only edges whose prefetch distance is covered by picked edges.
        limit = picked - FAR if t < high else picked
        # Numba compiles only the selected branches: it removes those of arguments that are missing.
        if table is not None:
            k = relabel_by_table(table, stamp, bits, node, k, indices, edge, row, done, limit, picked)
            done = limit
        if slots is not None:
            first = t0
            while t0 < t and ends[t0] <= limit:
                t0 += 1
            end = ends[t0 - 1] if t0 > low else m
            if begins is not None:
                words, own_slots, stamp, used, current, k = relabel_trees(
                    words, own_slots, stamp, used, current, node, tree, k, indices, edge, row, ends, first, t0, done,
                    picked, hop, begins, fanout,
                )  # fmt: skip
            else:
                words = grow_slots(words, stamp, node, tree, k + end - done)
                k = relabel_by_hash(
                    words, stamp, node, tree, k, indices, edge, row, frontier.tree, ends, first, t0, done, picked
                )
            done = end
    if begins is not None:
        begins[hop + 1, current + 1 :] = k
    return words, stamp, k, picked
