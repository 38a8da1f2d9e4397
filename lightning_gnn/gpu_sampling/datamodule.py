"""DataModules whose mini-batches are sampled and gathered on the GPU, with graph and features placed by one plan."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.loader.utils import get_input_nodes
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from typing_extensions import override

from lightning_gnn.datamodules.base import Loader, MiniBatchDataModule
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.features.disk_features import DiskFeatures
from lightning_gnn.features.memory_pool import pinned
from lightning_gnn.features.table import FEATURE_DTYPES, FeatureTable
from lightning_gnn.gpu_sampling.options import PlacementOptions
from lightning_gnn.gpu_sampling.pipeline import DevicePipeline
from lightning_gnn.gpu_sampling.placement import (
    TOPOLOGY,
    AccessCounts,
    Demand,
    Placement,
    count_reads,
    is_int8,
    name_of_table,
)
from lightning_gnn.gpu_sampling.sampler import PersistentNeighborSampler, check_shardable, find_gpu
from lightning_gnn.gpu_sampling.shards import LocalMachine, ShardedTable, rendezvous_on_machine
from lightning_gnn.gpu_sampling.stream_prefetcher import StreamPrefetching
from lightning_gnn.graph.stores import AttributeName, name_of, of_edges, of_nodes, stores_of
from lightning_gnn.loading.batch import Attribute
from lightning_gnn.runtime.lightning import rank_zero_info, rank_zero_warn
from lightning_gnn.runtime.memory_info import available_bytes
from lightning_gnn.sampling.neighbor import NeighborSampler

log = logging.getLogger(__name__)
_EVAL_OPTIONS = ("num_neighbors", "replace", "disjoint", "temporal_strategy", "time_window", "labor", "subgraph_type")
"""Sampler attributes that may differ in evaluation."""
_NOT_PLACED = ("num_nodes", "edge_index", "adj_t")


class PlacedOnGPU(MiniBatchDataModule):
    """Mix-in for DataModules: a GPU samples and gathers, from its own memory, other GPUs or pinned host memory."""

    on_cpu: ClassVar[str]
    """Class that samples the same mini-batches on the CPU."""

    def __init__(
        self,
        *args: Any,
        topology: str = "auto",
        features: str = "auto",
        cache_bytes: int | str = 0,
        quantize: bool = False,
        mode: str = "fused",
        fetch_size: int = 128,
        num_warps: int = 8,
        programs_per_sm: int = 4,
        prefetch: int = 2,
        bulk: int = 16,
        device: torch.device | str | None = None,
        device_memory: int | str | None = None,
        gpus: int | None = None,
        **kwargs: Any,
    ) -> None:
        placing = PlacementOptions(
            topology, features, cache_bytes, quantize, mode, fetch_size, num_warps, programs_per_sm, prefetch, bulk,
            device, device_memory, gpus,
        )  # fmt: skip
        if "tables" in {*kwargs, *(kwargs.get("eval_loader_kwargs") or ())}:
            raise TypeError(f"unknown option tables: {type(self).__name__} creates the tables itself; leave it out")
        super().__init__(*args, **kwargs)
        if not isinstance(self.graph_sampler, NeighborSampler):
            raise TypeError(
                f"{type(self).__name__} samples with its own kernels, so it cannot take the sampler "
                f"{type(self.graph_sampler).__name__}; use {self.on_cpu} with it"
            )
        if self.disk is not None and (features in ("device", "shard") or quantize):
            raise ValueError(
                f"features={features!r}, quantize={quantize}: these options are for features in memory, but memory= "
                "reads them from disk through the host; leave them out"
            )
        self.placement_options = placing
        self._placement: Placement | None = None
        self._placed_on: torch.device | str | None = None
        self._placed_data = self.data
        self._tables: dict[AttributeName, FeatureTable | ShardedTable | DiskFeatures] = {}
        self._samplers: dict[str, PersistentNeighborSampler] = {}
        if placing.topology == "shard":
            check_shardable(self.graph_sampler, self.eval_graph_sampler)

    def _training_seeds(self) -> tuple[NodeSamplerInput | EdgeSamplerInput, NegativeSampling | None]:
        """Return the seed nodes or edges of the training set, and their negative sampling."""
        raise NotImplementedError

    @override
    def make_loader(self, stage: str) -> Loader:
        if stage != "train" and self.inference is not None:
            return super().make_loader(stage)
        device = self._device()
        if device is None:
            if self._placed_on is None:
                self._rendezvous(None)
                rank_zero_warn("No GPU for the persistent sampler: sampling the same mini-batches on the CPU.")
                self._placed_on = "cpu"
            return super().make_loader(stage)
        if self._placed_on != device:
            self._place(device, stage)
        assert self._placement is not None
        return self.sampled_loader(
            stage,
            self._placed_data,
            self._samplers["train" if stage == "train" else "eval"],
            **{**self.disk_options(stage), "tables": self._tables},
            pipeline=partial(DevicePipeline, device=device),
            prefetcher=StreamPrefetching(self.placement_options.prefetch, self._placement.bulk),
            # A CUDA stream prefetches; worker threads would only serialize their launches on it.
            num_workers=0,
            pin_memory=False,
        )

    def _device(self) -> torch.device | None:
        if self.placement_options.device is not None:
            return find_gpu(self.placement_options.device)
        if self.trainer is not None:
            root = self.trainer.strategy.root_device
            return find_gpu(root) if root.type == "cuda" else None
        return find_gpu()

    @property
    def placement(self) -> Placement | None:
        """Placement of graph and features; None without a GPU, and before the first loader is created."""
        return self._placement

    def plan_placement(self, device: torch.device | None = None) -> Placement:
        """Return the placement for a GPU, by default that of the first loader, without copying any data."""
        memory = self._memory(device or self._device())
        return self._demand(self.placement_options.gpus or 1).plan(memory, self._count_reads)

    def _memory(self, device: torch.device | None) -> int:
        if self.placement_options.memory_budget is not None:
            return self.placement_options.memory_budget
        if device is None:
            raise ValueError("no GPU found to plan for; set the memory of one, such as device_memory='80GB'")
        return available_bytes(device) or 0

    def _rendezvous(self, device: torch.device | None) -> LocalMachine | None:
        """Return the machine's ranks if their GPUs can share tables, or None. All ranks must call this."""
        places = {"topology": self.placement_options.topology, "features": self.placement_options.features}
        sharded = [f"{name}='shard'" for name, place in places.items() if place == "shard"]
        machine = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            if not sharded and "auto" not in places.values():
                return None
            machine = rendezvous_on_machine(device)
        if device is None:
            return None
        size = 1 if machine is None else machine.size
        if (gpus := self.placement_options.gpus) not in (None, size):
            raise ValueError(f"gpus={gpus}, but the run has {size} on this machine: leave it out, or start {gpus}")
        if machine is None or size == 1:
            return None
        if sharded and machine.obstacle:
            raise ValueError(f"cannot use {', '.join(sharded)}: {machine.obstacle}; use 'auto', 'device' or 'pinned'")
        return None if machine.obstacle else machine

    def _demand(self, gpus: int = 1, stage: str = "train") -> Demand:
        """Collect the arrays and mini-batches that need device memory."""
        on_disk, edges = self.disk_options(stage).get("tables", {}), set[Attribute]()
        tables: dict[Attribute, FeatureTable] = {}
        row_bytes: dict[Attribute, float] = {}
        others: dict[Attribute, Tensor] = {}
        for name, store in stores_of(self.data):
            for key in store:
                value, attribute, by_row = store[key], (name, key), of_nodes(store, key) or of_edges(store, key)
                edges |= {attribute} if of_edges(store, key) else set()
                if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
                    value = torch.from_numpy(value)  # mini-batches contain numeric arrays as tensors
                if name_of(store, key) in on_disk:
                    row_bytes[attribute] = on_disk[name_of(store, key)].row_bytes
                elif key in _NOT_PLACED or not isinstance(value, Tensor) or value.requires_grad:
                    continue  # trained tensors stay the user's own objects, as do non-numeric attributes
                elif by_row and value.dim() == 2 and value.dtype in FEATURE_DTYPES and key != "y":
                    tables[attribute] = table = FeatureTable(value)
                    int8 = is_int8(attribute, table, self.placement_options)
                    row_bytes[attribute] = table.num_features * 4 if int8 else table.row_bytes
                else:
                    others[attribute] = value
                    if by_row:
                        row_bytes[attribute] = value.nbytes / max(value.size(0), 1)
        placing = self.placement_options
        return Demand(self.graph_sampler, tables, others, row_bytes, edges, placing, self._held, gpus)

    @property
    def _held(self) -> int:
        """Number of mini-batches on the device at a time: prefetched, current and previous ones."""
        return self.placement_options.prefetch + 2

    def _count_reads(self, batches: range) -> AccessCounts:
        inputs, negatives = self._training_seeds()
        return count_reads(self.graph_sampler, inputs, self.batch_size, batches, self.seed, negatives)

    def _place(self, device: torch.device, stage: str) -> None:
        """Copy graph, features and other attributes to their planned memory."""
        log.debug(f"{type(self).__name__}: placing the graph and features for {device}, stage {stage}")
        machine, options = self._rendezvous(device), self.placement_options
        demand = self._demand(1 if machine is None else machine.size, stage)
        memory = self._memory(device)
        if machine is None:
            plan = demand.plan(memory, self._count_reads)
        else:  # all ranks use one plan, for the smallest free memory of their GPUs
            memory = min(machine.gather(memory))
            plan = machine.broadcast_first(lambda: demand.plan(memory, self._count_reads))
        self._placement = plan
        rank_zero_info(f"persistent sampling: {plan}")
        self._placed_data, self._tables = copy.copy(self.data), self.disk_options(stage).get("tables", {})
        for (node_type, key), table in demand.tables.items():
            part = plan[name_of_table((node_type, key))]
            if options.quantize and key == "x":
                table = table.quantized()
            placed: FeatureTable | ShardedTable
            if part.place == "device":
                placed = table.to(device)
            elif part.place == "shard":
                assert machine is not None
                scales = None if table.scales is None else table.scales.to(device)
                placed = ShardedTable(machine.share(table.values), scales)
            else:
                placed = pinned(table, table.num_nodes * table.row_bytes, device, part.name)
                placed = placed.cached(part.nodes, device) if part.nodes.numel() else placed
            self._tables[key if node_type is None else (node_type, key)] = placed
        for (node_type, key), value in demand.others.items():
            store = self._placed_data if node_type is None else self._placed_data[node_type]
            store[key] = value.to(device)
        topology = plan[TOPOLOGY]
        train = PersistentNeighborSampler.of(
            self.graph_sampler,
            device=device,
            topology=topology.place,
            hot_nodes=topology.nodes if topology.nodes.numel() else None,
            machine=machine,
            start_edges=plan.start_edges,
            **{name: getattr(options, name) for name in ("mode", "fetch_size", "num_warps", "programs_per_sm")},
        )
        train.seed = self.seed
        changed = {name: getattr(self.eval_graph_sampler, name) for name in _EVAL_OPTIONS}
        self._samplers = {"train": train, "eval": train.with_options(**changed)}
        train.compile_ahead(self._samplers.values(), plan.bulk)
        self._placed_on = device


class PersistentSamplerDataModule(PlacedOnGPU, NeighborDataModule):
    """Samples and gathers the mini-batches of :class:`NeighborDataModule` on the GPU that trains on them.

    Graph and features are placed for the trainer's device when the first loader is created. Without a GPU, it warns
    and behaves as :class:`NeighborDataModule`.

    Arguments of :class:`~lightning_gnn.gpu_sampling.PlacementOptions` choose where graph and features are stored, and
    how the GPU samples: ``topology``, ``features``, ``cache_bytes``, ``quantize``, ``mode``, ``fetch_size``,
    ``num_warps``, ``programs_per_sm``, ``prefetch`` and ``bulk``. The plan is :attr:`placement`.
    ``device``, ``device_memory`` and ``gpus`` describe the GPU, also for :meth:`plan_placement`.

    Args:
        *args: Graph and seeds of :class:`~lightning_gnn.NeighborDataModule`.
        **kwargs: Further arguments of :class:`~lightning_gnn.NeighborDataModule`, such as ``num_neighbors``.

    Raises:
        ValueError: :class:`~lightning_gnn.NeighborDataModule` or ``PlacementOptions`` reject an argument. When the
            first loader is created: the device has too little memory, ``gpus`` differs from the run, or ``"shard"`` is
            used without peer access between the GPUs.
        RuntimeError: Page-locked memory cannot be allocated when the first loader is created.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import PersistentSamplerDataModule
        >>> path = Data(x=torch.eye(5), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
        >>> datamodule = PersistentSamplerDataModule(
        ...     path, input_train_nodes=torch.tensor([4, 2]), num_neighbors=[1, 1], batch_size=1, shuffle=False
        ... )
        >>> for batch in datamodule.train_dataloader():
        ...     print(batch.n_id.tolist(), list(batch.x.shape))
        [4, 3, 2] [3, 5]
        [2, 1, 0] [3, 5]
    """

    on_cpu = "NeighborDataModule"

    def _training_seeds(self) -> tuple[NodeSamplerInput, None]:
        with_seeds = [stage for stage in self._types if self._nodes[stage] is not None]
        stage = "train" if "train" in with_seeds else [*with_seeds, "predict"][0]  # without training seeds
        node_type, seeds, _ = get_input_nodes(self.data, self._seeds(stage))
        return NodeSamplerInput(None, seeds, self._times[stage], node_type), None
