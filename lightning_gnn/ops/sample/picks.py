"""Compiled uniform picks of in-edges on the CPU; they depend only on the degree, or eligible range, and the key."""

from typing import Any

import numba
import numpy as np

from lightning_gnn.ops.hashing import NODE_STEP, Word, draw_compiled, node_key_compiled, tree_key_compiled
from lightning_gnn.ops.intrinsics import prefetch
from lightning_gnn.ops.sample.lanes import LANES, draw_lanes
from lightning_gnn.ops.sample.relation import Frontier

SMALL_FANOUT = 64  # maximum fanout for lanes; above, comparing all draws costs more than shuffling all edges of a row
_AHEAD = 16  # prefetch distance of indptr, in rows
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
    """Return scratch memory in which :func:`pick_edges` collects rows until all lanes are full."""
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
    """Write the picks of nodes from t on, from position m on, until ``room`` are written; return the next t and m."""
    state, degrees, begins, starts, _ = scratch
    lists, node, tree, _, high, fanout, replace, disjoint, key, first_tree, times = frontier
    temporal, base, eligible, counts = times
    lane, stop = 0, m + room
    while t < high and m < stop:
        if t + _AHEAD < high:
            prefetch(indptr, lists[t + _AHEAD])
        v, own = node[t], lists[t]
        begin = indptr[own]
        degree = indptr[own + 1] - begin
        if temporal:
            begin, degree = eligible[t - base], counts[t - base]
        if fanout < 0 or (degree <= fanout and not replace):
            # Take all in-edges in CSC order.
            for j in range(degree):
                edge[m + j] = begin + j
            m += degree
        elif degree > 0:
            own_key = tree_key_compiled(key, first_tree + np.uint64(tree[t])) if disjoint else key
            # The stream does not depend on the hop, the position in the batch or the thread in which v is expanded.
            if fanout > SMALL_FANOUT:
                _pick_many(node_key_compiled(own_key, v), begin, degree, fanout, replace, edge, m)
            else:
                state[lane] = own_key ^ (np.uint64(v) * _STEP)
                degrees[lane] = degree
                begins[lane] = begin
                starts[lane] = m
                lane += 1
                if lane == LANES:
                    _draw_rows(scratch, lane, fanout, replace, edge)
                    lane = 0
            m += fanout
        ends[t] = m
        t += 1
    if lane:
        _draw_rows(scratch, lane, fanout, replace, edge)
    return t, m


@numba.njit(nogil=True, cache=True)
def _draw_rows(scratch: Any, lanes: int, fanout: int, replace: bool, edge: np.ndarray) -> None:
    """Draw and write the picks of the collected rows."""
    state, degrees, begins, starts, buffers = scratch
    picks = buffers[2]
    draw_lanes(state, degrees, fanout, replace, buffers[0], buffers[1], picks)
    for lane in range(lanes):
        begin, start = begins[lane], starts[lane]
        for j in range(fanout):
            edge[start + j] = begin + np.int64(picks[LANES * j + lane])


@numba.njit(nogil=True, cache=True)
def _pick_many(
    stream: Word, begin: int, degree: int, fanout: int, replace: bool, edge: np.ndarray, m: int
) -> None:  # fmt: skip
    """Pick edges of a node with a large fanout: a forward Fisher-Yates shuffle over all positions."""
    if replace:
        for j in range(fanout):
            edge[m + j] = begin + draw_compiled(stream, j, degree)
        return
    order = np.arange(begin, begin + degree)
    for j in range(fanout):
        r = j + draw_compiled(stream, j, degree - j)
        order[j], order[r] = order[r], order[j]
        edge[m + j] = order[j]
