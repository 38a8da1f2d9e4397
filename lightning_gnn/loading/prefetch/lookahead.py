"""Mini-batches sampled far ahead of the one whose features are read from disk, which then keeps what comes soonest."""

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

_FIRST_WINDOW = 64  # mini-batches sampled before the first one is read, at most, for which training waits
_MAX_OUT_OF_ORDER = 64  # mini-batches that may be read before an earlier one is
_BOOKKEEPING_BYTES = 10  # what the window keeps besides of each node of a mini-batch that waits


class CompactSampledBatch:
    """A sampled mini-batch that waits to be read, in few bytes."""

    def __init__(self, sampled: SampledBatch) -> None:
        self.task, self.key, self._seconds = sampled.task, sampled.key, sampled.seconds
        self._ids = CompactIds(sampled.out)

    def nodes(self, node_type: NodeType | None) -> Tensor:
        """Return the nodes of a type, as :meth:`SampledBatch.nodes`."""
        node = self._ids.nodes(node_type)
        return NO_NODES if node is None else node

    @property
    def num_bytes(self) -> int:
        """About what it takes while it waits."""
        return self._ids.num_bytes + _BOOKKEEPING_BYTES * self._ids.num_nodes

    def is_of(self, key: int, task: BatchTask) -> bool:
        """Return whether it is the mini-batch of a key and a task."""
        return key == self.key and self.task.is_same(task)

    def restored(self) -> SampledBatch:
        """Return what was sampled."""
        return SampledBatch(self.task, self._ids.unpacked(), self.key, self._seconds)


QueuedBatch: TypeAlias = tuple[CompactSampledBatch, bool] | None
"""A mini-batch, and whether it is of the next epoch; None where one of that has failed, which it does again there."""


class Lookahead:
    """Begins a :class:`LookaheadWindow` for each epoch of a loader, and hands the end of one on to the next."""

    def __init__(
        self, pipeline: MiniBatchPipeline, size: int | tuple[int, int], num_threads: int = 0, ahead: int = 0
    ) -> None:
        self._pipeline, self.size, self._num_threads, self._ahead = pipeline, size, num_threads, ahead
        self._handed_on: list[CompactSampledBatch] = []

    def begin(
        self, tasks: Iterable[BatchTask], first: int, next_epoch: Iterable[BatchTask] = ()
    ) -> LookaheadWindow | None:
        """Return what samples an epoch ahead from ``first`` on, to be closed; None where nothing is on disk."""
        tables = self._pipeline.disk_tables
        # A sampler of the user's own that may change as training goes on is not run ahead of it.
        is_wanted = self.size != 0 and not self._pipeline.requires_main_thread
        if not (tables and is_wanted and try_acquire_tables(tables, self._handed_on)):
            return None
        known, self._handed_on = self._handed_on, []
        if known:  # unless it is another epoch than the one that was expected
            tasks = iter(tasks)
            head = [*islice(tasks, 1)]
            expected = (known[0].task.epoch, known[0].task.index)
            known = known if [(task.epoch, task.index) for task in head] == [expected] else []
            tasks = chain(head, tasks)
        window = LookaheadWindow(
            self._pipeline, tasks, first, tables, self.size, self._num_threads, self._ahead, next_epoch, known
        )
        self._handed_on = window.handed_on  # which fills until the epoch ends
        return window


class LookaheadWindow:
    """Samples an epoch's mini-batches ahead, and schedules the reads of tables on disk by them; safe across threads."""

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
        known: Sequence[CompactSampledBatch] = (),
    ) -> None:
        most, most_bytes = size if isinstance(size, tuple) else (size, None)
        self._pipeline, self._tables = pipeline, tables
        self._release = weakref.finalize(self, _release, list(tables.values()))
        self._known = len(known) if all(table.announced == len(known) for table in tables.values()) else 0
        if not self._known:
            for table in tables.values():
                table.forget()
        sample = partial(_sample, pipeline, {(each.task.epoch, each.task.index): each for each in known})
        both = chain(((task, False) for task in tasks), ((task, True) for task in next_epoch))
        self._sampled = ThreadPrefetcher(sample, both, num_threads, max(ahead, 2 * num_threads))
        self.handed_on: list[CompactSampledBatch] = []
        """The mini-batches of the next epoch that have been sampled."""
        closed = self._closed = threading.Event()
        source = cast("Iterator[QueuedBatch]", takewhile(lambda _: not closed.is_set(), self._sampled))
        most = min(most, MOST_READS - 1 - _MAX_OUT_OF_ORDER)
        self._window = _window(source, most, most_bytes, max(_FIRST_WINDOW, len(known)), self.handed_on)
        self._failure: BaseException | None = None
        self._pulling, self._lock = threading.Lock(), threading.Lock()
        self._next = first  # of the window
        self._held: dict[int, CompactSampledBatch | BaseException] = {}
        self._new: deque[tuple[int, list[CompactSampledBatch]]] = deque()  # to be announced before which one is read
        self._front, self._read = first, set[int]()  # the first one that has not been read, and later ones that have

    def numbers(self) -> Iterator[int]:
        """Yield the number of each mini-batch, once it has been sampled."""
        while True:
            with self._pulling:
                try:
                    number = self._pull()
                except StopIteration:
                    return
            yield number

    def sampled(self, number: int, task: BatchTask | None = None) -> SampledBatch:
        """Return a mini-batch, which will be read; sampled again if it has been read, or is not that of ``task``."""
        self._sample_until(number)
        with self._lock:
            waiting = self._held.get(number)
        if isinstance(waiting, BaseException):
            raise waiting
        if waiting is not None and (task is None or waiting.is_of(self._pipeline.key(task), task)):
            return waiting.restored()
        assert task is not None
        return self._pipeline.sample(task)

    def read(self, number: int) -> None:
        """Note that the rows of a mini-batch are read now: call it just before."""
        self._sample_until(number)
        with self._lock:
            if self._held.pop(number, None) is None:
                return
            self._read.add(number)
            while self._new and self._new[0][0] <= number:
                for waiting in self._new.popleft()[1]:
                    if self._known:
                        self._known -= 1
                        continue
                    for name, table in self._tables.items():
                        table.announce(waiting.nodes(name[0] if isinstance(name, tuple) else None))
            while self._front in self._read:
                self._read.remove(self._front)
                self._front += 1
                for table in self._tables.values():
                    table.advance()

    def prepare(self, number: int, task: BatchTask | None = None, allocate: Allocator | None = None) -> PreparedBatch:
        """Return a mini-batch with its features, as the pipeline would; arguments of both."""
        sampled = self.sampled(number, task)
        self.read(number)
        return self._pipeline.gather(sampled, allocate)

    def _sample_until(self, number: int) -> None:
        with self._pulling:
            while number >= self._next:
                try:
                    self._pull()
                except StopIteration:
                    raise self._failure or RuntimeError(f"there is no mini-batch {number}") from None

    def _pull(self) -> int:
        waiting, new = next(self._window)
        if isinstance(waiting, BaseException):
            self._failure = waiting
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._held[number] = waiting
            self._new.append((number, new))
        return number

    def close(self) -> None:
        """Cancel what has not begun, join the threads and release the tables; the next epoch's reads stay."""
        self._closed.set()
        with self._pulling:
            whole = self.handed_on and self._front == self._next and next(self._window, None) is None
            self._sampled.close()
            self._window.close()
        with self._lock:
            self._held.clear()
            self._new.clear()
        if self._release.detach():
            _release(list(self._tables.values()), self.handed_on if whole else None)


def try_acquire_tables(tables: Mapping[AttributeName, DiskFeatures], known: object = None) -> bool:
    """Acquire all tables for scheduling reads, or none where another loader has one."""
    taken = [table for table in tables.values() if table.claim(known)]
    if len(taken) < len(tables):
        _release(taken)
    return len(taken) == len(tables)


def _release(tables: list[DiskFeatures], left_for: object = None) -> None:
    for table in tables:
        table.release(left_for)


def _sample(
    pipeline: MiniBatchPipeline, known: dict[tuple[int, int], CompactSampledBatch], wanted: tuple[BatchTask, bool]
) -> QueuedBatch:
    """Sample a mini-batch, unless it is known, with whether it is of the next epoch; None where one of that fails."""
    task, is_next_epoch = wanted
    found = known.pop((task.epoch, task.index), None)
    if found is not None and found.is_of(pipeline.key(task), task):
        return found, False
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
    handed_on: list[CompactSampledBatch],
) -> Generator[tuple[CompactSampledBatch | BaseException, list[CompactSampledBatch]]]:
    """Yield each mini-batch, or the error in its turn, with those whose reads are to be scheduled before it is read."""
    # `new` holds the mini-batches sampled since the last yield, whose reads have yet to be scheduled.
    waiting: deque[CompactSampledBatch] = deque()
    new: list[CompactSampledBatch] = []
    source: Iterator[QueuedBatch] | None = iter(sampled)
    failure: BaseException | None = None
    read = held = 0
    while True:
        # The window starts small and grows by two mini-batches per read, so that the first mini-batch is not held up.
        while source is not None and len(waiting) + len(handed_on) <= min(most, at_first + 2 * read):
            # The byte limit pauses sampling if a mini-batch is waiting; an epoch that is used up ends it.
            if (size is not None and held > size and waiting) or (handed_on and not waiting):
                break
            # An error ends the sampling at once, but is kept until the mini-batches before it have been yielded.
            try:
                found = next(source)
            except StopIteration:
                source = None
            except BaseException as error:
                source, failure = None, error
            else:
                if found is None:
                    source = None
                    continue
                one, is_next_epoch = found
                (handed_on if is_next_epoch else waiting).append(one)
                new.append(one)
                held += one.num_bytes
        if not waiting:
            break
        # No reference to the mini-batch is kept after the yield, so that its memory can be freed by the consumer.
        first = waiting.popleft()
        held -= first.num_bytes
        read += 1
        yield first, new
        del first
        new = []
    if failure is not None:
        yield failure, new
