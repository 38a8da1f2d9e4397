"""PyG's node and link loaders, with mini-batches prepared ahead by threads instead of processes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.typing import TensorFrame

from lightning_gnn.graph.checks import refuse_type
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.disk_features import DiskFeatures
from lightning_gnn.graph.edge_attributes import as_times
from lightning_gnn.graph.features import FeatureTable
from lightning_gnn.ops import batch_key, gather_rows
from lightning_gnn.ops.hashing import key_of_part
from lightning_gnn.runtime.messages import keywords_of
from lightning_gnn.runtime.pipeline import OrderedPipeline
from lightning_gnn.runtime.resume import keyed_random
from lightning_gnn.runtime.timeline import profiled
from lightning_gnn.sampling.deferred_edges import EdgePositions, defer, deferred
from lightning_gnn.sampling.look_ahead import Drawn, LookAhead, ReadInTurn, Waiting, claimed
from lightning_gnn.sampling.neighbor import NeighborSampler, ProcessRank, SeedRange
from lightning_gnn.sampling.options import checked_options
from lightning_gnn.sampling.packed import both_of
from lightning_gnn.sampling.seed_order import TrainingOrder, mini_batches, sharded_order, unwrap_order

_SAMPLING, _OUTPUT, _TRANSFORM = 1, 2, 3
"""Stages in which a user's own code may draw random numbers."""
_NOTHING = torch.empty(0, dtype=torch.int64)
Positions = Tensor | list[int]
"""Places among the seeds, int64 ``[n]``; what is no tensor becomes one, which takes longer than sampling can."""
Task = tuple[int, int, Positions]
"""A mini-batch to prepare: epoch, number, positions of the seeds, which may be a :class:`Slice`."""


class Slice(list[int]):
    """Positions of the seeds that one of several processes has of a mini-batch that they share.

    Args:
        part: Which part of the mini-batch it is.
        first: How many seeds of the mini-batch come before these.
    """

    def __init__(self, seeds: Iterable[int], part: int = 0, first: int = 0) -> None:
        super().__init__(seeds)
        self.part = part
        self.first = first


@dataclass
class PreparationTimes:
    """What preparing mini-batches has cost since it was last reset.

    Args:
        batches: Mini-batches handed out.
        nodes: Nodes in these mini-batches.
        edges: Edges in these mini-batches.
        sampling_s: Thread-seconds of sampling.
        features_s: Thread-seconds of feature loading.
        wait_s: Seconds for which the consumer waited.
    """

    batches: int = 0
    nodes: int = 0
    edges: int = 0
    sampling_s: float = 0.0
    features_s: float = 0.0
    wait_s: float = 0.0

    def add(self, more: PreparationTimes) -> None:
        """Add up."""
        for name, value in vars(more).items():
            setattr(self, name, getattr(self, name) + value)

    def reset(self) -> None:
        """Set all figures to zero."""
        self.__init__()  # type: ignore[misc]


@dataclass
class Prepared:
    """A mini-batch as any thread can make it; what is left belongs to the training thread, see ``finish``.

    Args:
        batch: Without what is in ``left``.
        key: The key of the mini-batch.
        left: Attributes, by the type that has them (None where there is one), whose rows are gathered when the
            mini-batch is trained on, and which rows, int64 ``[n]``.
        part: Which part of a mini-batch it is, where that has been shared out.
    """

    batch: Data
    cost: PreparationTimes
    key: int
    left: dict[tuple[Any, str], Tensor] = field(default_factory=dict)
    part: int = 0


class _ThreadedLoader:
    """Mixed into a PyG loader: the stages of a mini-batch with a key, an ordered pipeline of threads around them.

    ``num_workers`` threads share the graph and the features with the trainer; nothing is pickled or copied. Each thread
    keeps 4 bytes per node.
    """

    data: Data
    batch_sampler: Any
    sampler: Any
    _sample_from: str
    transform: Callable[[Data], Any] | None
    transform_sampler_output: Callable[[SamplerOutput], SamplerOutput] | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Note the arguments as Lightning's hooks do: it makes loaders anew to predict, to overfit and for ranks."""
        loader = super().__new__(cls)
        names = list(signature(cls.__init__).parameters)[1 : 1 + len(args)]
        saved = {"args": args, "kwargs": kwargs, "arg_names": tuple(names), "default_kwargs": {}}
        vars(loader).update({f"__pl_saved_{name}": value for name, value in saved.items()}, __dataset=None)
        return loader

    def __init__(
        self,
        *args: Any,
        seed: int = 0,
        rank: int | None = None,
        loader_id: int = 0,
        first_batch: Callable[[], int] | None = None,
        epoch: Callable[[int], int] | None = None,
        tables: Mapping[Any, FeatureTable | DiskFeatures] | None = None,
        lookahead: int | tuple[int, int] = 0,
        is_last: Callable[[int], bool] | None = None,
        thread_safe: bool = False,
        sparse_grad: bool = False,
        **kwargs: Any,
    ) -> None:
        kind = "node" if isinstance(self, NodeLoader) else "link"
        kwargs = checked_options(kwargs, kind, keywords_of(type(self)))
        for name in ("input_time", "edge_label_time"):
            if kwargs.get(name) is not None:
                kwargs[name] = as_times(kwargs[name], name)
        if isinstance(args[0] if args else kwargs.get("data"), Data):
            for name in ("input_nodes", "edge_label_index"):
                refuse_type(kwargs.get(name), name, "node" if name == "input_nodes" else "edge")
        self.seed = seed
        self._rank = rank
        self._process = ProcessRank()
        self.loader_id = loader_id
        self.first_batch = first_batch
        self.epoch = epoch
        self.tables = dict(tables or {})
        self.lookahead, self.is_last = lookahead, is_last
        self._begun: list[Waiting] = []
        self.thread_safe = thread_safe
        self.sparse_grad = sparse_grad
        self.num_threads: int = kwargs.pop("num_workers", 0)
        self.prefetch_factor_threads: int = kwargs.pop("prefetch_factor", None) or 2
        self.times = PreparationTimes()
        self._pass = -1
        self._epoch_seen: int | None = None
        kwargs["sampler"] = sharded_order(kwargs.get("sampler"))
        super().__init__(*args, num_workers=0, **kwargs)  # type: ignore[call-arg]
        unwrap_order(self.batch_sampler)
        order = getattr(self.batch_sampler, "sampler", None)
        if isinstance(order, DistributedSampler) and order.num_replicas > 1:
            self._rank = order.rank
        if not isinstance(self.data, Data | HeteroData):
            raise TypeError(f"expected a torch_geometric.data.Data or HeteroData, got {type(self.data).__name__}")
        if isinstance(self.data, HeteroData) and not all(isinstance(key, tuple) for key in self.tables):
            raise ValueError("tables are by attribute, so they cannot tell types apart: give them by (type, attribute)")
        self._takes_key, self._keyed = _takes_key(self._graph_sampler, self._sample_from)
        if not hasattr(self.sampler, "set_epoch"):
            with suppress(AttributeError):  # Lightning tells the epoch to samplers that want to know
                self.sampler.set_epoch = partial(setattr, self.sampler, "epoch")
        self._check_trained()
        if not self._joins_features and any(isinstance(table, DiskFeatures) for table in self.tables.values()):
            raise TypeError(f"{type(self).__name__}.filter_fn cuts features from data itself: it cannot read a disk's")
        if getattr(type(self), "collate_fn", None) not in (NodeLoader.collate_fn, LinkLoader.collate_fn):
            raise TypeError(
                f"{type(self).__name__}.collate_fn would not be called: stages take its place here; give a sampler of "
                "your own, transform_sampler_output= or another filter_fn"
            )
        if self.num_threads and self.in_training_thread:
            user_code = f"the sampler {type(self._graph_sampler).__name__}"
            if self.transform_sampler_output is not None:
                user_code = "transform_sampler_output"
            elif not self._joins_features:
                user_code = f"{type(self).__name__}.filter_fn"
            rank_zero_warn(
                f"{user_code} may draw from the process's random stream, so mini-batches are prepared in the "
                f"training thread; thread_safe=True lets {self.num_threads} worker threads run it"
            )
            self.num_threads = 0

    def __iter__(self) -> Iterator[Data]:
        return _ThreadedIterator(self)

    def begin_epoch(self) -> int:
        """Return the number of a pass that begins: what has been set on the sampler since the last one, or the next.

        The ``epoch`` that the loader was made with has the last word.
        """
        told = getattr(self.sampler, "epoch", None)
        self._pass = told if isinstance(told, int) and told != self._epoch_seen else self._pass + 1
        if self.epoch is not None:
            self._pass = self.epoch(self._pass)
            for sampler in (self.sampler, getattr(self.batch_sampler, "sampler", None), self.batch_sampler):
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(self._pass)
        self._epoch_seen = getattr(self.sampler, "epoch", None)
        return self._pass

    @property
    def rank(self) -> int:
        """Which process of a distributed run, part of the key of each mini-batch."""
        return self._process.get() if self._rank is None else self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = rank

    @property
    def in_training_thread(self) -> bool:
        """Whether all of a mini-batch must be made there: the user's own code comes before Feature Loading."""
        if not self._joins_features and self.trained():
            return True  # the user's own code gathers rows that must not be stale
        keyed = self._keyed and self.transform_sampler_output is None and self._joins_features
        return not (self.thread_safe or keyed)

    @property
    def _joins_features(self) -> bool:
        """Whether Feature Loading is ours: a class of the user's own may have another ``filter_fn``, as in PyG."""
        return type(self).filter_fn is _ThreadedLoader.filter_fn

    @property
    def samples_alone(self) -> bool:
        """Whether a subgraph is as a sampler of this package has made it."""
        sampler = self._graph_sampler
        ours = isinstance(sampler, NeighborSampler) and type(sampler).__module__.startswith("lightning_gnn.")
        return ours and self.transform_sampler_output is None

    @property
    def defers_edges(self) -> bool:
        """Whether ``e_id`` is looked up when it is read: nobody else comes between our sampler and our features."""
        sampler = self._graph_sampler
        if not self.samples_alone or not self._joins_features:
            return False
        return sampler.subgraph_type == SubgraphType.directional and not sampler.exclude_seed_edges

    @property
    def finishes(self) -> bool:
        """Whether ``finish`` has something to do."""
        return self.in_training_thread or bool(self.trained()) or (self.transform is not None and not self.thread_safe)

    @profiled("sampling")
    def sample(self, index: Positions, key: int, part: int = 0, first: int = 0) -> SamplerOutput:
        """Stage Sampling: from positions among the seeds to a subgraph.

        Args:
            part: Which part of it, where it has been shared out; for samplers that take no key.
            first: Position of the first seed in a mini-batch that has been shared out; for disjoint samples.
        """
        keyed = {"key": key} if self._takes_key else {}

        def draw(index: Positions) -> SamplerOutput:
            try:
                return self._sample(index, first, **keyed)
            except StopIteration as error:  # would end the epoch
                raise RuntimeError(f"the sampler {type(self._graph_sampler).__name__} raised StopIteration") from error

        return draw(index) if self._keyed else self._run_user_code(draw, index, key, _SAMPLING, part)

    @property
    def _graph_sampler(self) -> Any:
        raise NotImplementedError

    def _sample(self, index: Positions, first: int = 0, **key: int) -> SamplerOutput:
        raise NotImplementedError

    def describe(self, batch: Data, out: SamplerOutput) -> None:
        """Attach what tells the seeds of a batch."""
        raise NotImplementedError

    def trained(self) -> list[tuple[Any, str]]:
        """Return the attributes that are trained, with their types; rows of now would be stale by their turn."""
        return [
            (name, key)
            for name, store in stores_of(self.data)
            for key, value in store.items()
            if isinstance(value, Tensor) and value.requires_grad and (of_nodes(store, key) or of_edges(store, key))
        ]

    def filter_fn(self, out: SamplerOutput) -> Data:
        """Join a subgraph with its features, as PyG's loaders do, with random numbers from the process's stream."""
        batch, left = self._join(out if (change := self.transform_sampler_output) is None else change(out))
        self._gather_trained(batch, left)
        return batch if self.transform is None else self.transform(batch)

    @profiled("feature_loading")
    def load(self, out: SamplerOutput, key: int, part: int = 0) -> Prepared:
        """Stage Feature Loading: join a subgraph with its features, as far as that can be done ahead."""
        start = time.perf_counter()
        left: dict[tuple[Any, str], Tensor] = {}
        if not self._joins_features:
            batch = self._run_user_code(self.filter_fn, out, key, _TRANSFORM, part)
        else:
            if self.transform_sampler_output is not None:
                out = self._run_user_code(self.transform_sampler_output, out, key, _OUTPUT, part)
            batch, left = self._join(out)
            if self.transform is not None and self.thread_safe and not left:
                batch = self._run_user_code(self.transform, batch, key, _TRANSFORM, part)
        cost = PreparationTimes(1, _count(out.node), _count(out.row), features_s=time.perf_counter() - start)
        return Prepared(batch, cost, key, left, part)

    def _join(self, out: SamplerOutput | HeteroSamplerOutput) -> tuple[Any, dict[tuple[Any, str], Tensor]]:
        """Return a mini-batch without the rows of what is trained, and which these are."""
        batch = copy.copy(self.data)
        typed = isinstance(out, HeteroSamplerOutput)
        if typed is not isinstance(batch, HeteroData):
            raise TypeError(
                f"the sampler {type(self._graph_sampler).__name__} returned a {type(out).__name__}, but the graph is a "
                f"{type(batch).__name__}"
            )
        permutation = getattr(self._graph_sampler, "edge_permutation", None)
        trained, left = self.trained(), {}
        for name, store in stores_of(self.data):
            part = batch[name] if typed else batch._store
            node: Any
            row: Any
            col: Any
            node, row, col, edge = (
                (values or {}).get(name) if typed else values for values in (out.node, out.row, out.col, out.edge)
            )
            if typed and isinstance(name, str) and node is None:
                node = _NOTHING
            elif typed and not isinstance(name, str) and row is None:
                row, col, edge = _NOTHING, _NOTHING, _NOTHING
            places = permutation.get(name) if isinstance(permutation, dict) else permutation
            if edge is not None and places is not None:
                edge = places[edge.to(torch.int64)]
            for key in ("graph", "adj_t"):
                if key in part:
                    del part[key]
            if row is not None:
                part.edge_index = _joined(row, col)
            for key in store:
                if key in ("edge_index", "adj_t", "graph"):
                    continue
                if key == "num_nodes":
                    part.num_nodes = node.numel()
                    continue
                if not of_nodes(store, key) and not of_edges(store, key):
                    continue
                ids = node if of_nodes(store, key) else edge
                if isinstance(ids, EdgePositions):
                    ids = edge = ids.ids()
                if ids is None:
                    part[key] = None
                elif (name, key) in trained:
                    part[key], left[name, key] = torch.empty(0), ids  # the place among the attributes
                else:
                    part[key] = self._rows(store, key, ids)
            if node is not None and "n_id" not in store:
                part.n_id = node
            if isinstance(edge, EdgePositions) and "e_id" not in store:
                defer(part, edge)
            elif edge is not None and "e_id" not in store:
                part.e_id = edge
            kept = row is not None and out.orig_row is not None and out.orig_col is not None
            if kept and (not typed or name in out.orig_row):
                ends = (out.orig_row[name], out.orig_col[name]) if typed else (out.orig_row, out.orig_col)
                part._orig_edge_index = torch.stack(ends)
        for key in ("batch", "num_sampled_nodes", "num_sampled_edges"):
            if typed:
                batch.set_value_dict(key, getattr(out, key) or {})
            else:
                batch[key] = getattr(out, key)
        self.describe(batch, out)
        return batch, left

    def _gather_trained(self, batch: Any, left: dict[tuple[Any, str], Tensor]) -> None:
        for (name, key), ids in left.items():
            part = batch._store if name is None else batch[name]
            part[key] = self._trained_rows(self.data._store if name is None else self.data[name], key, ids)

    def pipeline(self, epoch: int, first: int) -> Any:
        """Return an iterator over the mini-batches of an epoch that are left, which can be closed."""
        ahead, tasks = self.num_threads * self.prefetch_factor_threads, self.tasks(epoch, first)
        look_ahead = self.look_ahead(tasks, first, self._tasks_after(epoch))
        if look_ahead is not None:
            reader = min(self.num_threads, 1)
            return ReadInTurn(look_ahead, OrderedPipeline(look_ahead, look_ahead.prepare, reader, max(ahead, 1)))
        return OrderedPipeline(tasks, self.prepare, self.num_threads, ahead)

    def look_ahead(self, tasks: Iterable[Task], first: int, beyond: Iterable[Task] = ()) -> LookAhead | None:
        """Return what samples mini-batches ahead, so that rows on disk can be read in the best order.

        Returns:
            It, to be closed; None where nothing is on disk, or where somebody else looks ahead already.
        """
        on_disk = {name: table for name, table in self.tables.items() if isinstance(table, DiskFeatures)}
        if not (on_disk and self.looks_ahead and claimed(on_disk, self._begun)):
            return None
        ahead = self.num_threads * self.prefetch_factor_threads
        begun, self._begun = self._begun, []
        if begun:  # unless it is another epoch than the one that was expected
            tasks = iter(tasks)
            head = [*islice(tasks, 1)]
            begun = begun if [task[:2] for task in head] == [begun[0].task[:2]] else []
            tasks = chain(head, tasks)
        made = LookAhead(self, tasks, first, on_disk, self.lookahead, self.num_threads, ahead, beyond, begun)
        self._begun = made.handed_on  # which fills until the epoch ends
        return made

    @property
    def looks_ahead(self) -> bool:
        """Whether coming mini-batches are sampled so that their rows can be read in the best order.

        A sampler of the user's own that may change as training goes on is not run ahead of it.
        """
        return self.lookahead != 0 and not self.in_training_thread

    def tasks(self, epoch: int, first: int, device: torch.device | None = None) -> Iterator[Task]:
        """Give the mini-batches of an epoch from ``first`` on; positions are on a device where that is possible."""
        numbered = enumerate(mini_batches(self.batch_sampler, first, device), first)
        return ((epoch, number, index) for number, index in numbered)

    def _tasks_after(self, epoch: int) -> Iterator[Task]:
        """Give the mini-batches of the next epoch, where there is one and its order is known already."""
        of = self.batch_sampler
        order = getattr(of, "sampler", None)
        if type(of) is not BatchSampler or type(order) is not TrainingOrder or (self.is_last and self.is_last(epoch)):
            return
        order = copy.copy(order)
        order.set_epoch(epoch + 1)
        for number, index in enumerate(mini_batches(BatchSampler(order, of.batch_size, of.drop_last))):
            yield epoch + 1, number, index

    def key_of(self, task: Task) -> int:
        """Return the key of a mini-batch."""
        epoch, number, _ = task
        return batch_key(self.seed, self.rank, self.loader_id, epoch, number)

    def prepare(self, task: Task, stage_ends: Callable[[], None] = lambda: None) -> Prepared:
        """Make one mini-batch, which the training thread has to :meth:`finish`; safe in any thread."""
        stage_ends()
        drawn = self.draw(task)
        stage_ends()
        prepared = self.join(drawn)
        stage_ends()
        return prepared

    def draw(self, task: Task) -> Drawn:
        """Sample a mini-batch, without its features."""
        key, index, start = self.key_of(task), task[2], time.perf_counter()
        part = getattr(index, "part", 0)
        with deferred(self.defers_edges):
            out = self.sample(index, key, part, getattr(index, "first", 0))
        return Drawn(out, key, part, time.perf_counter() - start)

    def join(self, drawn: Drawn) -> Prepared:
        """Join what :meth:`draw` gave with its features."""
        start = time.perf_counter()
        prepared = self.load(drawn.out, drawn.key, drawn.part)
        if self.pin_memory and torch.accelerator.is_available():  # type: ignore[attr-defined]
            prepared.batch = prepared.batch.pin_memory()
        prepared.cost.sampling_s, prepared.cost.features_s = drawn.seconds, time.perf_counter() - start
        return prepared

    def finish(self, prepared: Prepared) -> Data:
        """Do what is left of a mini-batch, in the training thread, just before it is trained on."""
        batch, start = prepared.batch, time.perf_counter()
        self._gather_trained(batch, prepared.left)
        if self._joins_features and self.transform is not None and not (self.thread_safe and not prepared.left):
            device = next((store.edge_index.device for store in batch.edge_stores if "edge_index" in store), None)
            batch = self._run_user_code(self.transform, batch, prepared.key, _TRANSFORM, prepared.part, device)
        prepared.cost.features_s += time.perf_counter() - start
        return batch

    def _run_user_code(
        self,
        code: Callable[[Any], Any],
        argument: Any,
        key: int,
        stage: int,
        part: int,
        device: torch.device | None = None,
    ) -> Any:
        """Call the user's own code with random numbers that follow from the key of the mini-batch."""
        seeded = nullcontext() if self.thread_safe else keyed_random(batch_key(key, part, stage), device)
        with seeded:
            try:
                return code(argument)
            except StopIteration as error:
                raise RuntimeError(f"{getattr(code, '__qualname__', code)} raised StopIteration") from error

    def _rows(self, store: Any, key: str, ids: Tensor) -> Any:
        if (name := name_of(store, key)) in self.tables:
            return self.tables[name].gather(ids)
        value = store[key]
        dim = self.data.__cat_dim__(key, value, store)
        if isinstance(value, Tensor) and value.is_cpu and ids.is_cpu and dim == 0:
            return gather_rows(value, ids)
        if isinstance(value, Tensor):
            return value.index_select(dim, ids.to(value.device))
        if isinstance(value, np.ndarray):
            rows = np.take(value, ids.cpu().numpy(), axis=dim)
            return torch.from_numpy(rows) if rows.dtype.kind in "biufc" else rows
        if isinstance(value, TensorFrame):
            return value[ids.to(value.device)]
        return [value[i] for i in ids.tolist()]

    def _trained_rows(self, store: Any, key: str, ids: Tensor) -> Tensor:
        value: Tensor = store[key]
        ids = ids.to(value.device)
        if self.sparse_grad:
            return F.embedding(ids, value, sparse=True)
        return value.index_select(self.data.__cat_dim__(key, value, store), ids)

    def _check_trained(self) -> None:
        for name, key in self.trained():
            store = self.data._store if name is None else self.data[name]
            value, where = store[key], f"data.{key}" if name is None else f"data[{name!r}].{key}"
            if not hasattr(self.batch_sampler, "__len__"):
                raise ValueError(
                    f"{where} requires gradients, but the batch_sampler has no __len__: without it Lightning "
                    "fetches each mini-batch before the step that changes its rows"
                )
            if name_of(store, key) in self.tables:
                raise ValueError(f"{where} is trained, so no table can stand for it")
            if self.sparse_grad and (value.dim() != 2 or self.data.__cat_dim__(key, value, store) != 0):
                raise ValueError(
                    f"sparse_grad=True needs rows, but {where}, which requires gradients, has the shape "
                    f"{list(value.shape)}"
                )
            if value.layout != torch.strided:
                raise TypeError(f"{where} requires gradients and is sparse; use {where}.to_dense()")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} batches, num_workers={self.num_threads})"  # type: ignore[arg-type]


class _ThreadedIterator:
    """Starts at the first ``next``: Lightning asks for the iterator before it sets the epoch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._pipeline: Any = None

    def __iter__(self) -> Iterator[Data]:
        return self

    def __next__(self) -> Data:
        loader = self._loader
        start = time.perf_counter()
        if self._pipeline is None:
            self._pipeline = self._begin()
        prepared = next(self._pipeline)
        batch, cost = loader.finish(prepared), prepared.cost
        cost.wait_s = time.perf_counter() - start
        loader.times.add(cost)
        return batch

    def _begin(self) -> Any:
        loader = self._loader
        epoch = loader.begin_epoch()
        return loader.pipeline(epoch, 0 if loader.first_batch is None else loader.first_batch())

    def close(self) -> None:
        """Stop preparing and join the threads."""
        if self._pipeline is not None:
            self._pipeline.close()


class ThreadedNodeLoader(_ThreadedLoader, NodeLoader):  # type: ignore[misc]
    """Mini-batches of seeds, in deterministic order, prepared ahead by threads.

    Takes the arguments of PyG's ``NodeLoader``, whose batches it equals attribute by attribute.

    Args:
        num_workers: Threads that prepare mini-batches; 0 prepares in the caller's thread.
        prefetch_factor: Mini-batches prepared ahead per thread, 2 by default.
        seed: Start of the random stream.
        rank: Which process of a distributed run; by default that of ``torch.distributed``.
        loader_id: Which loader of the run.
        first_batch: Called when iteration starts; tells how many batches of the epoch to skip.
        epoch: Called before it, with the number of the pass; tells which epoch it is. The number is the one that has
            been set on the sampler since the last pass, as Lightning does, or else passes are counted.
        tables: Where to gather some attributes from instead of ``data``, such as device memory or a disk; by attribute,
            or with several types by (type, attribute).
        lookahead: Mini-batches that are sampled before the first one of them is read from a disk, or how many at most
            and how many bytes of them.
        is_last: Says whether an epoch is the last; else that looks ahead into the next one.
        thread_safe: Your transforms, and a sampler of your own, draw no random numbers and may run in worker threads.
            Otherwise they run in the training thread, with torch, NumPy and ``random`` seeded from the mini-batch's key
            and put back afterwards, so that what they draw does not depend on the number of workers.
        sparse_grad: Give attributes that require gradients sparse ones, for ``SparseAdam`` and ``SGD``. Their rows are
            gathered when the mini-batch is handed out, from the values of then.

    Raises:
        TypeError: The data is no graph of PyG's, or a sparse tensor requires gradients.
        ValueError: A negative number of workers, no prefetching, or attributes that require gradients where rows cannot
            be gathered in time or sparsely.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Lightning makes loaders anew to overfit, from the arguments of the first __init__ that it finds in a class
        # derived from torch's DataLoader; our own would be those of PyG's.
        super().__init__(*args, **kwargs)

    _sample_from = "sample_from_nodes"

    @property
    def _graph_sampler(self) -> Any:
        return self.node_sampler

    def _sample(self, index: Positions, first: int = 0, **key: int) -> SamplerOutput:
        inputs = self.input_data[index]
        return self.node_sampler.sample_from_nodes(SeedRange(inputs, first) if first else inputs, **key)

    def describe(self, batch: Data, out: SamplerOutput) -> None:
        """Attach ``input_id`` and ``batch_size``, to the type of the seeds where there are several."""
        part = batch if isinstance(batch, Data) else batch[self.input_data.input_type]
        part.input_id, part.seed_time = out.metadata
        part.batch_size = out.metadata[0].size(0)


class ThreadedLinkLoader(_ThreadedLoader, LinkLoader):  # type: ignore[misc]
    """Mini-batches of edges, in deterministic order, prepared ahead by threads.

    Takes the arguments of PyG's ``LinkLoader``, whose batches it equals attribute by attribute, and those that
    :class:`ThreadedNodeLoader` adds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # here for Lightning, as in ThreadedNodeLoader

    _sample_from = "sample_from_edges"

    @property
    def _graph_sampler(self) -> Any:
        return self.link_sampler

    def _sample(self, index: Positions, first: int = 0, **key: int) -> SamplerOutput:
        if first and "key" in key and (self.neg_sampling is not None or getattr(self.link_sampler, "disjoint", False)):
            key["key"] = key_of_part(key["key"], first)  # else all parts of a mini-batch would draw the same
        return self.link_sampler.sample_from_edges(self.input_data[index], neg_sampling=self.neg_sampling, **key)

    def describe(self, batch: Data, out: SamplerOutput) -> None:
        """Attach ``input_id`` and the labelled edges, or the triplets, in local ids."""
        edges = source = target = batch
        if isinstance(batch, HeteroData):
            name = self.input_data.input_type
            edges, source, target = batch[name], batch[name[0]], batch[name[-1]]
        edges.input_id = out.metadata[0]
        if self.neg_sampling is None or self.neg_sampling.is_binary():
            edges.edge_label_index, edges.edge_label, edges.edge_label_time = out.metadata[1:4]
        else:
            source.src_index, target.dst_pos_index, target.dst_neg_index, time = out.metadata[1:5]
            source.seed_time = target.seed_time = time
            for key in ("edge_label_index", "edge_label_time"):
                if key in edges:
                    del edges[key]


def stores_of(data: Any) -> list[tuple[Any, Any]]:
    """Return the stores of nodes and edges with their types; the one of a graph of one type has None."""
    if isinstance(data, Data):
        return [(None, data._store)]
    return [(store._key, store) for store in (*data.node_stores, *data.edge_stores)]


def name_of(store: Any, key: str) -> Any:
    """Return the name of an attribute among those of all types: by (type, attribute) where there are several."""
    return key if store._key is None else (store._key, key)


def of_nodes(store: Any, key: str) -> bool:
    """Tell whether an attribute has a row for each node."""
    return hasattr(store, "is_node_attr") and bool(store.is_node_attr(key))


def of_edges(store: Any, key: str) -> bool:
    """Tell whether an attribute has a row for each edge."""
    if isinstance(store, EdgeStorage) and isinstance(graph := store.get("graph"), CSCGraph):  # PyG knows no such edges
        value = store[key]
        return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == graph.num_edges
    return hasattr(store, "is_edge_attr") and bool(store.is_edge_attr(key))


def _count(ids: Any) -> int:
    parts = ids.values() if isinstance(ids, dict) else [ids]
    return sum(part.numel() for part in parts if part is not None)


def _takes_key(sampler: Any, method: str) -> tuple[bool, bool]:
    """Whether a sampler takes the key of a mini-batch, and whether it draws from it alone: one that names it does."""
    parameters = signature(getattr(sampler, method)).parameters
    named = "key" in parameters
    passed_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return named or passed_on, named and getattr(sampler, "backend", None) != "pyg_lib"


def _joined(row: Tensor, col: Tensor) -> Tensor:
    """Return ``edge_index``, without a copy where both are the rows of one tensor."""
    both = both_of(row, col)
    return torch.stack([row, col]) if both is None else both
