"""Collective batching: CPU and device prepare the mini-batches of an epoch together (MorphGL, section 4)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from pytorch_lightning.utilities import rank_zero_warn

from lightning_gnn.collective.batch_schedule import BatchSchedule, Sizes
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.plan import CollectivePlan, StageTimes
from lightning_gnn.collective.profile import Profiler
from lightning_gnn.collective.routes import DeviceBatch, DeviceRoutes, HostRoute, PinnedBufferRing
from lightning_gnn.collective.workers import Workers
from lightning_gnn.loading.batch import PreparedBatch
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch import Prefetcher
from lightning_gnn.loading.prefetch.lookahead import LookaheadWindow
from lightning_gnn.runtime.timeline import Timeline


class CollectiveBatching:
    """Begins the :class:`CollectivePrefetcher` of each epoch of a loader, and makes and keeps its plan.

    Without a plan it begins with buffers of one size, measures the stages while the model trains, and goes on as the
    :class:`Dispatcher` finds best, which looks for it in a thread of its own. One epoch runs at a time: a new one takes
    the place of one that has not come to its end.

    Args:
        route: Prepares the same mini-batches on the device, in the training thread; None where it cannot.
        device: Where mini-batches are trained; by default the CPU.
        plan, gpu_buffer_size, profile_batches: As for :class:`CollectiveDataModule`; None to measure and plan.
        num_batches: Returns how many there are, for an epoch that ends early.
        torch_threads: Torch's threads in the training thread while it iterates; None leaves them.
        on_plan: Called with a plan that has been made; returns what to keep.

    Source: MorphGL, section 4.2; where its algorithms 1 to 4 train the model, this one yields.
    """

    def __init__(
        self,
        *,
        route: MiniBatchPipeline | None = None,
        device: torch.device | str = "cpu",
        plan: CollectivePlan | None = None,
        gpu_buffer_size: int = 10,
        profile_batches: int = 20,
        num_batches: Callable[[], float] | None = None,
        torch_threads: int | None = None,
        on_plan: Callable[[CollectivePlan], CollectivePlan] | None = None,
    ) -> None:
        # Keep the settings; stages are profiled later, while the first mini-batches are prepared.
        if gpu_buffer_size < 1:
            raise ValueError(f"gpu_buffer_size must be at least 1, but is {gpu_buffer_size}")
        self.route, self.device, self.plan = route, torch.device(device), plan
        self.gpu_buffer_size = gpu_buffer_size
        self.profiler = Profiler(profile_batches)
        self.num_batches, self.torch_threads, self.on_plan = num_batches, torch_threads, on_plan
        self.num_threads = self.num_ahead = 0
        """Of the loader whose epoch it is: threads of the CPU, and mini-batches that they prepare ahead."""
        # Planning runs in the background while training goes on with the present plan.
        self.planning: Future[CollectivePlan] | None = None
        """A plan that is being made."""
        # Host buffers are needed only if mini-batches move to another device.
        moves = route is not None or self.device.type != "cpu"
        self.ring = PinnedBufferRing(self.device) if moves else None
        self.routes = DeviceRoutes(self.device, self.ring)
        self._current: weakref.ReferenceType[CollectivePrefetcher] | None = None

    def __call__(self, loader: PipelineLoader, epoch: int, first: int) -> CollectivePrefetcher:
        """Return the prefetcher of an epoch; with 0 workers and no ``route`` mini-batches are made when asked for."""
        self.stop()
        self.num_threads, self.num_ahead = loader.num_threads, loader.num_ahead
        self.profiler.cpu_workers = max(1, self.num_threads)
        if self.route is not None:
            # Both prepare mini-batches of the same keys, also where Lightning sharded the loader.
            self.route.rank = loader.pipeline.rank
        prefetcher = CollectivePrefetcher(self, loader, epoch, first)
        self._current = weakref.ref(prefetcher)
        return prefetcher

    @property
    def timeline(self) -> Timeline | None:
        """What each stage did when, by ``time.perf_counter()``, as far as it has ended; reading waits for it."""
        self.routes.recorder.end_model()
        self.routes.recorder.write()
        return self.routes.recorder.timeline

    @timeline.setter
    def timeline(self, value: Timeline | None) -> None:
        self.routes.recorder.timeline = value

    @property
    def measures(self) -> bool:
        """Whether there is something to plan, and no plan yet."""
        return self.plan is None and self.route is not None and self.num_threads > 0

    def buffers(self, num_batches: int) -> tuple[int, int, int, int]:
        """Return ``gbs``, ``cbs``, and the CPU's lead and row for the rest of an epoch of so many mini-batches."""
        lead = row = 0
        if not self.num_threads:
            on_gpu, on_cpu = (1 if self.plan is None else max(1, self.plan.buffers[0])), 0
        elif self.route is None:
            on_gpu, on_cpu = 0, self.num_ahead if self.plan is None else max(1, self.plan.buffers[1])
        elif self.plan is not None:
            (on_gpu, on_cpu), lead, row = self.plan.buffers, self.plan.ahead, self.plan.row
        else:
            lead = on_gpu = on_cpu = max(1, min(self.gpu_buffer_size, num_batches // 4))
        return on_gpu, on_cpu, lead, row

    def plan_from(self, times: StageTimes | None, num_batches: int) -> CollectivePlan:
        """Return the best plan for what has been measured; None where epochs are too short to tell."""
        if times is not None:
            return Dispatcher(times, self.gpu_buffer_size, num_batches=num_batches).plan()
        rank_zero_warn(
            f"collective batching: epochs of {num_batches} mini-batches are too short to measure; the CPU prepares "
            "all of them"
        )
        return CollectivePlan("cpu", self.gpu_buffer_size, max(self.gpu_buffer_size, self.num_threads))

    def start_planning(self, times: StageTimes, num_batches: int) -> None:
        """Have a plan made in a thread."""
        thread = ThreadPoolExecutor(1, "lightning-gnn-dispatcher")
        self.planning = thread.submit(self.plan_from, times, num_batches)
        thread.shutdown(wait=False)

    def adopt(self, plan: CollectivePlan) -> None:
        """Make a plan the one in force."""
        self.planning = None
        self.plan = plan if self.on_plan is None else self.on_plan(plan)

    def end_model(self) -> None:
        """Note that what comes now, such as a validation, is not the model's time."""
        self.routes.recorder.end_model()

    def stop(self) -> None:
        """End the epoch under way, and join its threads."""
        current = None if self._current is None else self._current()
        if current is not None:
            current.close()

    def close(self) -> None:
        """End the epoch under way, and free the host memory."""
        self.stop()
        if self.ring is not None:
            self.ring.clear()


_PATIENCE_S = 1.0  # for the threads after an error, which should be raised soon


class CollectivePrefetcher(Prefetcher):
    """Takes the steps that the schedule decides on, and returns mini-batches where it says to train.

    CPU workers fill page-locked host memory (Route 0), the training thread lets the device sample and gather others
    (Route 1). Threads end with the last mini-batch, at :meth:`close`, when dropped and when anything fails.
    """

    def __init__(self, batching: CollectiveBatching, loader: PipelineLoader, epoch: int, first: int) -> None:
        self._batching = batching
        limit = len(loader) if batching.num_batches is None else min(len(loader), batching.num_batches())  # type: ignore[arg-type]
        self._num_batches = int(limit)
        self._left = max(0, self._num_batches - first)
        self._workers: Workers | None = None
        self._window: LookaheadWindow | None = None
        self._torch_threads: int | None = None
        # The epoch before ended without a last call, and much may have been done since.
        batching.routes.recorder.forget_model()
        if self._left:
            self._begin(loader, epoch, first)

    def __next__(self) -> PreparedBatch:
        self._batching.routes.recorder.end_model()  # the user is back
        try:
            if not self._left or self._workers is None:
                raise StopIteration
            return self._advance(self._workers)
        except StopIteration:
            self.close()
            raise
        except BaseException:
            self.close(_PATIENCE_S)
            raise

    def close(self, patience: float = 10.0) -> None:
        """Stop preparing and join the threads."""
        self._left = 0
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close(patience)
        window, self._window = self._window, None
        if window is not None:
            window.close()
        threads, self._torch_threads = self._torch_threads, None
        if threads is not None and torch.get_num_threads() == self._batching.torch_threads:
            torch.set_num_threads(threads)

    def __del__(self) -> None:
        with suppress(AttributeError, TypeError):  # at the interpreter's end modules are gone already
            self.close()

    def _begin(self, loader: PipelineLoader, epoch: int, first: int) -> None:
        batching = self._batching
        # An epoch begins with what the one before has planned, or measured.
        if batching.measures:
            batching.profiler.epochs += 1
            if batching.planning is not None:  # begun in the epoch before
                batching.adopt(batching.planning.result())
            elif batching.profiler.epochs > 2 or (batching.profiler.epochs > 1 and batching.profiler.enough()):
                batching.adopt(batching.plan_from(batching.profiler.stage_times(), self._num_batches))
        recorder = batching.routes.recorder
        recorder.on_stage = batching.profiler.add if batching.measures else None
        recorder.begin()

        # The training thread leaves cores to the workers.
        if batching.torch_threads is not None:
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(batching.torch_threads)
        sizes = self._sizes()
        schedule = BatchSchedule(self._num_batches, *sizes, first=first)
        if batching.route is None:  # rows on disk are read in the best order, unless the device prepares a part
            tasks, after = loader.tasks(epoch, first), loader.next_epoch_tasks(epoch)
            self._window = loader.lookahead.begin(tasks, first, after)
        threads = batching.num_threads if sizes[1] else 0
        self._host = HostRoute(loader.pipeline, batching.ring if batching.num_threads else None, self._window)
        self._workers = Workers(loader.tasks(epoch, first), self._host, schedule, threads, recorder)

    def _sizes(self) -> Sizes:
        """Return what the schedule needs to know."""
        batching = self._batching
        on_gpu, on_cpu, lead, row = batching.buffers(self._num_batches)
        workers = max(1, batching.num_threads)
        if batching.ring is not None:
            # Those in the buffer, those that workers are busy with, and one that is on its way.
            batching.ring.capacity = on_cpu + workers
        return on_gpu, on_cpu, workers, lead, row

    def _advance(self, workers: Workers) -> PreparedBatch:
        """Take steps until there is a mini-batch to train."""
        batching = self._batching
        while True:
            if batching.measures or batching.planning is not None:
                self._plan(workers)
            step = workers.next()
            if step.kind == "train":
                return self._train(workers, step.number)
            if step.kind == "end":
                raise RuntimeError(f"the schedule ended with {self._left} mini-batches left")
            if step.kind == "wait":
                workers.wait()
            else:
                self._bring(workers, step.number)

    def _plan(self, workers: Workers) -> None:
        """Have a plan made, in a thread, once enough is known, and go by it once it is there."""
        batching = self._batching
        if batching.planning is None and batching.profiler.enough() and (times := batching.profiler.stage_times()):
            batching.routes.recorder.on_stage = None
            batching.start_planning(times, self._num_batches)
        if batching.planning is not None and batching.planning.done():
            batching.adopt(batching.planning.result())
            workers.resize(self._sizes())

    def _bring(self, workers: Workers, number: int) -> None:
        """Let a mini-batch come to be on the device."""
        source, route, routes = workers.host.get(number), self._batching.route, self._batching.routes
        try:
            if source is not None:
                workers.device[number] = routes.transfer(number, source)
                workers.host.pop(number, None)
            elif route is not None:
                workers.device[number] = routes.prepare(route, workers.task(number))
            else:  # neither a device nor threads prepare ahead
                workers.device[number] = DeviceBatch(self._host.prepare(workers.task(number)).prepared)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"{error}\ncollective batching has prepared {len(workers.device)} mini-batches ahead in the memory of "
                f"{self._batching.device}: lower gpu_buffer_size, that of a plan of your own too, or batch_size"
            ) from error

    def _train(self, workers: Workers, number: int) -> PreparedBatch:
        batching = self._batching
        prepared = batching.routes.arrive(workers.train(number))
        self._left -= 1
        if not self._left:
            self.close()
        batching.routes.recorder.begin_model(number)
        return prepared
