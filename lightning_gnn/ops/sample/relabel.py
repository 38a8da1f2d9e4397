"""From global ids to local ones on the CPU, compiled: the next local id for a node that is new to the mini-batch.

Graphs have a table with an entry of 32 bits per node: a stamp, which says of which mini-batch the entry is, so that
nothing is cleared in between, and the local id in as many bits as ids need. It costs one cache miss per edge. A graph
too large for that has a hash table of the size of the mini-batch. Trees of a disjoint sample take turns in one that is
as small as a tree and stays in the cache, where what earlier hops found of it is entered again. With several types a
tree's edges come in many places: all trees are then in one hash table, by tree and node.
"""

import numba
import numpy as np

from lightning_gnn.ops.intrinsics import prefetch

NEAR = 16  # how many edges ahead their entries are asked for
FAR = 48  # how many edges ahead indices is asked for, which says where these entries are
FIRST_SLOTS = 1 << 11
LARGEST_GUESS = 1 << 16  # slots that a tree gets before it is seen to need more
LAST_STAMP = (1 << 15) - 1
"""Of a hash table, whose slots hold 15 bits of a stamp, 16 of the node's hash, and a local id of 32."""
_FIBONACCI = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed number
_LOCAL = (1 << 32) - 1
_NEAR, _FAR, _ONE = np.uint64(NEAR), np.uint64(FAR), np.uint64(1)
_TREE_STEP = 0x5851F42D4C957F2D  # by which trees of one node are told apart in a hash table


@numba.njit(nogil=True, cache=True)
def enter_all(table: np.ndarray, own: int, node: np.ndarray, count: int) -> None:
    """Enter the first nodes of a mini-batch into a table; of equal ones the first is what edges will refer to."""
    for t in range(count - 1, -1, -1):
        table[node[t]] = own | t


@numba.njit(nogil=True, cache=True, inline="always")
def _place(slots: np.ndarray, u: int) -> int:
    return ((u * _FIBONACCI) >> 32) & (slots.size - 1)


@numba.njit(nogil=True, cache=True)
def begin_reading(indices: np.ndarray, edge: np.ndarray, row: np.ndarray, begin: int, stop: int) -> None:
    """Do for the first edges of a hop what relabeling does for those far ahead."""
    for q in range(begin, min(begin + FAR, stop)):
        prefetch(indices, edge[q])
    for q in range(begin, min(begin + NEAR, stop)):
        row[q] = indices[edge[q]]


@numba.njit(nogil=True, cache=True)
def relabel_by_table(
    table: np.ndarray, own: int, bits: int, node: np.ndarray, k: int, indices: np.ndarray, edge: np.ndarray,
    row: np.ndarray, begin: int, end: int, stop: int,
) -> int:  # fmt: skip
    """Write the local ids of the sources of the edges ``[begin, end)``; new nodes get the next, from k on."""
    limit = 1 << bits
    # A pipeline of three stages: ask for ``indices`` of a pick far ahead, read those of a nearer one into ``row`` and
    # ask for its entry in the table, relabel. The last new node is written once more than there is: ``node`` has room.
    # Unsigned places: whether a signed one counts from the end would be asked at each access.
    past = np.uint64(stop)
    for q in range(np.uint64(begin), np.uint64(end)):
        if q + _FAR < past:
            prefetch(indices, np.uint64(edge[q + _FAR]))
        if q + _NEAR < past:
            near = np.int64(indices[np.uint64(edge[q + _NEAR])])
            row[q + _NEAR] = near
            prefetch(table, near)
        # Whether a node is new is hard to foretell: nothing branches on it, all is written either way.
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
def _word(stamp: int, u: int, local: int) -> int:
    return (((stamp << 16) | (((u * _FIBONACCI) >> 16) & 0xFFFF)) << 32) | local


@numba.njit(nogil=True, cache=True)
def _probe(slots: np.ndarray, stamp: int, node: np.ndarray, u: int) -> int:
    """Find the slot of a node, or the empty one where it belongs; one with another stamp is empty."""
    mask = slots.size - 1
    at = _place(slots, u)
    wanted = _word(stamp, u, 0) >> 32
    while (slots[at] >> 48) == stamp and ((slots[at] >> 32) != wanted or node[slots[at] & _LOCAL] != u):
        at = (at + 1) & mask
    return at


@numba.njit(nogil=True, cache=True)
def _with_room(slots: np.ndarray, stamp: int, node: np.ndarray, count: int) -> np.ndarray:
    """Return a hash table of which ``count`` nodes use at most half: the same, or a larger one with the same nodes."""
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
def enter_hashed(
    slots: np.ndarray, stamp: int, used: int, node: np.ndarray, begin: int, end: int
) -> tuple[np.ndarray, int]:
    """Enter nodes, of equal ones the first; return the hash table, maybe larger, and how many nodes it holds."""
    slots = _with_room(slots, stamp, node, used + end - begin)
    for t in range(begin, end):
        at = _probe(slots, stamp, node, node[t])
        if (slots[at] >> 48) != stamp:
            slots[at] = _word(stamp, node[t], t)
            used += 1
    return slots, used


@numba.njit(nogil=True, cache=True)
def relabel_by_hash(
    slots: np.ndarray, stamp: int, used: int, node: np.ndarray, k: int, indices: np.ndarray, edge: np.ndarray,
    row: np.ndarray, begin: int, end: int, stop: int,
) -> tuple[np.ndarray, int, int]:  # fmt: skip
    """Do the same with a hash table of 2^n slots; return it, maybe larger, its nodes, and how many there are."""
    slots = _with_room(slots, stamp, node, used + end - begin)
    most = _relabel_hashed(slots, stamp, node, k, indices, edge, row, begin, end, stop)
    return slots, used + most - k, most


# In a loop over edges a table is never replaced: Numba would count references at each edge.
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
            prefetch(slots, _place(slots, near))
        u = row[q]
        at = _probe(slots, stamp, node, u)
        if (slots[at] >> 48) == stamp:
            row[q] = slots[at] & _LOCAL
        else:
            slots[at] = _word(stamp, u, k)
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
    """Do the same for the edges of targets ``[low, high)`` tree by tree; ``begins``: a tree's first node by hop."""
    t = low
    while t < high:
        root = tree[t]
        while t + 1 < high and tree[t + 1] == root:
            t += 1
        if root != current:
            begins[hop + 1, current + 1 : root + 1] = k
            current = root
            likely = (begins[hop, root + 1] - begins[hop, root]) * (min(fanout, 64) if fanout >= 0 else 16)
            for level in range(hop + 1):
                likely += begins[level, root + 1] - begins[level, root]
            size = FIRST_SLOTS
            while size < min(2 * likely, LARGEST_GUESS):
                size *= 2
            if table.size < size:
                table = np.zeros(size, np.int64)
            slots = table[:size]  # a small part of what a larger tree has left behind
            stamp += 1
            if stamp > LAST_STAMP:
                table[:] = 0
                stamp = 1
            used = 0
            for level in range(hop + 1):
                slots, used = enter_hashed(slots, stamp, used, node, begins[level, root], begins[level, root + 1])
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
    """Do what :func:`_probe` does for a node of one tree."""
    mask = slots.size - 1
    at = _place(slots, _in_tree(u, root))
    wanted = _word(stamp, _in_tree(u, root), 0) >> 32
    while (slots[at] >> 48) == stamp and (
        (slots[at] >> 32) != wanted or node[slots[at] & _LOCAL] != u or tree[slots[at] & _LOCAL] != root
    ):
        at = (at + 1) & mask
    return at


@numba.njit(nogil=True, cache=True)
def forest_with_room(slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, count: int) -> np.ndarray:
    """Return a hash table of all trees that has room for ``count`` nodes, the same or a larger one."""
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
def enter_forest(slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, count: int) -> None:
    """Enter the first nodes of a disjoint sample, which are roots, into a hash table."""
    for t in range(count):
        slots[_probe_tree(slots, stamp, node, tree, node[t], tree[t])] = _word(stamp, _in_tree(node[t], tree[t]), t)


@numba.njit(nogil=True, cache=True)
def relabel_forest(
    slots: np.ndarray, stamp: int, node: np.ndarray, tree: np.ndarray, k: int, indices: np.ndarray, edge: np.ndarray,
    row: np.ndarray, roots: np.ndarray, ends: np.ndarray, low: int, high: int, begin: int, stop: int,
) -> int:  # fmt: skip
    """Do the same for the edges of targets ``[low, high)``, all trees in one table with room for each edge."""
    # Unsigned places, as above.
    ahead = np.uint64(low)  # the target of the edge whose slot is asked for
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
                prefetch(slots, _place(slots, _in_tree(near, roots[ahead])))
            # What _probe_tree does.
            u = row[q]
            wanted = _word(stamp, _in_tree(u, root), 0) >> 32
            at = np.uint64(_place(slots, _in_tree(u, root)))
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
