"""Compiled LABOR picks on the CPU: a node takes the in-edges with the smallest variates of their sources."""

import numba
import numpy as np

from lightning_gnn.ops.hashing import GOLDEN, Word, mix_compiled, node_key_compiled, tree_key_compiled
from lightning_gnn.ops.intrinsics import prefetch
from lightning_gnn.ops.sample.relation import Frontier

_AHEAD = 8  # prefetch distance of indices, in rows; indptr is prefetched at twice the distance
_GOLDEN, _ZERO = np.uint64(GOLDEN), np.uint64(0)


@numba.njit(nogil=True, cache=True, inline="always")
def _variate(key: Word, source: int, period_length: Word, batch: Word) -> Word:
    stream = node_key_compiled(key, source)
    if period_length > np.uint64(1):
        period = (batch + node_key_compiled(_ZERO, source) % period_length) // period_length
        stream = mix_compiled(stream + (period + np.uint64(1)) * _GOLDEN)
    return stream


@numba.njit(nogil=True, cache=True)
def pick_labor(
    indptr: np.ndarray, indices: np.ndarray, parallel: np.ndarray, period_length: Word, batch: Word, frontier: Frontier,
    edge: np.ndarray, ends: np.ndarray, m: int,
) -> int:  # fmt: skip
    """Write the picks of the frontier, in mini-batch ``batch``, from position m on; return the end position."""
    lists, _, tree, low, high, fanout, _, disjoint, key, first_tree, times = frontier
    temporal, base, eligible, counts = times
    variates = np.empty(1024, np.uint64)
    max_picks = min(max(fanout, 0), indices.size)
    best, positions = np.empty(max_picks, np.uint64), np.empty(max_picks, np.int64)
    for t in range(low, high):
        if t + 2 * _AHEAD < high:
            prefetch(indptr, lists[t + 2 * _AHEAD])
        if t + _AHEAD < high and indptr[lists[t + _AHEAD]] < indices.size:
            prefetch(indices, indptr[lists[t + _AHEAD]])
        begin = indptr[lists[t]]
        degree = indptr[lists[t] + 1] - begin
        if temporal:
            begin, degree = eligible[t - base], counts[t - base]
        if fanout < 0 or degree <= fanout:
            for j in range(degree):
                edge[m + j] = begin + j
            m += degree
        elif fanout > 0:
            own_key = tree_key_compiled(key, first_tree + np.uint64(tree[t])) if disjoint else key
            if variates.size < degree:
                variates = np.empty(2 * degree, np.uint64)
            for j in range(degree):
                variates[j] = _variate(own_key, indices[begin + j], period_length, batch)
            if parallel.size:
                for j in range(degree):
                    if parallel[begin + j]:
                        variates[j] = mix_compiled(variates[j] + np.uint64(parallel[begin + j]) * _GOLDEN)
            _find_smallest(variates[:degree], best, positions)
            for j in range(fanout):
                edge[m + j] = begin + positions[j]
            m += fanout
        ends[t] = m
    return m


@numba.njit(nogil=True, cache=True)
def _find_smallest(variates: np.ndarray, best: np.ndarray, positions: np.ndarray) -> None:
    """Write the sorted positions of the k smallest variates, of equal ones the first; ``best`` is scratch."""
    k, count, largest = positions.size, 0, 0
    # Skip variates above a limit below which this many are expected; in the rare case of fewer than k, read all again.
    expected = k + 4.0 * np.sqrt(k) + 4.0
    limit = np.uint64(2**64 - 1)
    if expected < variates.size:
        limit = np.uint64(expected / variates.size * 1.8446744073709550e19)
    while True:
        for j in range(variates.size):
            one = variates[j]
            if one > limit or (count == k and one >= best[largest]):
                continue
            if count < k:
                best[count], positions[count] = one, j
                count += 1
            else:  # replace the largest; among equal variates, the first positions remain
                best[largest], positions[largest] = one, j
            if count == k:
                largest = 0
                for i in range(1, k):
                    if best[i] > best[largest] or (best[i] == best[largest] and positions[i] > positions[largest]):
                        largest = i
        if count == k:
            break
        count, limit = 0, np.uint64(2**64 - 1)
    positions.sort()
