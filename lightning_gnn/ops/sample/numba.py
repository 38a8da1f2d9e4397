"""Neighbour sampling on the CPU, compiled, outside the GIL.

A hop goes through its edges in blocks that stay in the cache, in three stages of memory accesses that do not wait for
each other: pick edges and ask for ``indices`` of them (``picks``); read these, of the block before, and ask for their
entries in the table; relabel the block before that (``relabel``). What is written is the mini-batch itself.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.memory import pool
from lightning_gnn.ops.hashing import Word
from lightning_gnn.ops.library import library
from lightning_gnn.ops.sample.picks import hop_size, lane_scratch, pick_edges
from lightning_gnn.ops.sample.relabel import (
    FAR,
    FIRST_SLOTS,
    LAST_STAMP,
    begin_reading,
    enter_all,
    enter_hashed,
    relabel_by_hash,
    relabel_by_table,
    relabel_trees,
)

TABLE_LIMIT = 1 << 29
"""Largest node table a thread may hold, in bytes (4 per node); larger graphs are relabelled by hashing."""
_BLOCK = 128
"""About how many edges are picked before as many are relabelled."""
_FIRST_BITS = 20


@dataclass
class _Scratch(threading.local):
    """What one thread keeps between batches: 4 bytes per node, or a hash table, and a guess at the next batch's size.

    Args:
        table: The table of nodes, uint32 ``[num_nodes]``.
        bits: Of a local id in it.
        stamp: Of the last mini-batch in it.
        slots: The hash table, int64.
        slot_stamp: Of what was last entered in it.
        room: Edges that the next mini-batch begins with room for.
        ends: Ends of the targets' edges, int64.
        lanes: Of rows whose picks are drawn together.
    """

    table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    bits: int = _FIRST_BITS
    stamp: int = 0
    slots: np.ndarray = field(default_factory=lambda: np.zeros(FIRST_SLOTS, np.int64))
    slot_stamp: int = 0
    room: int = 0
    ends: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    lanes: tuple[np.ndarray, ...] = field(default_factory=lane_scratch)

    def begin_table(self, num_nodes: int) -> None:
        """Begin a mini-batch in the table."""
        if self.table.size < num_nodes:
            self.table, self.stamp = np.zeros(num_nodes, np.uint32), 0
        self.stamp += 1
        if self.stamp >> (32 - self.bits):
            self.table[:] = 0
            self.stamp = 1

    def widen(self, count: int, node: np.ndarray, entered: int) -> None:
        """Make room in the entries for ``count`` local ids, where ``entered`` nodes have theirs already."""
        bits = (count - 1).bit_length()
        if bits > self.bits:
            self.table[:] = 0
            self.bits, self.stamp = bits, 1
            enter_all(self.table, self.own, node, entered)

    def begin_slots(self) -> None:
        """Begin a mini-batch in the hash table."""
        self.slot_stamp += 1
        if self.slot_stamp > LAST_STAMP:
            self.slots[:] = 0
            self.slot_stamp = 1

    @property
    def own(self) -> int:
        """The stamp, in its place."""
        return self.stamp << self.bits


_scratch = _Scratch()


@torch.library.impl(library, "sample_neighbors", "CPU")
def _sample_cpu(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: list[int],
    key: int,
    replace: bool,
    disjoint: bool,
    first_tree: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int], list[int]]:
    pointers, sources = indptr.numpy(), indices.numpy()
    num_nodes, num_seeds = pointers.size - 1, seeds.numel()
    hashing = disjoint or 4 * num_nodes > TABLE_LIMIT
    scratch = _scratch
    # Rows first: where the targets go, behind them, is known once the edges are counted.
    room = scratch.room
    row, edge = _room(2 * room), _room(room)
    node, tree = _grown(seeds.numpy(), num_seeds, num_seeds + 1), _room(num_seeds + 1 if disjoint else 0)
    begins = np.zeros((len(fanouts) + 1, num_seeds + 1), np.int64)
    used = 0
    if disjoint:
        tree[:num_seeds] = begins[0, :num_seeds] = np.arange(num_seeds)
        begins[0, num_seeds] = num_seeds
    elif hashing:
        scratch.begin_slots()
        scratch.slots, used = enter_hashed(scratch.slots, scratch.slot_stamp, used, node, 0, num_seeds)
    else:
        scratch.begin_table(num_nodes)
        scratch.widen(num_seeds + 1, node, 0)
        enter_all(scratch.table, scratch.own, node, num_seeds)
    low, k, m = 0, num_seeds, 0
    node_counts, edge_counts = [num_seeds], []
    for hop, fanout in enumerate(fanouts):
        # The frontier is node[low:k], the new nodes of the hop before. An upper bound of its edges is at hand; they are
        # counted only where that bound does not fit, or there is none.
        size = (k - low) * fanout
        if fanout < 0 or m + size > room:
            size = hop_size(pointers, node, low, k, fanout, replace)
        if m + size > room:
            room = (m + size) * 9 // 8
            row, edge = _grown(row, m, 2 * room), _grown(edge, m, room)
        # Each edge may find a new node, and one more is written behind them.
        most = k + size if disjoint else min(k + size, num_nodes + num_seeds)
        node, tree = _grown(node, k, most + 1), _grown(tree, k, most + 1) if disjoint else tree
        if not hashing:
            scratch.widen(most + 1, node, k)
        if scratch.ends.size < k:
            scratch.ends = np.concatenate([scratch.ends[:low], np.empty(2 * k - low, np.int64)])
        high, begin = k, m
        scratch.slots, scratch.slot_stamp, used, k, m = _expand(
            pointers, sources, node, tree, low, high, hop, fanout, replace, disjoint, np.uint64(key & (2**64 - 1)),
            np.uint64(first_tree), row, edge, scratch.ends, m, hashing, scratch.table, scratch.own, scratch.bits,
            scratch.slots, scratch.slot_stamp, used, begins, scratch.lanes,
        )  # fmt: skip
        node_counts.append(k - high)
        edge_counts.append(m - begin)
        low = high
    scratch.room = m * 9 // 8
    edge_index = row[: 2 * m].reshape(2, m)
    write_targets(scratch.ends, low, edge_index[1])
    parts = (node[:k], edge_index, edge[:m], tree[:k] if disjoint else tree[:0])
    return *map(torch.from_numpy, parts), node_counts, edge_counts


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
    indptr: np.ndarray, indices: np.ndarray, node: np.ndarray, tree: np.ndarray, low: int, high: int, hop: int,
    fanout: int, replace: bool, disjoint: bool, key: Word, first_tree: Word, row: np.ndarray, edge: np.ndarray,
    ends: np.ndarray, m: int, hashing: bool, table: np.ndarray, own: int, bits: int, slots: np.ndarray, stamp: int,
    used: int, begins: np.ndarray, lanes: Any,
) -> tuple[np.ndarray, int, int, int, int]:  # fmt: skip
    """Sample one hop; return the hash table, its stamp, how many nodes it holds, and the counts of nodes and edges."""
    k, t, tree_slots, current = high, low, slots, np.int64(-1)
    # Edges before `picked` are picked, of targets before t; those before `done` are relabelled, of targets before t0.
    done, picked, t0 = m, m, t
    while t < high or done < picked:
        if t < high:
            t, picked = pick_edges(
                indptr, node, tree, t, high, fanout, replace, disjoint, key, first_tree, edge, ends, picked, _BLOCK,
                lanes,
            )  # fmt: skip
        if done == m:
            if t < high and picked - m < FAR:
                continue
            begin_reading(indices, edge, row, m, picked)
        # What is asked for far ahead is picked by then.
        limit = picked - FAR if t < high else picked
        if disjoint:
            first = t0
            while t0 < t and ends[t0] <= limit:
                t0 += 1
            slots, tree_slots, stamp, used, current, k = relabel_trees(
                slots, tree_slots, stamp, used, current, node, tree, k, indices, edge, row, ends, first, t0, done,
                picked, hop, begins, fanout,
            )  # fmt: skip
            done = ends[t0 - 1] if t0 > low else m
        elif hashing:
            slots, used, k = relabel_by_hash(slots, stamp, used, node, k, indices, edge, row, done, limit, picked)
            done = limit
        else:
            k = relabel_by_table(table, own, bits, node, k, indices, edge, row, done, limit, picked)
            done = limit
    begins[hop + 1, current + 1 :] = k
    return slots, stamp, used, k, picked
