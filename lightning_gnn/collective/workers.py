"""The CPU's part of collective batching: threads that fill the host buffer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from functools import partial

import torch

from lightning_gnn.collective.batch_schedule import BatchSchedule, ScheduleAction, Sizes
from lightning_gnn.collective.routes import DeviceBatch, HostBatch, HostRoute
from lightning_gnn.loading.batch import BatchTask
from lightning_gnn.runtime.devices import works
from lightning_gnn.runtime.thread_pipeline import Job, WorkerPool, one_torch_thread
from lightning_gnn.runtime.timeline import Recorder

THREAD_NAME = "lightning-gnn-collective"


class Workers:
    """An epoch's buffers, whose sizes may change, and the threads that fill the one in host memory."""

    def __init__(
        self,
        tasks: Iterator[BatchTask],
        host: HostRoute,
        schedule: BatchSchedule,
        num_threads: int,
        recorder: Recorder,
    ) -> None:
        self.schedule = schedule
        self.host: dict[int, HostBatch] = {}
        """Ready in host memory, by number."""
        self.device: dict[int, DeviceBatch] = {}
        """On the device, or on their way there."""
        self._tasks, self._pulled = tasks, dict[int, BatchTask]()
        self._route, self._recorder = host, recorder
        self._num_threads, self._busy = num_threads, 0
        self._assigned: deque[int] = deque()  # to a worker that is about to begin
        self._news = self._seen = 0
        self._crew = WorkerPool(self._claim, [THREAD_NAME], self._begin)
        self._crew.grow(0, num_threads)

    def next(self) -> ScheduleAction:
        """Return the next step of the training thread."""
        self._crew.check_process()
        with self._crew.lock:
            if self._crew.error is not None:
                raise self._crew.error
            self._seen = self._news
            step = self.schedule.next()
            self._assign()  # there may be room in host memory, or more that is far enough ahead
            return step

    def wait(self) -> None:
        """Wait until a worker has finished, or failed, since :meth:`next`."""
        with self._crew.lock:
            self._crew.progress_condition.wait_for(lambda: self._news != self._seen or self._crew.error is not None)

    def task(self, number: int) -> BatchTask:
        """Return what a mini-batch is to be made of."""
        with self._crew.lock:
            return self._task(number)

    def train(self, number: int) -> DeviceBatch:
        """Take a mini-batch off the device's buffer, to be trained."""
        with self._crew.lock:
            self._pulled.pop(number, None)
            return self.device.pop(number)

    def resize(self, sizes: Sizes) -> None:
        """Go on with other sizes; what is ready stays so."""
        with self._crew.lock:
            self.schedule.resize(*sizes)
            self._assign()

    def close(self, patience: float = 10.0) -> None:
        """Stop, join the threads and give all memory back; again and again if you like."""
        self._crew.close(patience)
        if not self._crew.can_be_joined:
            return
        with self._crew.lock:
            left, self.host = list(self.host.values()), {}
            self.device = {}
            self._tasks, self._pulled = iter(()), {}
        for batch in left:
            self._route.drop(batch)

    def _task(self, number: int) -> BatchTask:
        while number not in self._pulled:
            task = next(self._tasks, None)
            if task is None:
                raise RuntimeError(f"the batch sampler has no mini-batch {number}, but its length says so")
            self._pulled[task.index] = task
        return self._pulled[number]

    # -- in the threads

    def _begin(self) -> None:
        one_torch_thread()
        device = self._recorder.clock.device
        if device.type != "cpu" and device.index is not None:
            # Else its questions about events would begin a context on device 0 too.
            works(lambda: torch.accelerator.set_device_index(device))

    def _claim(self, group: int, lane: int) -> Job | None:
        self._assign()
        return partial(self._work, lane, self._task(self._assigned.popleft())) if self._assigned else None

    def _assign(self) -> None:
        """Give mini-batches to the workers that are free at this moment, before the training thread goes on."""
        while self._busy < self._num_threads and (number := self.schedule.claim()) is not None:
            self._busy += 1
            self._assigned.append(number)
            self._crew.wake(0)

    def _work(self, lane: int, task: BatchTask) -> None:
        number, start = task.index, time.perf_counter()
        batch = self._route.prepare(task)
        self._recorder.add("CPU", "cpu_batching", number, start, time.perf_counter(), lane)
        with self._crew.lock:
            self._busy -= 1
            if self._crew.stopped:
                self._route.drop(batch)
            else:
                self.schedule.ready(number)
                self.host[number] = batch
                self._assign()
            self._news += 1
            self._crew.progress_condition.notify_all()
