"""Layer-neighbor picks on the CPU, compiled: a node takes the in-edges whose sources have the smallest variates."""

import numba
import numpy as np

from lightning_gnn.ops.hashing import GOLDEN, Word, mix_compiled, node_key_compiled, tree_key_compiled
from lightning_gnn.ops.intrinsics import prefetch
from lightning_gnn.ops.sample.relation import Frontier

_AHEAD = 8  # how many rows ahead indices is asked for; indptr twice as many
_GOLDEN, _ZERO = np.uint64(GOLDEN), np.uint64(0)


@numba.njit(nogil=True, cache=True, inline="always")
def _variate(key: Word, source: int, often: Word, batch: Word) -> Word:
    stream = node_key_compiled(key, source)
    if often > np.uint64(1):
        period = (batch + node_key_compiled(_ZERO, source) % often) // often
        stream = mix_compiled(stream + (period + np.uint64(1)) * _GOLDEN)
    return stream


@numba.njit(nogil=True, cache=True)
def pick_labor(
    indptr: np.ndarray, indices: np.ndarray, parallel: np.ndarray, often: Word, batch: Word, frontier: Frontier,
    edge: np.ndarray, ends: np.ndarray, m: int,
) -> int:  # fmt: skip
    """Write the picks of the frontier from position m on, of mini-batch ``batch``; return the position behind them."""
    place, _, tree, low, high, fanout, _, disjoint, key, first_tree, times = frontier
    temporal, base, eligible, counts = times
    variates = np.empty(1024, np.uint64)
    most = min(max(fanout, 0), indices.size)
    least, places = np.empty(most, np.uint64), np.empty(most, np.int64)
    for t in range(low, high):
        if t + 2 * _AHEAD < high:
            prefetch(indptr, place[t + 2 * _AHEAD])
        if t + _AHEAD < high and indptr[place[t + _AHEAD]] < indices.size:
            prefetch(indices, indptr[place[t + _AHEAD]])
        begin = indptr[place[t]]
        degree = indptr[place[t] + 1] - begin
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
                variates[j] = _variate(own_key, indices[begin + j], often, batch)
            if parallel.size:
                for j in range(degree):
                    if parallel[begin + j]:
                        variates[j] = mix_compiled(variates[j] + np.uint64(parallel[begin + j]) * _GOLDEN)
            _smallest(variates[:degree], least, places)
            for j in range(fanout):
                edge[m + j] = begin + places[j]
            m += fanout
        ends[t] = m
    return m


@numba.njit(nogil=True, cache=True)
def _smallest(variates: np.ndarray, least: np.ndarray, places: np.ndarray) -> None:
    """Write the places of the k smallest numbers, ascending, of equal ones the first; ``least`` is scratch."""
    k, count, largest = places.size, 0, 0
    # As many hashes as this are expected below the limit, rarely fewer than k: what is above is not sorted in.
    few = k + 4.0 * np.sqrt(k) + 4.0
    limit = np.uint64(2**64 - 1)
    if few < variates.size:
        limit = np.uint64(few / variates.size * 1.8446744073709550e19)
    while True:
        for j in range(variates.size):
            one = variates[j]
            if one > limit or (count == k and one >= least[largest]):
                continue
            if count < k:
                least[count], places[count] = one, j
                count += 1
            else:  # in the place of the largest, so that places of equal numbers keep the first
                least[largest], places[largest] = one, j
            if count == k:
                largest = 0
                for i in range(1, k):
                    if least[i] > least[largest] or (least[i] == least[largest] and places[i] > places[largest]):
                        largest = i
        if count == k:
            break
        count, limit = 0, np.uint64(2**64 - 1)
    places.sort()
