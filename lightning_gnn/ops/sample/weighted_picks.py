"""Picking in-edges by weight on the CPU, compiled: a binary search in sums of weights for each draw."""

from typing import Any

import numba
import numpy as np

from lightning_gnn.ops.hashing import Word, draw_fraction_compiled, node_key_compiled, tree_key_compiled
from lightning_gnn.ops.intrinsics import prefetch
from lightning_gnn.ops.sample.relation import Frontier, most_draws

_AHEAD = 8  # how many rows ahead the sums are asked for; indptr twice as many
_SUMS_PER_LINE = 8
_CHUNK = 16  # how many draws are looked up side by side
_SHORT = 64  # in-edges of a node of which a word says which are picked
_most_draws: Any = numba.njit(most_draws)


@numba.njit(nogil=True, cache=True)
def pick_weighted(
    indptr: np.ndarray, weight: np.ndarray, prefix: np.ndarray, frontier: Frontier, edge: np.ndarray, ends: np.ndarray,
    m: int,
) -> int:  # fmt: skip
    """Write the edges that the nodes of the frontier pick, from position m on; return the position behind them."""
    place, node, tree, low, high, fanout, replace, disjoint, key, first_tree, _ = frontier
    drawn, places = np.empty(_CHUNK, np.int64), np.empty(_CHUNK, np.float64)
    for t in range(low, high):
        if t + 2 * _AHEAD < high:
            prefetch(indptr, place[t + 2 * _AHEAD])
        if t + _AHEAD < high:
            begin, end = indptr[place[t + _AHEAD]], indptr[place[t + _AHEAD] + 1]
            if end - begin > fanout or replace:
                # The draws of a node fall all over a short list; of a long one the last sum and the middle are read
                # first, and what follows is in the cache more often than not, as hubs are met often.
                step = _SUMS_PER_LINE if end - begin <= _SHORT else max((end - begin) >> 2, 1)
                for at in range(begin, end, step):
                    prefetch(prefix, at)
                prefetch(prefix, end - 1)
        begin = indptr[place[t]]
        degree = indptr[place[t] + 1] - begin
        if fanout < 0 or (degree <= fanout and not replace):
            for j in range(degree):
                edge[m + j] = begin + j
            m += degree
        elif degree > 0 and fanout > 0:
            own_key = tree_key_compiled(key, first_tree + np.uint64(tree[t])) if disjoint else key
            stream = node_key_compiled(own_key, node[t])
            picks = edge[m : m + fanout]
            if replace:
                for j in range(0, fanout, _CHUNK):
                    _hits(prefix, begin, degree, stream, j, picks[j : j + _CHUNK], places)
            else:
                _pick_distinct(weight, prefix, begin, degree, stream, picks, drawn, places)
            m += fanout
        ends[t] = m
    return m


@numba.njit(nogil=True, cache=True)
def _hits(
    prefix: np.ndarray, begin: int, degree: int, stream: Word, number: int, found: np.ndarray, places: np.ndarray
) -> None:
    """Write the edges that consecutive draws fall on; searches go side by side, and nothing branches on them."""
    total = prefix[begin + degree - 1]
    for j in range(found.size):
        places[j] = draw_fraction_compiled(stream, number + j) * total
        found[j] = begin
    # The last edge is what is left where none before it is hit, also by what rounding carries past it.
    size = degree
    while size > 1:
        half = size >> 1
        for j in range(found.size):
            at = found[j]
            found[j] = at + half * (prefix[at + half - 1] <= places[j])
        size -= half


@numba.njit(nogil=True, cache=True)
def _pick_distinct(
    weight: np.ndarray, prefix: np.ndarray, begin: int, degree: int, stream: Word, picks: np.ndarray,
    drawn: np.ndarray, places: np.ndarray,
) -> None:  # fmt: skip
    """Pick without replacement: draw again what was drawn, or go through what is left if that takes long."""
    fanout, most = picks.size, _most_draws(picks.size)
    count, number, seen = 0, 0, np.uint64(0)
    while count < fanout and number < most:
        # Of a short list much is drawn again; of a long one hardly anything, so no more is drawn than is missing.
        size = min(_CHUNK, most - number) if degree <= _SHORT else min(_CHUNK, most - number, fanout - count)
        _hits(prefix, begin, degree, stream, number, drawn[:size], places)
        number += size
        for j in range(size):
            found = drawn[j]
            if degree <= _SHORT:
                bit = np.uint64(1) << np.uint64(found - begin)
                again = (seen & bit) != 0
                seen |= bit
            else:
                again = False
                for i in range(count):
                    again |= picks[i] == found
            if not again:
                picks[count] = found
                count += 1
                if count == fanout:
                    break
    if count == fanout:
        return
    marks = np.zeros(degree, np.bool_)
    for i in range(count):
        marks[picks[i] - begin] = True
    for i in range(count, fanout):
        total, last = 0.0, 0
        for position in range(degree):
            if not marks[position]:
                total += weight[begin + position]
                last = position
        place, passed = draw_fraction_compiled(stream, most + i - count) * total, 0.0
        for position in range(degree):
            if not marks[position]:
                passed += weight[begin + position]
                if passed > place:
                    last = position
                    break
        marks[last] = True
        picks[i] = begin + last
