"""Compiled relabeling of global to local ids on the CPU; a node that is new to the mini-batch gets the next local id.

- Table: 32 bits per node of the graph, a stamp that identifies the mini-batch, so that the table is not cleared between
  mini-batches, and the local id in the remaining bits. It costs one cache miss per edge.
- Hash table: for graphs that are too large for a table, with a size proportional to the mini-batch. In a heterogeneous
  disjoint sample, where the edges of a tree are scattered, it holds the nodes of all trees.
- Trees: a homogeneous disjoint sample reuses one hash table of the size of a tree, which stays in the cache; the tree's
  nodes of earlier hops are inserted again.
"""

import numba
import numpy as np

from lightning_gnn.ops.intrinsics import prefetch

NEAR = 16  # prefetch distance of table entries, in edges
FAR = 48  # prefetch distance of indices, in edges; it must exceed NEAR, because indices locate the entries
INITIAL_SLOTS = 1 << 11
MAX_INITIAL_TREE_SLOTS = 1 << 16  # a tree's table is larger only if the tree turns out to need it
LAST_STAMP = (1 << 15) - 1  # a slot of a hash table holds 15 bits of stamp, 16 of the node's hash and 32 of local id
_FIBONACCI = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed integer
_LOCAL = (1 << 32) - 1
_NEAR, _FAR, _ONE = np.uint64(NEAR), np.uint64(FAR), np.uint64(1)
_TREE_STEP = 0x5851F42D4C957F2D  # distinguishes the hashes of a node in different trees


@numba.njit(nogil=True, cache=True)
def insert_into_table(table: np.ndarray, own: int, node: np.ndarray, count: int) -> None:
    """Insert the first nodes of a mini-batch into a table; edges refer to the first of equal nodes."""
    for t in range(count - 1, -1, -1):
        table[node[t]] = own | t


@numba.njit(nogil=True, cache=True, inline="always")
def _first_slot(slots: np.ndarray, u: int) -> int:
    return ((u * _FIBONACCI) >> 32) & (slots.size - 1)


@numba.njit(nogil=True, cache=True)
def start_prefetch(indices: np.ndarray, edge: np.ndarray, row: np.ndarray, begin: int, stop: int) -> None:
    """Prefetch for the first edges of a hop; relabeling prefetches for later edges."""
    for q in range(begin, min(begin + FAR, stop)):
        prefetch(indices, edge[q])
    for q in range(begin, min(begin + NEAR, stop)):
        row[q] = indices[edge[q]]


@numba.njit(nogil=True, cache=True)
def relabel_by_table(
    table: np.ndarray, own: int, bits: int, node: np.ndarray, k: int, indices: np.ndarray, edge: np.ndarray,
    row: np.ndarray, begin: int, end: int, stop: int,
) -> int:  # fmt: skip
    """Write the local ids of the sources of edges ``[begin, end)``; new nodes get the next ids, from k on."""
    limit = 1 << bits
    # A pipeline of three stages: prefetch ``indices`` of a pick far ahead; read that of a nearer pick into ``row`` and
    # prefetch its table entry; relabel. ``node`` has room for one write past the last new node.
    # Unsigned positions avoid Numba's check for negative indices at each access.
    past = np.uint64(stop)
    for q in range(np.uint64(begin), np.uint64(end)):
        if q + _FAR < past:
            prefetch(indices, np.uint64(edge[q + _FAR]))
        if q + _NEAR < past:
            near = np.int64(indices[np.uint64(edge[q + _NEAR])])
            row[q + _NEAR] = near
            prefetch(table, near)
        # Whether a node is new is unpredictable, so the code writes in both cases instead of branching.
        u = row[q]
        at = np.uint64(u)
        local = np.int64(table[at]) ^ own
        new = local >= limit
        local = k if new else local
        table[at] = own | local
        node[np.uint64(k)] = u
        row[q] = local
        k += new
    return k


@numba.njit(nogil=True, cache=True, inline="always")
def _pack(stamp: int, u: int, local: int) -> int:
    return (((stamp << 16) | (((u * _FIBONACCI) >> 16) & 0xFFFF)) << 32) | local


@numba.njit(nogil=True, cache=True, inline="always")
def _in_tree(u: int, root: int) -> int:
    return u + root * _TREE_STEP


@numba.njit(nogil=True, cache=True)
def _probe(slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, t: int) -> int:
    """Return the slot of node t, or the empty slot to insert it; a slot with another stamp is empty."""
    u, root, mask = node[t], tree[t] if tree.size else 0, slots.size - 1
    at = _first_slot(slots, _in_tree(u, root))
    wanted = _pack(stamp, _in_tree(u, root), 0) >> 32
    while (slots[at] >> 48) == stamp:
        local = slots[at] & _LOCAL
        if (slots[at] >> 32) == wanted and node[local] == u and (tree.size == 0 or tree[local] == root):
            break
        at = (at + 1) & mask
    return at


@numba.njit(nogil=True, cache=True)
def grow_slots(slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, count: int) -> np.ndarray:
    """Return the hash table, or a larger copy, such that ``count`` nodes fill at most half of it."""
    size = slots.size
    while size < 2 * count:
        size *= 2
    if size == slots.size:
        return slots
    larger = np.zeros(size, np.int64)
    for word in slots:
        if (word >> 48) == stamp:
            larger[_probe(larger, stamp, node, tree, word & _LOCAL)] = word
    return larger


@numba.njit(nogil=True, cache=True)
def insert_hashed(slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, begin: int, end: int) -> int:
    """Insert nodes, of equal nodes the first, into a hash table that has room for them; return their number."""
    inserted = 0
    for t in range(begin, end):
        at = _probe(slots, stamp, node, tree, t)
        if (slots[at] >> 48) != stamp:
            slots[at] = _pack(stamp, _in_tree(node[t], tree[t] if tree.size else 0), t)
            inserted += 1
    return inserted


# The table is not replaced inside the loop over edges, because Numba would then count references at each edge.
@numba.njit(nogil=True, cache=True)
def relabel_by_hash(
    slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, k: int, indices: np.ndarray, edge: np.ndarray,
    row: np.ndarray, roots: np.ndarray, ends: np.ndarray, low: int, high: int, begin: int, stop: int,
) -> int:  # fmt: skip
    """Relabel the edges of targets ``[low, high)`` with a hash table that has room for each; ``tree`` may be empty."""
    # Unsigned positions, as above.
    ahead = np.uint64(low)  # target of the edge whose slot is prefetched
    last, past, q, mask = np.uint64(high - 1), np.uint64(stop), np.uint64(begin), slots.size - 1
    disjoint = tree.size > 0
    for t in range(np.uint64(low), np.uint64(high)):
        root, end = roots[t] if disjoint else 0, np.uint64(ends[t])
        while q < end:
            if q + _FAR < past:
                prefetch(indices, np.uint64(edge[q + _FAR]))
            if q + _NEAR < past:
                near = np.int64(indices[np.uint64(edge[q + _NEAR])])
                row[q + _NEAR] = near
                if disjoint:
                    while ahead < last and np.uint64(ends[ahead]) <= q + _NEAR:
                        ahead += _ONE
                    near = _in_tree(near, roots[ahead])
                prefetch(slots, _first_slot(slots, near))
            # _probe, inlined.
            u = row[q]
            wanted = _pack(stamp, _in_tree(u, root), 0) >> 32
            at = np.uint64(_first_slot(slots, _in_tree(u, root)))
            word = slots[at]
            while (word >> 48) == stamp:
                local = np.uint64(word & _LOCAL)
                if (word >> 32) == wanted and node[local] == u and (not disjoint or tree[local] == root):
                    break
                at = np.uint64((np.int64(at) + 1) & mask)
                word = slots[at]
            if (word >> 48) == stamp:
                row[q] = word & _LOCAL
            else:
                new = np.uint64(k)
                slots[at], node[new], row[q] = (wanted << 32) | k, u, k
                if disjoint:
                    tree[new] = root
                k += 1
            q += _ONE
    return k


@numba.njit(nogil=True, cache=True)
def relabel_trees(
    table: np.ndarray, slots: np.ndarray, stamp: int, used: int, current: int, node: np.ndarray, tree: np.ndarray,
    k: int, indices: np.ndarray, edge: np.ndarray, row: np.ndarray, ends: np.ndarray, low: int, high: int, begin: int,
    stop: int, hop: int, begins: np.ndarray, fanout: int,
) -> tuple[np.ndarray, np.ndarray, int, int, int, int]:  # fmt: skip
    """Relabel the edges of targets ``[low, high)`` tree by tree; ``begins`` is the first new node of a tree by hop."""
    t, alone = low, tree[:0]  # a table with a single tree needs no trees
    while t < high:
        root, first = tree[t], t
        while t + 1 < high and tree[t + 1] == root:
            t += 1
        if root != current:
            begins[hop + 1, current + 1 : root + 1] = k
            current = root
            known = 0
            for level in range(hop + 1):
                known += begins[level, root + 1] - begins[level, root]
            expected = known + (begins[hop, root + 1] - begins[hop, root]) * (min(fanout, 64) if fanout >= 0 else 16)
            size = INITIAL_SLOTS
            while size < min(2 * expected, MAX_INITIAL_TREE_SLOTS):
                size *= 2
            if table.size < size:
                table = np.zeros(size, np.int64)
            stamp += 1
            if stamp > LAST_STAMP:
                table[:] = 0
                stamp = 1
            slots = grow_slots(table[:size], stamp, node, alone, known)  # a slice of the table of a larger tree
            used = 0
            for level in range(hop + 1):
                used += insert_hashed(slots, stamp, node, alone, begins[level, root], begins[level, root + 1])
        slots = grow_slots(slots, stamp, node, alone, used + ends[t] - begin)
        before = k
        k = relabel_by_hash(slots, stamp, node, alone, k, indices, edge, row, tree, ends, first, t + 1, begin, stop)
        tree[before:k] = root
        used += k - before
        begin = ends[t]
        t += 1
        if slots.size > table.size:
            table = slots
    return table, slots, stamp, used, current, k
