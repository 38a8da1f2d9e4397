"""Collective batching: CPU and device prepare the mini-batches of an epoch together (MorphGL, section 4)."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn

from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.plan import STAGES, CollectivePlan, StageTimes
from lightning_gnn.collective.profile import Profiler
from lightning_gnn.collective.reorder_buffer import ReorderBuffer, Sizes
from lightning_gnn.collective.routes import DeviceBatch, DeviceRoutes, HostRing, HostRoute
from lightning_gnn.collective.workers import Workers
from lightning_gnn.loading.batch import PreparedBatch
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch import Prefetcher
from lightning_gnn.loading.prefetch.lookahead import LookaheadWindow
from lightning_gnn.runtime.timeline import Timeline

PARTED = 0.1
"""Of what was expected of an epoch: if it takes so much more or less, it is planned anew."""
SHORTEST_S = 1.0
"""Of an epoch: to plan for a shorter one again takes longer than it could gain."""


class CollectiveBatching:
    """Begins the :class:`CollectivePrefetcher` of each epoch of a loader, and makes and keeps its plan.

    Without a plan it begins with buffers of one size, measures the stages while the model trains, and goes on as the
    :class:`Dispatcher` finds best, which looks for it in a thread of its own. It measures on: after an epoch that took
    a tenth longer or shorter than its plan said, it plans anew by what the stages take by then.

    One epoch runs at a time: a new one takes the place of one that has not come to its end.

    Args:
        route: Prepares the same mini-batches on the device, in the training thread; None where it cannot.
        device: Where mini-batches are trained; by default the CPU.
        plan: Who prepares which; None to measure and plan.
        gpu_buffer_size: ``gbs``, mini-batches that the device holds ready, where no plan says so.
        profile_batches: Measurements of each stage before planning.
        num_batches: Returns how many there are, for an epoch that ends early.
        torch_threads: Torch's threads in the training thread while it iterates; None leaves them.
        on_plan: Called with a plan that has been made, and why; returns what to keep.
        replan: Plan anew where epochs part from what their plan said.

    Raises:
        ValueError: ``gpu_buffer_size`` or ``profile_batches`` is below 1.

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
        on_plan: Callable[[CollectivePlan, str], CollectivePlan] | None = None,
        replan: bool = True,
    ) -> None:
        # Keep the settings; stages are profiled later, while the first mini-batches are prepared.
        if gpu_buffer_size < 1:
            raise ValueError(f"gpu_buffer_size must be at least 1, but is {gpu_buffer_size}")
        self.route, self.device, self.plan = route, torch.device(device), plan
        self.gpu_buffer_size, self.replan = gpu_buffer_size, replan
        self.profiler = Profiler(profile_batches)
        self.num_batches, self.torch_threads, self.on_plan = num_batches, torch_threads, on_plan
        self.num_threads = self.num_ahead = 0
        """Of the loader whose epoch it is: threads of the CPU, and mini-batches that they prepare ahead."""
        # Planning runs in the background while training goes on with the present plan.
        self.planning: Future[CollectivePlan] | None = None
        """A plan that is being made."""
        self._why = ""
        # Host buffers are needed only if mini-batches move to another device.
        moves = route is not None or self.device.type != "cpu"
        self.ring = HostRing(self.device) if moves else None
        # The promised epoch time is compared with the measured one to decide whether to plan anew.
        self.expected_s = 0.0 if plan is None else _promised(plan)
        """Seconds per mini-batch that are expected of an epoch; 0: nothing is."""
        self.last_epoch: tuple[float, int] | None = None
        """Seconds and mini-batches of an epoch that was whole, and of one plan."""
        self.routes = DeviceRoutes(self.device, self.ring)
        self.buffer_limit: tuple[int, int] | None = None
        """What memory has room for, once it did not suffice."""
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
        """What each stage did when, in seconds of ``time.perf_counter()``, as far as it has ended; None: not wanted.

        To read it waits for the device; to set it in mid-epoch begins in the middle.
        """
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

    @property
    def replans(self) -> bool:
        """Whether epochs are watched, to plan anew."""
        return self.replan and self.route is not None and self.num_threads > 0

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
        most = self.buffer_limit or (on_gpu, on_cpu)
        return min(on_gpu, most[0]), min(on_cpu, most[1]), lead, row

    def plan_from(self, times: StageTimes | None, num_batches: int) -> CollectivePlan:
        """Return the best plan for what has been measured; None where epochs are too short to tell."""
        if times is not None:
            return Dispatcher(times, self.gpu_buffer_size, num_batches=num_batches).plan(kept=self.plan)
        rank_zero_warn(
            f"collective batching: epochs of {num_batches} mini-batches are too short to measure; the CPU prepares "
            "all of them"
        )
        return CollectivePlan("cpu", self.gpu_buffer_size, max(self.gpu_buffer_size, self.num_threads))

    def start_planning(self, times: StageTimes, num_batches: int, why: str = "") -> None:
        """Have a plan made in a thread; ``why`` is for the user, if it is not the first one."""
        self._why = why
        thread = ThreadPoolExecutor(1, "lightning-gnn-dispatcher")
        self.planning = thread.submit(self.plan_from, times, num_batches)
        thread.shutdown(wait=False)

    def adopt(self, plan: CollectivePlan) -> None:
        """Make a plan the one in force."""
        self.planning = None
        if self.plan is None or plan.decisions != self.plan.decisions:
            self.expected_s = _promised(plan)
        self.plan = plan if self.on_plan is None else self.on_plan(plan, self._why or "measured and planned")
        self._why = ""

    def end_model(self) -> None:
        """Note that what comes now, such as a validation, is not the model's time."""
        self.routes.recorder.end_model()
        current = None if self._current is None else self._current()
        if current is not None:
            current.pause()

    def watch(self, plan: CollectivePlan, num_batches: int) -> None:
        """Measure the epoch that begins, and plan anew if the one before took another time than was expected of it.

        What it took is expected from then on, unless the new plan promises something else: epochs that cannot be told
        beforehand come to rest so. A stage that was measured too seldom is as it was.
        """
        took, self.last_epoch, expected = self.last_epoch, None, self.expected_s
        if took is not None and plan.times is not None:
            self.expected_s = each = took[0] / took[1]
            parted = expected and took[0] >= SHORTEST_S and abs(each - expected) > PARTED * expected
            if parted and self.planning is None and self.buffer_limit is None:
                enough = [stage for stage in STAGES if self.profiler.count(stage) >= self.profiler.num_measurements]
                found: dict[str, Any] = {stage: self.profiler.duration(stage) for stage in enough}
                times = replace(plan.times, **found)
                why = f"planned anew, as an epoch took {took[0]:.3g} s instead of {expected * took[1]:.3g}"
                self.start_planning(times, num_batches, why)
        self.profiler = Profiler(self.profiler.num_measurements, self.num_threads)
        self.routes.recorder.on_stage = self.profiler.add

    def shrink(
        self, buffers: tuple[int, int], on_device: bool, hopeless: bool, held: int, error: BaseException
    ) -> None:
        """Halve the buffers ``gbs`` and ``cbs``, for which memory is short; raise an error where that is hopeless.

        A buffer that could never be filled gets no larger than what it ``held``: halving a number out of reach would
        run out of memory again and again.
        """
        where = f"memory of {self.device}" if on_device else "page-locked host memory"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if hopeless:
            raise RuntimeError(
                f"collective batching: the {where} does not suffice for a mini-batch beside what is there ({reason}); "
                "lower batch_size or num_neighbors, or leave less of the graph in it"
            ) from error
        most = (held - ReorderBuffer.AHEAD, inf) if on_device else (inf, held)
        on_gpu, on_cpu = (
            min(size, int(max(1, min(size // 2, limit)))) for size, limit in zip(buffers, most, strict=True)
        )
        if (on_gpu, on_cpu) != buffers:
            rank_zero_warn(
                f"collective batching: too little {where} for buffers of {buffers[0]} mini-batches on the device and "
                f"{buffers[1]} on the host; going on with {on_gpu} and {on_cpu} ({reason})"
            )
        self.buffer_limit = on_gpu, on_cpu
        self.gpu_buffer_size = max(1, on_gpu)
        if self.plan is not None:
            self.plan = replace(self.plan, gpu_buffer_size=max(1, on_gpu), cpu_buffer_size=on_cpu)

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


def _promised(plan: CollectivePlan) -> float:
    """Return the seconds per mini-batch that a plan promises, without the last training, whose end is not seen."""
    model = 0.0 if plan.times is None else plan.times.model.mean
    return max(0.0, plan.epoch_s.get("collective", 0.0) - model) / max(1, plan.num_batches)


_PATIENCE_S = 1.0
"""After an error, for which nobody should wait long."""


class CollectivePrefetcher(Prefetcher):
    """Takes the steps that the schedule decides on, and returns mini-batches where it says to train.

    CPU workers fill page-locked host memory (Route 0), the training thread lets the device sample and gather others
    (Route 1), and returns them in the order of the epoch, as the plan says. It stops its threads with the last
    mini-batch, at :meth:`close`, when dropped and when anything fails.
    """

    def __init__(self, batching: CollectiveBatching, loader: PipelineLoader, epoch: int, first: int) -> None:
        self._batching = batching
        limit = len(loader) if batching.num_batches is None else min(len(loader), batching.num_batches())  # type: ignore[arg-type]
        self._num_batches = int(limit)
        self._left = max(0, self._num_batches - first)
        self._workers: Workers | None = None
        self._window: LookaheadWindow | None = None
        self._buffers = (0, 0)
        self._took_s, self._since = 0.0, inf
        self._watched = False
        self._torch_threads: int | None = None
        # The epoch before ended without a last call, and much may have been done since.
        batching.routes.recorder.forget_model()
        if self._left:
            self._begin(loader, epoch, first)

    def __next__(self) -> PreparedBatch:
        self._since = min(self._since, time.perf_counter())
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

    def pause(self) -> None:
        """Note that the time until the next mini-batch is asked for is not the epoch's."""
        self._took_s += max(0.0, time.perf_counter() - self._since)
        self._since = inf

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
            elif batching.profiler.exhausted() or (batching.profiler.epochs > 1 and batching.profiler.enough()):
                batching.adopt(batching.plan_from(batching.profiler.stage_times(), self._num_batches))
        recorder = batching.routes.recorder
        recorder.on_stage = batching.profiler.add if batching.measures else None
        if batching.replans and batching.plan is not None and batching.plan.times is not None:
            batching.watch(batching.plan, self._num_batches)
            self._watched = not first
        recorder.begin()

        # The training thread leaves cores to the workers.
        if batching.torch_threads is not None:
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(batching.torch_threads)
        schedule = ReorderBuffer(self._num_batches, *self._sizes(), first=first)
        if batching.route is None:  # rows on disk are read in the best order, unless the device prepares a part
            tasks, after = loader.tasks(epoch, first), loader.next_epoch_tasks(epoch)
            self._window = loader.lookahead.begin(tasks, first, after)
        threads = batching.num_threads if self._buffers[1] else 0
        self._host = HostRoute(loader.pipeline, batching.ring if batching.num_threads else None, self._window)
        self._workers = Workers(loader.tasks(epoch, first), self._host, schedule, threads, recorder)

    def _sizes(self) -> Sizes:
        """Return what the schedule needs to know."""
        batching = self._batching
        on_gpu, on_cpu, lead, row = batching.buffers(self._num_batches)
        self._buffers = on_gpu, on_cpu
        workers = max(1, batching.num_threads)
        if batching.buffer_limit is not None:
            workers = max(1, min(workers, on_cpu))
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
            if step.kind == "wait" and workers.shortage is not None:
                self._shrink(workers, workers.shortage, -1)
            elif step.kind == "wait":
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
            self._watched = False

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
            self._shrink(workers, error, number)

    def _shrink(self, workers: Workers, error: BaseException, number: int) -> None:
        """Go on with smaller buffers, once what is on the device has been trained."""
        on_device = isinstance(error, torch.OutOfMemoryError)
        self._watched = False
        held, ring, schedule = len(workers.device), self._batching.ring, workers.schedule
        hopeless = not held if on_device else self._buffers[1] <= 1
        self._batching.shrink(
            self._buffers, on_device, hopeless, held if on_device or ring is None else ring.num_slots, error
        )
        if on_device:
            workers.give_up(number)
            if schedule.head not in workers.device:  # what comes after it must make room
                for later in list(workers.device):
                    workers.give_up(later)
            if self._batching.device.type != "cpu":
                getattr(torch, self._batching.device.type).empty_cache()
        workers.resize(self._sizes())

    def _train(self, workers: Workers, number: int) -> PreparedBatch:
        batching = self._batching
        prepared = batching.routes.arrive(workers.train(number))
        self._left -= 1
        if self._watched:
            batching.profiler.collect()
        if not self._left:
            self.pause()
            batching.last_epoch = (self._took_s, self._num_batches) if self._watched else None
            self.close()
        batching.routes.recorder.begin_model(number)
        return prepared
