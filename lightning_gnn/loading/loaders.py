"""PyG's node and link loaders over a :class:`MiniBatchPipeline`: they give it tasks, and a prefetcher runs it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
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
from lightning_gnn.loading.options import checked_options
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch.lookahead import Lookahead
from lightning_gnn.loading.prefetch.protocol import Prefetcher
from lightning_gnn.loading.prefetch.threads import ThreadPrefetcher
from lightning_gnn.loading.seed_order import TrainingOrder, mini_batches, sharded_order, unwrap_order
from lightning_gnn.runtime.messages import keywords_of
from lightning_gnn.sampling.neighbor import Output

PrefetcherFactory = Callable[["PipelineLoader", int, int], Prefetcher]
"""Returns the prefetcher of an epoch, given the loader, the epoch, and the number of its first mini-batch."""


def prefetch_in_threads(loader: PipelineLoader, epoch: int, first: int) -> Prefetcher:
    """Return the prefetcher of ``num_workers`` threads; with rows on disk one of them reads what all have sampled."""
    ahead, pipeline, tasks = loader.num_ahead, loader.pipeline, loader.tasks(epoch, first)
    window = loader.lookahead.begin(tasks, first, loader.next_epoch_tasks(epoch))
    if window is not None:
        readers = min(loader.num_threads, 1)
        return ThreadPrefetcher(window.prepare, window.numbers(), readers, max(ahead, 1), window.close)
    return ThreadPrefetcher(pipeline.prepare, tasks, loader.num_threads, ahead)


def num_workers_of(loader: DataLoader[Batch]) -> int:
    """Return how many threads, or processes of a foreign loader, prepare mini-batches."""
    return loader.num_threads if isinstance(loader, PipelineLoader) else loader.num_workers


class PipelineLoader:
    """What :class:`NodeLoader` and :class:`LinkLoader` add to PyG's: a pipeline, its tasks, and who prefetches."""

    data: Batch
    dataset: range
    batch_sampler: Any
    sampler: Any
    input_data: NodeSamplerInput | EdgeSamplerInput
    pin_memory: bool
    neg_sampling: NegativeSampling | None = None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Note the arguments as Lightning's hooks do: it makes loaders again to predict, to overfit and for ranks."""
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
        pipeline: Callable[..., MiniBatchPipeline] = MiniBatchPipeline,
        prefetcher: PrefetcherFactory = prefetch_in_threads,
        **kwargs: Any,
    ) -> None:
        kind = "node" if isinstance(self, PyGNodeLoader) else "link"
        kwargs = checked_options(kwargs, kind, keywords_of(type(self)))
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
        self._pass = -1
        self._epoch_seen: int | None = None

        # PyG's loader takes the seeds and the order; Lightning may have wrapped the order to share it out.
        kwargs["sampler"] = sharded_order(kwargs.get("sampler"))
        super().__init__(*args, num_workers=0, **kwargs)  # type: ignore[call-arg]
        unwrap_order(self.batch_sampler)
        order = getattr(self.batch_sampler, "sampler", None)
        if isinstance(order, DistributedSampler) and order.num_replicas > 1:
            rank = order.rank
        if not hasattr(self.sampler, "set_epoch"):
            with suppress(AttributeError):  # Lightning sets the epoch of samplers that have such a method
                self.sampler.set_epoch = partial(setattr, self.sampler, "epoch")
        own_filter = type(self).filter_fn is not PipelineLoader.filter_fn
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
            filter_fn=self.filter_fn if own_filter else None,
            thread_safe=thread_safe,
            sparse_grad=sparse_grad,
            pin_memory=self.pin_memory,
        )
        self._check_users_code(own_filter)
        self.lookahead = Lookahead(self.pipeline, lookahead, self.num_threads, self.num_ahead)

    def __iter__(self) -> Iterator[Batch]:
        # A generator begins at the first next(): Lightning asks for the iterator before it sets the epoch.
        epoch = self.begin_epoch()
        first, batches = 0 if self.first_batch is None else self.first_batch(), list[Batch]()
        with self.prefetcher(self, epoch, first) as prefetcher:
            # No variable of this frame holds a mini-batch while it is trained on.
            while self._put_next(prefetcher, batches):
                yield batches.pop()

    def _put_next(self, prefetcher: Prefetcher, batches: list[Batch]) -> bool:
        """Append the next mini-batch, finished; return whether there is one."""
        start = time.perf_counter()
        if (prepared := next(prefetcher, None)) is None:
            return False
        batches.append(self.pipeline.finish(prepared))
        prepared.stats.wait_s = time.perf_counter() - start
        self.times.add(prepared.stats)
        return True

    def filter_fn(self, out: Output) -> Batch:
        """Join a subgraph with its features, as PyG's loaders do, with random numbers from the process's stream."""
        change, transform = self.pipeline.transform_sampler_output, self.pipeline.transform
        batch, deferred = self.pipeline.collate(out if change is None else change(out))
        self.pipeline.gather_trained(batch, deferred)
        return batch if transform is None else transform(batch)

    def begin_epoch(self) -> int:
        """Return the number of a pass that begins: that of ``epoch``, else what was set on the sampler, or the next."""
        given = getattr(self.sampler, "epoch", None)
        self._pass = given if isinstance(given, int) and given != self._epoch_seen else self._pass + 1
        if self.epoch is not None:
            self._pass = self.epoch(self._pass)
            for sampler in (self.sampler, getattr(self.batch_sampler, "sampler", None), self.batch_sampler):
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(self._pass)
        self._epoch_seen = getattr(self.sampler, "epoch", None)
        return self._pass

    @property
    def num_ahead(self) -> int:
        """Mini-batches that threads prepare ahead."""
        return self.num_threads * self.prefetch_factor_threads

    def tasks(self, epoch: int, first: int = 0, device: torch.device | None = None) -> Iterator[BatchTask]:
        """Yield the mini-batches of an epoch from ``first`` on; positions are on a device where that is possible."""
        for index, seeds in enumerate(mini_batches(self.batch_sampler, first, device), first):
            yield BatchTask(epoch, index, seeds)

    def next_epoch_tasks(self, epoch: int) -> Iterator[BatchTask]:
        """Yield the mini-batches of the next epoch, where there is one and its order is known already."""
        of = self.batch_sampler
        order = getattr(of, "sampler", None)
        if type(of) is not BatchSampler or type(order) is not TrainingOrder or (self.is_last and self.is_last(epoch)):
            return
        order = copy.copy(order)
        order.set_epoch(epoch + 1)
        for index, seeds in enumerate(mini_batches(BatchSampler(order, of.batch_size, of.drop_last))):
            yield BatchTask(epoch + 1, index, seeds)

    @property
    def _graph_sampler(self) -> BaseSampler:
        raise NotImplementedError

    def _check_users_code(self, own_filter: bool) -> None:
        """Refuse user code that would not be called, or too early, and run in the training thread what may draw."""
        if getattr(type(self), "collate_fn", None) not in (PyGNodeLoader.collate_fn, PyGLinkLoader.collate_fn):
            raise TypeError(
                f"{type(self).__name__}.collate_fn would not be called: stages take its place here; give a sampler of "
                "your own, transform_sampler_output= or another filter_fn"
            )
        for name, key in self.pipeline.trained_attributes():
            if not hasattr(self.batch_sampler, "__len__"):
                where = f"data.{key}" if name is None else f"data[{name!r}].{key}"
                raise ValueError(
                    f"{where} requires gradients, but the batch_sampler has no __len__: without it Lightning "
                    "fetches each mini-batch before the step that changes its rows"
                )
        if self.num_threads and self.pipeline.requires_main_thread:
            user_code = f"the sampler {type(self._graph_sampler).__name__}"
            if self.pipeline.transform_sampler_output is not None:
                user_code = "transform_sampler_output"
            elif own_filter:
                user_code = f"{type(self).__name__}.filter_fn"
            rank_zero_warn(
                f"{user_code} may draw from the process's random stream, so mini-batches are prepared in the "
                f"training thread; thread_safe=True lets {self.num_threads} worker threads run it"
            )
            self.num_threads = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} batches, num_workers={self.num_threads})"  # type: ignore[arg-type]


class NodeLoader(PipelineLoader, PyGNodeLoader):  # type: ignore[misc]
    """Mini-batches of seed nodes, in deterministic order, prepared ahead by threads.

    Takes the arguments of PyG's ``NodeLoader``, whose batches it equals attribute by attribute.

    Args:
        num_workers: Threads that prepare mini-batches; 0 prepares in the caller's thread.
        prefetch_factor: Mini-batches prepared ahead per thread, 2 by default.
        seed, rank, loader_id, tables, sparse_grad: As for :class:`MiniBatchPipeline`.
        first_batch: Called when iteration starts; returns how many batches of the epoch to skip.
        epoch: Called before it, with the number of the pass; returns which epoch it is. The number is the one that was
            set on the sampler since the last pass, as Lightning does, or else passes are counted.
        lookahead: Mini-batches that are sampled before the first one of them is read from a disk, or how many at most
            and how many bytes of them.
        is_last: Returns whether an epoch is the last; else the lookahead goes on into the next one.
        thread_safe: Your transforms, and a sampler of your own, draw no random numbers and may run in worker threads.
            Otherwise they run in the training thread, with torch, NumPy and ``random`` seeded from the mini-batch's key
            and put back afterwards, so that what they draw does not depend on the number of workers.
        pipeline: Makes the stages; called with the arguments of :class:`MiniBatchPipeline`.
        prefetcher: Called when an epoch begins, with the loader, the epoch, and the number of its first mini-batch;
            returns the :class:`Prefetcher` that runs the stages.

    Raises:
        TypeError, ValueError: What :class:`MiniBatchPipeline` refuses, or a keyword that cannot work here.
    """

    def __init__(self, *args: object, **kwargs: Any) -> None:
        # Lightning makes loaders again to overfit, from the arguments of the first __init__ that it finds in a class
        # derived from torch's DataLoader; our own would be those of PyG's.
        super().__init__(*args, **kwargs)

    @property
    def _graph_sampler(self) -> BaseSampler:
        return self.node_sampler


class LinkLoader(PipelineLoader, PyGLinkLoader):  # type: ignore[misc]
    """Mini-batches of seed edges, prepared ahead by threads; takes what PyG's does and :class:`NodeLoader` adds."""

    def __init__(self, *args: object, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # here for Lightning, as in NodeLoader

    @property
    def _graph_sampler(self) -> BaseSampler:
        return self.link_sampler
