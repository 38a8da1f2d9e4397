"""Places graph and features in GPU memory, in page-locked host memory, or in a cache of hot rows and lists."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from typing_extensions import override

from lightning_gnn.datamodules.base import Loader, MiniBatchDataModule
from lightning_gnn.features.disk_features import DiskFeatures
from lightning_gnn.features.memory_pool import pinned
from lightning_gnn.features.table import FEATURE_DTYPES, FeatureTable
from lightning_gnn.gpu_sampling.access_counts import AccessCounts, count_reads
from lightning_gnn.gpu_sampling.budget import Placement
from lightning_gnn.gpu_sampling.demand import TOPOLOGY, Demand
from lightning_gnn.gpu_sampling.options import PlacementOptions
from lightning_gnn.gpu_sampling.pipeline import DevicePipeline
from lightning_gnn.gpu_sampling.sampler import PersistentNeighborSampler, check_shardable, find_gpu
from lightning_gnn.gpu_sampling.shards import LocalMachine, ShardedTable, rendezvous_on_machine
from lightning_gnn.gpu_sampling.stream_prefetcher import StreamPrefetching
from lightning_gnn.graph.stores import AttributeName, name_of, of_edges, of_nodes, stores_of
from lightning_gnn.loading.batch import Attribute
from lightning_gnn.runtime.memory_info import available_bytes
from lightning_gnn.sampling.neighbor import NeighborSampler

log = logging.getLogger(__name__)
_EVAL_OPTIONS = ("num_neighbors", "replace", "disjoint", "temporal_strategy", "time_window", "labor", "subgraph_type")
"""Sampler attributes that may differ in evaluation."""


class PlacedOnGPU(MiniBatchDataModule):
    """Mix-in for DataModules: a GPU samples and gathers, from its own memory, other GPUs or pinned host memory."""

    on_cpu: ClassVar[str]
    """Class that samples the same mini-batches on the CPU."""

    def __init__(
        self,
        *args: Any,
        topology: str = "auto",
        features: str = "auto",
        cache_rows: int = 0,
        cache_bytes: int | str = 0,
        quantize: bool = False,
        mode: str = "fused",
        fetch_size: int = 128,
        num_warps: int = 4,
        programs_per_sm: int = 4,
        prefetch: int = 2,
        bulk: int = 8,
        device: torch.device | str | None = None,
        device_memory: int | str | None = None,
        gpus: int | None = None,
        **kwargs: Any,
    ) -> None:
        placing = PlacementOptions(
            topology, features, cache_rows, cache_bytes, quantize, mode, fetch_size, num_warps, programs_per_sm,
            prefetch, bulk, device, device_memory, gpus,
        )  # fmt: skip
        if "tables" in kwargs:
            raise TypeError(f"unknown option tables: {type(self).__name__} creates the tables itself; leave it out")
        super().__init__(*args, **kwargs)
        if not isinstance(self.graph_sampler, NeighborSampler):
            raise TypeError(
                f"{type(self).__name__} samples with its own kernels, so it cannot take the sampler "
                f"{type(self.graph_sampler).__name__}; use {self.on_cpu} with it"
            )
        if self._disk is not None and (features in ("device", "shard") or cache_rows or quantize):
            raise ValueError(
                f"features={features!r}, cache_rows={cache_rows}, quantize={quantize}: these options are for features "
                "in memory, but memory= reads them from disk through the host; leave them out"
            )
        self.placement_options = placing
        self._placement: Placement | None = None
        self._bulk = 1
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
        return self.sampled_loader(
            stage,
            self._placed_data,
            self._samplers["train" if stage == "train" else "eval"],
            **{**self._from_disk(stage), "tables": self._tables},
            pipeline=partial(DevicePipeline, device=device),
            prefetcher=StreamPrefetching(self.placement_options.prefetch, self._bulk),
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
        demand = self._demand(self.placement_options.gpus or 1)
        return demand.plan(self._memory(device or self._device()), self._count_reads)

    def _memory(self, device: torch.device | None) -> int:
        if self.placement_options.memory_budget is not None:
            return self.placement_options.memory_budget
        if device is None:
            raise ValueError("no GPU found to plan for; set the memory of one, such as device_memory='80GB'")
        return available_bytes(device) or 0

    def _rendezvous(self, device: torch.device | None) -> LocalMachine | None:
        """Return the machine's ranks if their GPUs can share tables, or None. Collective: every rank must call this."""
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
        data, on_disk = self.data, self._disk_tables(stage)
        tables: dict[Attribute, FeatureTable] = {}
        disk_tables: dict[Attribute, DiskFeatures] = {}
        others = {}
        of_rows = [(name, key) for name, store in stores_of(data) for key in store if of_nodes(store, key)]
        edges = {(name, key) for name, store in stores_of(data) for key in store if of_edges(store, key)}
        for name, store in stores_of(data):
            for key in store:
                value = store[key]
                if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
                    value = torch.from_numpy(value)  # mini-batches contain numeric arrays as tensors
                # Trained tensors stay the user's own objects, as do non-numeric attributes.
                if name_of(store, key) in on_disk:
                    disk_tables[name, key] = on_disk[name_of(store, key)]
                    continue
                if key in ("num_nodes", "edge_index", "adj_t") or not isinstance(value, Tensor) or value.requires_grad:
                    continue
                attribute, by_row = (name, key), (name, key) in of_rows or (name, key) in edges
                if by_row and value.dim() == 2 and value.dtype in FEATURE_DTYPES and key != "y":
                    tables[attribute] = FeatureTable(value)
                else:
                    others[attribute] = value
        return Demand(
            self.graph_sampler,
            tables,
            others,
            edges,
            [attribute for attribute in others if attribute in edges or attribute in of_rows],
            disk_tables,
            self.placement_options,
            self._held,
            gpus,
        )

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
        machine = self._rendezvous(device)
        demand = self._demand(1 if machine is None else machine.size, stage)
        memory = self._memory(device)
        if machine is None:
            plan = demand.plan(memory, self._count_reads)
        else:  # all ranks use one plan, for the smallest free memory of their GPUs
            memory = min(machine.gather(memory))
            plan = machine.broadcast_first(lambda: demand.plan(memory, self._count_reads))
        self._placement = plan
        self._bulk = plan.bulk
        rank_zero_info(f"persistent sampling: {plan}")
        self._placed_data, self._tables = copy.copy(self.data), {**self._disk_tables(stage)}
        for (node_type, key), table in demand.tables.items():
            name = demand.name_of((node_type, key))
            if self.placement_options.quantize and key == "x":
                table = table.quantized()
            placed: FeatureTable | ShardedTable
            if plan[name].place == "device":
                placed = table.to(device)
            elif plan[name].place == "shard":
                assert machine is not None
                scales = None if table.scales is None else table.scales.to(device)
                placed = ShardedTable(machine.share(table.values), scales)
            else:
                in_host_memory = pinned(table, table.num_nodes * table.row_bytes, device, name)
                nodes = plan[name].nodes
                placed = in_host_memory.cached(nodes, device) if nodes.numel() else in_host_memory
            self._tables[key if node_type is None else (node_type, key)] = placed
        for (node_type, key), value in demand.others.items():
            store = self._placed_data if node_type is None else self._placed_data[node_type]
            store[key] = value.to(device)
        topology = plan[TOPOLOGY]
        names = ("mode", "fetch_size", "num_warps", "programs_per_sm")
        options = {name: getattr(self.placement_options, name) for name in names}
        hot = topology.nodes if topology.nodes.numel() else None
        train = PersistentNeighborSampler.of(
            self.graph_sampler, device=device, topology=topology.place, hot_nodes=hot, machine=machine, **options
        )
        train.seed = self.seed
        changed = {name: getattr(self.eval_graph_sampler, name) for name in _EVAL_OPTIONS}
        self._samplers = {"train": train, "eval": train.with_options(**changed)}
        self._placed_on = device
