"""Thread pool, and an ordered multi-stage pipeline with bounded queues."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from types import MethodType
from typing import Any
from weakref import WeakMethod, WeakSet

import torch

Job = Callable[[], object]
StageFunction = Callable[[Any, Any], Any]  # called with an item's value and note; returns the item's next value


def one_torch_thread() -> None:
    """Make torch run operators in the calling thread only, since several items are processed in parallel."""
    torch.get_num_threads()  # set_num_threads has no effect before the first query
    torch.set_num_threads(1)


_pools: WeakSet[WorkerPool] = WeakSet()
_abandoned: list[WorkerPool] = []  # whose owners were collected before they were closed
_PATIENCE_S = 10.0  # how long the next epoch, or the interpreter's exit, waits for running jobs of abandoned pools
_POLL_S = 1.0  # how often an idle thread checks whether its owner still exists


def join_abandoned() -> None:
    """Wait for the running jobs of pools whose owners have been collected, for example at ``break`` in a loop."""
    while _abandoned:
        with suppress(IndexError):  # another thread has taken it
            _abandoned.pop().close(_PATIENCE_S)


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close(_PATIENCE_S)


class WorkerPool:
    """Groups of threads that run jobs until they are closed, a job fails, or ``owner`` is collected.

    ``claim`` is called under the lock with the indices of a group and a thread; it returns a job, or None to wait.
    ``owner`` is by default the object of this bound method, which running jobs may keep alive.
    """

    def __init__(
        self,
        claim: Callable[[int, int], Job | None],
        names: Sequence[str],
        begin: Callable[[], object],
        owner: object = None,
    ) -> None:
        self.lock = threading.RLock()
        self.progress_condition = threading.Condition(self.lock)
        """Notified when a job fails, and by owners that make progress."""
        self.error: BaseException | None = None  # the first exception raised by a job, with its traceback
        self.stopped = False
        self._claim, self._names = WeakMethod(claim), list(names)
        # Not keeping the owner of a bound method alive.
        self._begin = WeakMethod(begin) if isinstance(begin, MethodType) else lambda: begin
        self._job_conditions = [threading.Condition(self.lock) for _ in names]
        self._threads: list[list[threading.Thread]] = [[] for _ in names]
        self._busy: dict[int, str] = {}
        self._process = os.getpid()
        _pools.add(self)
        self._finalizer = weakref.finalize(claim.__self__ if owner is None else owner, self._abandon)  # type: ignore[attr-defined]
        self._finalizer.atexit = False

    @property
    def can_be_joined(self) -> bool:
        """Whether the calling thread may join the threads and take the lock."""
        # Not in a forked process: the threads belong to its parent, and one may have held the lock at the fork.
        is_worker = any(threading.current_thread() in group for group in self._threads)
        return self._process == os.getpid() and not is_worker

    def grow(self, group: int, num_threads: int) -> None:
        """Start threads until a group has ``num_threads``."""
        for number in range(len(self._threads[group]), num_threads):
            name = f"{self._names[group]}-{number}"
            thread = threading.Thread(target=self._run, args=(group, number), name=name, daemon=True)
            self._threads[group].append(thread)
            try:
                thread.start()
            except RuntimeError as error:
                self._threads[group].pop()  # only started threads can be joined
                raise RuntimeError(
                    f"{error} for {name}: memory (free, or ulimit -v) or the number of threads (ulimit -u) does not "
                    "suffice; use fewer threads, or num_workers=0"
                ) from None

    def wake(self, group: int) -> None:
        """Make the waiting threads of a group claim jobs again; the caller must hold the lock."""
        self._job_conditions[group].notify_all()

    def check_process(self) -> None:
        """Raise a RuntimeError in a forked process, which does not have the threads."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this iterator belongs to process {self._process}, whose threads prepare its mini-batches; process "
                f"{os.getpid()} is a fork of it, which has no threads: create a new iterator there, iter(loader)"
            )

    def close(self, patience: float = inf) -> list[str]:
        """Stop, wait up to ``patience`` seconds for running jobs, and return the names of threads still alive."""
        self._finalizer.detach()
        if self._process == os.getpid():
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
        """Return the stack traces of the threads that run a job."""
        frames = sys._current_frames()
        traces = [
            f"thread {name}:\n{''.join(traceback.format_stack(frames[ident]))}"
            for ident, name in self._busy.items()
            if ident in frames
        ]
        return "\n".join(traces) or "no thread is running a job"

    def _abandon(self) -> None:
        # Takes no lock and joins no thread, as the garbage collector may run this in any thread, at any line: the
        # thread may hold a lock for which a running job waits, or the one of ``threading`` that joining needs.
        self.stopped = True
        _abandoned.append(self)

    def _stop(self) -> None:
        self.stopped = True
        for condition in (*self._job_conditions, self.progress_condition):
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
                del job  # a waiting thread must not keep results alive
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
                self._job_conditions[group].wait(_POLL_S)
        return None


@dataclass
class Item:
    """A unit of work that passes through the stages."""

    value: Any  # input of the next step, replaced by its result
    note: Any = None
    seconds: dict[str, float] = field(default_factory=dict)  # thread-seconds of each step
    error: BaseException | None = None
    passed: int = 0  # number of completed stages

    def run(self, steps: Sequence[tuple[str, StageFunction]]) -> None:
        """Run steps on the value, and add their times to ``seconds``."""
        for name, step in steps:
            start = time.perf_counter()
            self.value = step(self.value, self.note)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class StagePipeline:
    """Ordered pipeline of stages; an item leaves a stage only when the next one has room, so a slow stage blocks.

    ``bound`` is the number of items in a stage in addition to one per thread, ``stall_timeout`` the seconds without
    progress after which :meth:`take` raises, ``patience`` the seconds to wait for running jobs on closing. The threads
    end when ``owner`` is collected, by default the pipeline itself, which threads at work keep alive.
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
        owner: object = None,
    ) -> None:
        self.stages = [list(steps) for steps in stages]
        self.patience = patience
        self.bound = bound
        self.stall_timeout = stall_timeout
        self._pool = WorkerPool(self._claim, [f"{name}-{steps[0][0]}" for steps in self.stages], begin, owner)
        self._jobs: list[deque[Item]] = [deque() for _ in self.stages]
        self._items: deque[Item] = deque()  # submitted and not taken
        self._entered = [0] * (len(self.stages) + 1)  # items that have entered each stage; last: items taken
        self._num_threads = [0] * len(self.stages)
        self._progress = time.monotonic()
        self.resize(num_threads)

    @property
    def in_flight(self) -> int:
        """Items submitted and not taken."""
        return len(self._items)

    @property
    def capacity(self) -> int:
        """Largest number of items in all stages together."""
        return sum(self._capacity_of(stage) for stage in range(len(self.stages)))

    def resize(self, num_threads: Sequence[int]) -> None:
        """Change the number of threads of each stage; surplus threads stay idle."""
        with self._pool.lock:
            for stage, wanted in enumerate(num_threads):
                self._num_threads[stage] = max(1, wanted)
                self._pool.grow(stage, self._num_threads[stage])
                self._pool.wake(stage)
            self._admit()

    def submit(self, item: Item) -> None:
        """Append an item to the pipeline."""
        self._pool.check_process()
        with self._pool.lock:
            self._items.append(item)
            self._admit()

    def take(self) -> Item:
        """Remove the oldest item and return it, after waiting until it has passed all stages; raise its error."""
        self._pool.check_process()
        with self._pool.lock:
            item, since = self._items[0], time.monotonic()
            while item.passed < len(self.stages):
                if self._pool.error is not None:
                    raise self._pool.error
                patience = max(self._progress, since) + self.stall_timeout - time.monotonic()
                if patience <= 0:
                    raise TimeoutError(
                        f"preparing mini-batches has made no progress for {self.stall_timeout:g} s; "
                        f"{self._pool.stacks()}"
                    )
                self._pool.progress_condition.wait(min(patience, 5.0))
            self._items.popleft()
            self._entered[-1] += 1
            self._admit()
        error, item.error = item.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it references this frame
        return item

    def fill(self, items: Iterator[Item], most: float = inf) -> None:
        """Submit items while the pipeline has room and holds fewer than ``most``."""
        while self.in_flight < min(self.capacity, most) and (item := next(items, None)) is not None:
            self.submit(item)

    def pull(self, items: Iterator[Item], most: float = inf) -> Item | None:
        """Fill the pipeline with at most ``most`` items and take the oldest one; return None if none is left."""
        self.fill(items, most)
        if not self._items:
            return None
        item = self.take()
        self.fill(items, most)
        return item

    def close(self, patience: float | None = None) -> list[str]:
        """Stop, drop all items, and return the names of threads that have not ended in time."""
        alive = self._pool.close(self.patience if patience is None else patience)
        self._items.clear()
        return alive

    def _capacity_of(self, stage: int) -> int:
        return self.bound + self._num_threads[stage]

    def _admit(self) -> None:
        """Move items to the stages in order; an item never overtakes an earlier one. The caller must hold the lock."""
        for stage in reversed(range(len(self.stages))):  # the last stage first: it makes room in the stages before it
            while self._entered[stage] < self._entered[stage + 1] + self._capacity_of(stage):
                index = self._entered[stage] - self._entered[-1]
                if index >= len(self._items) or (item := self._items[index]).passed < stage:
                    break
                self._entered[stage] += 1
                self._jobs[stage].append(item)
                self._pool.wake(stage)

    def _claim(self, stage: int, number: int) -> Job | None:
        if number >= self._num_threads[stage] or not self._jobs[stage]:
            return None
        return partial(self._run_stage, stage, self._jobs[stage].popleft())

    def _run_stage(self, stage: int, item: Item) -> None:
        error: BaseException | None = None
        try:
            if item.error is None:  # a failed item passes the remaining stages unchanged; take() raises its error
                item.run(self.stages[stage])
        except BaseException as caught:
            error = caught
        with self._pool.lock:
            item.error = item.error or error
            item.passed = stage + 1
            self._progress = time.monotonic()
            self._admit()
            self._pool.progress_condition.notify_all()
        del error  # it references this frame
