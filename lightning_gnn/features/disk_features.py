"""Features that stay on disk: read past the page cache, with what will be used soonest in a part of memory."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.features.disk_cache import NEVER, BeladyCache, location_bytes
from lightning_gnn.features.disk_reads import DirectReader, Ranges, copy_rows, layout_of, reader_bytes, rows_beside
from lightning_gnn.features.feature_file import FeatureFile
from lightning_gnn.features.memory_pool import pool
from lightning_gnn.runtime.messages import memory_bytes, shown

MOST_READS = 4096  # mini-batches that are looked ahead at most
_LEAST_ROWS = 64


@dataclass
class DiskCounts:
    """What reading has cost since it was last reset."""

    rows: int = 0
    hits: int = 0
    blocks: int = 0
    reads: int = 0

    def reset(self) -> None:
        """Set all figures to zero."""
        self.__init__()  # type: ignore[misc]


class DiskFeatures:
    """Features in a file of which a part is in memory: by Belady's rule, the rows that will be used soonest.

    What will be read may be announced (:meth:`announce`, :meth:`advance`); it changes what is read when, never what
    :meth:`gather` returns. Ranges of blocks are read by threads, with direct I/O where the file system has it.

    Args:
        file: A ``.npy`` file of float32, float16 or bfloat16 ``[num_nodes, num_features]``.
        memory: Bytes that all of this takes, such as ``"2GB"``: 12 bytes per row of the file, buffers, and the cache.

    Raises:
        OSError: The file is missing or cannot be read.
        TypeError, ValueError: It is no table of features, or the memory does not suffice.

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
        rows = self.file.num_rows
        if self.memory < (least := self.least_bytes(self.file)):
            raise ValueError(
                f"memory={shown(self.memory)} does not suffice to read {self.file.path} from disk: {rows} rows take "
                f"{shown(location_bytes(rows, MOST_READS))} to keep track of, and all together at least {shown(least)}"
            )
        self._reader = DirectReader(self.file)
        self.direct = self._reader.direct  # whether rows are read past the page cache
        more = (self.memory - least) // self.slot_bytes(self.file)
        self.cache_rows = min(rows, min(rows, _LEAST_ROWS) + more)  # rows that there is room for in memory
        self._where = BeladyCache(rows, self.cache_rows, MOST_READS)
        self._kept = np.empty((self.cache_rows, self.row_bytes), np.uint8)

    @staticmethod
    def slot_bytes(file: FeatureFile) -> int:
        """Return the bytes that a row in memory takes, with what says which row it is."""
        return file.row_bytes + 16

    @classmethod
    def least_bytes(cls, file: FeatureFile) -> int:
        """Return the least memory for a file: what each of its rows takes, buffers of the threads, and a few rows."""
        few = min(file.num_rows, _LEAST_ROWS) * cls.slot_bytes(file)
        return location_bytes(file.num_rows, MOST_READS) + reader_bytes(file) + few

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken in memory."""
        return self._where.num_bytes + self._kept.nbytes + reader_bytes(self.file)

    @property
    def announced(self) -> int:
        """Reads that are announced."""
        return self._where.announced

    def claim(self, by: object = None) -> bool:
        """Begin to announce reads, unless another one does; those that were left for ``by`` stay."""
        with self._lock:
            if self._claimed:
                return False
            self._claimed = True
            if by is not self._left_for:
                self._where.forget()
            return True

    def release(self, left_for: object = None) -> None:
        """Let others announce, and drop what was announced unless it is ``left_for`` who claims next."""
        with self._lock:
            self._left_for = left_for
            if left_for is None:
                self._where.forget()
            self._claimed = False

    def forget(self) -> None:
        """Drop what was announced; what is in memory stays."""
        with self._lock:
            self._where.forget()

    def announce(self, n_id: Tensor) -> None:
        """Add a read of some rows, int64 or int32 ``[n]`` within range, after those that were announced."""
        ids = self._checked(n_id)
        with self._lock:
            self._where.announce(ids)

    def advance(self) -> None:
        """Say that the first read of those announced comes now: call it just before :meth:`gather`."""
        with self._lock:
            self._where.advance()

    def gather(self, n_id: Tensor, out: Tensor | None = None, check: bool = False) -> Tensor:
        """Return the rows of some nodes, from memory or from the disk; safe in any thread.

        Args:
            n_id: Node ids, int64 or int32 ``[n]``, which always are checked; the rows come to where they are.
            out: Where to write, ``[n, num_features]`` of the table's dtype on the CPU; by default a buffer of the pool.

        Raises:
            IndexError: A node is out of range.
            OSError, ValueError: The disk refuses, the file was cut off, or ``out`` does not fit.
        """
        shape = (n_id.numel(), self.num_features)
        ids = self._checked(n_id)
        if out is None:
            out = pool.empty(shape, self.dtype)
        elif not (out.is_cpu and out.is_contiguous() and out.dtype == self.dtype and tuple(out.shape) == shape):
            raise ValueError(f"out must be {self.dtype} {list(shape)} on the CPU, one row after another")
        with self._lock:
            try:
                self._gather(ids, out.view(torch.uint8).numpy())
            except BaseException:
                self._where.clear()  # slots were given out that have not been filled
                raise
        return out if n_id.is_cpu else out.to(n_id.device)

    def _checked(self, n_id: Tensor) -> np.ndarray:
        ids = n_id.detach().cpu().numpy()
        if ids.dtype not in (np.int64, np.int32) or ids.ndim != 1:
            raise TypeError(f"node ids must be int64 or int32 [n], but are {n_id.dtype} {list(n_id.shape)}")
        if ids.size and not (ids.min() >= 0 and ids.max() < self.num_nodes):
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise IndexError(f"node {wrong} is out of range: {self.file.path} has {self.num_nodes} rows")
        return ids

    def _gather(self, ids: np.ndarray, out: np.ndarray) -> None:
        where, reader, file = self._where, self._reader, self.file
        # Copy the rows that memory holds.
        slots = where.slot[ids]
        there = np.flatnonzero(slots >= 0)
        copy_rows(self._kept, slots[there], there, out)
        places = np.flatnonzero(slots < 0)
        self.counts.rows += ids.size
        self.counts.hits += there.size
        # The remaining rows are read in the order of the file, so that neighboring ones share a read.
        if not places.size:
            return
        rows = ids[places].astype(np.int64)
        order = np.argsort(rows, kind="stable")
        rows, places = rows[order], places[order]
        ranges = Ranges.of(file, rows)
        # A row that occurs several times is kept once.
        first = np.concatenate([[True], rows[1:] != rows[:-1]])
        wanted = rows[first]
        # Rows in the same blocks that later mini-batches read are kept too, as they cost nothing more.
        if where.announced:
            beside = rows_beside(
                ranges.first, ranges.blocks, ranges.rows, rows, where.slot, where.next_read, NEVER, layout_of(file)
            )
            wanted = np.concatenate([wanted, beside])
        # Choose what is kept before the read, which writes kept rows to their slots directly.
        stamp = where.keep(wanted)
        before = reader.blocks_read, reader.reads
        reader.read(ranges, rows, places, out, where.slot, where.stamps, stamp, self._kept)
        self.counts.blocks += reader.blocks_read - before[0]
        self.counts.reads += reader.reads - before[1]

    def close(self) -> None:
        """End the threads and close the file."""
        self._reader.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.memory)

    def __repr__(self) -> str:
        share = self.cache_rows / max(self.num_nodes, 1)
        return (
            f"{type(self).__name__}({self.file.path}, num_nodes={self.num_nodes}, num_features={self.num_features}, "
            f"{self.file.dtype}, {share:.0%} in memory)"
        )
