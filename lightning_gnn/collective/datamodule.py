"""Node-level training on neighborhoods that CPU and GPU prepare together, as they are measured to do best."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.collective.prefetcher import CollectiveBatching
from lightning_gnn.datamodules.base import Loader
from lightning_gnn.features.table import FeatureTable
from lightning_gnn.gpu_sampling.datamodule import PersistentSamplerDataModule
from lightning_gnn.gpu_sampling.link_datamodule import PersistentLinkDataModule
from lightning_gnn.gpu_sampling.placement import PlacedOnGPU
from lightning_gnn.graph.stores import AttributeName, name_of, stores_of
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.runtime.cores import num_cores
from lightning_gnn.runtime.messages import removed, whole_number

ROUTES = ("auto", "cpu")
_CPU_PART = 4  # without an accelerator the model needs the cores: one in so many prepares mini-batches


class _PreparedTogether(PlacedOnGPU):
    """What both DataModules do; goes before the one that the GPU's mini-batches come from."""

    def __init__(
        self,
        *args: Any,
        num_workers: int | None = None,
        plan: CollectivePlan | str | Path = "auto",
        gpu_buffer_size: int = 10,
        profile_batches: int = 20,
        gpu_route: str = "auto",
        **kwargs: Any,
    ) -> None:
        # Validate the options before the base class builds anything from them.
        gpu_buffer_size = whole_number(gpu_buffer_size, "gpu_buffer_size", 1)
        profile_batches = whole_number(profile_batches, "profile_batches", 1)
        num_workers = None if num_workers is None else whole_number(num_workers, "num_workers", 0)
        for name in {"cache_plan", "replan"} & {*kwargs}:  # configurations that earlier releases saved have them
            if kwargs.pop(name):
                rank_zero_warn(f"{removed(f'datamodule.{name}')}")
        if gpu_route not in ROUTES:
            raise ValueError(f"gpu_route={gpu_route!r} is unknown; use one of {', '.join(ROUTES)}")
        self._given = _read_plan(plan)
        # The base class needs a number of workers; None in the attribute means that it is chosen with the loader.
        super().__init__(*args, num_workers=num_workers or 0, **kwargs)
        self.num_workers = num_workers
        self.gpu_buffer_size, self.profile_batches = gpu_buffer_size, profile_batches
        self.gpu_route = gpu_route
        # The plan and the running batchings are unknown until the loader is made.
        self._plan: CollectivePlan | None = None
        self._batchings: WeakSet[CollectiveBatching] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, such as that of a process of ddp_spawn, makes loaders of its own.
        return {name: value for name, value in self.__dict__.items() if name != "_batchings"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _batchings=WeakSet())

    @property
    def plan(self) -> CollectivePlan | None:
        """The plan in force; None before one has been made."""
        return self._plan

    def teardown(self, stage: str) -> None:
        """Stop preparing, and free the host memory."""
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Stop preparing, and free the host memory, when training ends before its time."""
        self._close()

    @override
    def make_loader(self, stage: str) -> Loader:
        device = self._device()
        training_device = self._training_device()
        if device is None and self._placed_on is None:
            self._rendezvous(None)
            if training_device.type == "cpu" and self.gpu_route == "auto":
                rank_zero_warn("No GPU for collective batching: CPU threads prepare the same mini-batches.")
            self._placed_on = "cpu"  # the base class need not say so again
        workers = self._workers(training_device)
        self.loader_kwargs["num_workers"] = self.eval_loader_kwargs["num_workers"] = workers
        if stage != "train":
            loader = super().make_loader(stage)
            if isinstance(loader, PipelineLoader):
                loader.first_batch = self._end_model
            return loader
        route = None if device is None and self.gpu_route != "cpu" else cast(PipelineLoader, super().make_loader(stage))
        if self.gpu_route == "cpu":
            training_device = torch.device("cpu")
        plan = self._plan_for(workers, route is not None)
        cores = cores_of_process(self.trainer)
        on_disk = self._from_disk(stage)
        batching = CollectiveBatching(
            route=None if route is None else route.pipeline,
            device=training_device,
            plan=plan,
            gpu_buffer_size=self.gpu_buffer_size,
            profile_batches=self.profile_batches,
            num_batches=self._num_batches,
            torch_threads=max(1, cores - workers) if route is not None or training_device.type != "cpu" else None,
            on_plan=self._keep,
        )
        self._batchings.add(batching)
        tables = {**self._host_tables(route), **on_disk.get("tables", {})}
        options = {**on_disk, "tables": tables, "prefetcher": batching, "pin_memory": False}
        return self.sampled_loader(stage, self.data, self.graph_sampler, **options)

    def _device(self) -> torch.device | None:
        return None if self.gpu_route == "cpu" else super()._device()

    @property
    def _held(self) -> int:
        return self.gpu_buffer_size + 2

    def _training_device(self) -> torch.device:
        if self.trainer is not None:
            return self.trainer.strategy.root_device
        return self._device() or torch.device("cpu")

    def _workers(self, device: torch.device) -> int:
        if self.num_workers is not None:
            return self.num_workers
        cores = cores_of_process(self.trainer)
        return max(1, cores // _CPU_PART if device.type == "cpu" and self.gpu_route == "auto" else cores - 1)

    def _host_tables(self, route: PipelineLoader | None) -> dict[AttributeName, FeatureTable]:
        """Where the CPU gathers from: what the GPU stores in fewer bits must be the same on the host."""
        if route is None or self.gpu_route == "cpu" or not self.placement_options.quantize:
            return {}
        quantized = {name_of(store, "x"): store for _, store in stores_of(self.data) if "x" in store}
        return {name: FeatureTable(store["x"]).quantized() for name, store in quantized.items() if name in self._tables}

    def _end_model(self) -> int:
        """Called when a validation in mid-epoch begins, which is not the model's time."""
        for batching in self._batchings:
            batching.end_model()
        return 0

    def _num_batches(self) -> float:
        """Mini-batches of an epoch that Lightning will ask for."""
        if self.trainer is None or not self.trainer.training:
            return float("inf")
        return self.trainer.num_training_batches

    def _plan_for(self, workers: int, has_route: bool) -> CollectivePlan | None:
        """Return the plan to begin with, None to measure."""
        if not has_route or not workers:
            mode, size = ("cpu", max(2 * workers, 1)) if workers else ("gpu", 0)
            self._plan = CollectivePlan(mode, self.gpu_buffer_size, size)  # type: ignore[arg-type]
            if self._given is not None and self._given.mode == mode:
                self._plan = self._given
            elif self._given is not None:
                rank_zero_warn(
                    f"collective batching: the plan is for CPU and GPU together, but here only one of them prepares "
                    f"mini-batches ({mode}); it is not used"
                )
            return self._plan
        # One that was made here before is gone by again, unless it was for one processor alone.
        made = self._plan if self._plan is not None and self._plan.times is not None else None
        self._plan = made if self._given is None else self._given
        if self._plan is not None:
            rank_zero_info(_one_line(self._plan, "going by the plan"))
        return self._plan

    def _keep(self, plan: CollectivePlan) -> CollectivePlan:
        """Take a plan that has been made."""
        self._plan = plan
        rank_zero_info(_one_line(plan, "measured and planned"))
        return plan

    def _close(self) -> None:
        for batching in self._batchings:
            batching.close()


class CollectiveDataModule(_PreparedTogether, PersistentSamplerDataModule):
    """Mini-batches of :class:`NeighborDataModule` for training, prepared by CPU threads and the GPU together.

    In the first epoch it measures what the stages take, while the model trains, and plans who prepares which. On a
    machine without a GPU, CPU threads prepare the mini-batches while the model trains; on another accelerator they do
    so through page-locked memory. Validation, testing and prediction are those of
    :class:`PersistentSamplerDataModule`.

    Args:
        *args: The graph and how it is sampled, as :class:`NeighborDataModule` takes them.
        num_workers: Threads that prepare mini-batches on the CPU; by default all cores of this process but one, or a
            quarter of them where the model needs them too.
        plan: ``"auto"``, a :class:`~lightning_gnn.collective.CollectivePlan`, or the path of a file with one.
        gpu_buffer_size: Mini-batches that the GPU holds ready.
        profile_batches: Measurements of each stage before planning.
        gpu_route: ``"auto"``, or ``"cpu"`` to let the CPU play the GPU's part, to try a schedule out without one.
        **kwargs: What of the graph lies where, and the loaders' options, as :class:`PersistentSamplerDataModule` takes
            them.

    Raises:
        ValueError: An option, or a plan, that cannot work.
        FileNotFoundError: There is no such plan.

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


class CollectiveLinkDataModule(_PreparedTogether, PersistentLinkDataModule):
    """Mini-batches of :class:`LinkDataModule` for training, prepared by CPU threads and the GPU together.

    Args:
        *args: The graph and its edges, as :class:`~lightning_gnn.LinkDataModule` takes them.
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


def _read_plan(plan: object) -> CollectivePlan | None:
    if isinstance(plan, CollectivePlan) or plan == "auto":
        return plan if isinstance(plan, CollectivePlan) else None
    if not isinstance(plan, (str, Path)):
        raise ValueError(f"plan must be 'auto', a CollectivePlan or the path of a file with one, but is {plan!r}")
    return CollectivePlan.load(plan)


def _one_line(plan: CollectivePlan, beginning: str) -> str:
    whole = {
        "collective": f"the CPU prepares about {plan.cpu_share:.0%} of the mini-batches, the GPU the others",
        "cpu": "the CPU prepares all mini-batches",
        "gpu": "the GPU prepares all mini-batches",
    }[plan.mode]
    seconds = plan.epoch_s.get("collective")
    return f"collective batching, {beginning}: {whole}" + ("" if seconds is None else f"; {seconds:.3g} s per epoch")


def cores_of_process(trainer: pl.Trainer | None) -> int:
    """Return how many cores this process may use, if it shares them with others of the run on this machine."""
    available = num_cores()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if trainer is not None and trainer.world_size > 1:
        processes = trainer.num_devices
    return max(1, available // max(1, min(processes, available)))
