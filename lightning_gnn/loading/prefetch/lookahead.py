"""Sampling far ahead of reading features from disk, so that the disk cache can apply Belady's rule."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, takewhile
from typing import TypeAlias, cast

from torch import Tensor
from torch_geometric.typing import NodeType

from lightning_gnn.features.disk_features import MOST_READS, DiskFeatures
from lightning_gnn.graph.stores import AttributeName
from lightning_gnn.loading.batch import NO_NODES, BatchTask, PreparedBatch, SampledBatch
from lightning_gnn.loading.collate import Allocator
from lightning_gnn.loading.compact_ids import CompactIds
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch.threads import ThreadPrefetcher

_FIRST_WINDOW = 64  # maximum mini-batches sampled before the first one is read; training waits for these
_MAX_OUT_OF_ORDER = 64  # maximum mini-batches that are read before an earlier one
_BOOKKEEPING_BYTES = 10  # additional bytes in the disk cache's window per node of a waiting mini-batch


class CompactSampledBatch:
    """A sampled mini-batch that waits for its features, in compact form."""

    def __init__(self, sampled: SampledBatch) -> None:
        self.task, self.key, self._seconds = sampled.task, sampled.key, sampled.seconds
        self._ids = CompactIds(sampled.out)

    def nodes(self, node_type: NodeType | None) -> Tensor:
        """Return the nodes of a type, like :meth:`SampledBatch.nodes`."""
        node = self._ids.nodes(node_type)
        return NO_NODES if node is None else node

    @property
    def num_bytes(self) -> int:
        """Approximate memory while it waits, in bytes."""
        return self._ids.num_bytes + _BOOKKEEPING_BYTES * self._ids.num_nodes

    def matches(self, key: int, task: BatchTask) -> bool:
        """Return whether this is the mini-batch of a key and task."""
        return key == self.key and self.task.is_same(task)

    def restore(self) -> SampledBatch:
        """Return the original sampled batch."""
        return SampledBatch(self.task, self._ids.decode(), self.key, self._seconds)


QueuedBatch: TypeAlias = tuple[CompactSampledBatch, bool] | None
"""A mini-batch, and whether it belongs to the next epoch; None after an error there, which recurs in that epoch."""


class Lookahead:
    """Creates a :class:`LookaheadWindow` per epoch, and passes mini-batches sampled early to the next epoch."""

    def __init__(
        self, pipeline: MiniBatchPipeline, size: int | tuple[int, int], num_threads: int = 0, ahead: int = 0
    ) -> None:
        self._pipeline, self.size, self._num_threads, self._ahead = pipeline, size, num_threads, ahead
        self._next_epoch_batches: list[CompactSampledBatch] = []

    def begin(
        self, tasks: Iterable[BatchTask], first: int, next_epoch: Iterable[BatchTask] = ()
    ) -> LookaheadWindow | None:
        """Return a window over an epoch from ``first`` on, which the caller must close; None without disk tables."""
        tables = self._pipeline.disk_tables
        # User code that requires the main thread may depend on training, so it is not run ahead.
        is_wanted = self.size != 0 and not self._pipeline.requires_main_thread
        if not (tables and is_wanted and try_acquire_tables(tables, self._next_epoch_batches)):
            return None
        presampled, self._next_epoch_batches = self._next_epoch_batches, []
        if presampled:  # discard them unless they belong to this epoch
            tasks = iter(tasks)
            head = [*islice(tasks, 1)]
            expected = (presampled[0].task.epoch, presampled[0].task.index)
            presampled = presampled if [(task.epoch, task.index) for task in head] == [expected] else []
            tasks = chain(head, tasks)
        window = LookaheadWindow(
            self._pipeline, tasks, first, tables, self.size, self._num_threads, self._ahead, next_epoch, presampled
        )
        self._next_epoch_batches = window.next_epoch_batches  # filled until the epoch ends
        return window


class LookaheadWindow:
    """Samples an epoch's mini-batches ahead and announces their reads to the disk tables. Thread-safe."""

    def __init__(
        self,
        pipeline: MiniBatchPipeline,
        tasks: Iterable[BatchTask],
        first: int,
        tables: Mapping[AttributeName, DiskFeatures],
        size: int | tuple[int, int],
        num_threads: int,
        ahead: int,
        next_epoch: Iterable[BatchTask] = (),
        presampled: Sequence[CompactSampledBatch] = (),
    ) -> None:
        most, most_bytes = size if isinstance(size, tuple) else (size, None)
        self._pipeline, self._tables = pipeline, tables
        self._release = weakref.finalize(self, _release, list(tables.values()))
        # The reads of these mini-batches are still announced, unless another loader has used the tables since.
        is_announced = all(table.announced == len(presampled) for table in tables.values())
        self._num_announced = len(presampled) if is_announced else 0
        if not self._num_announced:
            for table in tables.values():
                table.forget()
        sample = partial(_sample, pipeline, {(each.task.epoch, each.task.index): each for each in presampled})
        both = chain(((task, False) for task in tasks), ((task, True) for task in next_epoch))
        self._sampled = ThreadPrefetcher(sample, both, num_threads, max(ahead, 2 * num_threads))
        self.next_epoch_batches: list[CompactSampledBatch] = []  # sampled mini-batches of the next epoch
        closed = self._closed = threading.Event()
        source = cast("Iterator[QueuedBatch]", takewhile(lambda _: not closed.is_set(), self._sampled))
        most = min(most, MOST_READS - 1 - _MAX_OUT_OF_ORDER)
        self._window = _window(source, most, most_bytes, max(_FIRST_WINDOW, len(presampled)), self.next_epoch_batches)
        self._failure: BaseException | None = None
        self._pulling, self._lock = threading.Lock(), threading.Lock()
        self._next = first  # number of the next mini-batch to take from the window
        self._unread: dict[int, CompactSampledBatch | BaseException] = {}
        self._to_announce: deque[tuple[int, list[CompactSampledBatch]]] = deque()  # before reading which number
        self._first_unread, self._read_later = first, set[int]()  # numbers above _first_unread that have been read

    def numbers(self) -> Iterator[int]:
        """Yield the number of each mini-batch after it has been sampled."""
        while True:
            with self._pulling:
                try:
                    number = self._pull()
                except StopIteration:
                    return
            yield number

    def sampled(self, number: int, task: BatchTask | None = None) -> SampledBatch:
        """Return a sampled mini-batch; sample it again if it has already been read or does not match ``task``."""
        self._sample_until(number)
        with self._lock:
            waiting = self._unread.get(number)
        if isinstance(waiting, BaseException):
            raise waiting
        if waiting is not None and (task is None or waiting.matches(self._pipeline.key(task), task)):
            return waiting.restore()
        assert task is not None
        return self._pipeline.sample(task)

    def read(self, number: int) -> None:
        """Announce reads and advance the tables; call it just before reading the rows of a mini-batch."""
        self._sample_until(number)
        with self._lock:
            if self._unread.pop(number, None) is None:
                return
            self._read_later.add(number)
            while self._to_announce and self._to_announce[0][0] <= number:
                for waiting in self._to_announce.popleft()[1]:
                    if self._num_announced:
                        self._num_announced -= 1
                        continue
                    for name, table in self._tables.items():
                        table.announce(waiting.nodes(name[0] if isinstance(name, tuple) else None))
            while self._first_unread in self._read_later:
                self._read_later.remove(self._first_unread)
                self._first_unread += 1
                for table in self._tables.values():
                    table.advance()

    def prepare(self, number: int, task: BatchTask | None = None, allocate: Allocator | None = None) -> PreparedBatch:
        """Return a mini-batch with its features; see :meth:`sampled` and :meth:`MiniBatchPipeline.gather`."""
        sampled = self.sampled(number, task)
        self.read(number)
        return self._pipeline.gather(sampled, allocate)

    def _sample_until(self, number: int) -> None:
        with self._pulling:
            while number >= self._next:
                try:
                    self._pull()
                except StopIteration:
                    raise self._failure or RuntimeError(f"the epoch ends before mini-batch {number}") from None

    def _pull(self) -> int:
        waiting, new = next(self._window)
        if isinstance(waiting, BaseException):
            self._failure = waiting
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._unread[number] = waiting
            self._to_announce.append((number, new))
        return number

    def close(self) -> None:
        """Cancel pending tasks, join the threads and release the tables; the next epoch's reads stay announced."""
        self._closed.set()
        with self._pulling:
            is_complete = (
                self.next_epoch_batches and self._first_unread == self._next and next(self._window, None) is None
            )
            self._sampled.close()
            self._window.close()
        with self._lock:
            self._unread.clear()
            self._to_announce.clear()
        if self._release.detach():
            _release(list(self._tables.values()), self.next_epoch_batches if is_complete else None)


def try_acquire_tables(tables: Mapping[AttributeName, DiskFeatures], presampled: object = None) -> bool:
    """Acquire all tables for announcing reads, or none of them if another loader holds one; return the success."""
    acquired = [table for table in tables.values() if table.claim(presampled)]
    if len(acquired) < len(tables):
        _release(acquired)
    return len(acquired) == len(tables)


def _release(tables: list[DiskFeatures], left_for: object = None) -> None:
    for table in tables:
        table.release(left_for)


def _sample(
    pipeline: MiniBatchPipeline, presampled: dict[tuple[int, int], CompactSampledBatch], wanted: tuple[BatchTask, bool]
) -> QueuedBatch:
    """Return the presampled mini-batch of a task, or sample it; return None if this fails for the next epoch."""
    task, is_next_epoch = wanted
    earlier = presampled.pop((task.epoch, task.index), None)
    if earlier is not None and earlier.matches(pipeline.key(task), task):
        return earlier, False
    try:
        return CompactSampledBatch(pipeline.sample(task)), is_next_epoch
    except Exception:
        if is_next_epoch:
            return None
        raise


def _window(
    sampled: Iterable[QueuedBatch],
    most: int,
    size: int | None,
    at_first: int,
    next_epoch_batches: list[CompactSampledBatch],
) -> Generator[tuple[CompactSampledBatch | BaseException, list[CompactSampledBatch]]]:
    """Yield each mini-batch (or error) in order, with the batches whose reads must be announced before its read."""
    # `new` holds the mini-batches sampled since the last yield, whose reads are not announced yet.
    waiting: deque[CompactSampledBatch] = deque()
    new: list[CompactSampledBatch] = []
    source: Iterator[QueuedBatch] | None = iter(sampled)
    failure: BaseException | None = None
    read = waiting_bytes = 0
    while True:
        # The window starts small and grows by two mini-batches per read, so that the first one is available early.
        while source is not None and len(waiting) + len(next_epoch_batches) <= min(most, at_first + 2 * read):
            # The byte limit pauses sampling while a mini-batch is waiting; the end of this epoch stops it.
            if (size is not None and waiting_bytes > size and waiting) or (next_epoch_batches and not waiting):
                break
            # An error stops sampling immediately, but is yielded after the mini-batches before it.
            try:
                queued = next(source)
            except StopIteration:
                source = None
            except BaseException as error:
                source, failure = None, error
            else:
                if queued is None:
                    source = None
                    continue
                sampled_batch, is_next_epoch = queued
                (next_epoch_batches if is_next_epoch else waiting).append(sampled_batch)
                new.append(sampled_batch)
                waiting_bytes += sampled_batch.num_bytes
        if not waiting:
            break
        # Keep no reference to the mini-batch after the yield, so that the consumer can free its memory.
        first = waiting.popleft()
        waiting_bytes -= first.num_bytes
        read += 1
        yield first, new
        del first
        new = []
    if failure is not None:
        yield failure, new
