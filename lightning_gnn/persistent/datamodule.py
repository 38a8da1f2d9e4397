"""Node-level training on neighbourhoods that a GPU samples, and what of the graph is worth a place on it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch_geometric.loader.utils import get_input_nodes
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.typing import NodeType

from lightning_gnn.graph.cache import hottest_of_types, plan_dual_cache, plan_row_caches
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.features import FEATURE_DTYPES, FeatureTable
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.graph.memory import check_place, choose_place, pinned
from lightning_gnn.ops import batch_key, sample_neighbors
from lightning_gnn.persistent.loader import BulkNodeLoader
from lightning_gnn.persistent.sampler import MODES, PersistentNeighborSampler, find_gpu
from lightning_gnn.runtime.messages import true_or_false, whole_number
from lightning_gnn.sampling.loader import of_edges, of_nodes, stores_of
from lightning_gnn.sampling.neighbor import NeighborSampler, beyond_plain
from lightning_gnn.sampling.node_datamodule import NeighborDataModule

_PRESAMPLED_BATCHES = 8
_EVALUATION = ("num_neighbors", "replace", "disjoint", "temporal_strategy", "time_window", "labor", "subgraph_type")
"""What of the sampler may be another one in evaluation."""


class PersistentSamplerDataModule(NeighborDataModule):
    """Mini-batches sampled and gathered by the GPU that trains on them, equal to those of :class:`NeighborDataModule`.

    The graph and the features are placed when the first loader is made, on the trainer's device. On a machine without a
    GPU it says so in one line, and is a :class:`NeighborDataModule`.

    Args:
        *args: Graph and seeds of :class:`~lightning_gnn.NeighborDataModule`.
        topology: ``"device"``, ``"pinned"`` (page-locked host memory, read over PCIe) or ``"auto"`` (the device, if at
            most half of its free memory is needed).
        features: ``"device"``, ``"pinned"`` or ``"auto"`` for the features; other attributes of nodes and edges always
            lie on the device.
        cache_rows: Feature rows of the nodes with most out-edges that the device holds where features are pinned.
        cache_bytes: Instead, a budget that hot feature rows and hot adjacency lists share; some mini-batches are
            sampled first to count what is read, and each byte goes where it saves most (DUCATI's dual cache). Lists
            have a share in uniform sampling of graphs of one type; else rows, of all types, have all of it.
        quantize: Store ``x`` as int8 with one scale per row, a quarter of float32, dequantised when gathered.
        mode: ``"fused"`` (hop by hop with grid barriers) or ``"persistent"`` (a task queue, which samples uniformly in
            graphs of one type; all else runs hop by hop); the samples are equal.
        fetch_size: Tasks that a program of the persistent queue claims at a time.
        bulk: Mini-batches that are sampled in one launch, in uniform sampling of graphs of one type with
            ``mode="fused"``; fewer where their words, 8 bytes for each node of the graph and mini-batch, would take
            more than an eighth of the free memory. Everything else is sampled one mini-batch at a time.
        device: Where to sample; by default the trainer's device, or the current GPU.
        **kwargs: Further arguments of :class:`~lightning_gnn.NeighborDataModule`, such as ``num_neighbors``.

    Raises:
        ValueError: What :class:`~lightning_gnn.NeighborDataModule` refuses; an unknown place; a cache for features on
            the device.
        RuntimeError: Page-locked memory was refused, when the first loader is made.

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

    def __init__(
        self,
        *args: Any,
        topology: str = "auto",
        features: str = "auto",
        cache_rows: int = 0,
        cache_bytes: int = 0,
        quantize: bool = False,
        mode: str = "fused",
        fetch_size: int = 32,
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
        fetch_size = whole_number(fetch_size, "fetch_size", 1)
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
                f"{type(self.graph_sampler).__name__}; use NeighborDataModule with it"
            )
        self.topology, self.features = topology, features
        self.cache_rows, self.cache_bytes, self.quantize = cache_rows, cache_bytes, quantize
        self.mode, self.fetch_size, self.bulk = mode, fetch_size, whole_number(bulk, "bulk", 1)
        self._wanted = device
        self._placed_on: torch.device | str | None = None
        self._placed_data = self.data
        self._tables: dict[Any, FeatureTable] = {}
        self._samplers: dict[str, Any] = {}

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
        kwargs = self.loader_arguments(stage, self._count(stage))
        # The GPU works while the training thread goes on; there is nothing to gain by threads.
        kwargs.update(num_workers=0, pin_memory=False)
        return BulkNodeLoader(
            self._placed_data,
            self._samplers["train" if stage == "train" else "eval"],
            tables=self._tables,
            bulk=self.bulk,
            **self._inputs(stage),
            **kwargs,
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
        # What is trained stays the user's own tensor; so do attributes that are no tensors.
        values = {
            (name, key): store[key]
            for name, store in stores_of(data)
            for key in store
            if key not in ("num_nodes", "edge_index", "adj_t") and (of_nodes(store, key) or of_edges(store, key))
            if isinstance(store[key], Tensor) and not store[key].requires_grad
        }
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
        for (name, key), value in values.items():
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
        kind, seeds, _ = get_input_nodes(self.data, self._seeds("train"))
        size = self.loader_kwargs["batch_size"]
        if beyond_plain(sampler):
            if not tables:
                return {}, None
            inputs = NodeSamplerInput(None, seeds, self._times["train"], kind)
            reads = count_rows(sampler, inputs, size, _PRESAMPLED_BATCHES, seed=self.seed)
            widths = {name: table.row_bytes for name, table in tables.items()}
            return plan_row_caches({name: reads[name] for name in tables}, widths, self.cache_bytes), None
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


def _is_table(value: Tensor) -> bool:
    return value.dim() == 2 and value.dtype in FEATURE_DTYPES


@dataclass(frozen=True, eq=False)
class AccessCounts:
    """What some mini-batches touched.

    Args:
        features: Times that the feature row of each node was read, int64 ``[num_nodes]``.
        adjacency: Entries read from the adjacency list of each node, int64 ``[num_nodes]``.
        num_batches: Mini-batches counted.
    """

    features: Tensor
    adjacency: Tensor
    num_batches: int


def count_accesses(
    graph: CSCGraph,
    seeds: Tensor,
    fanouts: Sequence[int],
    batch_size: int,
    num_batches: int,
    *,
    seed: int = 0,
    replace: bool = False,
    disjoint: bool = False,
    backend: str | None = None,
) -> AccessCounts:
    """Sample mini-batches of shuffled seeds and count what they read from host memory.

    Args:
        graph: The topology.
        seeds: The training nodes, int64 ``[n]``.
        fanouts: In-edges to pick per node and hop; -1 takes all.
        batch_size: Seeds per mini-batch.
        num_batches: How many mini-batches; seeds are shuffled anew when they run out.
        seed: Start of the random stream.
        replace: Draw with replacement.
        disjoint: One tree per seed.
        backend: ``"numba"``, ``"pyg_lib"`` or ``"reference"``; by default the one for the device.

    Raises:
        IndexError: A seed outside the graph.
        ValueError: No seeds, or a batch size or number of batches below 1.

    Source: the pre-sampling of GNNLab (Yang et al., EuroSys 2022), which DUCATI extends to adjacency lists.
    """
    if batch_size < 1 or num_batches < 1 or seeds.numel() == 0:
        raise ValueError(
            f"pre-sampling needs seeds, a batch size and a number of batches, but got {seeds.numel()} seeds, "
            f"batch_size={batch_size}, num_batches={num_batches}"
        )
    features = torch.zeros(graph.num_nodes, dtype=torch.int64)
    adjacency = torch.zeros(graph.num_nodes, dtype=torch.int64)
    for index, key in _shuffled(seeds.numel(), batch_size, num_batches, seed):
        out = sample_neighbors(graph, seeds[index], fanouts, key, replace=replace, disjoint=disjoint, backend=backend)
        # A node can stand in a batch more than once: a seed given twice, or once per tree of a disjoint sample.
        features.index_add_(0, out.node, torch.ones_like(out.node))
        targets = out.node[out.edge_index[1]]
        adjacency.index_add_(0, targets, torch.ones_like(targets))
    return AccessCounts(features, adjacency, num_batches)


def count_rows(
    sampler: NeighborSampler, inputs: NodeSamplerInput, batch_size: int, num_batches: int, seed: int = 0
) -> dict[NodeType | None, Tensor]:
    """Sample mini-batches of shuffled seeds in any way and count how often each feature row is read.

    Args:
        sampler: Draws them.
        inputs: The training nodes, with their type and times.
        batch_size: Seeds per mini-batch.
        num_batches: How many mini-batches; seeds are shuffled anew when they run out.
        seed: Start of the random stream.

    Returns:
        Of each type of nodes, None where there is one, int64 ``[num_nodes]``.
    """
    sizes = sampler.graph.num_nodes
    counts = {
        name: torch.zeros(size, dtype=torch.int64)
        for name, size in (sizes if isinstance(sizes, dict) else {None: sizes}).items()
    }
    for index, key in _shuffled(inputs.node.numel(), batch_size, num_batches, seed):
        node = sampler.sample_from_nodes(inputs[index], key=key).node
        for name, ids in (node if isinstance(node, dict) else {None: node}).items():
            counts[name].index_add_(0, ids, torch.ones_like(ids))
    return counts


def _shuffled(num_seeds: int, batch_size: int, num_batches: int, seed: int) -> Iterator[tuple[Tensor, int]]:
    """Give the positions of the seeds of each mini-batch, int64 ``[batch_size]`` or fewer, and its key."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    per_epoch = -(-num_seeds // batch_size)
    for number in range(num_batches):
        epoch, batch = divmod(number, per_epoch)
        if batch == 0:
            order = torch.randperm(num_seeds, generator=generator)
        yield order[batch * batch_size : (batch + 1) * batch_size], batch_key(seed, epoch=epoch, batch=batch)
