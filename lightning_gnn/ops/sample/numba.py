"""Neighbour sampling on the CPU, compiled, outside the GIL.

Each hop is two passes of memory accesses that do not wait for each other: pick edge ids, then gather ``indices`` of the
picks and relabel them. The relabelling goes through one table per thread whose 64-bit entries pack a stamp and a local
id, so it costs one cache miss per edge, and nothing is cleared between batches. A graph too large for such a table, and
disjoint sampling, take an open-addressing hash table instead, which grows with the batch.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.memory import pool
from lightning_gnn.ops.hashing import Word, draw_compiled, node_key_compiled, tree_key_compiled
from lightning_gnn.ops.intrinsics import prefetch
from lightning_gnn.ops.library import library

TABLE_LIMIT = 1 << 29
"""Largest node table a thread may hold, in bytes (8 per node); larger graphs are relabelled by hashing."""

_AHEAD = 16
"""How many picks ahead the table (and, for nodes, ``indptr``) is asked for."""
_FAR_AHEAD = 32
"""How many before that ``indices`` is asked for, which says where in the table."""
_SMALL_FANOUT = 64
"""Up to which a few touched positions are searched one by one, faster than a shuffle of the whole neighbourhood."""
_LAST_STAMP = 2**31 - 1
_LARGEST_UINT32 = 2**32 - 1


@dataclass
class _Scratch(threading.local):
    """What one thread keeps between batches: 8 bytes per node (or the hash table) and 12 to 16 bytes per edge."""

    stamp: int = 0
    table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    hash_keys: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    hash_slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    node: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    tree: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    row: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    col: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    edge: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))
    wide_edge: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def next_stamp(self) -> int:
        if self.stamp == _LAST_STAMP:
            self.stamp = 0
            self.table[:] = 0
            self.hash_slots[:] = 0
        self.stamp += 1
        return self.stamp


_scratch = _Scratch()


def sample_numba(
    indptr: np.ndarray,
    indices: np.ndarray,
    seeds: np.ndarray,
    fanouts: np.ndarray,
    key: int,
    replace: bool,
    disjoint: bool,
    first_tree: int = 0,
    hashing: bool | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray, np.ndarray]:
    """Sample one mini-batch; see :func:`lightning_gnn.ops.sample_neighbors` for the definition.

    Args:
        indptr: int64 ``[num_nodes + 1]``.
        indices: int32 or int64 ``[num_edges]``.
        seeds: int64 ``[batch_size]``, checked.
        fanouts: int64 ``[num_hops]``; below zero means all.
        key: The batch key, signed 64-bit.
        replace: Draw with replacement.
        disjoint: One tree per seed.
        first_tree: Position of the first seed in the whole mini-batch, not negative; matters if disjoint.
        hashing: Relabel by hashing; by default where the table would exceed ``TABLE_LIMIT``.

    Returns:
        Arrays that belong to the calling thread and are valid until its next call: ``node``, ``row``, ``col``,
        ``edge``, ``tree``, and the counts of nodes and of edges per hop.
    """
    num_nodes = indptr.size - 1
    if hashing is None:
        hashing = 8 * num_nodes > TABLE_LIMIT
    wide = indices.size > _LARGEST_UINT32
    scratch = _scratch
    if not (hashing or disjoint) and scratch.table.size < num_nodes:
        scratch.table = np.zeros(num_nodes, np.int64)
    out = _sample(
        indptr,
        indices,
        seeds,
        fanouts,
        np.uint64(key & 0xFFFFFFFFFFFFFFFF),
        replace,
        disjoint,
        np.uint64(first_tree),
        hashing or disjoint,
        np.int64(scratch.next_stamp()),
        scratch.table,
        scratch.hash_keys,
        scratch.hash_slots,
        scratch.node,
        scratch.tree,
        scratch.row,
        scratch.col,
        scratch.wide_edge if wide else scratch.edge,
    )
    node_counts, edge_counts = out[0], out[1]
    scratch.hash_keys, scratch.hash_slots = out[2], out[3]
    scratch.node, scratch.tree, scratch.row, scratch.col, edge = out[4:]
    if wide:
        scratch.wide_edge = edge
    else:
        scratch.edge = edge
    n, m = int(node_counts.sum()), int(edge_counts.sum())
    tree = scratch.tree[:n] if disjoint else None
    return scratch.node[:n], scratch.row[:m], scratch.col[:m], edge[:m], tree, node_counts, edge_counts


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
    node, row, col, edge, tree, node_counts, edge_counts = sample_numba(
        indptr.numpy(), indices.numpy(), seeds.numpy(), np.array(fanouts, np.int64), key, replace, disjoint, first_tree
    )
    edge_index = pool.empty((2, row.size), torch.int64)
    _widen(row, edge_index[0].numpy())
    _widen(col, edge_index[1].numpy())
    batch = torch.empty(0, dtype=torch.int64) if tree is None else _owned(tree)
    return _owned(node), edge_index, _owned(edge), batch, node_counts.tolist(), edge_counts.tolist()


def _owned(array: np.ndarray) -> Tensor:
    """Copy what belongs to the thread into a buffer that belongs to the mini-batch."""
    out = pool.empty(array.shape, torch.int64)
    _widen(array, out.numpy())
    return out


@numba.njit(nogil=True, cache=True)
def _widen(source: np.ndarray, target: np.ndarray) -> None:
    """Copy integers into an int64 array of the same size, outside the GIL."""
    for i in range(source.size):
        target[i] = source[i]


@numba.njit(nogil=True, cache=True)
def _grown(array: np.ndarray, needed: int) -> np.ndarray:
    """Return the array, or a larger one with its contents: by half at least, so that growing batches settle soon."""
    if array.size >= needed:
        return array
    larger = np.empty(max(needed, array.size + array.size // 2), array.dtype)
    larger[: array.size] = array
    return larger


@numba.njit(nogil=True, cache=True)
def _hop_size(indptr: np.ndarray, node: np.ndarray, low: int, high: int, fanout: int, replace: bool) -> int:
    """Count the edges that the frontier ``node[low:high]`` will pick."""
    total = 0
    for t in range(low, high):
        degree = indptr[node[t] + 1] - indptr[node[t]]
        if fanout < 0 or (degree < fanout and not replace):
            total += degree
        elif degree > 0:
            total += fanout
    return total


@numba.njit(nogil=True, cache=True)
def _pick(
    indptr: np.ndarray, node: np.ndarray, tree: np.ndarray, low: int, high: int, fanout: int, replace: bool,
    disjoint: bool, key: Word, first_tree: Word, col: np.ndarray, edge: np.ndarray, m: int,
) -> int:  # fmt: skip
    """Write the edge ids picked by the frontier ``node[low:high]`` from position m on; return the end position.

    Neither ``indices`` nor the table is looked at: what a node picks follows from its degree and the key alone.
    """
    draws = np.empty(min(max(fanout, 1), _SMALL_FANOUT), np.int64)
    values = np.empty_like(draws)
    for t in range(low, high):
        if t + _AHEAD < high:
            prefetch(indptr, node[t + _AHEAD])
        v = node[t]
        begin = indptr[v]
        degree = indptr[v + 1] - begin
        # All in-edges, in CSC order; nothing is drawn.
        if fanout < 0 or (degree <= fanout and not replace):
            for j in range(degree):
                edge[m] = begin + j
                col[m] = t
                m += 1
            continue
        if degree == 0:
            continue
        own_key = tree_key_compiled(key, first_tree + np.uint64(tree[t])) if disjoint else key
        stream = node_key_compiled(own_key, v)  # the same in whichever hop, batch position or thread v is expanded
        if replace:
            for j in range(fanout):
                edge[m] = begin + draw_compiled(stream, j, degree)
                col[m] = t
                m += 1
            continue
        if fanout > _SMALL_FANOUT:
            _shuffle(stream, degree, fanout, begin, edge[m : m + fanout])
            col[m : m + fanout] = t
            m += fanout
            continue
        # Forward Fisher-Yates, of which only the touched positions are kept. When the draws are distinct and none
        # falls on a position still to come, no swap is ever seen again and the draws are the picks.
        seen = False
        for j in range(fanout):
            r = j + draw_compiled(stream, j, degree - j)
            draws[j] = r
            seen |= j < r < fanout
            for i in range(j):
                seen |= draws[i] == r
        if seen:
            _resolve(draws, values, fanout)
        for j in range(fanout):
            edge[m] = begin + draws[j]
            col[m] = t
            m += 1
    return m


@numba.njit(nogil=True, cache=True)
def _shuffle(stream: Word, degree: int, fanout: int, begin: int, picks: np.ndarray) -> None:
    """Forward Fisher-Yates over all positions, for fanouts so large that searching the touched ones costs more."""
    order = np.arange(begin, begin + degree)
    for j in range(fanout):
        r = j + draw_compiled(stream, j, degree - j)
        order[j], order[r] = order[r], order[j]
        picks[j] = order[j]


@numba.njit(nogil=True, cache=True)
def _resolve(draws: np.ndarray, values: np.ndarray, fanout: int) -> None:
    """Turn Fisher-Yates draws into picks in place; ``values[i]`` is what stands at position ``draws[i]``."""
    positions = draws.copy()
    kept = 0
    for j in range(fanout):
        # The shuffle swaps what stands at positions j and r. A position that no draw touched holds its own number.
        r = positions[j]
        value_r, value_j, at = r, np.int64(j), -1
        for i in range(kept):
            if positions[i] == r:
                value_r, at = values[i], i
            if positions[i] == j:
                value_j = values[i]
        # What stood at r is pick j; what stood at j moves to r. Position j itself is never read again.
        if at >= 0:
            values[at] = value_j
        else:
            positions[kept] = r
            values[kept] = value_j
            kept += 1
        draws[j] = value_r


@numba.njit(nogil=True, cache=True, inline="always")
def _probe(slots: np.ndarray, keys: np.ndarray, stamp: int, entry: int) -> Any:
    """Find the slot of an entry, or the empty slot where it belongs."""
    mask = slots.size - 1
    # Fibonacci hashing; a slot whose stamp is not this batch's is empty, whatever an earlier one left there.
    at = np.int64((np.uint64(entry) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) & mask
    while (slots[at] >> 32) == stamp and keys[at] != entry:
        at = (at + 1) & mask
    return at


@numba.njit(nogil=True, cache=True)
def _ensure_hash(
    keys: np.ndarray, slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, num_nodes: int,
    disjoint: bool, count: int, needed: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Keep the hash table at most half full; insert the ``count`` nodes again when it grows."""
    if slots.size >= 2 * needed and slots.size > 0:
        return keys, slots
    size = 1024
    while size < 2 * needed:
        size *= 2
    keys, slots = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for t in range(count):
        entry = node[t] + (np.int64(tree[t]) * num_nodes if disjoint else 0)
        at = _probe(slots, keys, stamp, entry)
        if (slots[at] >> 32) != stamp:
            keys[at] = entry
            slots[at] = (stamp << 32) | t
    return keys, slots


@numba.njit(nogil=True, cache=True)
def _relabel_table(
    table: np.ndarray, stamp: int, node: np.ndarray, k: int, row: np.ndarray, edge: np.ndarray, begin: int, end: int,
    indices: np.ndarray,
) -> int:  # fmt: skip
    """Write the local ids of the picks' sources into ``row``; new nodes get the next, from k on. Return k.

    Until its turn comes, ``row[q]`` holds the global id of pick q.
    """
    # Two memory accesses follow each other here, to indices and to the table. Each is asked for long before its turn.
    for q in range(begin, min(begin + _AHEAD, end)):
        row[q] = indices[edge[q]]
        prefetch(table, row[q])
    for q in range(begin, end):
        # Three stages of a pipeline: ask for indices of pick q + 48, read those of q + 16 and ask for their table
        # entries, relabel q.
        ahead = q + _AHEAD
        if ahead < end:
            if ahead + _FAR_AHEAD < end:
                prefetch(indices, edge[ahead + _FAR_AHEAD])
            row[ahead] = indices[edge[ahead]]
            prefetch(table, row[ahead])
        u = row[q]
        entry = table[u]
        if (entry >> 32) == stamp:
            row[q] = entry & 0xFFFFFFFF  # met before in this batch
        else:
            table[u] = (stamp << 32) | k
            node[k] = u
            row[q] = k
            k += 1
    return k


@numba.njit(nogil=True, cache=True)
def _relabel_hash(
    keys: np.ndarray, slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, num_nodes: int,
    disjoint: bool, k: int, row: np.ndarray, col: np.ndarray, edge: np.ndarray, begin: int, end: int,
    indices: np.ndarray,
) -> int:  # fmt: skip
    """The same by a hash table, whose keys are nodes, or, if disjoint, pairs of a tree and a node."""
    for q in range(begin, end):
        u = np.int64(indices[edge[q]])
        root = tree[col[q]] if disjoint else np.int32(0)
        entry = u + np.int64(root) * num_nodes
        at = _probe(slots, keys, stamp, entry)
        if (slots[at] >> 32) == stamp:
            row[q] = slots[at] & 0xFFFFFFFF
        else:
            keys[at] = entry
            slots[at] = (stamp << 32) | k
            node[k] = u
            if disjoint:
                tree[k] = root
            row[q] = k
            k += 1
    return k


@numba.njit(nogil=True, cache=True)
def _sample(
    indptr: np.ndarray, indices: np.ndarray, seeds: np.ndarray, fanouts: np.ndarray, key: Word, replace: bool,
    disjoint: bool, first_tree: Word, hashing: bool, stamp: int, table: np.ndarray, keys: np.ndarray,
    slots: np.ndarray, node: np.ndarray, tree: np.ndarray, row: np.ndarray, col: np.ndarray, edge: np.ndarray,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Sample all hops; return the counts per hop, and the thread's arrays, grown where they were too small."""
    num_nodes = indptr.size - 1
    node_counts = np.zeros(fanouts.size + 1, np.int64)
    edge_counts = np.zeros(fanouts.size, np.int64)
    k = seeds.size
    node = _grown(node, k)
    tree = _grown(tree, k if disjoint else 0)
    if hashing:
        keys, slots = _ensure_hash(keys, slots, stamp, node, tree, num_nodes, disjoint, 0, k)
    # Seeds come first, each at its own place; of equal ones the first is what edges will refer to.
    for t in range(k):
        v = seeds[t]
        node[t] = v
        if disjoint:
            tree[t] = t
        if hashing:
            entry = v + (np.int64(t) * num_nodes if disjoint else 0)
            at = _probe(slots, keys, stamp, entry)
            if (slots[at] >> 32) != stamp:
                keys[at] = entry
                slots[at] = (stamp << 32) | t
        elif (table[v] >> 32) != stamp:
            table[v] = (stamp << 32) | t
    node_counts[0] = k
    low, m = 0, 0
    for hop in range(fanouts.size):
        # The frontier is node[low:k], the new nodes of the hop before. An upper bound of its edges is at hand; they
        # are counted only where that bound does not fit, or there is none.
        fanout = fanouts[hop]
        size = (k - low) * fanout
        if fanout < 0 or m + size > edge.size:
            size = _hop_size(indptr, node, low, k, fanout, replace)
        row, col, edge = _grown(row, m + size), _grown(col, m + size), _grown(edge, m + size)
        end = _pick(indptr, node, tree, low, k, fanout, replace, disjoint, key, first_tree, col, edge, m)
        # Each edge may find a new node.
        node = _grown(node, k + end - m)
        tree = _grown(tree, k + end - m if disjoint else 0)
        low = k
        if hashing:
            keys, slots = _ensure_hash(keys, slots, stamp, node, tree, num_nodes, disjoint, k, k + end - m)
            k = _relabel_hash(keys, slots, stamp, node, tree, num_nodes, disjoint, k, row, col, edge, m, end, indices)
        else:
            k = _relabel_table(table, stamp, node, k, row, edge, m, end, indices)
        node_counts[hop + 1] = k - low
        edge_counts[hop] = end - m
        m = end
    return node_counts, edge_counts, keys, slots, node, tree, row, col, edge
