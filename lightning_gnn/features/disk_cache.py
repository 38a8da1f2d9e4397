"""Which rows of a file stay in memory: those that will be used soonest, as far as the coming reads are known.

Belady's rule, over a window of announced reads; other rows come after these, those used least recently go first.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

NEVER = 2**31 - 1  # the number of no read: a row that the window does not name
_FIRST_WINDOW = 1 << 10
_Ints = npt.NDArray[np.int32]
_njit = numba.njit(nogil=True, cache=True)


class _Slots(NamedTuple):
    """The slots of a cache, in a doubly linked list for each coming read."""

    slot: _Ints  # of each row, or -1
    row_of: _Ints  # of each slot, or -1
    links: _Ints  # slots before and after each in its list, or -1, [2, num_slots]
    ends: _Ints  # first and last slot of each list, or -1, [2, lists]
    counts: npt.NDArray[np.int64]  # slots taken; slots in the list of NEVER


def location_bytes(num_rows: int, most_reads: int) -> int:
    """Return what a :class:`BeladyCache` takes beside its slots, in bytes, while little is announced."""
    return 12 * num_rows + 8 * (most_reads + 2) + 8 * _FIRST_WINDOW + 16


@dataclass
class BeladyCache:
    """Which row is in which slot of a cache, and when it is read next."""

    num_rows: int  # rows of the file
    num_slots: int  # rows that the cache has room for
    most_reads: int  # reads that may be announced at once
    slot: _Ints = field(init=False)  # slot of each row, or -1, int32 [num_rows]
    next_read: _Ints = field(init=False)
    """Number of the announced read that is next to need each row, or ``NEVER``, int32 ``[num_rows]``."""
    _last: _Ints = field(init=False)
    _starts: list[tuple[int, int]] = field(init=False, default_factory=list)
    """Of each announced read, where its rows begin in the window, and how many they are."""

    def __post_init__(self) -> None:
        self.slot = np.full(self.num_rows, -1, np.int32)
        self.next_read = np.full(self.num_rows, NEVER, np.int32)
        self._last = np.full(self.num_rows, -1, np.int32)
        self._row_of = np.full(self.num_slots, -1, np.int32)
        self._links = np.full((2, self.num_slots), -1, np.int32)
        self._lists = self.most_reads + 2  # one for each coming read, by its number modulo; the last is that of NEVER
        self._ends = np.full((2, self._lists), -1, np.int32)
        self._stamp = np.zeros(self.num_slots, np.int32)
        self._counts = np.array([0, 0], np.int64)  # slots taken; slots in the list of NEVER
        self._ring = np.full((2, _FIRST_WINDOW), -1, np.int32)
        self._front = 0  # number of the next read
        self._round = 0

    @property
    def announced(self) -> int:
        """Reads that are known."""
        return len(self._starts)

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken, the window with them."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def announce(self, rows: npt.NDArray[Any]) -> None:
        """Add a read of some rows, integers ``[n]`` within range, after those known; a row may be named twice."""
        if len(self._starts) >= self.most_reads:
            raise ValueError(f"{self.most_reads} reads are announced already, which is all that there is room for")
        start = sum(self._starts[-1]) if self._starts else 0
        used = start - self._starts[0][0] if self._starts else 0
        if used + rows.size > self._ring.shape[1]:
            self._grow(used + rows.size)
            start = sum(self._starts[-1]) if self._starts else 0
        number = self._front + len(self._starts)
        count = _announce(rows, number, start, self._ring, self._last, self.next_read, self._state)
        self._starts.append((start, count))

    def advance(self) -> None:
        """Begin with the first read that was announced: what it needs is from now on needed for the next one."""
        start, count = self._starts.pop(0)
        _advance(start, count, self._ring, self.next_read, self._state)
        self._front += 1

    def forget(self) -> None:
        """Drop what was announced; the cache stays."""
        while self._starts:
            start, count = self._starts.pop()
            _forget(start, count, self._ring, self.next_read, self._state)

    def clear(self) -> None:
        """Drop what is in the cache, too."""
        self.forget()
        self.slot.fill(-1)
        self._row_of.fill(-1)
        self._links.fill(-1)
        self._ends.fill(-1)
        self._counts.fill(0)

    def keep(self, rows: npt.NDArray[np.int64]) -> int:
        """Give slots to rows being read, int64 ``[n]``, each once, that are needed sooner; return a stamp."""
        self._round += 1
        order = np.argsort(self.next_read[rows], kind="stable")
        _keep(rows[order], self._front, len(self._starts), self._round, self._stamp, self.next_read, self._state)
        return self._round

    @property
    def stamps(self) -> _Ints:
        """The round in which each slot was given out, int32 ``[num_slots]``."""
        return self._stamp

    @property
    def _state(self) -> _Slots:
        return _Slots(self.slot, self._row_of, self._links, self._ends, self._counts)

    def _grow(self, needed: int) -> None:
        """Let the window have room for so many rows, and a quarter more, with those there are at its beginning."""
        old, size = self._ring, self._ring.shape[1]
        first = self._starts[0][0] if self._starts else 0
        used = sum(self._starts[-1]) - first if self._starts else 0
        self._ring = np.full((2, needed + needed // 4), -1, np.int32)
        places = (first + np.arange(used)) % size
        self._ring[:, :used] = old[:, places]
        self._last[self._ring[0, :used]] = np.arange(used, dtype=np.int32)  # of a row named twice, the last one
        self._starts = [(start - first, count) for start, count in self._starts]


@_njit
def _unlink(slot: int, at: int, links: _Ints, ends: _Ints) -> None:
    before, after = links[0, slot], links[1, slot]
    if before >= 0:
        links[1, before] = after
    else:
        ends[0, at] = after
    if after >= 0:
        links[0, after] = before
    else:
        ends[1, at] = before


@_njit
def _append(slot: int, at: int, links: _Ints, ends: _Ints) -> None:
    last = ends[1, at]
    links[0, slot], links[1, slot] = last, -1
    if last >= 0:
        links[1, last] = slot
    else:
        ends[0, at] = slot
    ends[1, at] = slot


@_njit
def _list_of(read: int, lists: int) -> int:
    return lists - 1 if read == NEVER else read % (lists - 1)


@_njit
def _set_next(row: int, read: int, next_read: _Ints, state: _Slots) -> None:
    before = next_read[row]
    next_read[row] = read
    slot = state.slot[row]
    if slot >= 0:
        lists = state.ends.shape[1]
        _unlink(slot, _list_of(before, lists), state.links, state.ends)
        _append(slot, _list_of(read, lists), state.links, state.ends)
        state.counts[1] += (read == NEVER) - (before == NEVER)


@_njit
def _announce(
    rows: npt.NDArray[Any], number: int, start: int, ring: _Ints, last: _Ints, next_read: _Ints, state: _Slots
) -> int:
    size, count = ring.shape[1], 0
    for row in rows:
        before = last[row]
        if before >= 0 and ring[0, before] == row:
            if (before - start) % size < count:
                continue  # named twice
            ring[1, before] = number
        else:
            _set_next(row, number, next_read, state)
        place = (start + count) % size
        ring[0, place], ring[1, place] = row, NEVER
        last[row] = place
        count += 1
    return count


@_njit
def _advance(start: int, count: int, ring: _Ints, next_read: _Ints, state: _Slots) -> None:
    for place in range(start, start + count):
        at = place % ring.shape[1]
        _set_next(ring[0, at], ring[1, at], next_read, state)
        ring[0, at] = -1


@_njit
def _forget(start: int, count: int, ring: _Ints, next_read: _Ints, state: _Slots) -> None:
    for place in range(start, start + count):
        at = place % ring.shape[1]
        if next_read[ring[0, at]] != NEVER:
            _set_next(ring[0, at], NEVER, next_read, state)
        ring[0, at] = -1


@_njit
def _keep(
    rows: npt.NDArray[np.int64],
    front: int,
    announced: int,
    stamp: int,
    stamps: _Ints,
    next_read: _Ints,
    state: _Slots,
) -> None:
    slot, row_of, links, ends, counts = state
    lists, taken = ends.shape[1], counts[0]
    idle = counts[1]  # those that get into the list of NEVER now are not to be driven out again
    furthest = front + announced - 1
    for row in rows:
        read = next_read[row]
        if taken < row_of.size:
            place = taken
            taken += 1
        else:
            at = lists - 1
            if idle > 0:
                idle -= 1
                counts[1] -= 1
            else:
                while furthest > read and ends[0, furthest % (lists - 1)] < 0:
                    furthest -= 1
                if furthest <= read:  # of NEVER, always
                    break
                at = furthest % (lists - 1)
            place = ends[0, at]
            _unlink(place, at, links, ends)
            slot[row_of[place]] = -1
        slot[row], row_of[place], stamps[place] = place, row, stamp
        _append(place, _list_of(read, lists), links, ends)
        counts[1] += read == NEVER
    counts[0] = taken
