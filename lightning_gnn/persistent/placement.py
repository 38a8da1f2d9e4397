"""What of a graph lies on the GPU that samples it, in page-locked memory, or in a cache of hot rows and lists."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from torch_geometric.typing import NodeType

from lightning_gnn.graph.cache import hottest_of_types, plan_dual_cache, plan_row_caches
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.features import FEATURE_DTYPES, FeatureTable
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.graph.memory import check_place, choose_place, pinned
from lightning_gnn.persistent.access_counts import count_accesses, count_rows
from lightning_gnn.persistent.loader import DeviceLinkLoader, DeviceNodeLoader
from lightning_gnn.persistent.sampler import MODES, PersistentNeighborSampler, find_gpu
from lightning_gnn.runtime.messages import true_or_false, whole_number
from lightning_gnn.sampling.datamodule_base import MiniBatchDataModule
from lightning_gnn.sampling.loader import of_edges, of_nodes, stores_of
from lightning_gnn.sampling.neighbor import NeighborSampler, beyond_plain

_LOADERS = {"node": DeviceNodeLoader, "link": DeviceLinkLoader}
_PRESAMPLED_BATCHES = 8
_EVALUATION = ("num_neighbors", "replace", "disjoint", "temporal_strategy", "time_window", "labor", "subgraph_type")
"""What of the sampler may be another one in evaluation."""


class PlacedOnGPU(MiniBatchDataModule):
    """Mixed into a DataModule: its graph and features lie where a GPU reads them, which samples and gathers.

    The arguments are those of :class:`~lightning_gnn.PersistentSamplerDataModule`.
    """

    on_cpu: ClassVar[str]
    """The class that samples the same mini-batches on the CPU."""

    def __init__(
        self,
        *args: Any,
        topology: str = "auto",
        features: str = "auto",
        cache_rows: int = 0,
        cache_bytes: int = 0,
        quantize: bool = False,
        mode: str = "fused",
        fetch_size: int = 128,
        prefetch: int = 2,
        bulk: int = 8,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        check_place(topology, "topology")
        check_place(features, "features")
        cache_rows, cache_bytes = whole_number(cache_rows, "cache_rows", 0), whole_number(cache_bytes, "cache_bytes", 0)
        if cache_rows and cache_bytes:
            raise ValueError("give cache_rows or cache_bytes, not both: a budget decides how many rows there are")
        if features == "device" and cache_rows:
            raise ValueError("cache_rows is for features='pinned' or 'auto'; on the device every row is at hand")
        fetch_size, prefetch = whole_number(fetch_size, "fetch_size", 1), whole_number(prefetch, "prefetch", 0)
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is unknown; use one of {', '.join(MODES)}")
        try:
            device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r} is none: {error}") from None
        true_or_false(quantize, "quantize")
        if "tables" in kwargs:
            raise TypeError(f"there is no option tables: {type(self).__name__} makes them on its device")
        super().__init__(*args, **kwargs)
        if not isinstance(self.graph_sampler, NeighborSampler):
            raise TypeError(
                f"{type(self).__name__} samples by kernels of its own, so it cannot take the sampler "
                f"{type(self.graph_sampler).__name__}; use {self.on_cpu} with it"
            )
        self.topology, self.features = topology, features
        self.cache_rows, self.cache_bytes, self.quantize = cache_rows, cache_bytes, quantize
        self.mode, self.fetch_size, self.prefetch = mode, fetch_size, prefetch
        self.bulk = whole_number(bulk, "bulk", 1)
        self._wanted = device
        self._placed_on: torch.device | str | None = None
        self._placed_data = self.data
        self._tables: dict[Any, FeatureTable] = {}
        self._samplers: dict[str, Any] = {}

    def _training_seeds(self) -> tuple[NodeSamplerInput | EdgeSamplerInput, NegativeSampling | None]:
        """Return what mini-batches of the training set are sampled for, and what negative edges they have."""
        raise NotImplementedError

    def _loader(self, stage: str) -> Any:
        if stage != "train" and self.inference is not None:
            return super()._loader(stage)
        device = self._device()
        if device is None:
            if self._placed_on is None:
                rank_zero_warn("No GPU for the persistent sampler: sampling the same mini-batches on the CPU.")
                self._placed_on = "cpu"
            return super()._loader(stage)
        if self._placed_on != device:
            self._place(device)
        return self._sampled_loader(
            stage,
            self._placed_data,
            self._samplers["train" if stage == "train" else "eval"],
            _LOADERS[self.kind],
            tables=self._tables,
            device=device,
            prefetch=self.prefetch,
            **({"bulk": self.bulk} if self.kind == "node" else {}),
            # A stream prepares ahead of training; threads would take turns to launch on it.
            num_workers=0,
            pin_memory=False,
        )

    def _device(self) -> torch.device | None:
        if self._wanted is not None:
            return find_gpu(self._wanted)
        if self.trainer is not None:
            root = self.trainer.strategy.root_device
            return find_gpu(root) if root.type == "cuda" else None
        return find_gpu()

    def _place(self, device: torch.device) -> None:
        """Copy graph, features and other attributes to where they are read."""
        sampler, data = self.graph_sampler, self.batch_data
        self._placed_data, self._tables = copy.copy(data), {}
        # What is trained stays the user's own tensor; so do attributes that are no numbers.
        all_values = {
            (name, key): _as_tensor(store[key])
            for name, store in stores_of(data)
            for key in store
            if key not in ("num_nodes", "edge_index", "adj_t")
        }
        all_values = {at: v for at, v in all_values.items() if isinstance(v, Tensor) and not v.requires_grad}
        by_row = {
            (name, key)
            for name, store in stores_of(data)
            for key in store
            if of_nodes(store, key) or of_edges(store, key)
        }
        values = {at: value for at, value in all_values.items() if at in by_row}
        tables = {at: FeatureTable(value) for at, value in values.items() if _is_table(value) and at[1] != "y"}
        if self.quantize:
            tables = {at: table.quantized() if at[1] == "x" else table for at, table in tables.items()}
        named = {at: f"data.{at[1]}" if at[0] is None else f"data[{at[0]!r}].{at[1]}" for at in tables}
        places = {
            at: choose_place(self.features, table.num_nodes * table.row_bytes, device, named[at])
            for at, table in tables.items()
        }
        topology = choose_place(self.topology, sampler.graph.num_bytes, device, "the topology")
        features = {
            name: table
            for (name, key), table in tables.items()
            if key == "x" and places[name, key] == "pinned" and not isinstance(name, tuple)
        }
        hot_rows, hot_lists = self._hot_nodes(features, topology == "pinned")
        for at, table in tables.items():
            if places[at] == "device":
                placed = table.to(device)
            else:
                placed = pinned(table, table.num_nodes * table.row_bytes, device, named[at])
                placed = placed.cached(hot_rows[at[0]], device) if at[1] == "x" and at[0] in hot_rows else placed
            self._tables[at[1] if at[0] is None else at] = placed
        for (name, key), value in all_values.items():
            if (name, key) not in tables:
                part = self._placed_data if name is None else self._placed_data[name]
                part[key] = value.to(device)
        train = PersistentNeighborSampler.of(
            sampler,
            device=device,
            topology=topology,
            mode=self.mode,
            fetch_size=self.fetch_size,
            hot_nodes=hot_lists,
        )
        train.seed = self.seed
        evaluation = train.with_options(**{name: getattr(self.eval_graph_sampler, name) for name in _EVALUATION})
        self._samplers = {"train": train, "eval": evaluation}
        self._placed_on = device

    def _hot_nodes(self, tables: dict[NodeType | None, FeatureTable], lists: bool) -> tuple[Any, Tensor | None]:
        """Choose whose rows, of each type, and whose adjacency lists, the device holds of what lies in host memory.

        Args:
            tables: The features of nodes that lie in host memory, by type; None names the only one.
            lists: Whether the topology does.
        """
        sampler, graph = self.graph_sampler, self.graph_sampler.graph
        if self.cache_rows and tables:
            return hottest_of_types({name: _out_degrees(graph, name) for name in tables}, self.cache_rows), None
        if not self.cache_bytes or not (tables or lists):
            return {}, None
        inputs, negatives = self._training_seeds()
        size = self.loader_kwargs["batch_size"]
        if beyond_plain(sampler):
            if not tables:
                return {}, None
            reads = count_rows(sampler, inputs, size, _PRESAMPLED_BATCHES, self.seed, negatives)
            widths = {name: table.row_bytes for name, table in tables.items()}
            return plan_row_caches({name: reads[name] for name in tables}, widths, self.cache_bytes), None
        if isinstance(inputs, EdgeSamplerInput):  # negative ends are spread evenly: they make no node hot
            seeds, size = torch.stack([inputs.row, inputs.col], dim=1).view(-1), 2 * size
        else:
            seeds = inputs.node
        counts = count_accesses(graph, seeds, sampler.num_neighbors, size, _PRESAMPLED_BATCHES, seed=self.seed)
        features = tables.get(None)
        plan = plan_dual_cache(
            counts.features if features is not None else torch.zeros_like(counts.features),
            counts.adjacency if lists else torch.zeros_like(counts.adjacency),
            graph.in_degrees,
            0 if features is None else features.row_bytes,
            graph.indices.element_size(),
            self.cache_bytes,
        )
        rows = {} if features is None else {None: plan.feature_nodes}
        return rows, (plan.adjacency_nodes if lists else None)


def _out_degrees(graph: CSCGraph | HeteroCSCGraph, name: NodeType | None) -> Tensor:
    """Return how many edges come from each node of a type, int64 ``[num_nodes]``."""
    if isinstance(graph, CSCGraph):
        return graph.out_degrees
    degrees = torch.zeros(graph.sizes[str(name)], dtype=torch.int64)
    for (source, _, _), relation in graph.relations.items():
        if source == name:
            degrees += relation.out_degrees
    return degrees


def _as_tensor(value: Any) -> Any:
    """Return what mini-batches would hold as a tensor as one: arrays of numbers."""
    numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return torch.from_numpy(value) if numbers else value


def _is_table(value: Tensor) -> bool:
    return value.dim() == 2 and value.dtype in FEATURE_DTYPES
