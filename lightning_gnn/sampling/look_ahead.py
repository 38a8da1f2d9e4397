"""Mini-batches sampled far ahead of the one whose features are read from disk, which then keeps what comes soonest."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.graph.disk_features import MOST_READS, DiskFeatures
from lightning_gnn.runtime.pipeline import OrderedPipeline

_AT_FIRST = 64
"""Mini-batches that are sampled before the first one is read, at most: what is read by then knows little of what comes,
and training waits for it. Then two for each one, until the window is full."""
_NODE_BYTES, _EDGE_BYTES = 32, 24
"""Of a mini-batch that waits, with what the window notes of its nodes."""
_NO_NODES = torch.empty(0, dtype=torch.int64)


@dataclass
class Drawn:
    """A mini-batch that has been sampled, and has no features yet.

    Args:
        out: What the sampler gave.
        key: The key of the mini-batch.
        part: Which part of a mini-batch it is, where that has been shared out.
        seconds: What sampling took.
    """

    out: Any
    key: int
    part: int
    seconds: float

    def nodes(self, kind: Any) -> Tensor:
        """Return whose features it needs, of a type, or of a graph without types for None."""
        node = self.out.node.get(kind) if isinstance(self.out.node, dict) else self.out.node
        return _NO_NODES if node is None else node

    @property
    def num_bytes(self) -> int:
        """What it takes while it waits, about."""
        return _NODE_BYTES * _count(self.out.node) + _EDGE_BYTES * _count(self.out.row)


@dataclass(frozen=True)
class Begun:
    """A mini-batch of the next epoch that has been sampled.

    Args:
        task: Its epoch, its number and the positions of its seeds.
        drawn: What was sampled.
    """

    task: Any
    drawn: Drawn


class LookAhead:
    """Yields what a loader's ``prepare`` would, in order: sampled by threads, read by one that knows what comes.

    Which rows it reads when follows from the mini-batches alone, never from time.

    Args:
        loader: Draws and joins.
        tasks: The mini-batches.
        tables: Those on disk, claimed, by the name of their attribute.
        lookahead: Mini-batches beyond the one that is read, or these and the bytes that they may take.
        num_threads: How many threads sample; 0 does everything in the caller's thread.
        ahead: How many mini-batches may be ready at once.
        beyond: The mini-batches of the next epoch. They are only announced, so that an epoch's end keeps what the next
            one begins with, and handed on.
        begun: Those of this epoch that the last one has handed on.
    """

    def __init__(
        self,
        loader: Any,
        tasks: Iterable[Any],
        tables: Mapping[Any, DiskFeatures],
        lookahead: int | tuple[int, int],
        num_threads: int,
        ahead: int,
        beyond: Iterable[Any] = (),
        begun: Sequence[Begun] = (),
    ) -> None:
        most, size = lookahead if isinstance(lookahead, tuple) else (lookahead, None)
        self._release = weakref.finalize(self, _release, list(tables.values()))
        draw = partial(_draw, loader, {each.task[:2]: each for each in begun})
        both = chain(((task, False) for task in tasks), ((task, True) for task in beyond))
        self._drawn = OrderedPipeline(both, draw, num_threads, max(ahead, 2 * num_threads))
        self.handed_on: list[Begun] = []
        """The mini-batches of the next epoch that have been sampled."""
        at_first = max(_AT_FIRST, len(begun))
        window = _window(self._drawn, min(most, MOST_READS - 1), size, at_first, self.handed_on)
        join = partial(_join, loader, tables)
        self._made: OrderedPipeline[Any, Any] = OrderedPipeline(window, join, min(num_threads, 1), max(ahead, 1))

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
        self._drawn.close()
        self._release()


def _release(tables: list[DiskFeatures]) -> None:
    for table in tables:
        table.release()


def claimed(tables: Mapping[Any, DiskFeatures]) -> bool:
    """Take all tables to announce reads, or none where somebody else has one."""
    taken = [table for table in tables.values() if table.claim()]
    if len(taken) < len(tables):
        _release(taken)
    return len(taken) == len(tables)


def _draw(loader: Any, begun: dict[tuple[int, int], Begun], task: tuple[Any, bool]) -> Drawn | Begun | None:
    """Sample a mini-batch, unless it has been; one of the next epoch with its task, or None where that fails."""
    wanted, is_beyond = task
    if is_beyond:
        try:
            return Begun(wanted, loader.draw(wanted))
        except Exception:  # in its turn it fails again
            return None
    known = begun.pop(wanted[:2], None)
    if known is not None and known.drawn.key == loader.key_of(wanted) and _same_seeds(known.task[2], wanted[2]):
        return known.drawn
    drawn: Drawn = loader.draw(wanted)
    return drawn


def _same_seeds(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def _window(
    drawn: Iterable[Drawn | Begun | None], most: int, size: int | None, at_first: int, handed_on: list[Begun]
) -> Iterator[tuple[Drawn | BaseException, list[Drawn]]]:
    """Give each mini-batch with those that are to be announced before it is read.

    What fails is raised in its turn, after all that came before it. Those of the next epoch are announced, and handed
    on.
    """
    waiting: deque[Drawn] = deque()
    new: list[Drawn] = []
    source: Iterator[Drawn | Begun | None] | None = iter(drawn)
    failure: BaseException | None = None
    read = held = 0
    while True:
        while source is not None and len(waiting) + len(handed_on) <= min(most, at_first + 2 * read):
            if (size is not None and held > size and waiting) or (handed_on and not waiting):
                break
            try:
                one = next(source)
            except StopIteration:
                source = None
            except BaseException as error:
                source, failure = None, error
            else:
                if one is None:
                    source = None
                    continue
                if isinstance(one, Begun):
                    handed_on.append(one)
                    one = one.drawn
                else:
                    waiting.append(one)
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


def _join(loader: Any, tables: Mapping[Any, DiskFeatures], task: tuple[Drawn | BaseException, list[Drawn]]) -> Any:
    drawn, new = task
    if isinstance(drawn, BaseException):
        raise drawn
    for name, table in tables.items():
        kind = name[0] if isinstance(name, tuple) else None
        for each in new:
            table.announce(each.nodes(kind))
        table.advance()
    return loader.join(drawn)


def _count(ids: Any) -> int:
    parts = ids.values() if isinstance(ids, dict) else [ids]
    return sum(part.numel() for part in parts if part is not None)
