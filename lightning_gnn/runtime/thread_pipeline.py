"""Threads that prepare ahead: a crew that takes jobs, and stages joined by bounded queues, which keep the order."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from types import MethodType
from typing import Any
from weakref import WeakMethod

import torch

Job = Callable[[], object]
StageFunction = Callable[[Any, Any], Any]
"""Called with an item's value and its note; returns the item's next value."""


def one_torch_thread() -> None:
    """Keep torch from running operators in more than the calling thread, where items are the parallelism."""
    torch.get_num_threads()  # torch takes a number over only where it has been asked for before
    torch.set_num_threads(1)


class WorkerPool:
    """Threads in groups, which take jobs until they are stopped, a job fails, or the owner of ``claim`` is dropped.

    ``claim`` is called under the lock with a group and a thread in it, and returns a job, or None to wait.
    """

    def __init__(
        self, claim: Callable[[int, int], Job | None], names: Sequence[str], begin: Callable[[], object]
    ) -> None:
        self.lock = threading.RLock()
        self.progress_condition = threading.Condition(self.lock)
        """For those who wait for the crew; notified when a job fails, and by others that have news."""
        self.error: BaseException | None = None
        """What a job has raised, with its traceback."""
        self.stopped = False
        self._claim, self._names, self._begin = WeakMethod(claim), list(names), _weakly(begin)
        self._calls = [threading.Condition(self.lock) for _ in names]
        self._threads: list[list[threading.Thread]] = [[] for _ in names]
        self._busy: dict[int, str] = {}
        self._process = os.getpid()

    @property
    def can_be_joined(self) -> bool:
        """Whether its threads can be waited for, and its lock taken."""
        # Not so in a fork, whose parent has the threads, one of which may have held the lock; nor in one of them, where
        # the garbage collector has dropped the owner, maybe with the lock held.
        own = any(threading.current_thread() in group for group in self._threads)
        return self._process == os.getpid() and not own

    def grow(self, group: int, num_threads: int) -> None:
        """Start threads until a group has so many."""
        for number in range(len(self._threads[group]), num_threads):
            name = f"{self._names[group]}-{number}"
            thread = threading.Thread(target=self._run, args=(group, number), name=name, daemon=True)
            self._threads[group].append(thread)
            thread.start()

    def wake(self, group: int) -> None:
        """Let the threads of a group look for jobs again; the caller holds the lock."""
        self._calls[group].notify_all()

    def check_process(self) -> None:
        """Refuse to wait for threads that another process has."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this iterator belongs to process {self._process}, whose threads prepare its mini-batches; process "
                f"{os.getpid()} is a fork of it, which has no threads: begin a new iterator there, iter(loader)"
            )

    def close(self, patience: float = inf) -> list[str]:
        """Stop, join the threads once they are done with their jobs, and return the names of those that go on."""
        if self._process != os.getpid():
            return []
        with self.lock:
            self._stop()
        if not self.can_be_joined:
            return []
        threads = [thread for group in self._threads for thread in group]
        deadline = time.monotonic() + patience
        for thread in threads:
            thread.join(None if patience == inf else max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    def stacks(self) -> str:
        """Tell where the threads are that have a job."""
        frames = sys._current_frames()
        found = [
            f"thread {name}:\n{''.join(traceback.format_stack(frames[ident]))}"
            for ident, name in self._busy.items()
            if ident in frames
        ]
        return "\n".join(found) or "no thread is at work"

    def _stop(self) -> None:
        self.stopped = True
        for condition in (*self._calls, self.progress_condition):
            condition.notify_all()

    def _run(self, group: int, number: int) -> None:
        try:
            if (begin := self._begin()) is not None:
                begin()
                del begin
            while True:
                job = self._next(group, number)
                if job is None:
                    return
                job()
                del job  # a thread that waits keeps nothing of what it has made
        except BaseException as error:
            with self.lock:
                self.error = self.error or error
                self._stop()

    def _next(self, group: int, number: int) -> Job | None:
        ident = threading.get_ident()
        with self.lock:
            self._busy.pop(ident, None)
            while not self.stopped and (claim := self._claim()) is not None:
                if (job := claim(group, number)) is not None:
                    self._busy[ident] = threading.current_thread().name
                    return job
                del claim
                self._calls[group].wait()
        return None


def _weakly(function: Callable[[], object]) -> Callable[[], Callable[[], object] | None]:
    """Return a reference that does not keep the owner of a method alive."""
    return WeakMethod(function) if isinstance(function, MethodType) else lambda: function


@dataclass
class Item:
    """What passes through the stages."""

    value: Any
    """What the steps turn into something else, one after another."""
    note: Any = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Thread-seconds of each step."""
    error: BaseException | None = None
    passed: int = 0
    """How many stages are done with it."""

    def run(self, steps: Sequence[tuple[str, StageFunction]]) -> None:
        """Run some steps, and add up what they cost."""
        for name, step in steps:
            start = time.perf_counter()
            self.value = step(self.value, self.note)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class StagePipeline:
    """Take items through stages in order; a stage holds an item until the next one begins, so that a slow one blocks.

    ``bound`` are items in a stage beyond its threads', ``stall_timeout`` the seconds without progress after which
    :meth:`take` raises, ``patience`` those to wait for the last jobs.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[tuple[str, StageFunction]]],
        num_threads: Sequence[int],
        bound: int = 1,
        stall_timeout: float = 300.0,
        name: str = "lightning-gnn",
        begin: Callable[[], object] = one_torch_thread,
        patience: float = 3.0,
    ) -> None:
        self.stages = [list(steps) for steps in stages]
        self.patience = patience
        self.bound = bound
        self.stall_timeout = stall_timeout
        self._crew = WorkerPool(self._claim, [f"{name}-{steps[0][0]}" for steps in self.stages], begin)
        self._jobs: list[deque[Item]] = [deque() for _ in self.stages]
        self._items: deque[Item] = deque()  # submitted and not taken
        self._entered = [0] * (len(self.stages) + 1)  # items that have begun with each stage, and that were taken
        self._num_threads = [0] * len(self.stages)
        self._progress = time.monotonic()
        weakref.finalize(self, self._crew.close, patience)  # at the interpreter's end too
        self.resize(num_threads)

    @property
    def in_flight(self) -> int:
        """Items submitted and not taken."""
        return len(self._items)

    @property
    def capacity(self) -> int:
        """Items that the stages can hold together."""
        return sum(self._room(stage) for stage in range(len(self.stages)))

    def resize(self, num_threads: Sequence[int]) -> None:
        """Change the number of threads of each stage; those that are too many wait."""
        with self._crew.lock:
            for stage, wanted in enumerate(num_threads):
                self._num_threads[stage] = max(1, wanted)
                self._crew.grow(stage, self._num_threads[stage])
                self._crew.wake(stage)
            self._admit()

    def submit(self, item: Item) -> None:
        """Send an item on its way."""
        self._crew.check_process()
        with self._crew.lock:
            self._items.append(item)
            self._admit()

    def take(self) -> Item:
        """Return the first item that was submitted and not taken, once it has passed all stages."""
        self._crew.check_process()
        with self._crew.lock:
            item, since = self._items[0], time.monotonic()
            while item.passed < len(self.stages):
                if self._crew.error is not None:
                    raise self._crew.error
                patience = max(self._progress, since) + self.stall_timeout - time.monotonic()
                if patience <= 0:
                    raise TimeoutError(
                        f"preparing mini-batches has made no progress for {self.stall_timeout:g} s; "
                        f"{self._crew.stacks()}"
                    )
                self._crew.progress_condition.wait(min(patience, 5.0))
            self._items.popleft()
            self._entered[-1] += 1
            self._admit()
        error, item.error = item.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which holds this frame
        return item

    def fill(self, items: Iterator[Item], most: float = inf) -> None:
        """Send items on their way while there is room, and fewer than ``most`` are under way."""
        while self.in_flight < min(self.capacity, most) and (item := next(items, None)) is not None:
            self.submit(item)

    def pull(self, items: Iterator[Item], most: float = inf) -> Item | None:
        """Keep the stages filled with items, at most so many, and take the first one; None where there are no more."""
        self.fill(items, most)
        if not self._items:
            return None
        item = self.take()
        self.fill(items, most)
        return item

    def close(self, patience: float | None = None) -> list[str]:
        """Stop, drop what is under way, and return the names of threads that have not ended in time."""
        left = self._crew.close(self.patience if patience is None else patience)
        self._items.clear()
        return left

    def close_with(self, owner: object) -> None:
        """Stop when this is dropped, which items may lead to: the threads keep the pipeline while they are at work."""
        weakref.finalize(owner, self._crew.close, self.patience)

    def _room(self, stage: int) -> int:
        return self.bound + self._num_threads[stage]

    def _admit(self) -> None:
        """Let items enter the stages, in order: one that came out of order may not take the place of an earlier one."""
        for stage in reversed(range(len(self.stages))):  # from the last, which makes room in those before it
            while self._entered[stage] < self._entered[stage + 1] + self._room(stage):
                place = self._entered[stage] - self._entered[-1]
                if place >= len(self._items) or (item := self._items[place]).passed < stage:
                    break
                self._entered[stage] += 1
                self._jobs[stage].append(item)
                self._crew.wake(stage)

    def _claim(self, stage: int, number: int) -> Job | None:
        if number >= self._num_threads[stage] or not self._jobs[stage]:
            return None
        return partial(self._work, stage, self._jobs[stage].popleft())

    def _work(self, stage: int, item: Item) -> None:
        error: BaseException | None = None
        try:
            if item.error is None:  # one that has failed passes on untouched, to be taken in its turn
                item.run(self.stages[stage])
        except BaseException as caught:
            error = caught
        with self._crew.lock:
            item.error = item.error or error
            item.passed = stage + 1
            self._progress = time.monotonic()
            self._admit()
            self._crew.progress_condition.notify_all()
        del error  # which holds this frame
