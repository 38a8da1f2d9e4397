"""Compiled relabeling of global to local ids on the CPU; a node that is new to the mini-batch gets the next local id.

- Table: 32 bits per node of the graph, a stamp that identifies the mini-batch, so that the table is not cleared between
  mini-batches, and the local id in the remaining bits. It costs one cache miss per edge.
- Hash table: for graphs that are too large for a table, with a size proportional to the mini-batch.
- Trees: a homogeneous disjoint sample reuses one hash table of the size of a tree, which stays in the cache; the tree's
  nodes of earlier hops are inserted again.
- Forest: in a heterogeneous disjoint sample the edges of a tree are scattered; one hash table holds all trees.
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


@numba.njit(nogil=True, cache=True)
def _probe(slots: np.ndarray, stamp: int, node: np.ndarray, u: int) -> int:
    """Return the slot of a node, or the empty slot to insert it; a slot with another stamp is empty."""
    mask = slots.size - 1
    at = _first_slot(slots, u)
    wanted = _pack(stamp, u, 0) >> 32
    while (slots[at] >> 48) == stamp and ((slots[at] >> 32) != wanted or node[slots[at] & _LOCAL] != u):
        at = (at + 1) & mask
    return at


@numba.njit(nogil=True, cache=True)
def _grow_table(slots: np.ndarray, stamp: int, node: np.ndarray, count: int) -> np.ndarray:
    """Return the hash table, or a larger copy, such that ``count`` nodes fill at most half of it."""
    size = slots.size
    while size < 2 * count:
        size *= 2
    if size == slots.size:
        return slots
    larger = np.zeros(size, np.int64)
    for word in slots:
        if (word >> 48) == stamp:
            larger[_probe(larger, stamp, node, node[word & _LOCAL])] = word
    return larger


@numba.njit(nogil=True, cache=True)
def insert_hashed(
    slots: np.ndarray, stamp: int, used: int, node: np.ndarray, begin: int, end: int
) -> tuple[np.ndarray, int]:
    """Insert nodes, of equal nodes the first; return the hash table, possibly a larger one, and its number of nodes."""
    slots = _grow_table(slots, stamp, node, used + end - begin)
    for t in range(begin, end):
        at = _probe(slots, stamp, node, node[t])
        if (slots[at] >> 48) != stamp:
            slots[at] = _pack(stamp, node[t], t)
            used += 1
    return slots, used


@numba.njit(nogil=True, cache=True)
def relabel_by_hash(
    slots: np.ndarray, stamp: int, used: int, node: np.ndarray, k: int, indices: np.ndarray, edge: np.ndarray,
    row: np.ndarray, begin: int, end: int, stop: int,
) -> tuple[np.ndarray, int, int]:  # fmt: skip
    """Relabel with a hash table of 2^n slots; return it, possibly a larger one, its number of nodes, and the last k."""
    slots = _grow_table(slots, stamp, node, used + end - begin)
    next_id = _relabel_hashed(slots, stamp, node, k, indices, edge, row, begin, end, stop)
    return slots, used + next_id - k, next_id


# The table is not replaced inside the loop over edges, because Numba would then count references at each edge.
@numba.njit(nogil=True, cache=True)
def _relabel_hashed(
    slots: np.ndarray, stamp: int, node: np.ndarray, k: int, indices: np.ndarray, edge: np.ndarray, row: np.ndarray,
    begin: int, end: int, stop: int,
) -> int:  # fmt: skip
    for q in range(begin, end):
        if q + FAR < stop:
            prefetch(indices, edge[q + FAR])
        if q + NEAR < stop:
            near = np.int64(indices[edge[q + NEAR]])
            row[q + NEAR] = near
            prefetch(slots, _first_slot(slots, near))
        u = row[q]
        at = _probe(slots, stamp, node, u)
        if (slots[at] >> 48) == stamp:
            row[q] = slots[at] & _LOCAL
        else:
            slots[at] = _pack(stamp, u, k)
            node[k] = u
            row[q] = k
            k += 1
    return k


@numba.njit(nogil=True, cache=True)
def relabel_trees(
    table: np.ndarray, slots: np.ndarray, stamp: int, used: int, current: int, node: np.ndarray, tree: np.ndarray,
    k: int, indices: np.ndarray, edge: np.ndarray, row: np.ndarray, ends: np.ndarray, low: int, high: int, begin: int,
    stop: int, hop: int, begins: np.ndarray, fanout: int,
) -> tuple[np.ndarray, np.ndarray, int, int, int, int]:  # fmt: skip
    """Relabel the edges of targets ``[low, high)`` tree by tree; ``begins`` is the first new node of a tree by hop."""
    t = low
    while t < high:
        root = tree[t]
        while t + 1 < high and tree[t + 1] == root:
            t += 1
        if root != current:
            begins[hop + 1, current + 1 : root + 1] = k
            current = root
            expected = (begins[hop, root + 1] - begins[hop, root]) * (min(fanout, 64) if fanout >= 0 else 16)
            for level in range(hop + 1):
                expected += begins[level, root + 1] - begins[level, root]
            size = INITIAL_SLOTS
            while size < min(2 * expected, MAX_INITIAL_TREE_SLOTS):
                size *= 2
            if table.size < size:
                table = np.zeros(size, np.int64)
            slots = table[:size]  # a slice of the table of a larger tree
            stamp += 1
            if stamp > LAST_STAMP:
                table[:] = 0
                stamp = 1
            used = 0
            for level in range(hop + 1):
                slots, used = insert_hashed(slots, stamp, used, node, begins[level, root], begins[level, root + 1])
        before = k
        slots, used, k = relabel_by_hash(slots, stamp, used, node, k, indices, edge, row, begin, ends[t], stop)
        tree[before:k] = root
        begin = ends[t]
        t += 1
        if slots.size > table.size:
            table = slots
    return table, slots, stamp, used, current, k


@numba.njit(nogil=True, cache=True, inline="always")
def _in_tree(u: int, root: int) -> int:
    return u + root * _TREE_STEP


@numba.njit(nogil=True, cache=True)
def _probe_tree(slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, u: int, root: int) -> int:
    """Run :func:`_probe` for a node of a tree."""
    mask = slots.size - 1
    at = _first_slot(slots, _in_tree(u, root))
    wanted = _pack(stamp, _in_tree(u, root), 0) >> 32
    while (slots[at] >> 48) == stamp and (
        (slots[at] >> 32) != wanted or node[slots[at] & _LOCAL] != u or tree[slots[at] & _LOCAL] != root
    ):
        at = (at + 1) & mask
    return at


@numba.njit(nogil=True, cache=True)
def grow_forest(slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, count: int) -> np.ndarray:
    """Return the hash table of all trees, or a larger copy, with room for ``count`` nodes."""
    size = slots.size
    while size < 2 * count:
        size *= 2
    if size == slots.size:
        return slots
    larger = np.zeros(size, np.int64)
    for word in slots:
        if (word >> 48) == stamp:
            local = word & _LOCAL
            larger[_probe_tree(larger, stamp, node, tree, node[local], tree[local])] = word
    return larger


@numba.njit(nogil=True, cache=True)
def insert_forest(slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, count: int) -> None:
    """Insert the roots of a disjoint sample into a hash table."""
    for t in range(count):
        slots[_probe_tree(slots, stamp, node, tree, node[t], tree[t])] = _pack(stamp, _in_tree(node[t], tree[t]), t)


@numba.njit(nogil=True, cache=True)
def relabel_forest(
    slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, k: int, indices: np.ndarray, edge: np.ndarray,
    row: np.ndarray, roots: np.ndarray, ends: np.ndarray, low: int, high: int, begin: int, stop: int,
) -> int:  # fmt: skip
    """Relabel the edges of targets ``[low, high)`` in the hash table of all trees, which has room for each edge."""
    # Unsigned positions, as above.
    ahead = np.uint64(low)  # target of the edge whose slot is prefetched
    last, past, q, mask = np.uint64(high - 1), np.uint64(stop), np.uint64(begin), slots.size - 1
    for t in range(np.uint64(low), np.uint64(high)):
        root, end = roots[t], np.uint64(ends[t])
        while q < end:
            if q + _FAR < past:
                prefetch(indices, np.uint64(edge[q + _FAR]))
            if q + _NEAR < past:
                near = np.int64(indices[np.uint64(edge[q + _NEAR])])
                row[q + _NEAR] = near
                while ahead < last and np.uint64(ends[ahead]) <= q + _NEAR:
                    ahead += _ONE
                prefetch(slots, _first_slot(slots, _in_tree(near, roots[ahead])))
            # _probe_tree, inlined.
            u = row[q]
            wanted = _pack(stamp, _in_tree(u, root), 0) >> 32
            at = np.uint64(_first_slot(slots, _in_tree(u, root)))
            word = slots[at]
            while (word >> 48) == stamp:
                local = np.uint64(word & _LOCAL)
                if (word >> 32) == wanted and node[local] == u and tree[local] == root:
                    break
                at = np.uint64((np.int64(at) + 1) & mask)
                word = slots[at]
            if (word >> 48) == stamp:
                row[q] = word & _LOCAL
            else:
                new = np.uint64(k)
                slots[at], node[new], tree[new], row[q] = (wanted << 32) | k, u, root, k
                k += 1
            q += _ONE
    return k
