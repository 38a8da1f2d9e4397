"""Reading rows of a file past the system's page cache: in sorted, merged ranges of blocks, by several threads."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from pytorch_lightning.utilities import rank_zero_info

from lightning_gnn.graph.row_file import BLOCK_BYTES, RowFile, block_sums

AT_ONCE = 1 << 18
"""Bytes that a thread reads at once, more only for a row that is longer."""
_njit = numba.njit(nogil=True, cache=True)
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))
_memcpy: Any = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
_SHARES = 4
"""Pieces of work for each thread, so that a slow one holds up less."""


@dataclass(frozen=True)
class Ranges:
    """Ranges of blocks that hold some rows.

    Args:
        first: First block of each, from the beginning of the file, int64 ``[n]``.
        blocks: How many blocks, int64 ``[n]``.
        rows: Where the rows of each begin among those asked for, int64 ``[n + 1]``.
    """

    first: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    @classmethod
    def of(cls, file: RowFile, rows: npt.NDArray[np.int64]) -> Ranges:
        """Return those of rows in ascending order, int64 ``[n]``."""
        most = max(AT_ONCE // BLOCK_BYTES, 1)
        return cls(*_merge(rows, file.offset, file.rows_per_group, file.group_bytes, file.row_bytes, most))


class DirectReader:
    """Threads that read rows of a file, without the page cache where the file system can.

    Args:
        file: Where its rows lie.
        num_threads: Reads under way at once.
        verify: Compare each block with its checksum.

    Raises:
        OSError: The file cannot be opened.
        ValueError: There are no checksums to compare with.
    """

    def __init__(self, file: RowFile, num_threads: int = 8, verify: bool = False) -> None:
        self.file = file
        self.num_threads = num_threads
        self.sums = file.read_checksums() if verify else np.empty(0, np.uint32)
        self.direct, self._descriptor = _opened(file.path)
        self.blocks_read = 0
        self.reads = 0
        # What is mapped begins with a page, as direct reads want it.
        self._idle = [np.frombuffer(mmap.mmap(-1, _buffer_bytes(file)), np.uint8) for _ in range(num_threads)]
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lightning-gnn-disk")
        self.close = weakref.finalize(self, _close, self._threads, self._descriptor)
        """Stop the threads and close the file; as often as you like."""

    def read(
        self,
        ranges: Ranges,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
        slot: npt.NDArray[np.int32],
        stamps: npt.NDArray[np.int32],
        stamp: int,
        kept: npt.NDArray[np.uint8],
    ) -> None:
        """Read rows to where they are wanted, and to the cache what its slots with a certain stamp are for.

        Args:
            ranges: Those of the rows.
            rows: Ascending, int64 ``[n]``.
            places: Where each goes in ``out``, int64 ``[n]``.
            out: Bytes of rows, uint8 ``[m, row_bytes]``.
            slot: Slot of each row of the file, or -1.
            stamps: Of each slot.
            stamp: Of the slots to fill, with any row that the ranges hold.
            kept: Bytes of the slots, uint8 ``[num_slots, row_bytes]``.

        Raises:
            OSError: The disk refuses.
            ValueError: The file has become shorter, or a block differs from its checksum.
        """
        if not ranges.first.size:
            return
        ends = np.cumsum(ranges.blocks)
        shares = min(self.num_threads * _SHARES, ranges.first.size)
        cuts = np.searchsorted(ends, np.linspace(0, ends[-1], shares + 1)[1:-1])
        bounds = [0, *np.unique(cuts).tolist(), ranges.first.size]
        arguments = (ranges, rows, places, out, slot, stamps, stamp, kept)
        jobs = [
            self._threads.submit(self._share, first, last, *arguments)
            for first, last in pairwise(bounds)
            if last > first
        ]
        failed = [error for job in jobs if (error := job.exception()) is not None]  # all are waited for
        if failed:
            raise failed[0]
        self.blocks_read += int(ends[-1])
        self.reads += ranges.first.size

    def _share(self, first: int, last: int, ranges: Ranges, *arguments: Any) -> None:
        buffer = self._idle.pop()
        file = self.file
        layout = (file.offset, file.rows_per_group, file.group_bytes, file.row_bytes, file.num_rows)
        try:
            where = (ranges.first, ranges.blocks, ranges.rows)
            read: Any = _read_share
            stopped, got = read(self._descriptor, buffer, first, last, *where, *arguments, layout, self.sums)
        finally:
            self._idle.append(buffer)
        if stopped >= 0:
            self._explain(int(ranges.first[stopped]), int(ranges.blocks[stopped]), got)

    def _explain(self, block: int, blocks: int, got: int) -> None:
        """Raise what a failed read was about."""
        begin, size, path = block * BLOCK_BYTES, blocks * BLOCK_BYTES, self.file.path
        if got <= -2:
            bad = block - got - 2
            first = max(0, (bad * BLOCK_BYTES - self.file.offset) // self.file.group_bytes) * self.file.rows_per_group
            raise ValueError(
                f"{path} is damaged: the block at byte {bad * BLOCK_BYTES}, with row {first} and those after it, "
                "differs from its checksum; write the file again"
            )
        if got < 0:  # ask again, for the reason
            try:
                os.preadv(self._descriptor, [mmap.mmap(-1, size)], begin)
            except OSError as error:
                raise OSError(error.errno, f"{path} cannot be read at byte {begin}: {error.strerror}") from None
            raise OSError(errno.EIO, f"{path} could not be read at byte {begin} at first; is its disk failing?")
        raise ValueError(
            f"{path} was cut off while it was in use: {got} bytes came at byte {begin} instead of {size}; write "
            "it again"
        )


def reader_bytes(file: RowFile, num_threads: int, verify: bool) -> int:
    """Return what a :class:`DirectReader` takes in memory: buffers and checksums."""
    return num_threads * _buffer_bytes(file) + 4 * file.num_blocks * verify


def _buffer_bytes(file: RowFile) -> int:
    return max(AT_ONCE, -(-file.row_bytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES)


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


def _close(threads: ThreadPoolExecutor, descriptor: int) -> None:
    threads.shutdown(wait=True, cancel_futures=True)
    os.close(descriptor)


@_njit
def _merge(
    rows: npt.NDArray[np.int64], offset: int, per_group: int, group_bytes: int, row_bytes: int, most: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    first, blocks = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
    begins = np.empty(rows.size + 1, np.int64)
    n = -1
    for i in range(rows.size):
        at = offset + rows[i] // per_group * group_bytes + rows[i] % per_group * row_bytes
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
    layout: tuple[int, int, int, int, int],
) -> npt.NDArray[np.int64]:
    """Return the rows that come with others in the same blocks and are announced, int64 ``[n]``, each once."""
    found = np.empty(1024, np.int64)
    n, seen = 0, -1
    for k in range(first.size):
        low, high = _whole_rows(first[k], blocks[k], layout)
        at = begins[k]
        for row in range(max(low, seen + 1), high):
            seen = row
            while at < begins[k + 1] and rows[at] < row:
                at += 1
            asked = at < begins[k + 1] and rows[at] == row
            if asked or slot[row] >= 0 or next_read[row] == never:
                continue
            if n == found.size:
                found = np.concatenate((found, np.empty_like(found)))
            found[n] = row
            n += 1
    every: npt.NDArray[np.int64] = found[:n].copy()
    return every


@_njit
def _whole_rows(first: int, blocks: int, layout: tuple[int, int, int, int, int]) -> tuple[int, int]:
    """Return the first row that lies within blocks as a whole, and the one after the last."""
    offset, per_group, group_bytes, row_bytes, num_rows = layout
    begin, end = first * BLOCK_BYTES - offset, (first + blocks) * BLOCK_BYTES - offset
    if per_group == 1:
        low, high = -(-begin // group_bytes), (end - row_bytes) // group_bytes + 1
    else:  # a group is a block
        low, high = begin // group_bytes * per_group, end // group_bytes * per_group
    return max(low, 0), min(high, num_rows)


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
def _read_share(
    descriptor: int,
    buffer: npt.NDArray[np.uint8],
    begin: int,
    end: int,
    first: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
    slot: npt.NDArray[np.int32],
    stamps: npt.NDArray[np.int32],
    stamp: int,
    kept: npt.NDArray[np.uint8],
    layout: tuple[int, int, int, int, int],
    sums: npt.NDArray[np.uint32],
) -> tuple[int, int]:
    """Return the range that could not be read and how many bytes came, -1 for an error, below for a damaged block."""
    offset, per_group, group_bytes, width, _ = layout
    address, target, cache = buffer.ctypes.data, out.ctypes.data, kept.ctypes.data
    for k in range(begin, end):
        start, size = first[k] * BLOCK_BYTES, blocks[k] * BLOCK_BYTES
        needed = 0
        for i in range(begins[k], begins[k + 1]):
            at = offset + rows[i] // per_group * group_bytes + rows[i] % per_group * width
            needed = max(needed, at + width - start)
        got = 0
        while got < needed:
            more = _pread(np.int32(descriptor), address + np.uintp(got), np.uintp(size - got), start + got)
            if more < 0:
                return k, -1
            if more == 0:
                return k, got
            got += more
            if got < size and got % BLOCK_BYTES:
                break  # the end of the file
        if got < needed:
            return k, got
        if sums.size:
            found = block_sums(buffer[:size].view(np.uint64), BLOCK_BYTES // 8)
            for block in range(blocks[k]):
                if found[block] != sums[first[k] + block - offset // BLOCK_BYTES]:
                    return k, -2 - block
        for i in range(begins[k], begins[k + 1]):
            at = offset + rows[i] // per_group * group_bytes + rows[i] % per_group * width - start
            _memcpy(target + places[i] * width, address + at, width)
        low, high = _whole_rows(first[k], blocks[k], layout)
        for row in range(low, high):
            if slot[row] >= 0 and stamps[slot[row]] == stamp:
                at = offset + row // per_group * group_bytes + row % per_group * width - start
                if at + width <= got:
                    _memcpy(cache + slot[row] * width, address + at, width)
    return -1, 0
