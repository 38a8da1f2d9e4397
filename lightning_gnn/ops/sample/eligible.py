"""Compiled search of the in-edges that are eligible at the time of a tree: a range of each list, because times ascend.

Lists are searched in blocks of nodes; every step prefetches data of the next. The last step compares vectors of times.
"""

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from lightning_gnn.ops.intrinsics import Call, instruction, prefetch

_SHIFT = 4
_SPAN = 1 << _SHIFT  # times that are compared at once, and the stride of the coarse times
_ROWS = 64  # nodes per block
_I16, _I64 = ir.IntType(16), ir.IntType(64)
_TIMES = ir.VectorType(_I64, _SPAN)


@instruction("times at limit", types.int64)
def early(call: Call) -> ir.Value:
    """Return a mask of 16 bits: which of the int64 times from ``at`` on are at most ``limit``."""
    builder = call.builder
    times = call.load_as(_TIMES, "times", call.integer("at"))
    limits = call.repeat(call.integer("limit"), _SPAN)
    mask = builder.bitcast(builder.icmp_signed("<=", times, limits), _I16)
    return builder.zext(mask, _I64)


@instruction("mask", types.int64)
def count_bits(call: Call) -> ir.Value:
    """Return the number of set bits."""
    return call.builder.ctpop(call.integer("mask"))


@numba.njit(nogil=True, cache=True)
def count_eligible(
    indptr: np.ndarray, time: np.ndarray, coarse: np.ndarray, node: np.ndarray, tree: np.ndarray, low: int, high: int,
    until: np.ndarray, after: np.ndarray, window: bool, newest: int, first: np.ndarray, count: np.ndarray,
) -> None:  # fmt: skip
    """Write the first eligible in-edge and the count for each node, at most ``newest`` unless negative."""
    chunks = np.empty(_ROWS, np.int64)
    for t in range(low, min(low + _ROWS, high)):
        prefetch(indptr, node[t])
    for block in range(low, high, _ROWS):
        stop = min(block + _ROWS, high)
        for t in range(block, stop):
            if t + _ROWS < high:
                prefetch(indptr, node[t + _ROWS])
            begin, end = indptr[node[t]], indptr[node[t] + 1]
            first[t - low], count[t - low] = begin, end
            prefetch(coarse, begin >> _SHIFT)
            prefetch(coarse, end >> _SHIFT)
        _find_ends(time, coarse, first, count, count, tree, until, block, stop, low, chunks)
        if window:
            _find_ends(time, coarse, first, count, first, tree, after, block, stop, low, chunks)
        for i in range(block - low, stop - low):
            end = count[i]
            begin = max(first[i], end - newest if newest >= 0 else 0)
            first[i], count[i] = begin, end - begin


@numba.njit(nogil=True, cache=True)
def _find_ends(
    time: np.ndarray, coarse: np.ndarray, first: np.ndarray, count: np.ndarray, out: np.ndarray, tree: np.ndarray,
    limits: np.ndarray, block: int, stop: int, low: int, chunks: np.ndarray,
) -> None:  # fmt: skip
    """Write the first position in each list with a time later than the limit of its tree, or the end of the list."""
    # The position is in the chunk of 16 before the first later time in the list's part of `coarse`.
    for t in range(block, stop):
        limit, at = limits[tree[t]], (first[t - low] + _SPAN - 1) >> _SHIFT
        left = ((count[t - low] + _SPAN - 1) >> _SHIFT) - at
        while left > _SPAN:
            half = left >> 1
            before = np.int64(coarse[at + half] <= limit)
            at += before * (half + 1)
            left = half - before * (1 - (left & 1))
        chunk = _end_of_early(coarse, at, at + left, limit) - 1
        prefetch(time, chunk << _SHIFT)
        prefetch(time, (chunk << _SHIFT) + _SPAN // 2)
        chunks[t - block] = chunk
    for t in range(block, stop):
        begin = chunks[t - block] << _SHIFT
        out[t - low] = _end_of_early(
            time, max(first[t - low], begin), min(count[t - low], begin + _SPAN), limits[tree[t]]
        )


@numba.njit(nogil=True, cache=True, inline="always")
def _end_of_early(times: np.ndarray, begin: int, end: int, limit: int) -> int:
    """Return the position of the first time later than the limit in a range of at most 16 times, or the range's end."""
    if times.size < _SPAN:
        while begin < end and times[begin] <= limit:
            begin += 1
        return begin
    # Always compare 16 times, and mask those outside the range.
    at = max(min(begin, times.size - _SPAN), 0)
    inside = ((1 << max(end - at, 0)) - 1) & -(1 << (begin - at))
    early_ones: int = count_bits(early(times, at, limit) & inside)
    return begin + early_ones
