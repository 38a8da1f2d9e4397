"""A mini-batch in three stages that can be seen, called one by one, and run by any prefetcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from inspect import signature
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import get_input_nodes
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
)
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.typing import EdgeType, InputNodes, NodeType

from lightning_gnn.features.disk_features import DiskFeatures
from lightning_gnn.graph.stores import AttributeName, name_of, of_edges, of_nodes, stores_of
from lightning_gnn.loading.batch import Attribute, Batch, BatchTask, LoaderStats, PreparedBatch, SampledBatch
from lightning_gnn.loading.collate import Allocator, Tables, attach_edge_metadata, attach_seed_metadata, collate
from lightning_gnn.loading.random_state import keyed_random
from lightning_gnn.ops import batch_key
from lightning_gnn.ops.hashing import key_of_part
from lightning_gnn.runtime.timeline import profiled
from lightning_gnn.sampling.deferred_edges import deferred
from lightning_gnn.sampling.neighbor import NeighborSampler, OffsetSeedInput, Output, ProcessRank

Argument = TypeVar("Argument")
Result = TypeVar("Result")
_SAMPLING, _OUTPUT, _TRANSFORM = 1, 2, 3  # stages in which a user's own code may draw random numbers


class MiniBatchPipeline:
    """Turns a :class:`BatchTask` into a mini-batch of PyG in three stages: sample, gather, finish.

    It has no threads, no order and no epochs: a loader, or your own loop, gives it tasks. A mini-batch depends on
    (seed, rank, loader, epoch, index) alone, not on who prepares it. Thread-safe except :meth:`finish`, which belongs
    to the training thread, and except where :attr:`requires_main_thread`.

    Args:
        data: The graph, homogeneous or heterogeneous.
        sampler: A sampler of PyG's interface, such as :class:`~lightning_gnn.NeighborSampler`.
        seeds: What the tasks' positions refer to: nodes as PyG's ``NodeLoader`` takes them, or PyG's
            ``NodeSamplerInput`` or ``EdgeSamplerInput``.
        neg_sampling: PyG's negative edges, where the seeds are edges.
        seed, rank, loader_id: What the random stream follows from; the rank is by default that of
            ``torch.distributed``.
        tables: Where to gather some attributes from instead of ``data``, such as device memory or a disk; by attribute,
            or in a heterogeneous graph by (type, attribute).
        transform, transform_sampler_output: Applied to each mini-batch, and to each output of the sampler.
        filter_fn: Makes the mini-batch of the sampler's output, instead of :meth:`gather`'s own code.
        thread_safe: The user's code draws no random numbers and may run in any thread.
        sparse_grad: Give attributes that require gradients sparse ones, for ``SparseAdam`` and ``SGD``.
        pin_memory: Copy mini-batches into page-locked memory.

    Raises:
        TypeError: The data is not a graph of PyG's, or a sparse tensor requires gradients.
        ValueError: A table for an attribute that is trained, or tables without types in a heterogeneous graph.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import NeighborSampler
        >>> from lightning_gnn.loading import BatchTask, MiniBatchPipeline
        >>> path = Data(x=torch.eye(5), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
        >>> pipeline = MiniBatchPipeline(path, NeighborSampler(path, [1]), seeds=torch.tensor([4, 1]))
        >>> sampled = pipeline.sample(BatchTask(epoch=0, index=0, seeds=torch.tensor([0, 1])))
        >>> batch = pipeline.finish(pipeline.gather(sampled))
        >>> batch.n_id, batch.x.shape
        (tensor([4, 1, 3, 0]), torch.Size([4, 5]))
    """

    def __init__(
        self,
        data: Data | HeteroData,
        sampler: BaseSampler,
        seeds: NodeSamplerInput | EdgeSamplerInput | InputNodes = None,
        neg_sampling: NegativeSampling | None = None,
        *,
        seed: int = 0,
        rank: int | None = None,
        loader_id: int = 0,
        tables: Tables | None = None,
        transform: Callable[[Batch], Batch] | None = None,
        transform_sampler_output: Callable[[Output], Output] | None = None,
        filter_fn: Callable[[Output], Batch] | None = None,
        thread_safe: bool = False,
        sparse_grad: bool = False,
        pin_memory: bool = False,
    ) -> None:
        # Users may give seeds in any form that PyG accepts; from here on they are a sampler input.
        if not isinstance(data, Data | HeteroData):
            raise TypeError(f"expected a torch_geometric.data.Data or HeteroData, got {type(data).__name__}")
        if not isinstance(seeds, NodeSamplerInput | EdgeSamplerInput):
            node_type, ids, _ = get_input_nodes(data, seeds)
            seeds = NodeSamplerInput(None, ids, None, node_type)
        # A rank that is not given is looked up when a key is drawn, since worker processes do not belong to the group.
        self.data, self.sampler, self.seeds, self.neg_sampling = data, sampler, seeds, neg_sampling
        self.seed, self.loader_id = seed, loader_id
        self.tables = dict(tables or {})
        self.transform, self.transform_sampler_output, self.filter_fn = transform, transform_sampler_output, filter_fn
        self.thread_safe, self.sparse_grad, self.pin_memory = thread_safe, sparse_grad, pin_memory
        self._rank, self._process = rank, ProcessRank()
        # Reject tables and functions that cannot be combined with the data.
        if isinstance(data, HeteroData) and not all(isinstance(key, tuple) for key in self.tables):
            raise ValueError("tables are by attribute, so they cannot tell types apart: give them by (type, attribute)")
        if filter_fn is not None and self.disk_tables:
            raise TypeError(f"{filter_fn.__qualname__} cuts features from data itself: it cannot read a disk's")
        # Find out how the sampler takes the key, which decides whether it may run outside the main thread.
        self._takes_key, self._keyed = _takes_key(
            sampler, "sample_from_edges" if self.has_edges else "sample_from_nodes"
        )
        self._check_trained()

    # -- the stages

    @profiled("sampling")
    def sample(self, task: BatchTask) -> SampledBatch:
        """Sample the subgraph of a task."""
        key, start, offset = self.key(task), time.perf_counter(), task.seed_offset
        inputs, keyed = self.inputs(task), {"key": key} if self._takes_key else {}
        own_draws = self.thread_safe or self._keyed
        random = nullcontext() if own_draws else keyed_random(batch_key(key, task.shard, _SAMPLING))
        out: Output
        try:
            with deferred(self.defers_edges), random:
                if self.has_edges:
                    if keyed and offset and (self.neg_sampling is not None or getattr(self.sampler, "disjoint", False)):
                        keyed = {"key": key_of_part(key, offset)}  # else all parts of a mini-batch would draw the same
                    out = self.sampler.sample_from_edges(inputs, neg_sampling=self.neg_sampling, **keyed)
                else:
                    out = self.sampler.sample_from_nodes(inputs, **keyed)
        except StopIteration as error:
            raise RuntimeError(f"the sampler {type(self.sampler).__name__} raised StopIteration") from error
        return SampledBatch(task, out, key, time.perf_counter() - start)

    @profiled("feature_loading")
    def gather(self, sampled: SampledBatch, allocate: Allocator | None = None) -> PreparedBatch:
        """Gather features as far as can be done ahead of training, on the CPU into what ``allocate`` returns."""
        start, out, key, shard = time.perf_counter(), sampled.out, sampled.key, sampled.task.shard
        waiting: dict[Attribute, Tensor] = {}
        if self.filter_fn is not None:
            batch = self._call(self.filter_fn, out, key, _TRANSFORM, shard)
        else:
            if self.transform_sampler_output is not None:
                out = self._call(self.transform_sampler_output, out, key, _OUTPUT, shard)
            batch, waiting = self.collate(out, allocate)
            if self.transform is not None and self.thread_safe and not waiting:
                batch = self._call(self.transform, batch, key, _TRANSFORM, shard)
        if self.pin_memory and torch.accelerator.is_available():
            batch = batch.pin_memory()
        nodes, edges, seconds = _count(out.node), _count(out.row), time.perf_counter() - start
        return PreparedBatch(batch, sampled.task, key, LoaderStats(1, nodes, edges, sampled.seconds, seconds), waiting)

    def finish(self, prepared: PreparedBatch) -> Batch:
        """Gather trained rows and run the user's transform; in the training thread, just before the step."""
        batch, start = prepared.batch, time.perf_counter()
        self.gather_trained(batch, prepared.deferred)
        transformed = self.thread_safe and not prepared.deferred
        if self.filter_fn is None and self.transform is not None and not transformed:
            device = next((store.edge_index.device for store in batch.edge_stores if "edge_index" in store), None)
            batch = self._call(self.transform, batch, prepared.key, _TRANSFORM, prepared.task.shard, device)
        prepared.stats.features_s += time.perf_counter() - start
        return batch

    def prepare(self, task: BatchTask) -> PreparedBatch:
        """Sample and gather: both stages that may run in any thread."""
        return self.gather(self.sample(task))

    # -- what the stages stand on

    def key(self, task: BatchTask) -> int:
        """Return the key of a mini-batch."""
        return batch_key(self.seed, self.rank, self.loader_id, task.epoch, task.index)

    def inputs(self, task: BatchTask) -> NodeSamplerInput | EdgeSamplerInput:
        """Return the seeds of a task as PyG's samplers take them."""
        inputs = self.seeds[task.seeds]
        return OffsetSeedInput(inputs, task.seed_offset) if task.seed_offset and not self.has_edges else inputs

    @property
    def rank(self) -> int:
        """Which process of a distributed run, part of the key of each mini-batch."""
        return self._process.get() if self._rank is None else self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = rank

    @property
    def has_edges(self) -> bool:
        """Whether the seeds are edges."""
        return isinstance(self.seeds, EdgeSamplerInput)

    @property
    def disk_tables(self) -> dict[AttributeName, DiskFeatures]:
        """Tables that are read from disk."""
        return {name: table for name, table in self.tables.items() if isinstance(table, DiskFeatures)}

    @property
    def requires_main_thread(self) -> bool:
        """Whether the user's code runs before or in :meth:`gather`, and may draw from the process's random stream."""
        if self.filter_fn is not None and self.trained_attributes():
            return True  # it gathers rows that must not be stale
        keyed = self._keyed and self.transform_sampler_output is None and self.filter_fn is None
        return not (self.thread_safe or keyed)

    @property
    def has_deferred_work(self) -> bool:
        """Whether :meth:`finish` has something to do."""
        transforms = self.transform is not None and not self.thread_safe
        return self.requires_main_thread or bool(self.trained_attributes()) or transforms

    @property
    def has_own_sampler(self) -> bool:
        """Whether a subgraph is as a sampler of this package made it."""
        ours = isinstance(self.sampler, NeighborSampler) and type(self.sampler).__module__.startswith("lightning_gnn.")
        return ours and self.transform_sampler_output is None

    @property
    def defers_edges(self) -> bool:
        """Whether ``e_id`` is looked up when it is read: no user code comes between sampler and features."""
        if not self.has_own_sampler or self.filter_fn is not None:
            return False
        return self.sampler.subgraph_type == SubgraphType.directional and not self.sampler.exclude_seed_edges

    def trained_attributes(self) -> list[Attribute]:
        """Return the attributes that require gradients, with their types; rows gathered ahead would be stale."""
        return [
            (name, key)
            for name, store in stores_of(self.data)
            for key, value in store.items()
            if isinstance(value, Tensor) and value.requires_grad and (of_nodes(store, key) or of_edges(store, key))
        ]

    def collate(self, out: Output, allocate: Allocator | None = None) -> tuple[Batch, dict[Attribute, Tensor]]:
        """Return PyG's mini-batch of a subgraph, and the rows of what is trained, which are left out."""
        if isinstance(out, HeteroSamplerOutput) is not isinstance(self.data, HeteroData):
            raise TypeError(
                f"the sampler {type(self.sampler).__name__} returned a {type(out).__name__}, but the graph is a "
                f"{type(self.data).__name__}"
            )
        permutation = getattr(self.sampler, "edge_permutation", None)
        batch, waiting = collate(self.data, out, self.tables, self.trained_attributes(), permutation, allocate)
        if self.has_edges:
            attach_edge_metadata(batch, out, self.seeds, self.neg_sampling)
        else:
            attach_seed_metadata(batch, out, self.seeds)
        return batch, waiting

    def gather_trained(self, batch: Batch, waiting: Mapping[Attribute, Tensor]) -> None:
        """Gather the present rows of attributes that are trained."""
        for (name, key), ids in waiting.items():
            store, part = (self.data._store, batch._store) if name is None else (self.data[name], batch[name])
            value: Tensor = store[key]
            ids = ids.to(value.device)
            if self.sparse_grad:
                part[key] = F.embedding(ids, value, sparse=True)
            else:
                part[key] = value.index_select(self.data.__cat_dim__(key, value, store), ids)

    def _call(
        self,
        code: Callable[[Argument], Result],
        argument: Argument,
        key: int,
        stage: int,
        shard: int,
        device: torch.device | None = None,
    ) -> Result:
        """Call the user's code with random numbers that follow from the key of the mini-batch."""
        with nullcontext() if self.thread_safe else keyed_random(batch_key(key, shard, stage), device):
            try:
                return code(argument)
            except StopIteration as error:
                raise RuntimeError(f"{getattr(code, '__qualname__', code)} raised StopIteration") from error

    def _check_trained(self) -> None:
        """Refuse attributes whose gradients could not be taken."""
        for name, key in self.trained_attributes():
            store = self.data._store if name is None else self.data[name]
            value, where = store[key], f"data.{key}" if name is None else f"data[{name!r}].{key}"
            if name_of(store, key) in self.tables:
                raise ValueError(f"{where} is trained, so no table can stand for it")
            if self.sparse_grad and (value.dim() != 2 or self.data.__cat_dim__(key, value, store) != 0):
                raise ValueError(
                    f"sparse_grad=True needs rows, but {where}, which requires gradients, has the shape "
                    f"{list(value.shape)}"
                )
            if value.layout != torch.strided:
                raise TypeError(f"{where} requires gradients and is sparse; use {where}.to_dense()")


def _count(ids: Tensor | dict[NodeType | EdgeType, Tensor | None] | None) -> int:
    parts = ids.values() if isinstance(ids, dict) else [ids]
    return sum(part.numel() for part in parts if part is not None)


def _takes_key(sampler: BaseSampler, method: str) -> tuple[bool, bool]:
    """Whether a sampler takes the key of a mini-batch, and whether it draws from it alone: one that names it does."""
    parameters = signature(getattr(sampler, method)).parameters
    named = "key" in parameters
    passed_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return named or passed_on, named
