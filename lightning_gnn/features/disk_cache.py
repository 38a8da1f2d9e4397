"""Eviction policy of the disk cache: Belady's rule over a window of announced reads.

Rows that no announced read needs are evicted first (least recently used), then those whose next read is furthest away.
Free slots also take rows that were read only because they share a block with others. These are evicted before all.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

NEVER = 2**31 - 1  # next read of a row that no announced read needs
_FIRST_WINDOW = 1 << 10
_Ints = npt.NDArray[np.int32]
_njit = numba.njit(nogil=True, cache=True)


class _Slots(NamedTuple):
    """Cache slots, grouped by their next read: one doubly linked list per announced read, and one for ``NEVER``."""

    slot: _Ints  # slot of each row, or -1
    row_of: _Ints  # row in each slot, or -1
    links: _Ints  # previous and next slot of each slot in its list, or -1, [2, num_slots]
    ends: _Ints  # first and last slot of each list, or -1, [2, lists]
    counts: npt.NDArray[np.int64]  # number of used slots; number of slots in the list of NEVER


def location_bytes(num_rows: int, most_reads: int) -> int:
    """Return the bytes of a :class:`BeladyCache` without its slots and with the smallest window."""
    return 12 * num_rows + 8 * (most_reads + 2) + 8 * _FIRST_WINDOW + 16


@dataclass
class BeladyCache:
    """Maps rows of a file to cache slots and tracks the next announced read of each row."""

    num_rows: int  # rows of the file
    num_slots: int  # capacity of the cache, in rows
    most_reads: int  # maximum number of announced reads
    slot: _Ints = field(init=False)  # slot of each row, or -1, int32 [num_rows]
    next_read: _Ints = field(init=False)  # number of each row's first announced read, or NEVER, int32 [num_rows]
    _last_position: _Ints = field(init=False)  # last window position of each row, or -1
    _window_ranges: list[tuple[int, int]] = field(init=False, default_factory=list)  # (start, length) of each read

    def __post_init__(self) -> None:
        self.slot = np.full(self.num_rows, -1, np.int32)
        self.next_read = np.full(self.num_rows, NEVER, np.int32)
        self._last_position = np.full(self.num_rows, -1, np.int32)
        self._row_in_slot = np.full(self.num_slots, -1, np.int32)
        self._links = np.full((2, self.num_slots), -1, np.int32)
        self._lists = self.most_reads + 2  # one per announced read, by its number modulo, and one for NEVER
        self._ends = np.full((2, self._lists), -1, np.int32)
        self.stamps = np.zeros(self.num_slots, np.int32)  # with which each slot was last assigned, int32 [num_slots]
        self._counts = np.array([0, 0], np.int64)
        # Ring buffer of the rows of all announced reads, each with the number of the following read of the same row.
        self._window = np.full((2, _FIRST_WINDOW), -1, np.int32)
        self._first = 0  # number of the first announced read
        self._round = 0

    @property
    def announced(self) -> int:
        """Number of announced reads."""
        return len(self._window_ranges)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, including the window."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def announce(self, rows: npt.NDArray[Any]) -> None:
        """Append a read of rows to the window: integers ``[n]`` within range, duplicates allowed."""
        if len(self._window_ranges) >= self.most_reads:
            raise ValueError(f"{self.most_reads} reads are already announced, which is the maximum")
        start = sum(self._window_ranges[-1]) if self._window_ranges else 0
        used = start - self._window_ranges[0][0] if self._window_ranges else 0
        if used + rows.size > self._window.shape[1]:
            self._grow(used + rows.size)
            start = sum(self._window_ranges[-1]) if self._window_ranges else 0
        number = self._first + len(self._window_ranges)
        count = _announce(rows, number, start, self._window, self._last_position, self.next_read, self._state)
        self._window_ranges.append((start, count))

    def advance(self) -> None:
        """Remove the first announced read from the window; its rows move on to their following read."""
        start, count = self._window_ranges.pop(0)
        _advance(start, count, self._window, self.next_read, self._state)
        self._first += 1

    def forget(self) -> None:
        """Remove all announced reads; cached rows stay."""
        while self._window_ranges:
            start, count = self._window_ranges.pop()
            _cancel_read(start, count, self._window, self.next_read, self._state)

    def clear(self) -> None:
        """Remove all announced reads and all cached rows."""
        self.forget()
        self.slot.fill(-1)
        self._row_in_slot.fill(-1)
        self._links.fill(-1)
        self._ends.fill(-1)
        self._counts.fill(0)

    def keep(self, rows: npt.NDArray[np.int64]) -> int:
        """Assign slots to those of the unique ``rows``, int64 ``[n]``, that are needed sooner; return a stamp."""
        self._round += 1
        order = np.argsort(self.next_read[rows], kind="stable")
        _assign_slots(rows[order], self._first, self.announced, self._round, self.stamps, self.next_read, self._state)
        return self._round

    def fill(self, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> None:
        """Assign free slots, with the last stamp, to unannounced rows ``low[k]`` to ``high[k] - 1``, int64 ``[n]``."""
        if self._counts[0] < self.num_slots:
            _fill_free_slots(low, high, self._round, self.stamps, self.next_read, self._state)

    @property
    def _state(self) -> _Slots:
        return _Slots(self.slot, self._row_in_slot, self._links, self._ends, self._counts)

    def _grow(self, needed: int) -> None:
        """Enlarge the window to 1.25 ``needed`` rows and move its content to the beginning."""
        old, size = self._window, self._window.shape[1]
        first = self._window_ranges[0][0] if self._window_ranges else 0
        used = sum(self._window_ranges[-1]) - first if self._window_ranges else 0
        self._window = np.full((2, needed + needed // 4), -1, np.int32)
        self._window[:, :used] = old[:, (first + np.arange(used)) % size]
        # NumPy assigns in order, so a row that occurs twice gets its last position.
        self._last_position[self._window[0, :used]] = np.arange(used, dtype=np.int32)
        self._window_ranges = [(start - first, count) for start, count in self._window_ranges]


@_njit
def _remove_from_list(slot: int, list_index: int, links: _Ints, ends: _Ints) -> None:
    previous, following = links[0, slot], links[1, slot]
    if previous >= 0:
        links[1, previous] = following
    else:
        ends[0, list_index] = following
    if following >= 0:
        links[0, following] = previous
    else:
        ends[1, list_index] = previous


@_njit
def _append(slot: int, list_index: int, links: _Ints, ends: _Ints) -> None:
    last = ends[1, list_index]
    links[0, slot], links[1, slot] = last, -1
    if last >= 0:
        links[1, last] = slot
    else:
        ends[0, list_index] = slot
    ends[1, list_index] = slot


@_njit
def _list_index(read: int, lists: int) -> int:
    return lists - 1 if read == NEVER else read % (lists - 1)


@_njit
def _set_next_read(row: int, read: int, next_read: _Ints, state: _Slots) -> None:
    previous_read = next_read[row]
    next_read[row] = read
    slot = state.slot[row]
    if slot >= 0:
        lists = state.ends.shape[1]
        _remove_from_list(slot, _list_index(previous_read, lists), state.links, state.ends)
        _append(slot, _list_index(read, lists), state.links, state.ends)
        state.counts[1] += (read == NEVER) - (previous_read == NEVER)


@_njit
def _announce(
    rows: npt.NDArray[Any], number: int, start: int, window: _Ints, last: _Ints, next_read: _Ints, state: _Slots
) -> int:
    size, count = window.shape[1], 0
    for row in rows:
        earlier = last[row]
        if earlier >= 0 and window[0, earlier] == row:
            if (earlier - start) % size < count:
                continue  # a duplicate within this read
            window[1, earlier] = number
        else:
            _set_next_read(row, number, next_read, state)
        position = (start + count) % size
        window[0, position], window[1, position] = row, NEVER
        last[row] = position
        count += 1
    return count


@_njit
def _advance(start: int, count: int, window: _Ints, next_read: _Ints, state: _Slots) -> None:
    for i in range(start, start + count):
        position = i % window.shape[1]
        _set_next_read(window[0, position], window[1, position], next_read, state)
        window[0, position] = -1


@_njit
def _cancel_read(start: int, count: int, window: _Ints, next_read: _Ints, state: _Slots) -> None:
    for i in range(start, start + count):
        position = i % window.shape[1]
        if next_read[window[0, position]] != NEVER:
            _set_next_read(window[0, position], NEVER, next_read, state)
        window[0, position] = -1


@_njit
def _assign_slots(
    rows: npt.NDArray[np.int64],
    first_number: int,
    announced: int,
    stamp: int,
    stamps: _Ints,
    next_read: _Ints,
    state: _Slots,
) -> None:
    slot, row_of, links, ends, counts = state
    lists, used = ends.shape[1], counts[0]
    idle = counts[1]  # counted once, so that rows added to the list of NEVER below are not evicted again
    furthest = first_number + announced - 1
    for row in rows:
        read = next_read[row]
        if used < row_of.size:
            target = used
            used += 1
        else:
            # Evict a row without an announced read; failing that, one with the furthest read, if later than this row's.
            evict_from = lists - 1
            if idle > 0:
                idle -= 1
                counts[1] -= 1
            else:
                while furthest > read and ends[0, furthest % (lists - 1)] < 0:
                    furthest -= 1
                if furthest <= read:  # always true for NEVER
                    break
                evict_from = furthest % (lists - 1)
            target = ends[0, evict_from]
            _remove_from_list(target, evict_from, links, ends)
            slot[row_of[target]] = -1
        slot[row], row_of[target], stamps[target] = target, row, stamp
        _append(target, _list_index(read, lists), links, ends)
        counts[1] += read == NEVER
    counts[0] = used


@_njit
def _fill_free_slots(
    low: npt.NDArray[np.int64], high: npt.NDArray[np.int64], stamp: int, stamps: _Ints, next_read: _Ints, state: _Slots
) -> None:
    slot, row_of, links, ends, counts = state
    for k in range(low.size):
        for row in range(low[k], high[k]):
            target = counts[0]
            if target == row_of.size:
                return
            if slot[row] < 0 and next_read[row] == NEVER:
                slot[row], row_of[target], stamps[target] = target, row, stamp
                # Reversed arrays make it the first of its list, which is the next to be evicted.
                _append(target, ends.shape[1] - 1, links[::-1], ends[::-1])
                counts += 1  # a used slot, and one in the list of NEVER
