"""PyG-compatible node and link loaders: they create tasks, which a prefetcher runs on a :class:`MiniBatchPipeline`."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader as PyGLinkLoader
from torch_geometric.loader import NodeLoader as PyGNodeLoader
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from typing_extensions import Self

from lightning_gnn.graph.checks import refuse_type
from lightning_gnn.graph.edge_attributes import as_times
from lightning_gnn.loading.batch import Batch, BatchTask, LoaderStats
from lightning_gnn.loading.collate import Tables
from lightning_gnn.loading.options import validate_options
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch.lookahead import Lookahead
from lightning_gnn.loading.prefetch.protocol import Prefetcher
from lightning_gnn.loading.prefetch.threads import ThreadPrefetcher
from lightning_gnn.loading.seed_order import TrainingOrder, mini_batches, sharded_order, unwrap_order
from lightning_gnn.runtime.lightning import rank_zero_warn
from lightning_gnn.runtime.messages import keywords_of
from lightning_gnn.runtime.thread_pipeline import join_abandoned
from lightning_gnn.sampling.neighbor import Output

log = logging.getLogger(__name__)
PrefetcherFactory = Callable[["PipelineLoader", int, int], Prefetcher]
"""Creates the prefetcher of an epoch, given the loader, the epoch, and the number of its first mini-batch."""


def prefetch_in_threads(loader: PipelineLoader, epoch: int, first: int) -> Prefetcher:
    """Return a prefetcher with ``num_workers`` threads; with features on disk, one reads what the others sample."""
    ahead, pipeline, tasks = loader.num_ahead, loader.pipeline, loader.tasks(epoch, first)
    window = loader.lookahead.begin(tasks, first, loader.next_epoch_tasks(epoch))
    if window is not None:
        readers = min(loader.num_threads, 1)
        return ThreadPrefetcher(window.prepare, window.numbers(), readers, max(ahead, 1), window.close)
    return ThreadPrefetcher(pipeline.prepare, tasks, loader.num_threads, ahead)


def num_workers_of(loader: DataLoader[Batch]) -> int:
    """Return the number of preparation threads, or of worker processes of another ``DataLoader``."""
    return loader.num_threads if isinstance(loader, PipelineLoader) else loader.num_workers


class PipelineLoader:
    """Mixin that adds a pipeline, its tasks and a prefetcher to PyG's loaders."""

    data: Batch
    dataset: range
    batch_sampler: Any
    sampler: Any
    input_data: NodeSamplerInput | EdgeSamplerInput
    pin_memory: bool
    neg_sampling: NegativeSampling | None = None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Save the arguments as Lightning's hooks do, which re-create loaders to predict, to overfit and for ranks."""
        loader = super().__new__(cls)
        names = list(signature(cls.__init__).parameters)[1 : 1 + len(args)]
        saved = {"args": args, "kwargs": kwargs, "arg_names": tuple(names), "default_kwargs": {}}
        vars(loader).update({f"__pl_saved_{name}": value for name, value in saved.items()}, __dataset=None)
        return loader

    def __init__(
        self,
        *args: object,
        seed: int = 0,
        rank: int | None = None,
        loader_id: int = 0,
        first_batch: Callable[[], int] | None = None,
        epoch: Callable[[int], int] | None = None,
        tables: Tables | None = None,
        lookahead: int | tuple[int, int] = 0,
        is_last: Callable[[int], bool] | None = None,
        thread_safe: bool = False,
        sparse_grad: bool = False,
        sums_ahead: bool = False,
        pipeline: Callable[..., MiniBatchPipeline] = MiniBatchPipeline,
        prefetcher: PrefetcherFactory = prefetch_in_threads,
        **kwargs: Any,
    ) -> None:
        kind = "node" if isinstance(self, PyGNodeLoader) else "link"
        kwargs = validate_options(kwargs, kind, keywords_of(type(self)))
        for name in ("input_time", "edge_label_time"):
            if kwargs.get(name) is not None:
                kwargs[name] = as_times(kwargs[name], name)
        if isinstance(args[0] if args else kwargs.get("data"), Data):
            for name in ("input_nodes", "edge_label_index"):
                refuse_type(kwargs.get(name), name, "node" if name == "input_nodes" else "edge")
        self.first_batch, self.epoch, self.is_last = first_batch, epoch, is_last
        self.prefetcher = prefetcher
        self.num_threads: int = kwargs.pop("num_workers", 0)
        self.prefetch_factor_threads: int = kwargs.pop("prefetch_factor", None) or 2
        self.times = LoaderStats()
        self._epoch_id = -1
        self._epoch_seen: int | None = None

        # PyG's loader handles seeds and order; Lightning may have wrapped the order to shard it across ranks.
        kwargs["sampler"] = sharded_order(kwargs.get("sampler"))
        super().__init__(*args, num_workers=0, **kwargs)  # type: ignore[call-arg]
        unwrap_order(self.batch_sampler)
        order = getattr(self.batch_sampler, "sampler", None)
        if isinstance(order, DistributedSampler) and order.num_replicas > 1:
            rank = order.rank
        if not hasattr(self.sampler, "set_epoch"):
            with suppress(AttributeError):  # Lightning calls set_epoch of samplers that define it
                self.sampler.set_epoch = partial(setattr, self.sampler, "epoch")
        overrides_filter = type(self).filter_fn is not PipelineLoader.filter_fn
        self.pipeline = pipeline(
            self.data,
            self._graph_sampler,
            self.input_data,
            self.neg_sampling,
            seed=seed,
            rank=rank,
            loader_id=loader_id,
            tables=tables,
            transform=self.transform,  # type: ignore[attr-defined]
            transform_sampler_output=self.transform_sampler_output,  # type: ignore[attr-defined]
            filter_fn=self.filter_fn if overrides_filter else None,
            thread_safe=thread_safe,
            sparse_grad=sparse_grad,
            sums_ahead=sums_ahead,
            pin_memory=self.pin_memory,
        )
        self._check_user_code(overrides_filter)
        self.lookahead = Lookahead(self.pipeline, lookahead, self.num_threads, self.num_ahead)

    def __iter__(self) -> Iterator[Batch]:
        # This generator starts at its first next(); Lightning calls iter() before it sets the epoch.
        join_abandoned()  # their last jobs may still use this loader
        epoch = self.begin_epoch()
        first, batches = 0 if self.first_batch is None else self.first_batch(), list[Batch]()
        log.debug(f"{type(self).__name__}: epoch {epoch} from mini-batch {first}, {self.num_threads} worker threads")
        with self.prefetcher(self, epoch, first) as prefetcher:
            # Keep no reference to a mini-batch in this frame while it is trained on, so that its memory can be freed.
            while self._append_next(prefetcher, batches):
                yield batches.pop()

    def _append_next(self, prefetcher: Prefetcher, batches: list[Batch]) -> bool:
        """Finish and append the next mini-batch; return False at the end of the epoch."""
        start = time.perf_counter()
        if (prepared := next(prefetcher, None)) is None:
            return False
        batches.append(self.pipeline.finish(prepared))
        prepared.stats.wait_s = time.perf_counter() - start
        self.times.add(prepared.stats)
        return True

    def filter_fn(self, out: Output) -> Batch:
        """Join a subgraph with its features, as in PyG's loaders; transforms use the process's random state."""
        transform_output, transform = self.pipeline.transform_sampler_output, self.pipeline.transform
        batch, deferred = self.pipeline.collate(out if transform_output is None else transform_output(out))
        self.pipeline.gather_trained(batch, deferred)
        return batch if transform is None else transform(batch)

    def begin_epoch(self) -> int:
        """Start an epoch and return its number: from ``epoch``, else as set on the sampler, else the next one."""
        was_set = getattr(self.sampler, "epoch", None)
        self._epoch_id = was_set if isinstance(was_set, int) and was_set != self._epoch_seen else self._epoch_id + 1
        if self.epoch is not None:
            self._epoch_id = self.epoch(self._epoch_id)
            for sampler in (self.sampler, getattr(self.batch_sampler, "sampler", None), self.batch_sampler):
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(self._epoch_id)
        self._epoch_seen = getattr(self.sampler, "epoch", None)
        return self._epoch_id

    @property
    def num_ahead(self) -> int:
        """Number of mini-batches that threads prepare ahead."""
        return self.num_threads * self.prefetch_factor_threads

    def tasks(self, epoch: int, first: int = 0, device: torch.device | None = None) -> Iterator[BatchTask]:
        """Yield the tasks of an epoch from ``first`` on, with seeds on ``device`` if the order is known as a tensor."""
        for index, seeds in enumerate(mini_batches(self.batch_sampler, first, device), first):
            yield BatchTask(epoch, index, seeds)

    def next_epoch_tasks(self, epoch: int) -> Iterator[BatchTask]:
        """Yield the tasks of the next epoch; none after the last epoch, or if its order is not known yet."""
        sampler = self.batch_sampler
        order = getattr(sampler, "sampler", None)
        if type(sampler) is not BatchSampler or type(order) is not TrainingOrder:
            return
        if self.is_last and self.is_last(epoch):
            return
        order = copy.copy(order)
        order.set_epoch(epoch + 1)
        for index, seeds in enumerate(mini_batches(BatchSampler(order, sampler.batch_size, sampler.drop_last))):
            yield BatchTask(epoch + 1, index, seeds)

    @property
    def _graph_sampler(self) -> BaseSampler:
        raise NotImplementedError

    def _check_user_code(self, overrides_filter: bool) -> None:
        """Reject unsupported user code; disable worker threads for code that may use the process's random state."""
        if getattr(type(self), "collate_fn", None) not in (PyGNodeLoader.collate_fn, PyGLinkLoader.collate_fn):
            raise TypeError(
                f"{type(self).__name__}.collate_fn would not be called, as pipeline stages replace it; use a custom "
                "sampler, transform_sampler_output= or filter_fn"
            )
        for name, key in self.pipeline.trained_attributes():
            if not hasattr(self.batch_sampler, "__len__"):
                where = f"data.{key}" if name is None else f"data[{name!r}].{key}"
                raise ValueError(
                    f"{where} requires gradients, but the batch_sampler has no __len__: without it, Lightning "
                    "fetches each mini-batch before the previous step has updated its rows"
                )
        if self.num_threads and self.pipeline.requires_main_thread:
            user_code = f"the sampler {type(self._graph_sampler).__name__}"
            if self.pipeline.transform_sampler_output is not None:
                user_code = "transform_sampler_output"
            elif overrides_filter:
                user_code = f"{type(self).__name__}.filter_fn"
            rank_zero_warn(
                f"{user_code} may use the process's random state, so mini-batches are prepared in the training "
                f"thread; thread_safe=True lets {self.num_threads} worker threads run it"
            )
            self.num_threads = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} batches, num_workers={self.num_threads})"  # type: ignore[arg-type]


class NodeLoader(PipelineLoader, PyGNodeLoader):  # type: ignore[misc]
    """Mini-batches of seed nodes, in deterministic order, prefetched by threads.

    Accepts the arguments of PyG's ``NodeLoader``, whose batches it reproduces attribute by attribute.

    Args:
        num_workers: Number of threads that prepare mini-batches; 0 prepares in the caller's thread.
        prefetch_factor: Mini-batches prepared ahead per thread, 2 by default.
        seed, rank, loader_id, tables, sparse_grad, sums_ahead: See :class:`MiniBatchPipeline`.
        first_batch: Called when iteration starts; returns the number of mini-batches of the epoch to skip.
        epoch: Called before ``first_batch``; returns the number of the epoch. Its argument is the epoch set on the
            sampler since the last iteration (Lightning sets it), or else a count of iterations.
        lookahead: For features on disk, the number of mini-batches to sample ahead of reading, or that number and a
            limit in bytes.
        is_last: Returns whether an epoch is the last; if not, the lookahead continues into the next epoch.
        thread_safe: Declares that your transforms and sampler use no global random state and may run in worker threads.
            Otherwise they run in the training thread, with torch, NumPy and ``random`` seeded from the mini-batch's key
            and restored afterwards, so that results do not depend on the number of workers.
        pipeline: Creates the pipeline from the arguments of :class:`MiniBatchPipeline`.
        prefetcher: Called when an epoch begins, with the loader, the epoch, and the number of its first mini-batch;
            returns the :class:`Prefetcher` that runs the stages.

    Raises:
        TypeError, ValueError: :class:`MiniBatchPipeline` rejects its arguments, or a keyword is not supported.
    """

    def __init__(self, *args: object, **kwargs: Any) -> None:
        # To overfit, Lightning re-creates loaders from the signature of the first __init__ in a subclass of torch's
        # DataLoader. Without this method, that would be PyG's.
        super().__init__(*args, **kwargs)

    @property
    def _graph_sampler(self) -> BaseSampler:
        return self.node_sampler


class LinkLoader(PipelineLoader, PyGLinkLoader):  # type: ignore[misc]
    """Mini-batches of seed edges, prefetched by threads.

    Accepts the arguments of PyG's ``LinkLoader`` and those that :class:`NodeLoader` adds.
    """

    def __init__(self, *args: object, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # for Lightning, as in NodeLoader

    @property
    def _graph_sampler(self) -> BaseSampler:
        return self.link_sampler
