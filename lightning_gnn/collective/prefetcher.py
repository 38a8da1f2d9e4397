"""Prefetching by collective batching: CPU and device prepare an epoch's mini-batches together (MorphGL, section 4)."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

from lightning_gnn.collective.batch_schedule import BatchSchedule, Sizes
from lightning_gnn.collective.dispatcher import HOST_PER_WORKER, Dispatcher
from lightning_gnn.collective.dual_buffer import DualBuffer
from lightning_gnn.collective.plan import CollectivePlan, ScheduleName, StageTimes
from lightning_gnn.collective.profile import Profiler
from lightning_gnn.collective.published import PublishedDispatcher
from lightning_gnn.collective.routes import DeviceBatch, DeviceRoutes, HostRoute, PinnedBufferRing
from lightning_gnn.collective.workers import Workers
from lightning_gnn.loading.batch import PreparedBatch
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch import Prefetcher
from lightning_gnn.loading.prefetch.lookahead import LookaheadWindow
from lightning_gnn.runtime.lightning import rank_zero_warn
from lightning_gnn.runtime.timeline import Timeline

log = logging.getLogger(__name__)
PLANNERS: dict[str, type[Dispatcher]] = {"auto": Dispatcher, "paper": PublishedDispatcher}


class CollectiveBatching:
    """Creates the :class:`CollectivePrefetcher` of each epoch of a loader, and creates and stores its plan.

    Without a plan, it starts with equal buffer sizes, measures the stages while the model trains, runs the
    :class:`Dispatcher` in a thread, and then switches to its plan. One epoch runs at a time: starting a new one ends
    an unfinished one.

    Args:
        route: Pipeline that prepares the same mini-batches on the device, in the training thread; None without one.
        device: Device on which mini-batches are trained; by default the CPU.
        plan, gpu_buffer_size, profile_batches, schedule: See :class:`CollectiveDataModule`; ``plan=None`` measures and
            plans, with ``planner``.
        num_batches: Returns the number of mini-batches to yield, for an epoch that ends early.
        torch_threads: Number of torch threads in the training thread during an epoch; None leaves it unchanged.
        on_plan: Called with a new plan; returns the plan to use.
        trained: Numbers of the current epoch's mini-batches in the order of training, updated here; a resumed epoch
            continues from them.

    Source: MorphGL, section 4.2; where its algorithms 1 to 4 train the model, this class yields.
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
        planner: type[Dispatcher] = Dispatcher,
        schedule: ScheduleName = "in_order",
        trained: list[int] | None = None,
    ) -> None:
        if gpu_buffer_size < 1:
            raise ValueError(f"gpu_buffer_size must be at least 1, but is {gpu_buffer_size}")
        self.route, self.device, self.plan = route, torch.device(device), plan
        self.gpu_buffer_size, self.planner, self.schedule = gpu_buffer_size, planner, schedule
        self.trained = [] if trained is None else trained
        self.profiler = Profiler(profile_batches)
        self.num_batches, self.torch_threads, self.on_plan = num_batches, torch_threads, on_plan
        self.num_threads = self.num_ahead = 0  # of the current loader
        self.planning: Future[CollectivePlan] | None = None  # creates a plan while training continues
        # Host buffers are needed only if mini-batches move to another device.
        moves = route is not None or self.device.type != "cpu"
        self.ring = PinnedBufferRing(self.device) if moves else None
        self.routes = DeviceRoutes(self.device, self.ring)
        self.is_managed, self.most_ahead = False, sys.maxsize
        self.stall_timeout: float | None = None
        self._current_prefetcher: weakref.ReferenceType[CollectivePrefetcher] | None = None

    def __call__(self, loader: PipelineLoader, epoch: int, first: int) -> CollectivePrefetcher:
        """Return the prefetcher of an epoch; without workers and ``route``, it prepares mini-batches on demand."""
        self.stop()
        self.num_threads, self.num_ahead = loader.num_threads, loader.num_ahead
        self.profiler.cpu_workers = max(1, self.num_threads)
        if self.route is not None:
            # Both routes use the same random keys, even if Lightning sharded the loader.
            self.route.rank = loader.pipeline.rank
        prefetcher = CollectivePrefetcher(self, loader, epoch, first)
        self._current_prefetcher = weakref.ref(prefetcher)
        return prefetcher

    @property
    def timeline(self) -> Timeline | None:
        """Timeline of finished stages, in ``time.perf_counter()`` seconds. Reading synchronizes the device."""
        self.routes.recorder.end_model()
        self.routes.recorder.write()
        return self.routes.recorder.timeline

    @timeline.setter
    def timeline(self, value: Timeline | None) -> None:
        self.routes.recorder.timeline = value

    @property
    def measures(self) -> bool:
        """Whether stages are measured to plan, which requires both routes and no plan yet."""
        return not self.is_managed and self.plan is None and self.route is not None and self.num_threads > 0

    @property
    def trains_as_ready(self) -> bool:
        """Whether mini-batches are trained as they become ready; with a single route there is nothing to schedule."""
        return self.schedule == "paper" and self.route is not None

    def needed_ahead(self, num_threads: int) -> int:
        """Return how far ahead of training mini-batches are prepared without a limit on an automatic plan's buffers."""
        on_gpu, lead = (self.gpu_buffer_size, 0) if self.plan is None else (self.plan.buffers[0], self.plan.ahead)
        return max(2 * on_gpu, lead) + HOST_PER_WORKER * num_threads

    def manage(self, most_ahead: int, stall_timeout: float) -> None:
        """Let the caller set the plan and the threads, by :meth:`adopt` and :meth:`resize`."""
        self.is_managed, self.most_ahead, self.stall_timeout, self.torch_threads = True, most_ahead, stall_timeout, None

    def buffers(self, num_batches: int) -> tuple[int, int, int, int]:
        """Return ``gbs``, ``cbs``, ``lead`` and ``row`` for the rest of an epoch of ``num_batches`` mini-batches."""
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
        """Return the best plan for measured times; a CPU plan with a warning if epochs were too short to measure."""
        if times is not None:
            planner = self.planner(times, self.gpu_buffer_size, num_batches=num_batches, schedule=self.schedule)
            return planner.plan()
        rank_zero_warn(
            f"collective batching: epochs of {num_batches} mini-batches are too short to measure; the CPU prepares "
            "all of them"
        )
        return CollectivePlan("cpu", self.gpu_buffer_size, max(self.gpu_buffer_size, self.num_threads))

    def start_planning(self, times: StageTimes, num_batches: int) -> None:
        """Start creating a plan in a thread."""
        log.debug(f"{type(self).__name__}: planning epochs of {num_batches} mini-batches")
        thread = ThreadPoolExecutor(1, "lightning-gnn-dispatcher")
        self.planning = thread.submit(self.plan_from, times, num_batches)
        thread.shutdown(wait=False)

    def adopt(self, plan: CollectivePlan) -> None:
        """Set the current plan."""
        self.planning = None
        self.plan = plan if self.on_plan is None else self.on_plan(plan)

    def resize(self, num_threads: int) -> None:
        """Set the number of CPU workers and apply the current plan, also in a running epoch."""
        self.num_threads = num_threads
        if (current := self._get_current()) is not None:
            current.resize()

    def end_model(self) -> None:
        """End the time measurement of the model step, such as before a validation."""
        self.routes.recorder.end_model()

    def stop(self) -> None:
        """End the current epoch and join its threads."""
        if (current := self._get_current()) is not None:
            current.close()

    def close(self) -> None:
        """End the current epoch and free host memory."""
        self.stop()
        if self.ring is not None:
            self.ring.clear()

    def _get_current(self) -> CollectivePrefetcher | None:
        return None if self._current_prefetcher is None else self._current_prefetcher()


_JOIN_TIMEOUT_AFTER_ERROR_S = 1.0  # short, so that the error is raised promptly


class CollectivePrefetcher(Prefetcher):
    """Executes the schedule's actions and returns the mini-batches to train.

    CPU workers prepare mini-batches in pinned host memory (route 0); the training thread samples and gathers others on
    the device (route 1). Threads end after the last mini-batch, at :meth:`close`, on deletion, and after an error.
    """

    def __init__(self, batching: CollectiveBatching, loader: PipelineLoader, epoch: int, first: int) -> None:
        self._batching = batching
        limit = len(loader) if batching.num_batches is None else min(len(loader), batching.num_batches())  # type: ignore[arg-type]
        self._num_batches = int(limit)
        self._num_left = max(0, self._num_batches - first)
        self._workers: Workers | None = None
        self._window: LookaheadWindow | None = None
        self._torch_threads: int | None = None
        # The previous epoch ended without a final call, so the time since then is not model time.
        batching.routes.recorder.forget_model()
        if self._num_left:
            self._start_epoch(loader, epoch, first)

    def __next__(self) -> PreparedBatch:
        self._batching.routes.recorder.end_model()  # the model step ends when the next mini-batch is requested
        try:
            if not self._num_left or self._workers is None:
                raise StopIteration
            return self._advance(self._workers)
        except StopIteration:
            self.close()
            raise
        except BaseException:
            self.close(_JOIN_TIMEOUT_AFTER_ERROR_S)
            raise

    def resize(self) -> None:
        """Apply the plan and the number of threads."""
        if self._workers is not None:
            sizes = self._schedule_sizes()
            self._workers.resize(sizes, self._num_threads(sizes))

    def close(self, patience: float = 10.0) -> None:
        """Stop preparing mini-batches and join the threads."""
        self._num_left = 0
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close(patience)
        window, self._window = self._window, None
        if window is not None:
            window.close()
        self._restore_torch_threads()

    def __del__(self) -> None:
        # The workers and the window stop by themselves.
        with suppress(AttributeError, TypeError):  # at interpreter exit, modules may be deleted already
            self._restore_torch_threads()

    def _restore_torch_threads(self) -> None:
        threads, self._torch_threads = self._torch_threads, None
        if threads is not None and torch.get_num_threads() == self._batching.torch_threads:
            torch.set_num_threads(threads)

    def _start_epoch(self, loader: PipelineLoader, epoch: int, first: int) -> None:
        batching, left = self._batching, self._find_left(first)
        # Adopt a plan from the measurements of the previous epoch.
        if batching.measures:
            batching.profiler.epochs += 1
            if batching.planning is not None:  # started in the previous epoch
                batching.adopt(batching.planning.result())
            elif batching.profiler.epochs > 2 or (batching.profiler.epochs > 1 and batching.profiler.enough()):
                batching.adopt(batching.plan_from(batching.profiler.stage_times(), self._num_batches))
        recorder = batching.routes.recorder
        recorder.on_stage = batching.profiler.add if batching.measures or batching.is_managed else None
        recorder.begin()

        # Reserve cores for the workers.
        if batching.torch_threads is not None:
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(batching.torch_threads)
        sizes = self._schedule_sizes()
        schedule: BatchSchedule | DualBuffer = BatchSchedule(
            self._num_batches, *sizes, first=first, most_ahead=batching.most_ahead
        )
        if batching.trains_as_ready:
            schedule = DualBuffer(left, *sizes)
        if batching.route is None:  # the lookahead requires that the CPU prepares all mini-batches
            tasks, after = loader.tasks(epoch, first), loader.next_epoch_tasks(epoch)
            self._window = loader.lookahead.begin(tasks, first, after)
        self._host = HostRoute(loader.pipeline, batching.ring if batching.num_threads else None, self._window)
        tasks, threads = loader.tasks(epoch, left[0]), self._num_threads(sizes)
        self._workers = Workers(tasks, self._host, schedule, threads, recorder, batching.stall_timeout, self)

    def _find_left(self, first: int) -> Sequence[int]:
        """Return the mini-batches left to train, ascending; raise a ValueError if the schedule cannot continue."""
        trained = self._batching.trained
        del trained[first:]
        if len(trained) < first:  # not recorded, so trained in order
            trained[:] = range(first)
        if self._batching.trains_as_ready:
            before = set(trained)
            return [number for number in range(self._num_batches) if number not in before][: self._num_left]
        if trained != list(range(first)):
            raise ValueError(
                f"the checkpoint was saved within an epoch of which {first} mini-batches were trained in another order "
                "(schedule='paper'): resume with schedule='paper' and both routes, or from the end of an epoch"
            )
        return range(first, self._num_batches)

    def _schedule_sizes(self) -> Sizes:
        """Return the arguments of :meth:`BatchSchedule.resize`, and set the ring's capacity."""
        batching = self._batching
        on_gpu, on_cpu, lead, row = batching.buffers(self._num_batches)
        workers = max(1, batching.num_threads)
        if batching.ring is not None:
            # Mini-batches in the buffer, on workers, and one in transfer.
            batching.ring.capacity = on_cpu + workers
        return on_gpu, on_cpu, workers, lead, row

    def _num_threads(self, sizes: Sizes) -> int:
        return self._batching.num_threads if sizes[1] else 0

    def _advance(self, workers: Workers) -> PreparedBatch:
        """Execute actions until a mini-batch is due for training."""
        batching = self._batching
        while True:
            if batching.measures:
                self._update_plan()
            step = workers.next()
            if step.kind == "train":
                return self._take_for_training(workers, step.number)
            if step.kind == "end":
                raise RuntimeError(f"the schedule ended with {self._num_left} mini-batches left")
            if step.kind == "wait":
                workers.wait()
            else:
                self._load_on_device(workers, step.number)

    def _update_plan(self) -> None:
        """Start planning after enough measurements, and adopt the plan when it is ready."""
        batching = self._batching
        if batching.planning is None and batching.profiler.enough() and (times := batching.profiler.stage_times()):
            batching.routes.recorder.on_stage = None
            batching.start_planning(times, self._num_batches)
        if batching.planning is not None and batching.planning.done():
            batching.adopt(batching.planning.result())
            self.resize()

    def _load_on_device(self, workers: Workers, number: int) -> None:
        """Transfer a mini-batch to the device, or prepare it there."""
        source, route, routes = workers.host.get(number), self._batching.route, self._batching.routes
        try:
            if source is not None:
                workers.device[number] = routes.transfer(number, source)
                workers.host.pop(number, None)
            elif route is not None:
                workers.device[number] = routes.prepare(route, workers.task(number))
            else:  # no device route and no threads: prepare on demand
                workers.device[number] = DeviceBatch(self._host.prepare(workers.task(number)).prepared)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"{error}\ncollective batching has prepared {len(workers.device)} mini-batches ahead in the memory of "
                f"{self._batching.device}: lower gpu_buffer_size (also in a plan file) or batch_size"
            ) from error

    def _take_for_training(self, workers: Workers, number: int) -> PreparedBatch:
        batching = self._batching
        prepared = batching.routes.arrive(workers.train(number))
        batching.trained.append(number)
        self._num_left -= 1
        if not self._num_left:
            self.close()
        batching.routes.recorder.begin_model(number)
        return prepared
