"""One epoch of collective batching: the training thread's side (MorphGL, algorithms 1 to 4)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch_geometric.data import Data

from lightning_gnn.collective.dual_buffer import DualBuffer
from lightning_gnn.collective.workers import Workers

if TYPE_CHECKING:
    from lightning_gnn.collective.loader import CollectiveLoader


_PATIENCE_S = 1.0
"""After an error, for which nobody should wait long."""


class CollectiveEpoch:
    """Takes the steps that the schedule decides on, and yields where it says to train.

    It starts at the first ``next``, since Lightning asks for the iterator before it sets the epoch, and stops its
    threads with the last mini-batch, at :meth:`close`, when dropped and when anything fails.

    Args:
        loader: Whose epoch.
    """

    def __init__(self, loader: CollectiveLoader) -> None:
        self._loader = loader
        self._workers: Workers | None = None
        self._begun = False
        self._num_batches = 0
        self._left = 0
        self._buffers = (0, 0)
        self._draining: deque[int] = deque()  # what is trained before the schedule changes
        self._changed: tuple[int, int] | None = None
        self._torch_threads: int | None = None
        self._phase: tuple[str, float] = ("", 0.0)

    def __iter__(self) -> Iterator[Data]:
        return self

    def __next__(self) -> Data:
        start = time.perf_counter()
        recorder = self._loader.routes.recorder
        if self._begun:
            recorder.end_model()  # the user is back
        else:
            recorder.forget_model()  # the epoch before ended without a last call, and much may have been done since
        try:
            if not self._begun:
                self._begin()
            if not self._left or self._workers is None:
                self.close()
                raise StopIteration
            batch = self._advance(self._workers)
        except BaseException:
            self.close(_PATIENCE_S)
            raise
        self._loader.times.wait_s += time.perf_counter() - start
        return batch

    def close(self, patience: float = 10.0) -> None:
        """Stop preparing and join the threads.

        Args:
            patience: Seconds to wait for those that are in the middle of a mini-batch.
        """
        self._begun, self._left = True, 0
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close(patience)
            self._note_phase("", time.perf_counter())
        threads, self._torch_threads = self._torch_threads, None
        if threads is not None and torch.get_num_threads() == self._loader.torch_threads:
            torch.set_num_threads(threads)

    def __del__(self) -> None:
        with suppress(AttributeError, TypeError):  # at the interpreter's end modules are gone already
            self.close()

    def _begin(self) -> None:
        loader = self._loader
        self._begun = True
        epoch = loader.begin_epoch()
        first = 0 if loader.first_batch is None else loader.first_batch()
        limit = len(loader) if loader.num_batches is None else min(len(loader), loader.num_batches())
        self._num_batches = int(limit)
        trained = loader.order[:first] if not loader.deterministic and len(loader.order) >= first else range(first)
        loader.order[:] = trained
        self._left = max(0, self._num_batches - len(loader.order))
        if not self._left:
            return
        recorder = loader.routes.recorder
        if loader.measures:
            loader.profiler.epochs += 1
            if loader.profiler.exhausted() or (loader.profiler.epochs > 1 and loader.profiler.enough()):
                loader.plan_from_measurements(self._num_batches)
        recorder.profiler = loader.profiler if loader.measures else None
        recorder.begin()
        if loader.torch_threads is not None:
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(loader.torch_threads)
        done = frozenset(loader.order)
        numbered = enumerate(loader.batch_sampler)
        tasks = ((epoch, number, list(index)) for number, index in numbered if number not in done)
        schedule = self._schedule(loader.buffers(self._num_batches), done)
        threads = loader.num_threads if self._buffers[1] else 0
        self._workers = Workers(tasks, loader.prepare_on_host, loader.drop, schedule, threads, recorder)

    def _schedule(self, buffers: tuple[int, int], trained: frozenset[int]) -> DualBuffer:
        loader = self._loader
        self._buffers = buffers
        workers = max(1, loader.num_threads)
        if loader.most is not None:
            workers = max(1, min(workers, buffers[1]))
        if loader.ring is not None:
            # Those in the buffer, those that workers are busy with, and one that is on its way.
            loader.ring.capacity = buffers[1] + workers
        return DualBuffer(self._num_batches, *buffers, workers, done=trained, deterministic=loader.deterministic)

    def _advance(self, workers: Workers) -> Data:
        """Take steps until there is a mini-batch to train."""
        loader = self._loader
        while True:
            if self._draining:
                return self._train(workers, self._draining.popleft())
            if self._changed is not None:
                self._reschedule(workers, self._changed)
            if loader.measures and not workers.schedule.gpu_buffer and loader.profiler.enough():
                loader.plan_from_measurements(self._num_batches)
                loader.routes.recorder.profiler = None
                self._reschedule(workers, loader.buffers(self._num_batches))
            step = workers.next()
            self._note_phase(step.phase, time.perf_counter())
            if step.kind == "train":
                return self._train(workers, step.number)
            if step.kind == "end":
                raise RuntimeError(f"the schedule ended with {self._left} mini-batches left")
            if step.kind == "wait" and workers.shortage is not None:
                self._shrink(workers, workers.shortage)
            elif step.kind == "wait":
                workers.wait()
            else:
                self._bring(workers, step.number)

    def _bring(self, workers: Workers, number: int) -> None:
        """Let a mini-batch come to be on the device."""
        source = workers.host.get(number)
        try:
            if source is None:
                workers.device[number] = self._loader.routes.prepare(workers.task(number))
            else:
                workers.device[number] = self._loader.routes.transfer(number, source)
                workers.host.pop(number, None)
        except torch.OutOfMemoryError as error:
            self._shrink(workers, error)

    def _shrink(self, workers: Workers, error: BaseException) -> None:
        """Go on with smaller buffers, once what is on the device has been trained."""
        self._draining = deque(number for number, _ in workers.schedule.gpu_buffer if number in workers.device)
        on_device = isinstance(error, torch.OutOfMemoryError)
        hopeless = not self._draining if on_device else self._buffers[1] <= 1
        ring = self._loader.ring
        held = len(self._draining) if on_device or ring is None else ring.num_slots
        self._changed = self._loader.shrink(self._buffers, on_device, hopeless, held, error)

    def _reschedule(self, workers: Workers, buffers: tuple[int, int]) -> None:
        if self._changed is not None and self._loader.device.type != "cpu":
            getattr(torch, self._loader.device.type).empty_cache()
        self._changed = None
        workers.reschedule(self._schedule(buffers, frozenset(self._loader.order)))

    def _train(self, workers: Workers, number: int) -> Data:
        loader = self._loader
        prepared = loader.routes.arrive(workers.train(number))
        batch = loader.finish(prepared)
        loader.order.append(number)
        self._left -= 1
        loader.times.add(prepared.cost)
        if not self._left:
            self.close()
        loader.routes.recorder.begin_model(number)
        return batch

    def _note_phase(self, name: str, now: float) -> None:
        if name != self._phase[0]:
            if self._phase[0]:
                self._loader.routes.recorder.phase(*self._phase, now)
            self._phase = name, now
