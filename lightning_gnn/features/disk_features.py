"""Out-of-core features: read from disk with direct I/O, with a row cache in memory that follows Belady's rule."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.features.disk_cache import NEVER, BeladyCache, location_bytes
from lightning_gnn.features.disk_reads import DirectReader, Ranges, copy_rows, extra_rows, reader_bytes
from lightning_gnn.features.feature_file import FeatureFile
from lightning_gnn.features.memory_pool import pool
from lightning_gnn.runtime.messages import memory_bytes, shown

MOST_READS = 4096  # maximum number of announced mini-batches
_MIN_CACHE_ROWS = 64


@dataclass
class DiskCounts:
    """Rows gathered, rows found in the cache, blocks read from disk, and reads issued since the last reset."""

    rows: int = 0
    hits: int = 0
    blocks: int = 0
    reads: int = 0

    def reset(self) -> None:
        """Set all counts to zero."""
        self.__init__()  # type: ignore[misc]


class DiskFeatures:
    """Features in a file with a row cache in memory. By Belady's rule, it holds the rows that are read again soonest.

    Announcing future reads (:meth:`announce`, :meth:`advance`) improves the cache and never changes what :meth:`gather`
    returns. Threads read ranges of blocks, with direct I/O if the file system supports it.

    Args:
        file: A ``.npy`` file of float32, float16 or bfloat16 ``[num_nodes, num_features]``.
        memory: Total memory in bytes, such as ``"2GB"``: 12 bytes per row of the file, read buffers, and the cache.

    Raises:
        OSError: The file is missing or cannot be read.
        TypeError, ValueError: The file is not a feature table, or ``memory`` is too small.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from lightning_gnn.features import DiskFeatures, FeatureTable
        >>> x = torch.randn(1000, 16)
        >>> features = DiskFeatures(FeatureTable(x).save(tempfile.mkdtemp() + "/x.npy"), memory="3MB")
        >>> torch.equal(features.gather(torch.tensor([5, 900, 5])), x[[5, 900, 5]])
        True
        >>> features.counts
        DiskCounts(rows=3, hits=0, blocks=2, reads=2)
    """

    def __init__(self, file: FeatureFile | str | Path, memory: int | str) -> None:
        self.file = file if isinstance(file, FeatureFile) else FeatureFile.open(file)
        self.memory = memory_bytes(memory, "memory")
        self.num_nodes, self.num_features = self.file.num_rows, self.file.num_columns
        self.dtype, self.row_bytes = self.file.dtype, self.file.row_bytes
        self.counts = DiskCounts()
        self._lock = threading.RLock()
        self._claimed = False
        self._left_for: object = None
        self._releases = deque[object]()  # arguments of releases, applied once the lock is held
        rows = self.file.num_rows
        if self.memory < (least := self.least_bytes(self.file)):
            raise ValueError(
                f"memory={shown(self.memory)} is too small to read {self.file.path} from disk: use at least "
                f"{shown(least)}, of which {shown(location_bytes(rows, MOST_READS))} is the index of its {rows} rows"
            )
        self._reader = DirectReader(self.file)
        self.direct = self._reader.direct  # whether reads bypass the page cache
        more = (self.memory - least) // self.slot_bytes(self.file)
        self.cache_rows = min(rows, min(rows, _MIN_CACHE_ROWS) + more)  # capacity of the cache, in rows
        self._cache = BeladyCache(rows, self.cache_rows, MOST_READS)
        self._slot_bytes = np.empty((self.cache_rows, self.row_bytes), np.uint8)

    @staticmethod
    def slot_bytes(file: FeatureFile) -> int:
        """Return the bytes of a cached row, including its bookkeeping."""
        return file.row_bytes + 16

    @classmethod
    def least_bytes(cls, file: FeatureFile) -> int:
        """Return the minimum memory for a file: the index of its rows, the read buffers, and a few cached rows."""
        few = min(file.num_rows, _MIN_CACHE_ROWS) * cls.slot_bytes(file)
        return location_bytes(file.num_rows, MOST_READS) + reader_bytes(file) + few

    @property
    def num_bytes(self) -> int:
        """Memory in use, in bytes."""
        return self._cache.num_bytes + self._slot_bytes.nbytes + reader_bytes(self.file)

    @property
    def announced(self) -> int:
        """Number of announced reads."""
        with self._locked() as cache:
            return cache.announced

    def claim(self, by: object = None) -> bool:
        """Acquire the right to announce reads; return False if it is taken. Retains reads released for ``by``."""
        with self._locked() as cache:
            if self._claimed:
                return False
            self._claimed = True
            if by is not self._left_for:
                cache.forget()
            return True

    def release(self, left_for: object = None) -> None:
        """Stop being the announcer; announced reads are retained if ``left_for`` is the next to claim the table."""
        self._releases.append(left_for)  # no lock, as the garbage collector may call this in a thread that reads

    def forget(self) -> None:
        """Drop all announced reads; cached rows stay."""
        with self._locked() as cache:
            cache.forget()

    def announce(self, n_id: Tensor) -> None:
        """Append a read of some rows, int64 or int32 ``[n]`` within range, to the announced ones."""
        ids = self._as_ids(n_id)
        with self._locked() as cache:
            cache.announce(ids)

    def advance(self) -> None:
        """Remove the first announced read. Call it just before the :meth:`gather` of that read."""
        with self._locked() as cache:
            cache.advance()

    def gather(self, n_id: Tensor, out: Tensor | None = None, check: bool = False) -> Tensor:
        """Return the rows of some nodes, from the cache or from disk. Thread-safe.

        Args:
            n_id: Node ids, int64 or int32 ``[n]``, always checked. The rows are returned on their device.
            out: Output, ``[n, num_features]`` of the table's dtype on the CPU; by default a buffer of the pool.

        Raises:
            IndexError: A node id is out of range.
            OSError, ValueError: The disk read failed, the file was truncated, or ``out`` does not match.
        """
        shape = (n_id.numel(), self.num_features)
        ids = self._as_ids(n_id)
        if out is None:
            out = pool.empty(shape, self.dtype)
        elif not (out.is_cpu and out.is_contiguous() and out.dtype == self.dtype and tuple(out.shape) == shape):
            raise ValueError(f"out must be a contiguous {self.dtype} {list(shape)} on the CPU")
        with self._locked() as cache:
            try:
                self._gather(ids, out.view(torch.uint8).numpy())
            except BaseException:
                cache.clear()  # slots were assigned, but not filled
                raise
        return out if n_id.is_cpu else out.to(n_id.device)

    @contextmanager
    def _locked(self) -> Iterator[BeladyCache]:
        """Lock the table, apply its release, and yield its cache."""
        with self._lock:
            while self._releases:
                self._left_for, self._claimed = self._releases.popleft(), False
                if self._left_for is None:
                    self._cache.forget()
            yield self._cache

    def _as_ids(self, n_id: Tensor) -> np.ndarray:
        ids = n_id.detach().cpu().numpy()
        if ids.dtype not in (np.int64, np.int32) or ids.ndim != 1:
            raise TypeError(f"node ids must be int64 or int32 [n], but are {n_id.dtype} {list(n_id.shape)}")
        if ids.size and not (ids.min() >= 0 and ids.max() < self.num_nodes):
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise IndexError(f"node {wrong} is out of range: {self.file.path} has {self.num_nodes} rows")
        return ids

    def _gather(self, ids: np.ndarray, out: np.ndarray) -> None:
        cache, reader, file = self._cache, self._reader, self.file
        slots = cache.slot[ids]
        hits = np.flatnonzero(slots >= 0)
        copy_rows(self._slot_bytes, slots[hits], hits, out)
        misses = np.flatnonzero(slots < 0)
        self.counts.rows += ids.size
        self.counts.hits += hits.size
        # Read the remaining rows in file order, so that adjacent rows share a read.
        if not misses.size:
            return
        rows = ids[misses].astype(np.int64)
        order = np.argsort(rows, kind="stable")
        rows, misses = rows[order], misses[order]
        ranges = Ranges.of(file, rows)
        # A row that occurs several times is cached once.
        first = np.concatenate([[True], rows[1:] != rows[:-1]])
        to_cache = rows[first]
        # Also cache rows in the same blocks that later mini-batches need, since reading them costs nothing more.
        if cache.announced:
            extra = extra_rows(ranges.begins, ranges.low, ranges.high, rows, cache.slot, cache.next_read, NEVER)
            to_cache = np.concatenate([to_cache, extra])
        # Assign the slots before the read, which copies rows to their slots directly.
        stamp = cache.keep(to_cache)
        # As long as slots are free, also cache the rows in the same blocks that no announced mini-batch needs.
        cache.fill(ranges.low, ranges.high)
        before = reader.blocks_read, reader.reads
        reader.read(ranges, rows, misses, out, cache.slot, cache.stamps, stamp, self._slot_bytes)
        self.counts.blocks += reader.blocks_read - before[0]
        self.counts.reads += reader.reads - before[1]

    def close(self) -> None:
        """Stop the reader threads and close the file."""
        self._reader.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.memory)

    def __repr__(self) -> str:
        cached = self.cache_rows / max(self.num_nodes, 1)
        return (
            f"{type(self).__name__}({self.file.path}, num_nodes={self.num_nodes}, num_features={self.num_features}, "
            f"{self.file.dtype}, {cached:.0%} in memory)"
        )
