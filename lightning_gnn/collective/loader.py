"""Collective batching: CPU and device prepare the mini-batches of an epoch together (MorphGL, section 4)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.epoch import CollectiveEpoch
from lightning_gnn.collective.host_ring import HostRing
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.collective.profile import Profiler
from lightning_gnn.collective.routes import DeviceRoutes, HostBatch, Task
from lightning_gnn.ops import gather_rows
from lightning_gnn.runtime.timeline import Timeline
from lightning_gnn.sampling.loader import ThreadedNodeLoader


class CollectiveLoader(ThreadedNodeLoader):
    """The mini-batches of :class:`ThreadedNodeLoader`, of which the device that trains on them prepares a part.

    CPU workers fill page-locked host memory (Route 0), the training thread lets the device sample and gather others
    (Route 1), and yields them, in overlaps of three phases, as the plan says. Without a plan it begins with as many of
    each, measures the stages while the model trains, and goes on as the :class:`Dispatcher` finds best.

    It iterates once at a time: a new iterator takes the place of one that has not come to its end.

    Args:
        *args: As for :class:`ThreadedNodeLoader`.
        route: Prepares the same mini-batches on the device, in the training thread; None where it cannot.
        device: Where mini-batches are trained; by default the CPU.
        plan: Who prepares which; None to measure and plan.
        gpu_buffer_size: ``gbs``, mini-batches that the device holds ready, where no plan says so.
        profile_batches: Measurements of each stage before planning.
        deterministic: Yield the mini-batches in the order of the epoch. Otherwise each is yielded once, as it is ready.
        num_batches: Tells how many there are, for an epoch that ends early.
        torch_threads: Torch's threads in the training thread while it iterates; None leaves them.
        order: Is filled with the numbers of the epoch's mini-batches as they are handed out; in a resumed epoch without
            ``deterministic`` it says which ones were.
        on_plan: Called with a plan that has been made; returns what to keep.
        **kwargs: As for :class:`ThreadedNodeLoader`; ``num_workers`` are the threads of the CPU. With 0 and no
            ``route`` mini-batches are prepared when they are asked for.

    Raises:
        ValueError: As for :class:`ThreadedNodeLoader`; ``gpu_buffer_size`` or ``profile_batches`` is below 1.

    Source: MorphGL, section 4.2, algorithms 1 to 4. In each the model trains where this one yields.
    """

    def __init__(
        self,
        *args: Any,
        route: ThreadedNodeLoader | None = None,
        device: torch.device | str = "cpu",
        plan: CollectivePlan | None = None,
        gpu_buffer_size: int = 10,
        profile_batches: int = 20,
        deterministic: bool = True,
        num_batches: Callable[[], float] | None = None,
        torch_threads: int | None = None,
        order: list[int] | None = None,
        on_plan: Callable[[CollectivePlan], CollectivePlan] | None = None,
        **kwargs: Any,
    ) -> None:
        if gpu_buffer_size < 1:
            raise ValueError(f"gpu_buffer_size must be at least 1, but is {gpu_buffer_size}")
        super().__init__(*args, **kwargs)
        self.route = route
        self.device = torch.device(device)
        self.plan = plan
        self.gpu_buffer_size = gpu_buffer_size
        self.profiler = Profiler(profile_batches, max(1, self.num_threads))
        self.deterministic = deterministic
        self.num_batches = num_batches
        self.torch_threads = torch_threads
        self.order = [] if order is None else order
        self.on_plan = on_plan
        moves = route is not None or self.device.type != "cpu"
        self.ring = HostRing(self.device) if moves and self.num_threads else None
        in_thread = self if route is None and not self.num_threads else route
        self.routes = DeviceRoutes(self.device, in_thread, self.ring)
        self.most: tuple[int, int] | None = None
        """What memory has room for, once it did not suffice."""
        self._slot = threading.local()
        self._epoch: weakref.ReferenceType[CollectiveEpoch] | None = None

    def __iter__(self) -> Iterator[Data]:
        self.stop()
        epoch = CollectiveEpoch(self)
        self._epoch = weakref.ref(epoch)
        return epoch

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
    def names(self) -> dict[str, str]:
        """What to call the resources and stages of its timelines where the CPU stands in for a GPU."""
        if self.device.type != "cpu":
            return {}
        if self.route is None:
            return {"GPU": "CPU, training"}
        stages = {"gpu_batching": "sampling, CPU as GPU", "uva": "gathering, CPU as GPU", "dma": "copying, CPU as PCIe"}
        return {"GPU": "CPU as GPU", "PCIe": "CPU as PCIe", **stages}

    @property
    def measures(self) -> bool:
        """Whether there is something to plan, and no plan yet."""
        return self.plan is None and self.route is not None and self.num_threads > 0

    def buffers(self, num_batches: int) -> tuple[int, int]:
        """Return ``gbs`` and ``cbs`` for the rest of an epoch.

        Args:
            num_batches: Mini-batches of the epoch.
        """
        if not self.num_threads:
            on_gpu, on_cpu = (1 if self.plan is None else max(1, self.plan.buffers[0])), 0
        elif self.route is None:
            ahead = self.num_threads * self.prefetch_factor_threads
            on_gpu, on_cpu = 0, ahead if self.plan is None else max(1, self.plan.buffers[1])
        elif self.plan is not None:
            on_gpu, on_cpu = self.plan.buffers
        else:
            on_gpu = on_cpu = max(1, min(self.gpu_buffer_size, num_batches // 2))
        return (on_gpu, on_cpu) if self.most is None else (min(on_gpu, self.most[0]), min(on_cpu, self.most[1]))

    def plan_from_measurements(self, num_batches: int) -> None:
        """Turn what has been measured into the plan in force.

        Args:
            num_batches: Mini-batches of an epoch.
        """
        times = self.profiler.stage_times()
        if times is None:
            rank_zero_warn(
                f"collective batching: epochs of {num_batches} mini-batches are too short to measure; the CPU prepares "
                "all of them"
            )
            self.plan = CollectivePlan("cpu", self.gpu_buffer_size, max(self.gpu_buffer_size, self.num_threads))
        else:
            dispatcher = Dispatcher(
                times, self.gpu_buffer_size, num_batches=num_batches, deterministic=self.deterministic
            )
            self.plan = dispatcher.plan()
        if self.on_plan is not None:
            self.plan = self.on_plan(self.plan)

    def shrink(
        self, buffers: tuple[int, int], on_device: bool, hopeless: bool, held: int, error: BaseException
    ) -> tuple[int, int]:
        """Halve the buffers, for which memory does not suffice, and return their sizes.

        A buffer that could never be filled gets no larger than what it held: halving a number out of reach would run
        out of memory again and again.

        Args:
            buffers: ``gbs`` and ``cbs`` as they are.
            on_device: Whether it is the device's memory.
            hopeless: Whether there was nothing to make room.
            held: Mini-batches for which that memory did suffice.
            error: What has been raised.

        Raises:
            RuntimeError: It is hopeless; the message has the advice.
        """
        where = f"memory of {self.device}" if on_device else "page-locked host memory"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if hopeless:
            raise RuntimeError(
                f"collective batching: the {where} does not suffice for a mini-batch beside what is there ({reason}); "
                "lower batch_size or num_neighbors, or leave less of the graph in it"
            ) from error
        most = (held, inf) if on_device else (inf, held)
        on_gpu, on_cpu = (
            min(size, int(max(1, min(size // 2, limit)))) for size, limit in zip(buffers, most, strict=True)
        )
        if (on_gpu, on_cpu) != buffers:
            rank_zero_warn(
                f"collective batching: too little {where} for buffers of {buffers[0]} mini-batches on the device and "
                f"{buffers[1]} on the host; going on with {on_gpu} and {on_cpu} ({reason})"
            )
        self.most = on_gpu, on_cpu
        self.gpu_buffer_size = max(1, on_gpu)
        if self.plan is not None:
            self.plan = replace(self.plan, gpu_buffer_size=max(1, on_gpu), cpu_buffer_size=on_cpu)
        return self.most

    def prepare_on_host(self, task: Task) -> HostBatch:
        """Route 0: make a mini-batch in memory that the device can fetch; safe in any thread.

        Raises:
            HostMemoryError: The system refused it.
        """
        if self.ring is None:
            return HostBatch(self.prepare(task))
        slot = self._slot.value = self.ring.take()
        try:
            prepared = self.prepare(task)
            return HostBatch(replace(prepared, batch=slot.hold(prepared.batch)), slot)
        except BaseException:
            self.ring.discard(slot)
            raise
        finally:
            self._slot.value = None

    def drop(self, batch: HostBatch) -> None:
        """Give the memory of a mini-batch back that nobody needs."""
        if batch.slot is not None and self.ring is not None:
            self.ring.give_back(batch.slot)

    def stop(self) -> None:
        """Stop preparing, and join the threads."""
        epoch = None if self._epoch is None else self._epoch()
        if epoch is not None:
            epoch.close()

    def close(self) -> None:
        """Stop preparing, and free the host memory."""
        self.stop()
        if self.ring is not None:
            self.ring.clear()

    def _rows(self, key: str, ids: Tensor) -> Any:
        slot = getattr(self._slot, "value", None)
        if slot is None or not ids.is_cpu:
            return super()._rows(key, ids)
        if key in self.tables:
            table = self.tables[key]
            return table.gather(ids, out=slot.empty(key, (ids.numel(), table.num_features), table.dtype))
        value = self.data[key]
        if type(value) is not Tensor or not value.is_cpu or self.data.__cat_dim__(key, value) != 0:
            return super()._rows(key, ids)
        return gather_rows(value, ids, out=slot.empty(key, (ids.numel(), *value.shape[1:]), value.dtype))
