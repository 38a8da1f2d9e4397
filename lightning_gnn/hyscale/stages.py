"""Stages joined by bounded queues: items pass through in order, each stage with threads of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_gnn.runtime.pipeline import check_process

Step = Callable[[int, Any, Any], Any]
"""Called with the number of a part, the part's value and the item's note; returns the part's next value."""


@dataclass
class Item:
    """What passes through the stages: a few parts that are worked on side by side.

    Args:
        parts: Value of each part; None for one that does not exist.
        note: Anything that the steps need to know about the item.
    """

    parts: list[Any]
    note: Any = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Thread-seconds of each step."""
    error: BaseException | None = None
    number: int = -1
    left: int = 0
    finished: bool = False

    def run(self, part: int, steps: Sequence[tuple[str, Step]]) -> list[tuple[str, float]]:
        """Take a part through some steps and return what they cost."""
        costs = []
        for name, step in steps:
            start = time.perf_counter()
            self.parts[part] = step(part, self.parts[part], self.note)
            costs.append((name, time.perf_counter() - start))
        return costs

    def add(self, costs: list[tuple[str, float]]) -> None:
        """Add costs of a part."""
        for name, seconds in costs:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class StagePipeline:
    """Take items through stages, in order, with at most a few of them in each.

    A stage holds an item from when it begins with it until the next one begins: one that is slow keeps those before it
    from running ahead. An exception in a step is raised by :meth:`take` of that item, with its own traceback.

    Args:
        stages: The steps of each stage, one after another.
        num_threads: Threads of each stage.
        bound: Items in a stage beyond those that its threads are busy with, at least 1.
        stall_timeout: Seconds without any progress after which :meth:`take` gives up.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[tuple[str, Step]]],
        num_threads: Sequence[int],
        bound: int = 1,
        stall_timeout: float = 300.0,
    ) -> None:
        self.stages = [list(steps) for steps in stages]
        self.bound = bound
        self.stall_timeout = stall_timeout
        self._lock = threading.Lock()
        self._work = [threading.Condition(self._lock) for _ in self.stages]
        self._ready = threading.Condition(self._lock)
        self._jobs: list[deque[tuple[Item, int]]] = [deque() for _ in self.stages]
        self._entering: list[dict[int, Item]] = [{} for _ in self.stages]
        self._next = [0] * len(self.stages)  # the number that may enter each stage
        self._inside = [0] * len(self.stages)
        self._items: deque[Item] = deque()
        self._submitted = 0
        self._progress = time.monotonic()
        self._closed = False
        self._num_threads = [0] * len(self.stages)
        self._threads: list[list[threading.Thread]] = [[] for _ in self.stages]
        self._busy: dict[int, str] = {}
        self._process = os.getpid()
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
        with self._lock:
            for stage, wanted in enumerate(num_threads):
                self._num_threads[stage] = max(1, wanted)
                while len(self._threads[stage]) < self._num_threads[stage]:
                    index = len(self._threads[stage])
                    name = f"hybrid-{self.stages[stage][0][0]}-{index}"
                    thread = threading.Thread(target=self._run, args=(stage, index), name=name, daemon=True)
                    self._threads[stage].append(thread)
                    thread.start()
                self._work[stage].notify_all()

    def submit(self, item: Item) -> None:
        """Send an item on its way."""
        check_process(self._process)
        with self._lock:
            item.number = self._submitted
            self._submitted += 1
            self._items.append(item)
            self._entering[0][item.number] = item
            self._admit(0)

    def take(self) -> Item:
        """Return the first item that was submitted and not taken, once it has passed all stages.

        Raises:
            TimeoutError: Nothing has moved for ``stall_timeout`` seconds; it shows where the threads are.
        """
        check_process(self._process)
        with self._lock:
            item = self._items.popleft()
            since = time.monotonic()
            while not item.finished:
                patience = max(self._progress, since) + self.stall_timeout - time.monotonic()
                if patience <= 0:
                    raise TimeoutError(
                        f"preparing mini-batches has made no progress for {self.stall_timeout:g} s; {self._stacks()}"
                    )
                self._ready.wait(min(patience, 5.0))
            if item.error is None:
                self._inside[-1] -= 1
                self._admit(len(self.stages) - 1)
        if item.error is not None:
            raise item.error
        return item

    def close(self, patience: float = 3.0) -> list[str]:
        """Stop, and return the names of threads that have not ended in time."""
        if self._process != os.getpid():
            return []  # a fork: the threads are the parent's, and one of them may have held the lock
        with self._lock:
            self._closed = True
            for condition in (*self._work, self._ready):
                condition.notify_all()
            threads = [thread for stage in self._threads for thread in stage]
        deadline = time.monotonic() + patience
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    def _room(self, stage: int) -> int:
        return self.bound + self._num_threads[stage]

    def _admit(self, stage: int) -> None:
        """Let items enter a stage, in order: one that came out of order may not take the place of an earlier one."""
        while self._inside[stage] < self._room(stage):
            item = self._entering[stage].pop(self._next[stage], None)
            if item is None:
                return
            self._next[stage] += 1
            self._inside[stage] += 1
            if stage:
                self._inside[stage - 1] -= 1
                self._admit(stage - 1)
            jobs = [(item, part) for part, value in enumerate(item.parts) if value is not None]
            item.left = len(jobs)
            self._jobs[stage].extend(jobs)
            if jobs:
                self._work[stage].notify(len(jobs))
            else:
                self._leave(stage, item)

    def _leave(self, stage: int, item: Item) -> None:
        self._progress = time.monotonic()
        if stage + 1 < len(self.stages) and item.error is None:
            self._entering[stage + 1][item.number] = item
            self._admit(stage + 1)
            return
        item.finished = True
        self._ready.notify_all()

    def _run(self, stage: int, index: int) -> None:
        # Items are the parallelism: teams of threads in each stage would only fight the model. Torch takes the number
        # over only where it has been asked for before.
        torch.get_num_threads()
        torch.set_num_threads(1)
        name = threading.current_thread().name
        ident = threading.get_ident()
        while True:
            with self._lock:
                while not self._closed and (not self._jobs[stage] or index >= self._num_threads[stage]):
                    self._work[stage].wait()
                    if index >= self._num_threads[stage] and self._jobs[stage]:
                        self._work[stage].notify()  # the wake-up was meant for one that works
                if self._closed:
                    return
                item, part = self._jobs[stage].popleft()
                self._busy[ident] = name
            error, costs = None, []
            try:
                if item.error is None:
                    costs = item.run(part, self.stages[stage])
            except BaseException as caught:
                error = caught
            with self._lock:
                del self._busy[ident]
                item.add(costs)
                item.error = item.error or error
                item.left -= 1
                if item.left == 0:
                    self._leave(stage, item)
            del item, error

    def _stacks(self) -> str:
        frames = sys._current_frames()
        found = [
            f"thread {name}:\n{''.join(traceback.format_stack(frames[ident]))}"
            for ident, name in self._busy.items()
            if ident in frames
        ]
        return "\n".join(found) or "no thread is at work"
