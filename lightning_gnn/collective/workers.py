"""CPU worker threads of collective batching, which fill the host buffer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from functools import partial

import torch

from lightning_gnn.collective.batch_schedule import BatchSchedule, ScheduleAction, Sizes
from lightning_gnn.collective.dual_buffer import DualBuffer
from lightning_gnn.collective.routes import DeviceBatch, HostBatch, HostRoute
from lightning_gnn.loading.batch import BatchTask
from lightning_gnn.runtime.devices import works
from lightning_gnn.runtime.thread_pipeline import Job, WorkerPool, one_torch_thread
from lightning_gnn.runtime.timeline import Recorder

THREAD_NAME = "lightning-gnn-collective"


class Workers:
    """An epoch's host and device buffers, and the threads that fill the host buffer."""

    def __init__(
        self,
        tasks: Iterator[BatchTask],
        host: HostRoute,
        schedule: BatchSchedule | DualBuffer,
        num_threads: int,
        recorder: Recorder,
        stall_timeout: float | None = None,  # seconds without progress until TimeoutError; None: no limit
        owner: object = None,  # the threads end when it is collected; running jobs keep this object alive
    ) -> None:
        self.schedule = schedule
        self.host: dict[int, HostBatch] = {}  # mini-batches ready in host memory, by number
        self.device: dict[int, DeviceBatch] = {}  # mini-batches on the device or in transfer, by number
        self._tasks, self._pulled = tasks, dict[int, BatchTask]()
        self._route, self._recorder = host, recorder
        self._num_threads, self._num_busy, self._stall_timeout = num_threads, 0, stall_timeout
        self._assigned: deque[int] = deque()  # to workers that have not started yet
        self._num_finished = self._num_seen = 0
        self._pool = WorkerPool(self._claim, [THREAD_NAME], self._begin, owner)
        with self._pool.lock:
            self._assign()  # before the training thread's first action
        self._pool.grow(0, num_threads)

    def next(self) -> ScheduleAction:
        """Return the next action of the training thread."""
        self._pool.check_process()
        with self._pool.lock:
            if self._pool.error is not None:
                raise self._pool.error
            self._num_seen = self._num_finished
            step = self.schedule.next()
            self._assign()  # the action may have freed a host slot, or advanced the lead
            return step

    def wait(self) -> None:
        """Wait until a worker has finished or failed since the last :meth:`next`."""
        with self._pool.lock:
            if not self._pool.progress_condition.wait_for(
                lambda: self._num_finished != self._num_seen or self._pool.error is not None, self._stall_timeout
            ):
                raise TimeoutError(
                    f"preparing mini-batches has made no progress for {self._stall_timeout:g} s; {self._pool.stacks()}"
                )

    def task(self, number: int) -> BatchTask:
        """Return the task of a mini-batch."""
        with self._pool.lock:
            return self._task(number)

    def train(self, number: int) -> DeviceBatch:
        """Remove a mini-batch from the device buffer and return it for training."""
        with self._pool.lock:
            self._pulled.pop(number, None)
            return self.device.pop(number)

    def resize(self, sizes: Sizes, num_threads: int) -> None:
        """Change the sizes of the schedule and the number of threads; prepared mini-batches are retained."""
        with self._pool.lock:
            self._num_threads = num_threads  # surplus threads stay idle
            self._pool.grow(0, num_threads)
            self.schedule.resize(*sizes)
            self._assign()

    def close(self, patience: float = 10.0) -> None:
        """Stop and join the threads, and return all slots to the ring. Idempotent."""
        self._pool.close(patience)
        if not self._pool.can_be_joined:
            return
        with self._pool.lock:
            discarded, self.host = list(self.host.values()), {}
            self.device = {}
            self._tasks, self._pulled = iter(()), {}
        for batch in discarded:
            self._route.drop(batch)

    def _task(self, number: int) -> BatchTask:
        while number not in self._pulled:
            task = next(self._tasks, None)
            if task is None:
                raise RuntimeError(f"the batch sampler ended before mini-batch {number}, which its length includes")
            self._pulled[task.index] = task
        return self._pulled[number]

    # -- called in the worker threads

    def _begin(self) -> None:
        one_torch_thread()
        device = self._recorder.clock.device
        if device.type != "cpu" and device.index is not None:
            # Otherwise, querying events would create a context on device 0, too.
            works(lambda: torch.accelerator.set_device_index(device))

    def _claim(self, group: int, lane: int) -> Job | None:
        self._assign()
        return partial(self._prepare, lane, self._task(self._assigned.popleft())) if self._assigned else None

    def _assign(self) -> None:
        """Assign mini-batches to all idle workers; the caller must hold the lock."""
        while self._num_busy < self._num_threads and (number := self.schedule.claim()) is not None:
            self._num_busy += 1
            self._assigned.append(number)
            self._pool.wake(0)

    def _prepare(self, lane: int, task: BatchTask) -> None:
        number, start = task.index, time.perf_counter()
        batch = self._route.prepare(task)
        self._recorder.add("CPU", "cpu_batching", number, start, time.perf_counter(), lane)
        with self._pool.lock:
            self._num_busy -= 1
            if self._pool.stopped:
                self._route.drop(batch)
            else:
                self.schedule.ready(number)
                self.host[number] = batch
                self._assign()
            self._num_finished += 1
            self._pool.progress_condition.notify_all()
