"""Reading rows of a file past the system's page cache: in sorted, merged ranges of blocks, many at once."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from pytorch_lightning.utilities import rank_zero_info

from lightning_gnn.features.feature_file import BLOCK_BYTES, FeatureFile
from lightning_gnn.features.read_queue import DEPTH, QUEUE_BYTES, ReadQueue, ask, submit, wait
from lightning_gnn.runtime.cores import num_cores

AT_ONCE = 1 << 18  # bytes that are read in one piece, more only for a row that is longer
THREADS = 8  # threads that read where the system has no queues: with one read at a time
_CORES_PER_QUEUE = 4  # one queue asks for 300,000 blocks a second; where cores abound, a second thread has another one
_njit = numba.njit(nogil=True, cache=True)
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))
_memcpy: Any = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
_SHARES = 4  # pieces of work for each thread that waits for one read at a time, so that a slow one holds up less
SHORT, REFUSED = 1, -1  # what may become of a range
Layout = tuple[int, int, int]  # where a file's rows begin, the bytes of a row, and how many rows there are


@dataclass(frozen=True)
class Ranges:
    """Ranges of blocks that hold some rows."""

    first: npt.NDArray[np.int64]  # first block of each, from the beginning of the file, int64 [n]
    blocks: npt.NDArray[np.int64]  # how many blocks, int64 [n]
    rows: npt.NDArray[np.int64]  # where the rows of each begin among those asked for, int64 [n + 1]

    @classmethod
    def of(cls, file: FeatureFile, rows: npt.NDArray[np.int64]) -> Ranges:
        """Return those of rows in ascending order, int64 ``[n]``."""
        most = max(AT_ONCE // BLOCK_BYTES, 1)
        return cls(*_merge(rows, file.offset, file.row_bytes, most))


class _Job(NamedTuple):
    """Ranges to read, and where their rows go."""

    descriptor: int
    first: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    out: npt.NDArray[np.uint8]
    slot: npt.NDArray[np.int32]
    stamps: npt.NDArray[np.int32]
    stamp: int
    kept: npt.NDArray[np.uint8]
    layout: Layout


class DirectReader:
    """Threads that read rows of a file, without the page cache where the file system can.

    Where reads can be queued, one thread, or two, keeps up to 256 of them under way; else eight threads wait for one
    each.
    """

    def __init__(self, file: FeatureFile) -> None:
        self.file = file
        self.direct, self._descriptor = _opened(file.path)
        self.blocks_read = 0
        self.reads = 0
        self._begin()

    def _begin(self) -> None:
        """Make what one process needs: a forked one has no threads, no queues, and shares its parent's buffers."""
        self._process = os.getpid()
        queues = _queues() if self.direct else []
        self._queued = bool(queues)
        self._num_threads = len(queues) or THREADS
        # What is mapped begins with a page, as direct reads want it.
        size = _all_buffers_bytes(self.file) // self._num_threads // BLOCK_BYTES * BLOCK_BYTES
        buffers = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(self._num_threads)]
        each: list[ReadQueue | None] = [*queues] or [None] * THREADS
        self._idle = list(zip(buffers, each, strict=True))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="lightning-gnn-disk")
        self.close = weakref.finalize(self, _close, self._threads, queues, self._descriptor)
        """Stop the threads and close the file; as often as you like."""

    def _forget_parent(self) -> None:
        """Leave to the process that this one was forked from what belongs to it, even where numbers are the same."""
        self.close.detach()
        for _, queue in self._idle:
            if queue is not None:
                queue.close.detach()

    def read(
        self,
        ranges: Ranges,
        rows: npt.NDArray[np.int64],  # ascending, int64 [n]
        places: npt.NDArray[np.int64],  # where each goes in out, int64 [n]
        out: npt.NDArray[np.uint8],  # bytes of rows, uint8 [m, row_bytes]
        slot: npt.NDArray[np.int32],  # slot of each row of the file, or -1
        stamps: npt.NDArray[np.int32],
        stamp: int,  # of the slots to fill, with any row that the ranges hold
        kept: npt.NDArray[np.uint8],  # bytes of the slots, uint8 [num_slots, row_bytes]
    ) -> None:
        """Read rows to where they are wanted, and to the cache what its slots with a certain stamp are for."""
        if not ranges.first.size:
            return
        if self._process != os.getpid():
            self._forget_parent()
            self._begin()
        ends = np.cumsum(ranges.blocks)
        shares = min(self._num_threads if self._queued else self._num_threads * _SHARES, ranges.first.size)
        cuts = np.searchsorted(ends, np.linspace(0, ends[-1], shares + 1)[1:-1])
        bounds = [0, *np.unique(cuts).tolist(), ranges.first.size]
        where = (ranges.first, ranges.blocks, ranges.rows, rows, places)
        job = _Job(self._descriptor, *where, out, slot, stamps, stamp, kept, layout_of(self.file))
        jobs = [self._threads.submit(self._share, first, last, job) for first, last in pairwise(bounds) if last > first]
        failed = [error for job in jobs if (error := job.exception()) is not None]  # all are waited for
        if failed:
            raise failed[0]
        self.blocks_read += int(ends[-1])
        self.reads += ranges.first.size

    def _share(self, first: int, last: int, job: _Job) -> None:
        buffer, queue = idle = self._idle.pop()
        try:
            if queue is None:
                stopped, failed = _read_in_turn(job, buffer, first, last)
            else:
                stopped, failed = _read_queued(job, buffer, first, last, queue.state, queue.reads, queue.got)
        finally:
            self._idle.append(idle)
        if stopped >= 0:
            self._explain(int(job.first[stopped]), int(job.blocks[stopped]), failed)

    def _explain(self, block: int, blocks: int, failed: int) -> None:
        """Raise what a failed read was about."""
        begin, size, path = block * BLOCK_BYTES, blocks * BLOCK_BYTES, self.file.path
        if failed == REFUSED:  # ask again, for the reason
            try:
                os.preadv(self._descriptor, [mmap.mmap(-1, size)], begin)
            except OSError as error:
                raise OSError(error.errno, f"{path} cannot be read at byte {begin}: {error.strerror}") from None
            raise OSError(errno.EIO, f"{path} could not be read at byte {begin} at first; is its disk failing?")
        raise ValueError(
            f"{path} was cut off while it was in use: {failed - SHORT} bytes came at byte {begin} instead of {size}; "
            "write it again"
        )


def layout_of(file: FeatureFile) -> Layout:
    """Return where a file's rows lie, for compiled code."""
    return file.offset, file.row_bytes, file.num_rows


def reader_bytes(file: FeatureFile) -> int:
    """Return what the buffers of a :class:`DirectReader` take in memory."""
    return _all_buffers_bytes(file) + _most_queues() * QUEUE_BYTES


def _all_buffers_bytes(file: FeatureFile) -> int:
    """Return the bytes of all buffers, with room for a longest read of each thread, and two of each queue."""
    return THREADS * max(AT_ONCE, -(-file.row_bytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES)


def _queues() -> list[ReadQueue]:
    """Return a queue for each thread, or none if the system has no such or no more of them."""
    try:
        return [ReadQueue() for _ in range(_most_queues())]
    except OSError:
        return []


def _most_queues() -> int:
    return 1 if num_cores() <= _CORES_PER_QUEUE else 2


def _opened(path: str) -> tuple[bool, int]:
    """Open a file for direct reads, or else for reads that leave nothing in the page cache; say which."""
    if not hasattr(os, "pread"):
        raise OSError(errno.ENOSYS, "rows are read from disk by pread, which this system lacks; leave memory= out")
    if hasattr(os, "O_DIRECT"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        else:
            probe = mmap.mmap(-1, BLOCK_BYTES)
            try:
                os.preadv(descriptor, [probe], 0)
                return True, descriptor
            except OSError as error:
                os.close(descriptor)
                if error.errno != errno.EINVAL:
                    raise
    descriptor = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    rank_zero_info(f"{path} is read through the page cache, as its file system has no direct reads")
    return False, descriptor


def _close(threads: ThreadPoolExecutor, queues: list[ReadQueue], descriptor: int) -> None:
    threads.shutdown(wait=True, cancel_futures=True)
    for queue in queues:
        queue.close()
    os.close(descriptor)


@_njit
def _merge(
    rows: npt.NDArray[np.int64], offset: int, row_bytes: int, most: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    first, blocks = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
    begins = np.empty(rows.size + 1, np.int64)
    n = -1
    for i in range(rows.size):
        at = offset + rows[i] * row_bytes
        begin, end = at // BLOCK_BYTES, (at + row_bytes - 1) // BLOCK_BYTES + 1
        if n >= 0 and begin <= first[n] + blocks[n] and end - first[n] <= most:
            blocks[n] = max(blocks[n], end - first[n])
        else:
            n += 1
            first[n], blocks[n], begins[n] = begin, end - begin, i
    begins[n + 1] = rows.size
    return first[: n + 1].copy(), blocks[: n + 1].copy(), begins[: n + 2].copy()


@_njit
def rows_beside(
    first: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    slot: npt.NDArray[np.int32],
    next_read: npt.NDArray[np.int32],
    never: int,
    layout: Layout,
) -> npt.NDArray[np.int64]:
    """Return the rows that come with others in the same blocks and are announced, int64 ``[n]``, each once."""
    # The array of found rows doubles as needed; `seen` prevents a row from being found in two overlapping reads.
    found = np.empty(1024, np.int64)
    n, seen = 0, -1
    # Each read covers whole blocks, and so rows beside those that were asked for.
    for k in range(first.size):
        low, high = _whole_rows(first[k], blocks[k], layout)
        at = begins[k]
        for row in range(max(low, seen + 1), high):
            seen = row
            # Skip what is asked for anyway, what is kept already, and what no announced mini-batch reads.
            while at < begins[k + 1] and rows[at] < row:
                at += 1
            asked = at < begins[k + 1] and rows[at] == row
            if asked or slot[row] >= 0 or next_read[row] == never:
                continue
            if n == found.size:
                found = np.concatenate((found, np.empty_like(found)))
            found[n] = row
            n += 1
    # Copy the rows found, so that the larger array can be freed.
    every: npt.NDArray[np.int64] = found[:n].copy()
    return every


@_njit
def _whole_rows(first: int, blocks: int, layout: Layout) -> tuple[int, int]:
    """Return the first row that lies within blocks as a whole, and the one after the last."""
    offset, row_bytes, num_rows = layout
    begin, end = first * BLOCK_BYTES - offset, (first + blocks) * BLOCK_BYTES - offset
    return max(-(-begin // row_bytes), 0), min(end // row_bytes, num_rows)


@_njit
def copy_rows(
    source: npt.NDArray[np.uint8],
    slots: npt.NDArray[np.int32],
    places: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
) -> None:
    """Copy rows ``slots`` of ``source`` to rows ``places`` of ``out``, all uint8 ``[…, row_bytes]``."""
    width = out.shape[1]
    for i in range(slots.size):
        _memcpy(out.ctypes.data + places[i] * width, source.ctypes.data + slots[i] * width, width)


@_njit
def _read_in_turn(job: _Job, buffer: npt.NDArray[np.uint8], begin: int, end: int) -> tuple[int, int]:
    """Return the range that could not be read and what :func:`_hand_out` said of it."""
    for k in range(begin, end):
        failed = _hand_out(job, buffer, k, 0)
        if failed:
            return k, failed
    return -1, 0


@_njit
def _read_queued(
    job: _Job,
    buffer: npt.NDArray[np.uint8],
    begin: int,
    end: int,
    state: npt.NDArray[np.int64],
    reads: npt.NDArray[np.int64],
    got: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Do as :func:`_read_in_turn`, with half of a queue under way while the other half is handed out."""
    most, room = DEPTH // 2, buffer.size // 2
    opened, count, pending = np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64)
    coming, half, stopped, failed = begin, 0, -1, 0
    while True:
        # All of this half has been handed out: it takes the next reads, unless one has failed.
        count[half] = taken = 0
        opened[half] = coming
        while stopped < 0 and coming < end and count[half] < most:
            size, number = job.blocks[coming] * BLOCK_BYTES, half * most + count[half]
            if taken + size > room:
                break
            address = buffer.ctypes.data + np.uintp(half * room + taken)
            ask(reads, number, job.descriptor, address, size, job.first[coming] * BLOCK_BYTES)
            count[half] += 1
            coming += 1
            taken += size
        if count[half]:
            pending[half] = submit(state, reads, got, half * most, count[half])
        half = 1 - half
        if not count[half]:
            if not count[1 - half]:
                return stopped, failed
            continue
        if not wait(state, got, pending, half, most):
            return opened[half], REFUSED
        taken = half * room
        for number in range(count[half]):
            k = opened[half] + number
            size = job.blocks[k] * BLOCK_BYTES
            if stopped < 0:
                failed = _hand_out(job, buffer[taken : taken + size], k, got[half * most + number])
                if failed:
                    stopped = k
            taken += size


@_njit
def _hand_out(job: _Job, buffer: npt.NDArray[np.uint8], k: int, got: int) -> int:
    """Copy a range's rows to where they go; return 0, :data:`REFUSED`, or :data:`SHORT` plus the bytes that came."""
    width, address = job.out.shape[1], buffer.ctypes.data
    start, size = job.first[k] * BLOCK_BYTES, job.blocks[k] * BLOCK_BYTES
    needed = 0  # bytes; those after the first `got` are read first
    for i in range(job.begins[k], job.begins[k + 1]):
        needed = max(needed, _begin_of(job.rows[i], job.layout) + width - start)
    got = max(got, 0)
    while got < needed:
        if got % BLOCK_BYTES:
            return SHORT + got  # the end of the file
        more = _pread(np.int32(job.descriptor), address + np.uintp(got), np.uintp(size - got), start + got)
        if more < 0:
            return REFUSED
        if more == 0:
            return SHORT + got
        got += more
    for i in range(job.begins[k], job.begins[k + 1]):
        at = _begin_of(job.rows[i], job.layout) - start
        _memcpy(job.out.ctypes.data + job.places[i] * width, address + at, width)
    low, high = _whole_rows(job.first[k], job.blocks[k], job.layout)
    for row in range(low, high):
        slot = job.slot[row]
        if slot >= 0 and job.stamps[slot] == job.stamp:
            at = _begin_of(row, job.layout) - start
            if at + width <= got:
                _memcpy(job.kept.ctypes.data + slot * width, address + at, width)
    return 0


@_njit
def _begin_of(row: int, layout: Layout) -> int:
    """Return where a row begins in the file."""
    offset, row_bytes, _ = layout
    return offset + row * row_bytes
