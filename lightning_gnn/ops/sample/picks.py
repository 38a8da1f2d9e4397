"""Picking in-edges uniformly on the CPU, compiled: picks follow from the degree, or range of times, and the key."""

from typing import Any

import numba
import numpy as np

from lightning_gnn.ops.hashing import NODE_STEP, Word, draw_compiled, node_key_compiled, tree_key_compiled
from lightning_gnn.ops.intrinsics import prefetch
from lightning_gnn.ops.sample.lanes import LANES, draw_lanes
from lightning_gnn.ops.sample.relation import Frontier

SMALL_FANOUT = 64
"""Up to which rows draw in lanes; above, comparing all draws of a row costs more than shuffling all of its edges."""
_AHEAD = 16  # how many rows ahead indptr is asked for
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
    indptr: np.ndarray, frontier: Frontier, t: int, edge: np.ndarray, ends: np.ndarray, m: int, room: int, scratch: Any
) -> tuple[int, int]:
    """Write the picks of nodes from t on, from position m on, until there are ``room`` or no more; return t and m."""
    state, degrees, begins, starts, _ = scratch
    place, node, tree, _, high, fanout, replace, disjoint, key, first_tree, times = frontier
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
