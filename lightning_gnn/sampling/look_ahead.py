"""Mini-batches sampled far ahead of the one whose features are read from disk, which then keeps what comes soonest."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.graph.disk_features import MOST_READS, DiskFeatures
from lightning_gnn.runtime.pipeline import OrderedPipeline
from lightning_gnn.sampling.packed import Packed

_AT_FIRST = 64
"""Mini-batches that are sampled before the first one is read, at most: what is read by then knows little of what comes,
and training waits for it. Then two for each one, until the window is full."""
_OUT_OF_TURN = 64
"""Mini-batches that may be read before an earlier one is."""
_NOTED_BYTES = 10
"""Of each node of a mini-batch that waits: what the window notes of it."""
_NO_NODES = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Drawn:
    """A mini-batch that has been sampled, and has no features yet.

    Args:
        out: What the sampler gave.
        key: The key of the mini-batch.
        part: Which part of a mini-batch it is, where that has been shared out.
    """

    out: Any
    key: int
    part: int
    seconds: float

    def nodes(self, kind: Any) -> Tensor:
        """Return whose features it needs, of a type, or of a graph without types for None."""
        node = self.out.node.get(kind) if isinstance(self.out.node, dict) else self.out.node
        return _NO_NODES if node is None else node


class Waiting:
    """A mini-batch that has been sampled and waits to be read, in few bytes."""

    def __init__(self, task: Any, drawn: Drawn) -> None:
        self.task = task
        self._packed, self._drawn = Packed(drawn.out), replace(drawn, out=None)

    def nodes(self, kind: Any) -> Tensor:
        """Return whose features it needs, as :meth:`Drawn.nodes`."""
        node = self._packed.nodes(kind)
        return _NO_NODES if node is None else node

    @property
    def num_bytes(self) -> int:
        """What it takes while it waits, with what the window notes of it, about."""
        return self._packed.num_bytes + _NOTED_BYTES * self._packed.num_nodes

    def is_of(self, key: int, task: Any) -> bool:
        """Say whether it is the mini-batch of a key and a task."""
        mine, other = self.task[2], task[2]
        if key != self._drawn.key or type(mine) is not type(other):
            return False
        if isinstance(mine, Tensor):
            return torch.equal(mine, other)
        return bool(mine == other) and getattr(mine, "first", 0) == getattr(other, "first", 0)

    def drawn(self) -> Drawn:
        """Return what was sampled."""
        return replace(self._drawn, out=self._packed.unpacked())


class LookAhead:
    """Samples an epoch's mini-batches ahead, and tells tables on disk which rows will be read when.

    Several threads may ask for mini-batches, about in order. Where one reads all of them in turn, which rows are read
    when follows from the mini-batches alone, never from time.

    Args:
        first: The number of the first one; the others follow one by one.
        tables: Those on disk, claimed, by the name of their attribute.
        lookahead: Mini-batches beyond the one that is read, or these and the bytes that they may take.
        num_threads: How many threads sample; 0 samples in that of who asks.
        ahead: How many mini-batches may have been sampled beyond those.
        beyond: The mini-batches of the next epoch. They are only announced, so that an epoch's end keeps what the next
            one begins with, and handed on.
        begun: Those of this epoch that the last one has handed on. Where the tables still know them, as what was left
            for ``begun``, they are not announced again.
    """

    def __init__(
        self,
        loader: Any,
        tasks: Iterable[Any],
        first: int,
        tables: Mapping[Any, DiskFeatures],
        lookahead: int | tuple[int, int],
        num_threads: int,
        ahead: int,
        beyond: Iterable[Any] = (),
        begun: Sequence[Waiting] = (),
    ) -> None:
        most, size = lookahead if isinstance(lookahead, tuple) else (lookahead, None)
        self._loader, self._tables = loader, tables
        self._release = weakref.finalize(self, _release, list(tables.values()))
        self._known = len(begun) if all(table.announced == len(begun) for table in tables.values()) else 0
        if not self._known:
            for table in tables.values():
                table.forget()
        draw = partial(_draw, loader, {each.task[:2]: each for each in begun})
        both = chain(((task, False) for task in tasks), ((task, True) for task in beyond))
        self._sampled = OrderedPipeline(both, draw, num_threads, max(ahead, 2 * num_threads))
        self.handed_on: list[Waiting] = []
        """The mini-batches of the next epoch that have been sampled."""
        closed = self._closed = threading.Event()
        source = takewhile(lambda _: not closed.is_set(), self._sampled)
        most = min(most, MOST_READS - 1 - _OUT_OF_TURN)
        self._window = _window(source, most, size, max(_AT_FIRST, len(begun)), self.handed_on)
        self._failure: BaseException | None = None
        self._pulling, self._lock = threading.Lock(), threading.Lock()
        self._next = first  # of the window
        self._held: dict[int, Waiting | BaseException] = {}
        self._new: deque[tuple[int, list[Waiting]]] = deque()  # to be announced before which one is read
        self._front, self._read = first, set[int]()  # the first one that has not been read, and later ones that have

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        """Return the number of the next mini-batch, once it has been sampled."""
        with self._pulling:
            return self._pull()

    def drawn(self, number: int, task: Any = None) -> Drawn:
        """Return a mini-batch, which will be read.

        Args:
            task: Its epoch, its number and the positions of its seeds. If they are others than it was sampled for, or
                it has been read already, it is sampled again.
        """
        self._sample_until(number)
        with self._lock:
            waiting = self._held.get(number)
        if isinstance(waiting, BaseException):
            raise waiting
        if waiting is not None and (task is None or waiting.is_of(self._loader.key_of(task), task)):
            return waiting.drawn()
        again: Drawn = self._loader.draw(task)
        return again

    def read(self, number: int) -> None:
        """Say that the rows of a mini-batch are read now: call it just before."""
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

    def prepare(self, number: int, task: Any = None) -> Any:
        """Return a mini-batch with its features, as the loader's ``prepare`` would; arguments of :meth:`drawn`."""
        drawn = self.drawn(number, task)
        self.read(number)
        return self._loader.join(drawn)

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
        """Cancel what has not begun, wait for the threads to end, and let others announce their reads.

        Where all of the epoch has been read, what is announced of the next one stays so, for who begins with it.
        """
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


class ReadInTurn:
    """Yields mini-batches that are sampled ahead, and read one after another."""

    def __init__(self, look_ahead: LookAhead, made: Any) -> None:
        self._look_ahead, self._made = look_ahead, made

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._made)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what has not begun, wait for the threads to end, and let others announce their reads."""
        self._made.close()
        self._look_ahead.close()


def claimed(tables: Mapping[Any, DiskFeatures], by: object = None) -> bool:
    """Take all tables to announce reads, or none where somebody else has one."""
    taken = [table for table in tables.values() if table.claim(by)]
    if len(taken) < len(tables):
        _release(taken)
    return len(taken) == len(tables)


def _release(tables: list[DiskFeatures], left_for: object = None) -> None:
    for table in tables:
        table.release(left_for)


def _draw(loader: Any, begun: dict[tuple[int, int], Waiting], task: tuple[Any, bool]) -> tuple[Waiting, bool] | None:
    """Sample a mini-batch, unless it has been; say whether it is of the next epoch, and return None where that fails.

    In its turn what has failed there fails again.
    """
    wanted, is_beyond = task
    known = begun.pop(wanted[:2], None)
    if known is not None and known.is_of(loader.key_of(wanted), wanted):
        return known, False
    try:
        return Waiting(wanted, loader.draw(wanted)), is_beyond
    except Exception:
        if is_beyond:
            return None
        raise


def _window(
    sampled: Iterable[tuple[Waiting, bool] | None], most: int, size: int | None, at_first: int, handed_on: list[Waiting]
) -> Generator[tuple[Waiting | BaseException, list[Waiting]]]:
    """Give each mini-batch with those that are to be announced before it is read.

    What fails is given in its turn, after all that came before it. Those of the next epoch are announced, and handed
    on.
    """
    waiting: deque[Waiting] = deque()
    new: list[Waiting] = []
    source: Iterator[tuple[Waiting, bool] | None] | None = iter(sampled)
    failure: BaseException | None = None
    read = held = 0
    while True:
        while source is not None and len(waiting) + len(handed_on) <= min(most, at_first + 2 * read):
            if (size is not None and held > size and waiting) or (handed_on and not waiting):
                break
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
                one, is_beyond = found
                (handed_on if is_beyond else waiting).append(one)
                new.append(one)
                held += one.num_bytes
        if not waiting:
            break
        first = waiting.popleft()
        held -= first.num_bytes
        read += 1
        yield first, new
        del first
        new = []
    if failure is not None:
        yield failure, new
