"""A machine whose stages sleep: collective batching and its peers with real threads and scripted durations.

Nothing computes, so the number of real cores does not matter. A sleep that lasted too long shortens the next one of
its thread.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from lightning_gnn.collective.plan import CollectivePlan, StageTimes
from lightning_gnn.collective.reorder_buffer import ReorderBuffer
from lightning_gnn.collective.simulate import drawn_durations
from lightning_gnn.runtime.timeline import Interval, Resource, Timeline


class SleepingMachine:
    """CPU workers, a PCIe link and a GPU, each a thread that sleeps for as long as a stage takes.

    Args:
        times: Of the stages.
        num_batches: Mini-batches of an epoch.
    """

    def __init__(self, times: StageTimes, num_batches: int) -> None:
        self.times = times
        self.num_batches = num_batches
        self.timeline = Timeline()
        self._drawn = drawn_durations(times, num_batches, seed=0)
        self._owed = threading.local()
        self._pcie = threading.Lock()  # reads of the GPU and transfers share it
        self._workers = threading.Condition()
        self._finished = False

    def collective(self, plan: CollectivePlan) -> Timeline:
        """Train an epoch with the schedule of the loader."""
        schedule = plan.schedule(self.num_batches, self.times.cpu_workers)
        arrivals: dict[int, Future[None]] = {}
        with self._working(schedule), ThreadPoolExecutor(1) as link:
            while True:
                with self._workers:
                    step = schedule.next()
                    while step.kind == "wait":
                        self._workers.wait()
                        step = schedule.next()
                    self._workers.notify_all()
                if step.kind == "end":
                    return self.timeline
                if step.kind == "batch":
                    self._batch(step.number)
                elif step.kind == "transfer":
                    arrivals[step.number] = link.submit(self._transfer, step.number)
                else:
                    if step.route == "cpu":
                        arrivals.pop(step.number).result()
                    self._train(step.number)

    def cpu_only(self) -> Timeline:
        """Train an epoch of what the CPU prepares; each mini-batch sets out as soon as it is ready and has room."""
        room = threading.Semaphore(2 * self.times.cpu_workers)

        def prepare(number: int) -> None:
            room.acquire()
            self._prepare(number)

        def transfer(number: int, prepared: Future[None]) -> None:
            prepared.result()
            self._transfer(number)

        with ThreadPoolExecutor(self.times.cpu_workers) as pool, ThreadPoolExecutor(1) as link:
            prepared = [pool.submit(prepare, number) for number in range(self.num_batches)]
            arrivals = [link.submit(transfer, number, one) for number, one in enumerate(prepared)]
            for number, arrival in enumerate(arrivals):
                arrival.result()
                room.release()
                self._train(number)
        return self.timeline

    def gpu_only(self) -> Timeline:
        """Train an epoch of what the GPU prepares."""
        for number in range(self.num_batches):
            self._batch(number)
            self._train(number)
        return self.timeline

    def random_split(self, ratio: float, seed: int = 0) -> Timeline:
        """Train an epoch in which the CPU prepares each mini-batch with a probability, ahead of time.

        It sets out for the GPU when its turn comes, while the one before is still being trained.

        Args:
            ratio: The probability.
            seed: Of the draws.
        """
        draws = random.Random(seed)
        routes = [draws.random() < ratio for _ in range(self.num_batches)]
        arrivals: dict[int, Future[None]] = {}
        ahead = [number for number, on_cpu in enumerate(routes) if on_cpu][::-1]
        prepared: dict[int, Future[None]] = {}
        before: Future[None] | None = None

        def train(number: int) -> None:
            if routes[number]:
                arrivals.pop(number).result()
            self._train(number)

        with (
            ThreadPoolExecutor(self.times.cpu_workers) as pool,
            ThreadPoolExecutor(1) as link,
            ThreadPoolExecutor(1) as gpu,
        ):
            for number, on_cpu in enumerate(routes):
                while ahead and len(prepared) < 2 * self.times.cpu_workers:
                    following = ahead.pop()
                    prepared[following] = pool.submit(self._prepare, following)
                if on_cpu:
                    prepared.pop(number).result()
                    arrivals[number] = link.submit(self._transfer, number)
                else:
                    gpu.submit(self._batch, number).result()
                if before is not None:
                    before.result()
                before = gpu.submit(train, number)
        return self.timeline

    @contextmanager
    def _working(self, schedule: ReorderBuffer) -> Iterator[None]:
        def work(lane: int) -> None:
            while True:
                with self._workers:
                    while (number := schedule.claim()) is None:
                        if self._finished:
                            return
                        self._workers.wait()
                self._prepare(number, lane)
                with self._workers:
                    schedule.ready(number)
                    self._workers.notify_all()

        with ThreadPoolExecutor(self.times.cpu_workers) as pool:
            running = [pool.submit(work, lane) for lane in range(self.times.cpu_workers)]
            try:
                yield
            finally:
                with self._workers:
                    self._finished = True
                    self._workers.notify_all()
                for worker in running:
                    worker.result()

    def _prepare(self, number: int, lane: int | None = None) -> None:
        if lane is None:
            lane = int(threading.current_thread().name.rpartition("_")[2])
        self._sleep("CPU", "cpu_batching", number, lane)

    def _transfer(self, number: int) -> None:
        with self._pcie:
            self._sleep("PCIe", "dma", number)

    def _batch(self, number: int) -> None:
        """The GPU samples and gathers a mini-batch, both over PCIe."""
        with self._pcie:
            for stage in ("gpu_batching", "uva"):
                reads = self._sleep("GPU", stage, number)
                self.timeline.intervals.append(replace(reads, resource="PCIe"))

    def _train(self, number: int) -> None:
        self._sleep("GPU", "model", number)

    def _sleep(self, resource: Resource, stage: str, number: int, lane: int = 0) -> Interval:
        start = time.perf_counter()
        seconds = self._drawn(stage, number) - getattr(self._owed, "seconds", 0.0)
        time.sleep(max(0.0, seconds))
        end = time.perf_counter()
        self._owed.seconds = end - start - seconds
        interval = Interval(resource, stage, number, start, end, lane)
        self.timeline.intervals.append(interval)
        return interval
