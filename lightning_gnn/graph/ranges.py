"""Contiguous ranges of equal work: what range-based partitioning gives to each worker of a group."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt


def balance_ranges(loads: npt.ArrayLike, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut a sequence into contiguous ranges such that the heaviest range is as light as possible.

    Exact: a binary search for the least maximum over prefix sums. Within it, each range in turn comes as near as it can
    to an even share of what is left; no range is empty where there are enough items.

    Args:
        loads: Work of each item, integer ``[num_items]``, none negative.
        parts: How many ranges.

    Returns:
        ``parts`` pairs ``(start, stop)`` that follow one another from 0 to ``num_items``; with fewer items than parts,
        each item has a range of its own and the ranges at the end are empty.

    Raises:
        TypeError: The loads are no integers.
        ValueError: A load is negative, the loads are not one-dimensional, or ``parts`` is less than 1.
    """
    loads = check_loads(loads)
    if parts < 1:
        raise ValueError(f"parts must be at least 1, but is {parts}")
    num_items = loads.size
    if num_items <= parts:
        bounds = [min(part, num_items) for part in range(parts + 1)]
    else:
        if not loads.any():
            loads = np.ones_like(loads)  # share out the items themselves
        prefix: np.ndarray = np.concatenate([[0], np.cumsum(loads)])
        bounds = _spread(prefix, parts, _least_maximum(prefix, int(loads.max()), parts))
    return tuple(pairwise(bounds))


def check_loads(loads: npt.ArrayLike) -> np.ndarray:
    """Return loads as int64 ``[num_items]``.

    Raises:
        TypeError: They are no integers.
        ValueError: They are not one-dimensional, or one is negative.
    """
    loads = np.asarray(loads)
    if loads.ndim != 1:
        raise ValueError(f"loads must have one dimension, but have the shape {list(loads.shape)}")
    if loads.size and not np.issubdtype(loads.dtype, np.integer):
        raise TypeError(f"loads must be whole numbers (edges), but are {loads.dtype}")
    if loads.size and loads.min() < 0:
        at = int(loads.argmin())
        raise ValueError(f"loads must not be negative, but loads[{at}] = {int(loads[at])}")
    return loads.astype(np.int64)


def _least_maximum(prefix: np.ndarray, heaviest: int, parts: int) -> int:
    """Return the least load that ``parts`` ranges need not exceed."""
    low = max(-(-int(prefix[-1]) // parts), heaviest)
    high = low + heaviest  # a greedy cut at the mean overshoots by less than one item
    while low < high:
        middle = (low + high) // 2
        if _fits(prefix, middle, parts):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(prefix: np.ndarray, limit: int, parts: int) -> bool:
    at, end = 0, prefix.size - 1
    for _ in range(parts):
        at = _reach(prefix, at, limit)
        if at == end:
            return True
    return False


def _reach(prefix: np.ndarray, start: int, limit: int) -> int:
    """Return the furthest stop of a range from ``start`` that is no heavier than ``limit``."""
    return int(np.searchsorted(prefix, prefix[start] + limit, side="right")) - 1


def _spread(prefix: np.ndarray, parts: int, limit: int) -> list[int]:
    """Return boundaries near even shares, with no range empty or heavier than ``limit``; items outnumber parts."""
    end = prefix.size - 1
    earliest = [0] * parts + [end]  # from which the rest still fits into the ranges that are left
    for part in range(parts - 1, 0, -1):
        earliest[part] = int(np.searchsorted(prefix, prefix[earliest[part + 1]] - limit, side="left"))
    bounds = [0]
    for part in range(1, parts):
        done = int(prefix[bounds[-1]])
        share = done + (int(prefix[-1]) - done) // (parts - part + 1)
        near = int(np.searchsorted(prefix, share, side="left"))
        if near and share - prefix[near - 1] < prefix[near] - share:
            near -= 1
        low = max(earliest[part], bounds[-1] + 1)
        high = min(_reach(prefix, bounds[-1], limit), end - (parts - part))
        bounds.append(min(max(near, low), high))
    return [*bounds, end]
