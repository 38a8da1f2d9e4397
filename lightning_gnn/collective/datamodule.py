"""DataModules whose mini-batches CPU and GPU prepare together, following a measured plan."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args
from weakref import WeakSet

import torch
from typing_extensions import override

from lightning_gnn.collective.batch_schedule import BatchSchedule
from lightning_gnn.collective.dispatcher import GPU_BUFFERS
from lightning_gnn.collective.plan import CollectivePlan, Duration, ScheduleName
from lightning_gnn.collective.prefetcher import PLANNERS, CollectiveBatching
from lightning_gnn.datamodules.base import Loader
from lightning_gnn.features.table import FeatureTable
from lightning_gnn.gpu_sampling.datamodule import PersistentSamplerDataModule, PlacedOnGPU
from lightning_gnn.gpu_sampling.link_datamodule import PersistentLinkDataModule
from lightning_gnn.graph.stores import AttributeName, name_of, stores_of
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.lightning import pl, rank_zero_info, rank_zero_warn
from lightning_gnn.runtime.messages import whole_number

ROUTES = ("auto", "cpu")
_CORES_PER_WORKER = 4  # without an accelerator the model needs most cores: one in four prepares mini-batches


class _CollectiveMixin(PlacedOnGPU):
    """Mixin with the options and loaders of both collective DataModules."""

    def __init__(
        self,
        *args: Any,
        num_workers: int | None = None,
        plan: CollectivePlan | str | Path = "auto",
        gpu_buffer_size: int = 10,
        profile_batches: int = 20,
        gpu_route: str = "auto",
        schedule: ScheduleName = "in_order",
        **kwargs: Any,
    ) -> None:
        gpu_buffer_size = whole_number(gpu_buffer_size, "gpu_buffer_size", 1)
        profile_batches = whole_number(profile_batches, "profile_batches", 1)
        num_workers = None if num_workers is None else whole_number(num_workers, "num_workers", 0)
        if gpu_route not in ROUTES:
            raise ValueError(f"gpu_route={gpu_route!r} is unknown; use one of {', '.join(ROUTES)}")
        if schedule not in get_args(ScheduleName):
            raise ValueError(f"schedule={schedule!r} is unknown; use one of {', '.join(get_args(ScheduleName))}")
        self._given_plan = _read_plan(plan, schedule)
        # The base class requires a number of workers; None in our attribute means that make_loader chooses it.
        super().__init__(*args, num_workers=num_workers or 0, **kwargs)
        self.num_workers = num_workers
        self.gpu_buffer_size, self.profile_batches = gpu_buffer_size, profile_batches
        self.gpu_route, self.schedule = gpu_route, schedule
        self.planner = PLANNERS[str(plan) if self._given_plan is None else "auto"]
        self._trained: list[int] = []  # of the current epoch, in the order of training
        self._plan: CollectivePlan | None = None
        self._batchings: WeakSet[CollectiveBatching] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, such as that of a ddp_spawn process, creates its own loaders.
        return {name: value for name, value in self.__dict__.items() if name != "_batchings"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _batchings=WeakSet())

    @property
    def plan(self) -> CollectivePlan | None:
        """The current plan; None before planning."""
        return self._plan

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume, with the published schedule also the mini-batches trained so far."""
        return {**super().state_dict(), **({"trained": [*self._trained]} if self.schedule == "paper" else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the interrupted run."""
        super().load_state_dict(state_dict)
        self._trained[:] = state_dict.get("trained", [])

    def teardown(self, stage: str) -> None:
        """Stop preparing mini-batches and free host memory."""
        self._close_batchings()

    def on_exception(self, exception: BaseException) -> None:
        """Stop preparing mini-batches and free host memory."""
        self._close_batchings()

    @override
    def make_loader(self, stage: str) -> Loader:
        device = self._device()
        training_device = self._training_device()
        if device is None and self._placed_on is None:
            self._rendezvous(None)
            if training_device.type == "cpu" and self.gpu_route == "auto":
                rank_zero_warn("No GPU for collective batching: CPU threads prepare the same mini-batches.")
            self._placed_on = "cpu"  # suppresses the base class's warning
        workers = self._choose_num_workers(training_device)
        self.loader_kwargs["num_workers"] = self.eval_loader_kwargs["num_workers"] = workers
        if stage != "train":
            loader = super().make_loader(stage)
            if isinstance(loader, PipelineLoader):
                loader.first_batch = self._end_model
            return loader
        route = None if device is None and self.gpu_route != "cpu" else cast(PipelineLoader, super().make_loader(stage))
        if self.gpu_route == "cpu":
            training_device = torch.device("cpu")
        if self.schedule == "paper" and route is not None:
            self._check_any_order()
        plan = self._initial_plan(workers, route is not None)
        cores = cores_of_process(self.trainer)
        on_disk = self.disk_options(stage)
        batching = CollectiveBatching(
            route=None if route is None else route.pipeline,
            device=training_device,
            plan=plan,
            gpu_buffer_size=self.gpu_buffer_size,
            profile_batches=self.profile_batches,
            num_batches=self._num_batches,
            torch_threads=max(1, cores - workers) if route is not None or training_device.type != "cpu" else None,
            on_plan=self._adopt_plan,
            planner=self.planner,
            schedule=self.schedule,
            trained=self._trained,
        )
        self._batchings.add(batching)
        tables = {**self._host_tables(route), **on_disk.get("tables", {})}
        options = {**on_disk, "tables": tables, "prefetcher": batching, "pin_memory": False}
        return self.sampled_loader(stage, self.data, self.graph_sampler, **options)

    def _device(self) -> torch.device | None:
        return None if self.gpu_route == "cpu" else super()._device()

    def _check_any_order(self) -> None:
        """Raise a ValueError if the run needs the order of the epoch, which ``schedule="paper"`` does not keep."""
        what = "schedule='paper' trains mini-batches as they become ready, "
        if self.trainer is not None and self.trainer.world_size > 1:
            what += f"in another order in each of {self.trainer.world_size} processes; use one"
        elif torch.are_deterministic_algorithms_enabled():
            what += "which deterministic=True excludes; leave it out"
        else:
            return
        raise ValueError(f"{what}, or schedule='in_order'")

    @property
    def _held(self) -> int:
        size = self.gpu_buffer_size if self._given_plan is None else self._given_plan.buffers[0]
        return size + BatchSchedule.AHEAD

    def plan_with_cache(self, plan: CollectivePlan) -> CollectivePlan:
        """Choose ``gpu_buffer_size`` for a later run together with the cache that fits beside its mini-batches.

        The time of reading is proportional to the bytes that the cache misses. A plan that was given, or that has no
        cache to share memory with, is returned as it is.
        """
        placement, times, limit = self._placement, plan.times, self.gpu_buffer_size
        if self._given_plan is not None or times is None or placement is None or not placement.num_batches:
            return plan
        demand, count_reads, missed, plans = self._demand(), cache(self._count_reads), dict[int, float](), []
        for size in sorted({limit, *(size for size in GPU_BUFFERS if size < limit)}, reverse=True):
            held = replace(demand, batches_on_device=size + BatchSchedule.AHEAD)
            missed[size] = 1 - held.plan(placement.memory, count_reads).hit_rate
            scale = missed[size] / missed[limit] if missed[limit] else 1.0
            changed = replace(times, uva=Duration(scale * times.uva.mean, scale * times.uva.spread))
            planner = self.planner(changed, size, num_batches=plan.num_batches, schedule=self.schedule)
            plans.append(planner.plan())
        return min(plans, key=lambda plan: plan.epoch_s["collective"])

    def _training_device(self) -> torch.device:
        if self.trainer is not None:
            return self.trainer.strategy.root_device
        return self._device() or torch.device("cpu")

    def _choose_num_workers(self, device: torch.device) -> int:
        if self.num_workers is not None:
            return self.num_workers
        cores = cores_of_process(self.trainer)
        return max(1, cores // _CORES_PER_WORKER if device.type == "cpu" and self.gpu_route == "auto" else cores - 1)

    def _host_tables(self, route: PipelineLoader | None) -> dict[AttributeName, FeatureTable]:
        """Return the CPU's feature tables, quantized if the GPU's are, so that both routes give the same values."""
        if route is None or self.gpu_route == "cpu" or not self.placement_options.quantize:
            return {}
        quantized = {name_of(store, "x"): store for _, store in stores_of(self.data) if "x" in store}
        return {name: FeatureTable(store["x"]).quantized() for name, store in quantized.items() if name in self._tables}

    def _end_model(self) -> int:
        """End the time measurement of the model step, as a validation within the epoch begins."""
        for batching in self._batchings:
            batching.end_model()
        return 0

    def _num_batches(self) -> float:
        """Return the number of mini-batches that Lightning will request in an epoch."""
        if self.trainer is None or not self.trainer.training:
            return float("inf")
        return self.trainer.num_training_batches

    def _initial_plan(self, workers: int, has_route: bool) -> CollectivePlan | None:
        """Return the plan to start with; None to measure first."""
        if not has_route or not workers:
            mode, size = ("cpu", max(2 * workers, 1)) if workers else ("gpu", 0)
            self._plan = CollectivePlan(mode, self.gpu_buffer_size, size)  # type: ignore[arg-type]
            if self._given_plan is not None and self._given_plan.mode == mode:
                self._plan = self._given_plan
            elif self._given_plan is not None:
                rank_zero_warn(
                    f"collective batching: ignoring the plan, which is for CPU and GPU together, since only one "
                    f"prepares mini-batches here ({mode})"
                )
            return self._plan
        # Reuse an earlier measured plan, unless a single processor was available then (it has no times).
        measured = self._plan if self._plan is not None and self._plan.times is not None else None
        self._plan = measured if self._given_plan is None else self._given_plan
        if self._plan is not None:
            rank_zero_info(_summarize(self._plan, "using the plan"))
        return self._plan

    def _adopt_plan(self, plan: CollectivePlan) -> CollectivePlan:
        """Store and log a measured plan."""
        self._plan = plan
        rank_zero_info(_summarize(plan, "measured and planned"))
        return plan

    def _close_batchings(self) -> None:
        for batching in self._batchings:
            batching.close()


class CollectiveDataModule(_CollectiveMixin, PersistentSamplerDataModule):
    """Mini-batches of :class:`NeighborDataModule` for training, prepared by CPU threads and the GPU together.

    The first epoch measures the stages while the model trains, and then plans which mini-batches CPU and GPU prepare.
    Without a GPU, CPU threads prepare all mini-batches; for other accelerators, in pinned memory. Validation, testing
    and prediction are those of :class:`PersistentSamplerDataModule`.

    Args:
        *args: Graph and sampling arguments of :class:`NeighborDataModule`.
        num_workers: Number of CPU threads that prepare mini-batches; by default all cores of this process but one, or a
            quarter of them if the model also runs on the CPU.
        plan: ``"auto"``, ``"paper"`` (equation 6 and feedback, as published), a
            :class:`~lightning_gnn.collective.CollectivePlan`, or the path of a plan file, whose ``gpu_buffer_size``
            then also decides how much memory a cache gets.
        gpu_buffer_size: Maximum number of mini-batches that the GPU prepares in a row.
        profile_batches: Measurements of each stage before planning.
        gpu_route: ``"auto"``, or ``"cpu"`` to run the GPU's part on the CPU, for trying a schedule without a GPU.
        schedule: ``"in_order"``, or ``"paper"`` to train the same mini-batches as they become ready, as published
            (algorithms 1 to 4): not in the order of the epoch, for one process, and not reproducible.
        **kwargs: Placement and loader options of :class:`PersistentSamplerDataModule`.

    Raises:
        ValueError: An option or a plan is invalid.
        FileNotFoundError: The plan file does not exist.

    Source: MorphGL, section 4.

    Examples:
        >>> from lightning_gnn import CollectiveDataModule
        >>> from lightning_gnn.collective import CollectivePlan
        >>> from lightning_gnn.datasets.synthetic import planted_power_law
        >>> data = planted_power_law(300, 2000, num_classes=3, num_features=8, split=(0.5, 0.2, 0.2))
        >>> plan = CollectivePlan("collective", gpu_buffer_size=2, cpu_buffer_size=1)  # else it is measured
        >>> options = {"num_neighbors": [4, 2], "batch_size": 50, "num_workers": 1, "gpu_route": "cpu"}
        >>> datamodule = CollectiveDataModule(data, **options, plan=plan)
        >>> [batch.batch_size for batch in datamodule.train_dataloader()]
        [50, 50, 50]
        >>> str(datamodule.plan).splitlines()[0].split(',')[0]
        'collective batching: the CPU prepares about 33% of the mini-batches'
    """


class CollectiveLinkDataModule(_CollectiveMixin, PersistentLinkDataModule):
    """Mini-batches of :class:`LinkDataModule` for training, prepared by CPU threads and the GPU together.

    Args:
        *args: Graph and edge arguments of :class:`~lightning_gnn.LinkDataModule`.
        **kwargs: Options of :class:`CollectiveDataModule`, and of :class:`~lightning_gnn.PersistentLinkDataModule`.

    Examples:
        >>> from lightning_gnn import CollectiveLinkDataModule
        >>> from lightning_gnn.datasets.synthetic import planted_power_law
        >>> data = planted_power_law(300, 2000, num_classes=3, num_features=8)
        >>> options = {"num_neighbors": [4, 2], "batch_size": 50, "num_workers": 1, "gpu_route": "cpu"}
        >>> datamodule = CollectiveLinkDataModule(data, data.edge_index[:, :100], **options)
        >>> [batch.edge_label_index.size(1) for batch in datamodule.train_dataloader()]
        [50, 50]
    """


def _read_plan(plan: object, schedule: ScheduleName) -> CollectivePlan | None:
    """Return the given plan for a schedule, without predictions for another one; None if it is to be planned."""
    if isinstance(plan, str) and plan in PLANNERS:
        return None
    if not isinstance(plan, (CollectivePlan, str, Path)):
        raise ValueError(f"plan must be 'auto', 'paper', a CollectivePlan or the path of a plan file, but is {plan!r}")
    given = plan if isinstance(plan, CollectivePlan) else CollectivePlan.load(plan)
    if given.schedule == schedule:
        return given
    if given.epoch_s:
        rank_zero_warn(
            f"collective batching: what the plan predicts is for schedule={given.schedule!r}, not {schedule!r}"
        )
    return replace(given, schedule=schedule, epoch_s={}, cpu_part=None)


def _summarize(plan: CollectivePlan, status: str) -> str:
    assignment = {
        "collective": f"the CPU prepares about {plan.cpu_share:.0%} of the mini-batches, the GPU the others",
        "cpu": "the CPU prepares all mini-batches",
        "gpu": "the GPU prepares all mini-batches",
    }[plan.mode]
    seconds, gap = plan.epoch_s.get("collective"), plan.optimality_gap
    predicted = "" if seconds is None else f"; {seconds:.3g} s per epoch"
    certificate = "" if gap is None else f", at most {gap:.1%} above any schedule"
    return f"collective batching, {status}: {assignment}{predicted}{certificate}"


def cores_of_process(trainer: pl.Trainer | None) -> int:
    """Return this process's number of cores when the run's processes divide the machine's cores equally."""
    available = num_cores()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if trainer is not None and trainer.world_size > 1:
        processes = trainer.num_devices
    return max(1, available // max(1, min(processes, available)))
