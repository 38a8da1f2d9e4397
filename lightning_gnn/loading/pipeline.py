"""The three-stage mini-batch pipeline (sample, gather, finish), callable stage by stage and run by any prefetcher."""

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
from lightning_gnn.graph.adjacency import with_adj_t_values
from lightning_gnn.graph.csc import unexpected_graph
from lightning_gnn.graph.stores import AttributeName, name_of, of_edges, of_nodes, stores_of
from lightning_gnn.loading.batch import Attribute, Batch, BatchTask, LoaderStats, PreparedBatch, SampledBatch
from lightning_gnn.loading.collate import Allocator, Tables, attach_edge_metadata, attach_seed_metadata, collate
from lightning_gnn.loading.random_state import keyed_random
from lightning_gnn.ops import batch_key
from lightning_gnn.ops.aggregate_update.sums_ahead import SumsAhead
from lightning_gnn.ops.hashing import key_of_part
from lightning_gnn.runtime.any_batch import map_tensors
from lightning_gnn.runtime.timeline import profiled
from lightning_gnn.sampling.deferred_edges import deferred
from lightning_gnn.sampling.neighbor import NeighborSampler, OffsetSeedInput, Output, ProcessRank

Argument = TypeVar("Argument")
Result = TypeVar("Result")
_STAGE_SAMPLING, _STAGE_OUTPUT, _STAGE_TRANSFORM = 1, 2, 3  # stages with user code that may use random numbers


class MiniBatchPipeline:
    """Turns a :class:`BatchTask` into a PyG mini-batch in three stages: sample, gather, finish.

    It has no threads, order or epochs: a loader, or your own loop, supplies tasks. A mini-batch depends only on (seed,
    rank, loader, epoch, index), not on the thread or process that prepares it. :meth:`sample` and :meth:`gather` are
    thread-safe unless :attr:`requires_main_thread`; call :meth:`finish` in the training thread.

    Args:
        data: The graph, homogeneous or heterogeneous.
        sampler: A sampler with PyG's interface, such as :class:`~lightning_gnn.NeighborSampler`.
        seeds: The seeds that tasks index: nodes in any form that PyG's ``NodeLoader`` accepts, ``NodeSamplerInput``, or
            ``EdgeSamplerInput``.
        neg_sampling: PyG's negative sampling, for seed edges.
        seed, rank, loader_id: Determine the random key of each mini-batch. The rank defaults to that of
            ``torch.distributed``.
        tables: Sources that replace attributes of ``data``, such as tables on a device or on disk; by attribute name,
            or by (type, attribute) in a heterogeneous graph.
        transform, transform_sampler_output: Applied to each mini-batch, and to each output of the sampler.
        filter_fn: Creates the mini-batch from the sampler's output, replacing the default code of :meth:`gather`.
        thread_safe: Declares that user code uses no global random state and may run in any thread.
        sparse_grad: Compute sparse gradients of trainable attributes, for ``SparseAdam`` and ``SGD``.
        sums_ahead: Compute the sums of a model's first layer in :meth:`gather`, on a CPU; results do not change.
        pin_memory: Copy mini-batches into pinned memory.

    Raises:
        TypeError: ``data`` is not a PyG graph, a sparse tensor requires gradients, or ``filter_fn`` needs disk tables.
        ValueError: ``tables`` contains a trainable attribute, or lacks the types of a heterogeneous graph, or
            ``sums_ahead`` is set for one.

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
        sums_ahead: bool = False,
        pin_memory: bool = False,
    ) -> None:
        if not isinstance(data, Data | HeteroData):
            raise unexpected_graph(data, "a torch_geometric.data.Data or HeteroData")
        data = with_adj_t_values(data)
        if not isinstance(seeds, NodeSamplerInput | EdgeSamplerInput):
            node_type, ids, _ = get_input_nodes(data, seeds)
            seeds = NodeSamplerInput(None, ids, None, node_type)
        # The default rank is looked up lazily, since worker processes do not belong to the process group.
        self.data, self.sampler, self.seeds, self.neg_sampling = data, sampler, seeds, neg_sampling
        self.seed, self.loader_id = seed, loader_id
        self.tables = dict(tables or {})
        self.transform, self.transform_sampler_output, self.filter_fn = transform, transform_sampler_output, filter_fn
        self.thread_safe, self.sparse_grad, self.pin_memory = thread_safe, sparse_grad, pin_memory
        self.sums_ahead = SumsAhead() if sums_ahead else None
        self._rank, self._process = rank, ProcessRank()
        if isinstance(data, HeteroData) and not all(isinstance(key, tuple) for key in self.tables):
            raise ValueError("the keys of tables must be (type, attribute) in a heterogeneous graph")
        if isinstance(data, HeteroData) and sums_ahead:
            raise ValueError("sums_ahead=True supports graphs with one node and edge type only; leave it out")
        if filter_fn is not None and self.disk_tables:
            raise TypeError(f"{filter_fn.__qualname__} reads features from data, so it cannot use features on disk")
        # Whether the sampler uses the key decides whether it may run outside the main thread.
        self._accepts_key, self._uses_only_key = _accepts_key(
            sampler, "sample_from_edges" if self.has_edges else "sample_from_nodes"
        )
        self._validate_trainable()

    # -- the stages

    @profiled("sampling")
    def sample(self, task: BatchTask) -> SampledBatch:
        """Sample a task's subgraph."""
        key, start, offset = self.key(task), time.perf_counter(), task.seed_offset
        inputs, keyed = self.inputs(task), {"key": key} if self._accepts_key else {}
        needs_no_seeding = self.thread_safe or self._uses_only_key
        random = nullcontext() if needs_no_seeding else keyed_random(batch_key(key, task.shard, _STAGE_SAMPLING))
        out: Output
        try:
            with deferred(self.defers_edges), random:
                if self.has_edges:
                    if keyed and offset and (self.neg_sampling is not None or getattr(self.sampler, "disjoint", False)):
                        keyed = {"key": key_of_part(key, offset)}  # else all shards would use the same random numbers
                    out = self.sampler.sample_from_edges(inputs, neg_sampling=self.neg_sampling, **keyed)
                else:
                    out = self.sampler.sample_from_nodes(inputs, **keyed)
        except StopIteration as error:
            raise RuntimeError(f"the sampler {type(self.sampler).__name__} raised StopIteration") from error
        return SampledBatch(task, out, key, time.perf_counter() - start)

    @profiled("feature_loading")
    def gather(self, sampled: SampledBatch, allocate: Allocator | None = None) -> PreparedBatch:
        """Gather all features that can be gathered ahead of training; ``allocate`` provides CPU output tensors."""
        start, out, key, shard = time.perf_counter(), sampled.out, sampled.key, sampled.task.shard
        pending: dict[Attribute, Tensor] = {}
        if self.filter_fn is not None:
            batch = self._call_user(self.filter_fn, out, key, _STAGE_TRANSFORM, shard)
        else:
            if self.transform_sampler_output is not None:
                out = self._call_user(self.transform_sampler_output, out, key, _STAGE_OUTPUT, shard)
            batch, pending = self.collate(out, allocate)
            if self.transform is not None and self.thread_safe and not pending:
                batch = self._call_user(self.transform, batch, key, _STAGE_TRANSFORM, shard)
        # A transform in the training thread comes later, and may write by NumPy, which leaves no trace.
        if self.sums_ahead is not None and (self.transform is None or (self.thread_safe and not pending)):
            self.sums_ahead.prepare(batch)
        if self.pin_memory and torch.accelerator.is_available():
            batch = map_tensors(batch, Tensor.pin_memory, lambda graph: graph.pin_memory())
        nodes, edges, seconds = _count_ids(out.node), _count_ids(out.row), time.perf_counter() - start
        return PreparedBatch(batch, sampled.task, key, LoaderStats(1, nodes, edges, sampled.seconds, seconds), pending)

    def finish(self, prepared: PreparedBatch) -> Batch:
        """Gather trainable rows and run the user's transform; call it in the training thread just before the step."""
        batch, start = prepared.batch, time.perf_counter()
        self.gather_trained(batch, prepared.deferred)
        is_transformed = self.thread_safe and not prepared.deferred
        if self.filter_fn is None and self.transform is not None and not is_transformed:
            device = next((store.edge_index.device for store in batch.edge_stores if "edge_index" in store), None)
            batch = self._call_user(self.transform, batch, prepared.key, _STAGE_TRANSFORM, prepared.task.shard, device)
        prepared.stats.features_s += time.perf_counter() - start
        return batch

    def prepare(self, task: BatchTask) -> PreparedBatch:
        """Sample and gather, the two stages that may run in worker threads."""
        return self.gather(self.sample(task))

    # -- helpers and properties

    def key(self, task: BatchTask) -> int:
        """Return the random key of a mini-batch."""
        return batch_key(self.seed, self.rank, self.loader_id, task.epoch, task.index)

    def inputs(self, task: BatchTask) -> NodeSamplerInput | EdgeSamplerInput:
        """Return the seeds of a task as input for PyG's samplers."""
        inputs = self.seeds[task.seeds]
        return OffsetSeedInput(inputs, task.seed_offset) if task.seed_offset and not self.has_edges else inputs

    @property
    def rank(self) -> int:
        """Rank of this process, part of each mini-batch's key."""
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
        """Whether user code that runs in :meth:`sample` or :meth:`gather` may use the process's random state."""
        if self.filter_fn is not None and self.trained_attributes():
            return True  # filter_fn gathers trainable rows, which would be stale if prefetched
        is_keyed = self._uses_only_key and self.transform_sampler_output is None and self.filter_fn is None
        return not (self.thread_safe or is_keyed)

    @property
    def has_deferred_work(self) -> bool:
        """Whether :meth:`finish` does any work."""
        has_transform = self.transform is not None and not self.thread_safe
        return self.requires_main_thread or bool(self.trained_attributes()) or has_transform

    @property
    def has_own_sampler(self) -> bool:
        """Whether subgraphs are the unmodified output of a sampler of this package."""
        sampler = self.sampler
        is_ours = isinstance(sampler, NeighborSampler) and type(sampler).__module__.startswith("lightning_gnn.")
        return is_ours and self.transform_sampler_output is None

    @property
    def defers_edges(self) -> bool:
        """Whether ``e_id`` is computed lazily, which requires that no user code sees the sampler's output."""
        if not self.has_own_sampler or self.filter_fn is not None:
            return False
        return self.sampler.subgraph_type == SubgraphType.directional and not self.sampler.exclude_seed_edges

    def trained_attributes(self) -> list[Attribute]:
        """Return the attributes that require gradients; rows of these would be stale if gathered ahead."""
        return [
            (name, key)
            for name, store in stores_of(self.data)
            for key, value in store.items()
            if isinstance(value, Tensor) and value.requires_grad and (of_nodes(store, key) or of_edges(store, key))
        ]

    def collate(self, out: Output, allocate: Allocator | None = None) -> tuple[Batch, dict[Attribute, Tensor]]:
        """Return PyG's mini-batch of a subgraph without trainable rows, and the ids of these rows."""
        if isinstance(out, HeteroSamplerOutput) is not isinstance(self.data, HeteroData):
            raise TypeError(
                f"the sampler {type(self.sampler).__name__} returned a {type(out).__name__}, but the graph is a "
                f"{type(self.data).__name__}"
            )
        permutation = getattr(self.sampler, "edge_permutation", None)
        batch, pending = collate(self.data, out, self.tables, self.trained_attributes(), permutation, allocate)
        if self.has_edges:
            attach_edge_metadata(batch, out, self.seeds, self.neg_sampling)
        else:
            attach_seed_metadata(batch, out, self.seeds)
        return batch, pending

    def gather_trained(self, batch: Batch, pending: Mapping[Attribute, Tensor]) -> None:
        """Gather the current rows of trainable attributes into a batch."""
        for (name, key), ids in pending.items():
            store, target = (self.data._store, batch._store) if name is None else (self.data[name], batch[name])
            value: Tensor = store[key]
            ids = ids.to(value.device)
            if self.sparse_grad:
                target[key] = F.embedding(ids, value, sparse=True)
            else:
                target[key] = value.index_select(self.data.__cat_dim__(key, value, store), ids)

    def _call_user(
        self,
        code: Callable[[Argument], Result],
        argument: Argument,
        key: int,
        stage: int,
        shard: int,
        device: torch.device | None = None,
    ) -> Result:
        """Call user code with random generators seeded from the mini-batch's key, unless it is thread-safe."""
        with nullcontext() if self.thread_safe else keyed_random(batch_key(key, shard, stage), device):
            name = getattr(code, "__qualname__", code)
            try:
                result = code(argument)
            except StopIteration as error:
                raise RuntimeError(f"{name} raised StopIteration") from error
            if result is None:
                raise TypeError(f"{name} returned None: end it with a return statement, such as 'return batch'")
            return result

    def _validate_trainable(self) -> None:
        """Raise an error for trainable attributes whose gradients cannot be computed."""
        for name, key in self.trained_attributes():
            store = self.data._store if name is None else self.data[name]
            value, where = store[key], f"data.{key}" if name is None else f"data[{name!r}].{key}"
            if name_of(store, key) in self.tables:
                raise ValueError(f"{where} requires gradients, so tables must not contain it")
            if self.sparse_grad and (value.dim() != 2 or self.data.__cat_dim__(key, value, store) != 0):
                shape = list(value.shape)
                raise ValueError(
                    f"sparse_grad=True requires row-wise data, but the trainable {where} has shape {shape}"
                )
            if value.layout != torch.strided:
                raise TypeError(f"{where} requires gradients and is sparse; use {where}.to_dense()")


def _count_ids(ids: Tensor | dict[NodeType | EdgeType, Tensor | None] | None) -> int:
    parts = ids.values() if isinstance(ids, dict) else [ids]
    return sum(part.numel() for part in parts if part is not None)


def _accepts_key(sampler: BaseSampler, method: str) -> tuple[bool, bool]:
    """Return whether a sampler accepts ``key``, and whether it names it, which implies that it uses no other RNG."""
    parameters = signature(getattr(sampler, method)).parameters
    is_named = "key" in parameters
    has_kwargs = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return is_named or has_kwargs, is_named
