"""Picking in-edges by weight on the CPU, compiled: a binary search in sums of weights for each draw."""

import numba
import numpy as np

from lightning_gnn.ops.hashing import Word, draw_fraction_compiled, node_key_compiled, tree_key_compiled
from lightning_gnn.ops.intrinsics import prefetch
from lightning_gnn.ops.sample.relation import most_draws

_AHEAD = 8
"""How many rows ahead the sums are asked for; ``indptr`` twice as many."""
_FEW = 64
"""Up to how many picks are compared with each other; more are marked in a list of the node's in-edges."""
_most_draws = numba.njit(most_draws)


@numba.njit(nogil=True, cache=True)
def pick_weighted(
    indptr: np.ndarray, weight: np.ndarray, prefix: np.ndarray, node: np.ndarray, tree: np.ndarray, low: int, high: int,
    fanout: int, replace: bool, disjoint: bool, key: Word, first_tree: Word, edge: np.ndarray, ends: np.ndarray, m: int,
) -> int:  # fmt: skip
    """Write the edges that the nodes ``[low, high)`` pick, from position m on; return the position behind them.

    Args:
        indptr: int64 ``[num_nodes + 1]``.
        weight: Of the edges, float64, all positive.
        prefix: Sums of each list's weights, float64.
        node: Global ids of the frontier, int64, up to ``high``.
        tree: Their trees, int64, if disjoint.
        low: The first node.
        high: One past the last node.
        fanout: Below zero means all.
        replace: Draw with replacement.
        disjoint: Draw for each tree by a key of its own.
        key: Of the mini-batch, uint64.
        first_tree: Position of the first seed, uint64.
        edge: Where to write, int64.
        ends: Where to write the end of each node's edges, int64.
        m: Where to begin.
    """
    for t in range(low, high):
        if t + 2 * _AHEAD < high:
            prefetch(indptr, node[t + 2 * _AHEAD])
        if t + _AHEAD < high:
            # The last sum is read first, for the total, and the middle one after it.
            begin, end = indptr[node[t + _AHEAD]], indptr[node[t + _AHEAD] + 1]
            if end > begin:
                prefetch(prefix, end - 1)
                prefetch(prefix, (begin + end) >> 1)
        v = node[t]
        begin = indptr[v]
        degree = indptr[v + 1] - begin
        if fanout < 0 or (degree <= fanout and not replace):
            for j in range(degree):
                edge[m + j] = begin + j
            m += degree
        elif degree > 0:
            own_key = tree_key_compiled(key, first_tree + np.uint64(tree[t])) if disjoint else key
            stream = node_key_compiled(own_key, v)
            picks = edge[m : m + fanout]
            if replace:
                for j in range(fanout):
                    picks[j] = _hit(prefix, begin, degree, stream, j)
            else:
                _pick_successively(weight, prefix, begin, degree, stream, picks)
            m += fanout
        ends[t] = m
    return m


@numba.njit(nogil=True, cache=True)
def _hit(prefix: np.ndarray, begin: int, degree: int, stream: Word, j: int) -> int:
    """Return the edge that a draw falls on."""
    last = begin + degree - 1
    place = draw_fraction_compiled(stream, j) * prefix[last]
    first = begin
    while first < last:  # what rounding carries past the last one is the last one's
        middle = (first + last) >> 1
        if prefix[middle] <= place:
            first = middle + 1
        else:
            last = middle
    return first


@numba.njit(nogil=True, cache=True)
def _pick_successively(
    weight: np.ndarray, prefix: np.ndarray, begin: int, degree: int, stream: Word, picks: np.ndarray
) -> None:
    """Pick without replacement: draw again what has been drawn, and go through what is left if that takes too long."""
    fanout = picks.size
    few = fanout <= _FEW
    marks = np.zeros(0 if few else degree, np.bool_)
    count, number, most = 0, 0, _most_draws(fanout)
    while count < fanout and number < most:
        found = _hit(prefix, begin, degree, stream, number)
        number += 1
        if few:
            again = False
            for i in range(count):
                again |= picks[i] == found
        else:
            again = marks[found - begin]
            marks[found - begin] = True
        picks[count] = found
        count += not again
    if count == fanout:
        return
    marks = np.zeros(degree, np.bool_)
    for i in range(count):
        marks[picks[i] - begin] = True
    while count < fanout:
        total, last = 0.0, 0
        for position in range(degree):
            if not marks[position]:
                total += weight[begin + position]
                last = position
        place, passed = draw_fraction_compiled(stream, number) * total, 0.0
        number += 1
        for position in range(degree):
            if not marks[position]:
                passed += weight[begin + position]
                if passed > place:
                    last = position
                    break
        marks[last] = True
        picks[count] = begin + last
        count += 1
