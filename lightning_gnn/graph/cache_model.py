"""Which order of the rows a CPU aggregates faster: a small model of its caches, the same on every machine and rank.

An entry costs some time, and more if its source is not in the level-2 cache. There stay the sources that are read most,
and of the others those that were read last. The figures were fitted to times measured on one core of a server.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]

PIECE_BYTES = 256
"""Of a source that is read at a time: a slice of 64 columns of float32."""
POPULAR, LAST = 1024, 3072
"""Sources in a level-2 cache of 1 MB: those that are read most, and those that were read last."""
SHARED_BYTES = 16 << 20
"""What is had of the cache behind it, which others share."""
HIT, NEAR_MISS, FAR_MISS, SCATTERED_ROW = 3.5, 10.0, 30.0, 20.0
"""Nanoseconds of an entry; more for a source in the shared cache, or in memory; and of a row that is written out of
turn."""
GAIN = 0.9
"""An order that needs more than this part of the natural order's time is not worth its making."""


def order_cost(rows: _Array, indptr: _Array, indices: _Array, offsets: _Array) -> float:
    """Return the milliseconds of an aggregation of 64 columns on one core, with the rows in this order.

    Args:
        rows: Vertices in order, int32 ``[V]``.
        indptr: First entry of each vertex, int64 ``[V + 1]``.
        indices: Source of each entry, ``[E]``.
        offsets: First entry of each source in the transpose, int64 ``[C + 1]``: how often it is read.
    """
    misses = count_misses(rows, indptr, indices, _popular(offsets), LAST)
    return _milliseconds(offsets, misses, int((np.diff(rows) != 1).sum()))


def least_cost(offsets: _Array, num_rows: int) -> float:
    """Return what the best of all orders could cost: every source is loaded once, and rows are written anywhere."""
    loaded = (np.diff(offsets) > 0) & ~_popular(offsets)
    return _milliseconds(offsets, int(loaded.sum()), num_rows)


def _milliseconds(offsets: _Array, misses: int, scattered: int) -> float:
    far = max(0.0, 1 - SHARED_BYTES / (offsets.size * PIECE_BYTES))  # the part of the sources that is in memory alone
    miss = NEAR_MISS + far * (FAR_MISS - NEAR_MISS)
    return float(offsets[-1] * HIT + misses * miss + scattered * SCATTERED_ROW) * 1e-6


def _popular(offsets: _Array) -> npt.NDArray[np.bool_]:
    reads = np.diff(offsets)
    popular = np.zeros(reads.size, np.bool_)
    popular[np.argsort(-reads, kind="stable")[:POPULAR]] = True
    return popular


@numba.njit(nogil=True, cache=True)
def count_misses(rows: _Array, indptr: _Array, indices: _Array, popular: _Array, size: int) -> int:
    """Count the entries whose source is in no cache of ``size`` sources, which is emptied whenever it is full.

    Args:
        rows: Vertices in order, int32 ``[V]``.
        indptr: First entry of each vertex, int64 ``[V + 1]``.
        indices: Source of each entry, ``[E]``.
        popular: Sources that have a place of their own, bool ``[C]``.
        size: At least 1.
    """
    stamps = np.zeros(popular.size, np.int64)  # a source is in the cache where this is the window's stamp
    misses = held = 0
    stamp = 1
    for row in rows:
        for e in range(indptr[row], indptr[row + 1]):
            source = indices[e]
            if not popular[source] and stamps[source] != stamp:
                stamps[source] = stamp
                misses += 1
                held += 1
                if held == size:
                    stamp += 1
                    held = 0
    return misses
