"""Compiled weighted picks of in-edges on the CPU: every draw is a binary search in prefix sums of the weights."""

from typing import Any

import numba
import numpy as np

from lightning_gnn.ops.hashing import Word, draw_fraction_compiled, node_key_compiled, tree_key_compiled
from lightning_gnn.ops.intrinsics import prefetch
from lightning_gnn.ops.sample.relation import Frontier, max_draws

_AHEAD = 8  # prefetch distance of the sums, in rows; indptr is prefetched at twice the distance
_SUMS_PER_LINE = 8  # float64 per cache line
_CHUNK = 16  # draws that are searched in parallel
_SHORT = 64  # maximum length of a list whose picked edges are recorded in the bits of a word
_max_draws: Any = numba.njit(max_draws)


@numba.njit(nogil=True, cache=True)
def pick_weighted(
    indptr: np.ndarray, weight: np.ndarray, prefix: np.ndarray, frontier: Frontier, edge: np.ndarray, ends: np.ndarray,
    m: int,
) -> int:  # fmt: skip
    """Write the picks of the frontier from position m on; return the end position."""
    lists, node, tree, low, high, fanout, replace, disjoint, key, first_tree, _ = frontier
    hits, thresholds = np.empty(_CHUNK, np.int64), np.empty(_CHUNK, np.float64)
    for t in range(low, high):
        if t + 2 * _AHEAD < high:
            prefetch(indptr, lists[t + 2 * _AHEAD])
        if t + _AHEAD < high:
            begin, end = indptr[lists[t + _AHEAD]], indptr[lists[t + _AHEAD] + 1]
            if end - begin > fanout or replace:
                # Draws hit any part of a short list, which is prefetched completely. In a long list the last and middle
                # sums are read first; the others are often in the cache, because hubs occur frequently.
                step = _SUMS_PER_LINE if end - begin <= _SHORT else max((end - begin) >> 2, 1)
                for at in range(begin, end, step):
                    prefetch(prefix, at)
                prefetch(prefix, end - 1)
        begin = indptr[lists[t]]
        degree = indptr[lists[t] + 1] - begin
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
                    _find_hits(prefix, begin, degree, stream, j, picks[j : j + _CHUNK], thresholds)
            else:
                _pick_distinct(weight, prefix, begin, degree, stream, picks, hits, thresholds)
            m += fanout
        ends[t] = m
    return m


@numba.njit(nogil=True, cache=True)
def _find_hits(
    prefix: np.ndarray, begin: int, degree: int, stream: Word, number: int, hits: np.ndarray, thresholds: np.ndarray
) -> None:
    """Write the edges selected by consecutive draws; the searches run in parallel, without branches."""
    total = prefix[begin + degree - 1]
    for j in range(hits.size):
        thresholds[j] = draw_fraction_compiled(stream, number + j) * total
        hits[j] = begin
    # The search ends at the last edge if no earlier edge is hit, also if rounding exceeds the total.
    size = degree
    while size > 1:
        half = size >> 1
        for j in range(hits.size):
            at = hits[j]
            hits[j] = at + half * (prefix[at + half - 1] <= thresholds[j])
        size -= half


@numba.njit(nogil=True, cache=True)
def _pick_distinct(
    weight: np.ndarray, prefix: np.ndarray, begin: int, degree: int, stream: Word, picks: np.ndarray,
    hits: np.ndarray, thresholds: np.ndarray,
) -> None:  # fmt: skip
    """Pick without replacement: repeat draws of picked edges, or after too many draws, scan the remaining edges."""
    fanout, limit = picks.size, _max_draws(picks.size)
    count, number, seen = 0, 0, np.uint64(0)
    while count < fanout and number < limit:
        # Draws repeat often in a short list, rarely in a long list, where only the missing picks are drawn.
        size = min(_CHUNK, limit - number) if degree <= _SHORT else min(_CHUNK, limit - number, fanout - count)
        _find_hits(prefix, begin, degree, stream, number, hits[:size], thresholds)
        number += size
        for j in range(size):
            hit = hits[j]
            if degree <= _SHORT:
                bit = np.uint64(1) << np.uint64(hit - begin)
                is_repeated = (seen & bit) != 0
                seen |= bit
            else:
                is_repeated = False
                for i in range(count):
                    is_repeated |= picks[i] == hit
            if not is_repeated:
                picks[count] = hit
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
        threshold, passed = draw_fraction_compiled(stream, limit + i - count) * total, 0.0
        for position in range(degree):
            if not marks[position]:
                passed += weight[begin + position]
                if passed > threshold:
                    last = position
                    break
        marks[last] = True
        picks[i] = begin + last
