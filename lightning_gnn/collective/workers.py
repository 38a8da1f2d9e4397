"""The CPU's part of collective batching: threads that fill the host buffer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import torch

from lightning_gnn.collective.dual_buffer import DualBuffer, Step
from lightning_gnn.collective.host_ring import HostMemoryError
from lightning_gnn.collective.profile import Recorder
from lightning_gnn.collective.routes import DeviceBatch, HostBatch, Task
from lightning_gnn.runtime.pipeline import check_process
from lightning_gnn.runtime.transfer import works

THREAD_NAME = "lightning-gnn-collective"


class Workers:
    """An epoch's buffers, and the threads that fill the one in host memory; the training thread asks :meth:`next`.

    The schedule may change in mid-epoch, when the device's buffer is empty. What is ready in host memory stays so,
    whoever the new schedule leaves it to: the content does not depend on who prepares it.

    Args:
        tasks: The epoch's mini-batches from the first on.
        prepare: Makes one in host memory, in a worker's thread.
        drop: Gives the memory of one back that nobody needs.
        schedule: The decisions.
        num_threads: How many.
        recorder: Is told what each mini-batch took.
    """

    def __init__(
        self,
        tasks: Iterator[Task],
        prepare: Callable[[Task], HostBatch],
        drop: Callable[[HostBatch], None],
        schedule: DualBuffer,
        num_threads: int,
        recorder: Recorder,
    ) -> None:
        self.schedule = schedule
        self.host: dict[int, HostBatch] = {}
        """Ready in host memory, by number."""
        self.device: dict[int, DeviceBatch] = {}
        """On the device, or on their way there."""
        self.shortage: HostMemoryError | None = None
        """Page-locked memory was refused; who changes the schedule sets it back."""
        self._tasks, self._pulled = tasks, dict[int, Task]()
        self._prepare, self._drop, self._recorder = prepare, drop, recorder
        self._error: BaseException | None = None
        self._stopped = False
        self._generation = 0
        self._news = self._seen = self._busy = 0
        self._condition = threading.Condition()
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"{THREAD_NAME}-{lane}", daemon=True)
            for lane in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> Step:
        """Return the next step of the training thread; ``"wait"`` also where memory is short.

        Raises:
            BaseException: What a worker has raised, with its traceback.
        """
        check_process(self._process)
        with self._condition:
            if self._error is not None:
                raise self._error
            self._seen = self._news
            if self.shortage is not None:
                return Step("wait", phase="blocking")
            step = self.schedule.next()
            if step.kind == "transfer":
                self._condition.notify_all()  # there is room in host memory
            return step

    def wait(self) -> None:
        """Wait until a worker has finished, or failed, since :meth:`next`."""
        with self._condition:
            self._condition.wait_for(lambda: self._news != self._seen)

    def task(self, number: int) -> Task:
        """Return what a mini-batch is to be made of.

        Raises:
            RuntimeError: The batch sampler has no more.
        """
        with self._condition:
            return self._task(number)

    def train(self, number: int) -> DeviceBatch:
        """Take a mini-batch off the device's buffer, to be trained."""
        with self._condition:
            self._pulled.pop(number, None)
            return self.device.pop(number)

    def reschedule(self, schedule: DualBuffer) -> None:
        """Go on with another schedule, which leaves out what has been trained; nothing may be on the device."""
        with self._condition:
            self.schedule = schedule
            self._generation += 1
            if self.shortage is not None:
                self._condition.wait_for(lambda: not self._busy or self._error is not None)
                self.shortage = None
                for batch in self.host.values():  # it may be late before their turn comes
                    self._drop(batch)
                self.host.clear()
            self._condition.notify_all()

    def close(self, patience: float = 10.0) -> None:
        """Stop, join the threads and give all memory back; again and again if you like.

        Args:
            patience: Seconds to wait for threads that are in the middle of a mini-batch.
        """
        if self._process != os.getpid():
            return  # a fork: the threads are the parent's, and one of them may have held the lock
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        if threading.current_thread() in self._threads:
            return  # the garbage collector dropped the iterator here, and may have done so with the lock held
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._condition:
            left, self.host = list(self.host.values()), {}
            self.device = {}
            self._tasks, self._pulled = iter(()), {}
        for batch in left:
            self._drop(batch)

    def _task(self, number: int) -> Task:
        while number not in self._pulled:
            task = next(self._tasks, None)
            if task is None:
                raise RuntimeError(f"the batch sampler has no mini-batch {number}, but its length says so")
            self._pulled[task[1]] = task
        return self._pulled[number]

    def _work(self, lane: int) -> None:
        # Mini-batches are the parallelism: teams of threads in each worker would only fight the model. Torch takes the
        # number over only where it has been asked for before.
        torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            _use(self._recorder.clock.device)
            while (claimed := self._claim()) is not None:
                task, generation = claimed
                start, shortage = time.perf_counter(), None
                try:
                    batch = self._prepare(task)
                except HostMemoryError as error:
                    shortage = HostMemoryError(*error.args)  # without the traceback, which holds memory
                if shortage is not None:
                    self._wait_for_memory(shortage)
                    continue
                self._recorder.add("CPU", "cpu_batching", task[1], start, time.perf_counter(), lane)
                self._deliver(task[1], batch, generation)
                del batch, task, claimed
        except BaseException as error:
            with self._condition:
                self._error = self._error or error
                self._tell()

    def _claim(self) -> tuple[Task, int] | None:
        """Wait for a mini-batch to prepare; None at the end."""
        with self._condition:
            while not self._stopped and self._error is None:
                number = None if self.shortage is not None else self.schedule.claim()
                if number is None:
                    self._condition.wait()
                elif number in self.host:
                    self._ready(number)
                else:
                    task = self._task(number)
                    self._busy += 1
                    return task, self._generation
        return None

    def _deliver(self, number: int, batch: HostBatch, generation: int) -> None:
        with self._condition:
            self._busy -= 1
            if self._stopped or generation != self._generation:
                self._drop(batch)
                self._tell()
                return
            self.host[number] = batch
            self._ready(number)

    def _wait_for_memory(self, shortage: HostMemoryError) -> None:
        """Report that memory is short, and wait for another schedule."""
        with self._condition:
            self.shortage = shortage
            self._busy -= 1
            self._tell()
            self._condition.wait_for(lambda: self._stopped or self.shortage is None)

    def _ready(self, number: int) -> None:
        self.schedule.ready(number)
        self._tell()

    def _tell(self) -> None:
        self._news += 1
        self._condition.notify_all()


def _use(device: torch.device) -> None:
    """Make a device this thread's own; its questions about events would otherwise begin a context on device 0 too."""
    if device.type != "cpu" and device.index is not None:
        works(lambda: torch.accelerator.set_device_index(device))
