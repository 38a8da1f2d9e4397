"""Reads rows of a file with direct I/O: in sorted, merged ranges of blocks, with many reads in flight."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from lightning_gnn.features.feature_file import BLOCK_BYTES, FeatureFile
from lightning_gnn.features.read_queue import DEPTH, QUEUE_BYTES, ReadQueue, set_read, submit, wait
from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.lightning import rank_zero_info

AT_ONCE = 1 << 18  # maximum bytes of one read; a longer row is still read at once
THREADS = 8  # reader threads if the system lacks read queues; each issues one read at a time
_CORES_PER_QUEUE = 4  # one queue issues 300,000 block reads a second; more cores get a second thread and queue
_njit = numba.njit(nogil=True, cache=True)
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))
_memcpy: Any = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
_JOBS_PER_THREAD = 4  # for threads without a queue: small jobs balance the load when some reads are slow
SHORT, REFUSED = 1, -1  # status of a failed range: the file ended, or the system reported an error


class Ranges(NamedTuple):
    """Ranges of blocks that cover the requested rows."""

    first: npt.NDArray[np.int64]  # first block of each range, counted from the beginning of the file, int64 [n]
    blocks: npt.NDArray[np.int64]  # number of blocks of each range, int64 [n]
    begins: npt.NDArray[np.int64]  # offsets of each range's rows among the requested rows, int64 [n + 1]
    low: npt.NDArray[np.int64]  # first row that each range contains completely, int64 [n]
    high: npt.NDArray[np.int64]  # end of those rows, int64 [n]

    @classmethod
    def of(cls, file: FeatureFile, rows: npt.NDArray[np.int64]) -> Ranges:
        """Return the ranges that cover ``rows``, ascending int64 ``[n]``."""
        most = max(AT_ONCE // BLOCK_BYTES, 1)
        first, blocks, begins = _merge(rows, file.offset, file.row_bytes, most)
        begin, end = first * BLOCK_BYTES - file.offset, (first + blocks) * BLOCK_BYTES - file.offset
        low, high = np.maximum(-(-begin // file.row_bytes), 0), np.minimum(end // file.row_bytes, file.num_rows)
        return cls(first, blocks, begins, low, high)


class _Job(NamedTuple):
    """Ranges to read and the destinations of their rows; the fields follow :meth:`DirectReader.read`."""

    descriptor: int
    offset: int  # of the first row in the file, in bytes
    ranges: Ranges
    rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    out: npt.NDArray[np.uint8]
    slot: npt.NDArray[np.int32]
    stamps: npt.NDArray[np.int32]
    stamp: int
    slot_bytes: npt.NDArray[np.uint8]


class DirectReader:
    """Reads rows of a file in threads, bypassing the page cache if the file system supports it.

    With read queues, one or two threads have up to 256 reads in flight each; otherwise, eight threads read one range at
    a time.
    """

    def __init__(self, file: FeatureFile) -> None:
        self.file = file
        self.direct, self._descriptor = _open_for_reads(file.path)
        self.blocks_read = 0
        self.reads = 0
        self._start_threads()

    def _start_threads(self) -> None:
        """Create threads, queues and buffers; called again after a fork, which inherits only unusable ones."""
        self._process = os.getpid()
        queues = _create_queues() if self.direct else []
        self._queued = bool(queues)
        self._num_threads = len(queues) or THREADS
        # Direct I/O requires aligned buffers; an anonymous mapping is page-aligned.
        size = _all_buffers_bytes(self.file) // self._num_threads // BLOCK_BYTES * BLOCK_BYTES
        buffers = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(self._num_threads)]
        each: list[ReadQueue | None] = [*queues] or [None] * THREADS
        self._idle_buffers = list(zip(buffers, each, strict=True))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="lightning-gnn-disk")
        self._release = weakref.finalize(self, _release, self._threads, queues, self._descriptor)

    def close(self) -> None:
        """Wait for running reads, stop the threads and close the file. Idempotent."""
        self._threads.shutdown(cancel_futures=True)
        self._release()

    def read(
        self,
        ranges: Ranges,
        rows: npt.NDArray[np.int64],  # ascending, int64 [n]
        places: npt.NDArray[np.int64],  # destination of each row in out, int64 [n]
        out: npt.NDArray[np.uint8],  # output rows, uint8 [m, row_bytes]
        slot: npt.NDArray[np.int32],  # slot of each row of the file, or -1
        stamps: npt.NDArray[np.int32],  # stamp of each slot
        stamp: int,  # stamp of the slots to fill, from any row in the ranges
        slot_bytes: npt.NDArray[np.uint8],  # content of the slots, uint8 [num_slots, row_bytes]
    ) -> None:
        """Read rows into ``out``, and fill the cache slots that carry ``stamp``."""
        if not ranges.first.size:
            return
        if self._process != os.getpid():
            # Disable the inherited finalizers: the parent uses its queues, whose handles are only valid there.
            self._release.detach()
            for _, queue in self._idle_buffers:
                if queue is not None:
                    queue.close.detach()
            self._start_threads()
        ends = np.cumsum(ranges.blocks)
        num_jobs = min(self._num_threads if self._queued else self._num_threads * _JOBS_PER_THREAD, ranges.first.size)
        cuts = np.searchsorted(ends, np.linspace(0, ends[-1], num_jobs + 1)[1:-1])
        bounds = [0, *np.unique(cuts).tolist(), ranges.first.size]
        job = _Job(self._descriptor, self.file.offset, ranges, rows, places, out, slot, stamps, stamp, slot_bytes)
        jobs = [self._threads.submit(self._read, first, last, job) for first, last in pairwise(bounds) if last > first]
        failed = [error for job in jobs if (error := job.exception()) is not None]  # waits for all jobs
        if failed:
            raise failed[0]
        self.blocks_read += int(ends[-1])
        self.reads += ranges.first.size

    def _read(self, first: int, last: int, job: _Job) -> None:
        buffer, queue = idle = self._idle_buffers.pop()
        try:
            if queue is None:
                stopped, failed = _read_one_by_one(job, buffer, first, last)
            else:
                stopped, failed = _read_queued(job, buffer, first, last, queue.state, queue.reads, queue.got)
        finally:
            self._idle_buffers.append(idle)
        if stopped >= 0:
            self._raise_read_error(int(job.ranges.first[stopped]), int(job.ranges.blocks[stopped]), failed)

    def _raise_read_error(self, block: int, blocks: int, failed: int) -> None:
        """Raise an exception that explains a failed read."""
        begin, size, path = block * BLOCK_BYTES, blocks * BLOCK_BYTES, self.file.path
        if failed == REFUSED:  # repeat the read to get its errno
            try:
                os.preadv(self._descriptor, [mmap.mmap(-1, size)], begin)
            except OSError as error:
                raise OSError(error.errno, f"{path} cannot be read at byte {begin}: {error.strerror}") from None
            raise OSError(errno.EIO, f"{path} could not be read at byte {begin} at first; check its disk for errors")
        raise ValueError(
            f"{path} was truncated while in use: a read at byte {begin} returned {failed - SHORT} of {size} bytes; "
            "write it again"
        )


def reader_bytes(file: FeatureFile) -> int:
    """Return the bytes of the buffers and queues of a :class:`DirectReader`."""
    return _all_buffers_bytes(file) + _num_queues() * QUEUE_BYTES


def _all_buffers_bytes(file: FeatureFile) -> int:
    """Return the bytes of all buffers, enough for one longest read per thread, or two per queue."""
    return THREADS * max(AT_ONCE, -(-file.row_bytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES)


def _create_queues() -> list[ReadQueue]:
    """Return a queue for each thread, or an empty list if the system lacks them or has reached its limit."""
    try:
        return [ReadQueue() for _ in range(_num_queues())]
    except OSError:
        return []


def _num_queues() -> int:
    return 1 if num_cores() <= _CORES_PER_QUEUE else 2


def _open_for_reads(path: str) -> tuple[bool, int]:
    """Open a file; return whether direct I/O works, and the file descriptor."""
    if not hasattr(os, "pread"):
        raise OSError(errno.ENOSYS, "reading rows from disk requires pread, which this system lacks; omit memory=")
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
    rank_zero_info(f"{path} is read through the page cache, because its file system does not support direct I/O")
    return False, descriptor


def _release(threads: ThreadPoolExecutor, queues: list[ReadQueue], descriptor: int) -> None:
    # Does not join the threads, as the garbage collector may run this in any thread, also while one starts. None of
    # them reads any more: a read keeps its reader alive.
    threads.shutdown(wait=False)
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
        position = offset + rows[i] * row_bytes
        begin, end = position // BLOCK_BYTES, (position + row_bytes - 1) // BLOCK_BYTES + 1
        if n >= 0 and begin <= first[n] + blocks[n] and end - first[n] <= most:
            blocks[n] = max(blocks[n], end - first[n])
        else:
            n += 1
            first[n], blocks[n], begins[n] = begin, end - begin, i
    begins[n + 1] = rows.size
    return first[: n + 1].copy(), blocks[: n + 1].copy(), begins[: n + 2].copy()


@_njit
def extra_rows(
    begins: npt.NDArray[np.int64],
    low: npt.NDArray[np.int64],
    high: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    slot: npt.NDArray[np.int32],
    next_read: npt.NDArray[np.int32],
    never: int,
) -> npt.NDArray[np.int64]:
    """Return the announced, uncached rows that the ranges contain in addition to ``rows``, unique int64 ``[n]``."""
    # The array of found rows doubles as needed; `seen` prevents a row from being found in two overlapping ranges.
    found = np.empty(1024, np.int64)
    n, seen = 0, -1
    # Each range consists of whole blocks, and so can contain rows that were not requested.
    for k in range(low.size):
        i = begins[k]
        for row in range(max(low[k], seen + 1), high[k]):
            seen = row
            # Skip rows that are requested, already cached, or not needed by any announced mini-batch.
            while i < begins[k + 1] and rows[i] < row:
                i += 1
            is_requested = i < begins[k + 1] and rows[i] == row
            if is_requested or slot[row] >= 0 or next_read[row] == never:
                continue
            if n == found.size:
                found = np.concatenate((found, np.empty_like(found)))
            found[n] = row
            n += 1
    result: npt.NDArray[np.int64] = found[:n].copy()  # so that the larger array can be freed
    return result


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
def _read_one_by_one(job: _Job, buffer: npt.NDArray[np.uint8], begin: int, end: int) -> tuple[int, int]:
    """Read ranges one at a time; return the range that failed, or -1, and its status of :func:`_copy_range_out`."""
    for k in range(begin, end):
        failed = _copy_range_out(job, buffer, k, 0)
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
    """Read like :func:`_read_one_by_one`, with one half of the queue in flight while the other half is copied."""
    depth, capacity = DEPTH // 2, buffer.size // 2
    opened, count, pending = np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64)
    upcoming, half, stopped, failed = begin, 0, -1, 0
    while True:
        # This half has been copied completely: submit its next reads, unless one has failed.
        count[half] = used = 0
        opened[half] = upcoming
        while stopped < 0 and upcoming < end and count[half] < depth:
            size, number = job.ranges.blocks[upcoming] * BLOCK_BYTES, half * depth + count[half]
            if used + size > capacity:
                break
            address = buffer.ctypes.data + np.uintp(half * capacity + used)
            set_read(reads, number, job.descriptor, address, size, job.ranges.first[upcoming] * BLOCK_BYTES)
            count[half] += 1
            upcoming += 1
            used += size
        if count[half]:
            pending[half] = submit(state, reads, got, half * depth, count[half])
        # Continue with the other half, whose reads were submitted one iteration earlier.
        half = 1 - half
        if not count[half]:
            if not count[1 - half]:
                return stopped, failed
            continue
        if not wait(state, got, pending, half, depth):
            return opened[half], REFUSED
        used = half * capacity
        for number in range(count[half]):
            k = opened[half] + number
            size = job.ranges.blocks[k] * BLOCK_BYTES
            if stopped < 0:
                failed = _copy_range_out(job, buffer[used : used + size], k, got[half * depth + number])
                if failed:
                    stopped = k
            used += size


@_njit
def _copy_range_out(job: _Job, buffer: npt.NDArray[np.uint8], k: int, got: int) -> int:
    """Copy a range's rows to ``out`` and the cache; return 0, :data:`REFUSED`, or :data:`SHORT` plus the bytes read."""
    ranges, width, address = job.ranges, job.out.shape[1], buffer.ctypes.data
    start, size = ranges.first[k] * BLOCK_BYTES, ranges.blocks[k] * BLOCK_BYTES
    ahead = job.offset - start  # position of the file's first row relative to the buffer
    # Bytes of the range that requested and cached rows need; the loop below reads those still missing.
    needed = ahead + ranges.high[k] * width
    for i in range(ranges.begins[k], ranges.begins[k + 1]):
        needed = max(needed, ahead + (job.rows[i] + 1) * width)
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
    for i in range(ranges.begins[k], ranges.begins[k + 1]):
        source = address + np.uintp(ahead + job.rows[i] * width)
        _memcpy(job.out.ctypes.data + job.places[i] * width, source, width)
    for row in range(ranges.low[k], ranges.high[k]):
        slot = job.slot[row]
        if slot >= 0 and job.stamps[slot] == job.stamp:
            _memcpy(job.slot_bytes.ctypes.data + slot * width, address + np.uintp(ahead + row * width), width)
    return 0
