"""Picking in-edges uniformly on the CPU, compiled: what a node picks follows from its degree and the key alone.

Neither ``indices`` nor the table of nodes is looked at here. Where edges have times, those that count are a range.
"""

from typing import Any

import numba
import numpy as np

from lightning_gnn.ops.hashing import NODE_STEP, Word, draw_compiled, node_key_compiled, tree_key_compiled
from lightning_gnn.ops.intrinsics import prefetch
from lightning_gnn.ops.sample.lanes import LANES, draw_lanes

SMALL_FANOUT = 64
"""Up to which rows draw in lanes; above, comparing all draws of a row costs more than shuffling all of its edges."""
_AHEAD = 16
"""How many rows ahead ``indptr`` is asked for."""
_STEP = np.uint64(NODE_STEP)


@numba.njit(nogil=True, cache=True)
def hop_size(indptr: np.ndarray, node: np.ndarray, low: int, high: int, fanout: int, replace: bool) -> int:
    """Count the edges that the frontier ``node[low:high]`` will pick."""
    total = 0
    for t in range(low, high):
        if t + _AHEAD < high:
            prefetch(indptr, node[t + _AHEAD])
        degree = indptr[node[t] + 1] - indptr[node[t]]
        if fanout < 0 or (degree < fanout and not replace):
            total += degree
        elif degree > 0:
            total += fanout
    return total


def no_times() -> tuple[Any, ...]:
    """Return what says that all in-edges count: whether times matter; of which node the first numbers are; for each
    node from there on, the first in-edge that counts, and how many do.
    """
    none = np.empty(0, np.int64)
    return False, 0, none, none


@numba.njit(nogil=True, cache=True)
def count_eligible(
    indptr: np.ndarray, time: np.ndarray, coarse: np.ndarray, node: np.ndarray, tree: np.ndarray, low: int, high: int,
    until: np.ndarray, after: np.ndarray, window: bool, newest: int, first: np.ndarray, count: np.ndarray,
) -> None:  # fmt: skip
    """Write which in-edges of the nodes ``[low, high)`` the times of their trees allow.

    Sixteen nodes are searched side by side, so that none waits for what another reads.

    Args:
        indptr: int64 ``[num_nodes + 1]``.
        time: Of the edges, ascending in each list, int64.
        coarse: Every sixteenth of them.
        node: Global ids, int64, up to ``high``.
        tree: Their trees, int64.
        low: The first node.
        high: One past the last node.
        until: The latest time that counts, for each tree.
        after: The latest time that no longer counts, for each tree.
        window: Whether there is one.
        newest: How many of them count at most, the newest; below zero means all.
        first: Where to write the first edges, int64 ``[high - low]``.
        count: Where to write how many count, int64 ``[high - low]``.
    """
    limit, left, places = np.empty(LANES, np.int64), np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    for t in range(low, high, LANES):
        lanes = min(LANES, high - t)
        begins, ends = first[t - low : t - low + lanes], count[t - low : t - low + lanes]
        for lane in range(lanes):
            if t + lane + LANES < high:
                prefetch(indptr, node[t + lane + LANES])
            begins[lane] = indptr[node[t + lane]]
            limit[lane] = until[tree[t + lane]]
        _first_above(time, coarse, begins, indptr, node[t : t + lanes], limit, left, places)
        ends[:] = places[:lanes]
        if window:
            for lane in range(lanes):
                limit[lane] = after[tree[t + lane]]
            _first_above(time, coarse, begins, indptr, node[t : t + lanes], limit, left, places)
            begins[:] = places[:lanes]
        for lane in range(lanes):
            end = ends[lane]
            begins[lane] = max(min(begins[lane], end), end - newest if newest >= 0 else 0)
            ends[lane] = end - begins[lane]


@numba.njit(nogil=True, cache=True)
def _first_above(
    time: np.ndarray, coarse: np.ndarray, begins: np.ndarray, indptr: np.ndarray, node: np.ndarray, limit: np.ndarray,
    left: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the place of the first time in each list, from its begin on, that is later than its limit."""
    # The place is among the sixteen before the first time in `coarse`, of those in the list, that is later.
    for lane in range(node.size):
        out[lane] = (begins[lane] + 15) >> 4
        left[lane] = ((indptr[node[lane] + 1] + 15) >> 4) - out[lane]
    _search(coarse, limit, left, out, node.size)
    for lane in range(node.size):
        begin, end = begins[lane], indptr[node[lane] + 1]
        start = max(begin, ((out[lane] - 1) << 4) + 1)
        left[lane] = min(end, out[lane] << 4) - start
        out[lane] = start
    _search(time, limit, left, out, node.size)


@numba.njit(nogil=True, cache=True)
def _search(times: np.ndarray, limit: np.ndarray, left: np.ndarray, out: np.ndarray, lanes: int) -> None:
    """Move each place on to the first of the next ``left`` times that is later than the limit."""
    more = True
    while more:
        more = False
        for lane in range(lanes):
            size = left[lane]
            if size > 0:
                more, half, at = True, size >> 1, out[lane]
                early = np.int64(times[at + half] <= limit[lane])
                out[lane] = at + early * (half + 1)
                left[lane] = half - early * (1 - (size & 1))


def lane_scratch() -> tuple[np.ndarray, ...]:
    """Return memory for what :func:`pick_edges` keeps of rows until there are enough of them."""
    return (
        np.zeros(LANES, np.uint64),
        np.ones(LANES, np.int64),
        np.zeros(LANES, np.int64),
        np.zeros(LANES, np.int64),
        np.empty((3, SMALL_FANOUT * LANES), np.uint32),
    )


@numba.njit(nogil=True, cache=True)
def pick_edges(
    indptr: np.ndarray, place: np.ndarray, node: np.ndarray, tree: np.ndarray, t: int, high: int, fanout: int,
    replace: bool, disjoint: bool, key: Word, first_tree: Word, times: Any, edge: np.ndarray, ends: np.ndarray, m: int,
    room: int, scratch: Any,
) -> tuple[int, int]:  # fmt: skip
    """Write the edges that nodes from t on pick, from position m on, until there are ``room`` of them or no more nodes.

    Args:
        indptr: int64 ``[num_nodes + 1]``.
        place: Where in ``indptr`` the lists of the frontier are, int64, up to ``high``: ``node``, where it has all.
        node: Global ids of the frontier, int64, up to ``high``.
        tree: Their trees, int64, if disjoint.
        t: The first node.
        high: One past the last node.
        fanout: Below zero means all.
        replace: Draw with replacement.
        disjoint: Draw for each tree by a key of its own.
        key: Of the mini-batch, uint64.
        first_tree: Position of the first seed, uint64.
        times: Of :func:`no_times`, or what takes its place.
        edge: Where to write, int64.
        ends: Where to write the end of each node's edges, int64, one per node.
        m: Where to begin.
        room: About how many edges to pick.
        scratch: Of :func:`lane_scratch`.

    Returns:
        The node and the position to go on with.
    """
    state, degrees, begins, starts, _ = scratch
    temporal, base, eligible, counts = times
    lane, stop = 0, m + room
    while t < high and m < stop:
        if t + _AHEAD < high:
            prefetch(indptr, place[t + _AHEAD])
        v, own = node[t], place[t]
        begin = indptr[own]
        degree = indptr[own + 1] - begin
        if temporal:
            begin, degree = eligible[t - base], counts[t - base]
        if fanout < 0 or (degree <= fanout and not replace):
            # All in-edges, in CSC order; nothing is drawn.
            for j in range(degree):
                edge[m + j] = begin + j
            m += degree
        elif degree > 0:
            own_key = tree_key_compiled(key, first_tree + np.uint64(tree[t])) if disjoint else key
            # The stream is the same in whichever hop, batch position or thread v is expanded.
            if fanout > SMALL_FANOUT:
                _pick_many(node_key_compiled(own_key, v), begin, degree, fanout, replace, edge, m)
            else:
                state[lane] = own_key ^ (np.uint64(v) * _STEP)
                degrees[lane] = degree
                begins[lane] = begin
                starts[lane] = m
                lane += 1
                if lane == LANES:
                    _draw(scratch, lane, fanout, replace, edge)
                    lane = 0
            m += fanout
        ends[t] = m
        t += 1
    if lane:
        _draw(scratch, lane, fanout, replace, edge)
    return t, m


@numba.njit(nogil=True, cache=True)
def _draw(scratch: Any, lanes: int, fanout: int, replace: bool, edge: np.ndarray) -> None:
    """Write the picks of rows that have gathered."""
    state, degrees, begins, places, drawn = scratch
    picks = drawn[2]
    draw_lanes(state, degrees, fanout, replace, drawn[0], drawn[1], picks)
    for lane in range(lanes):
        begin, place = begins[lane], places[lane]
        for j in range(fanout):
            edge[place + j] = begin + np.int64(picks[LANES * j + lane])


@numba.njit(nogil=True, cache=True)
def _pick_many(
    stream: Word, begin: int, degree: int, fanout: int, replace: bool, edge: np.ndarray, m: int
) -> None:  # fmt: skip
    """Pick more edges of one node than lanes have room for: a forward Fisher-Yates over all positions."""
    if replace:
        for j in range(fanout):
            edge[m + j] = begin + draw_compiled(stream, j, degree)
        return
    order = np.arange(begin, begin + degree)
    for j in range(fanout):
        r = j + draw_compiled(stream, j, degree - j)
        order[j], order[r] = order[r], order[j]
        edge[m + j] = order[j]
