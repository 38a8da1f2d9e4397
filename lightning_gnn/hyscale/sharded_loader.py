"""Loaders that shard the seeds of every mini-batch across ranks (HyScale-GNN, section III)."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from math import inf
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler
from torch_geometric.data.data import BaseData

from lightning_gnn.collective.prefetcher import CollectiveBatching, CollectivePrefetcher
from lightning_gnn.gpu_sampling.stream_prefetcher import StreamPrefetching
from lightning_gnn.hyscale.staged_prefetcher import BatchShare, StagedBatching
from lightning_gnn.hyscale.transfer import Transfer
from lightning_gnn.loading.batch import Batch, BatchTask, Positions
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.loading.prefetch import ThreadPrefetcher
from lightning_gnn.runtime.precision import converted

Split = Callable[[int, int], tuple[int, int]]
"""Maps a mini-batch's number of seeds and its index in the epoch to the start and stop of this rank's seeds."""


class ShardedBatchSampler:
    """Wraps a batch sampler and yields only this rank's seeds of every mini-batch."""

    def __init__(
        self,
        loader: DataLoader[Batch],  # the loader that provides the batch sampler
        split: Split,  # returns the range of this rank's seeds
        shard: int = 0,  # index of this rank's shard
        first_batch: Callable[[], int] = lambda: 0,  # returns the number of mini-batches to skip in the epoch
        num_batches: Callable[[], float] = lambda: inf,
        on_epoch: Callable[[int], object] = lambda first: None,
        rank: int | None = None,  # global rank of this process; None for a single rank
    ) -> None:
        # Callables defer values that the Trainer sets later, such as the first mini-batch of a resumed epoch.
        self.batches = cast(BatchSampler, loader.batch_sampler)
        self.split = split
        self.shard = shard
        self.first_batch = first_batch
        self.num_batches = num_batches
        self.on_epoch = on_epoch
        # Shares and generator states belong to the current epoch.
        self.shares: deque[BatchShare] = deque()
        """Shares of the yielded shards whose mini-batches have not been delivered yet."""
        self.order_state: Tensor | None = None
        """Torch's RNG state before the current epoch was shuffled; None if the order is deterministic."""
        self.resumed: tuple[Tensor, Tensor] | None = None
        """RNG states for a resumed epoch: to shuffle its order with, and to continue with afterwards."""
        self._rank = rank
        # A sampler that also shards the seeds would leave each rank with a shard of its shard.
        sampler = getattr(self.batches, "sampler", None)
        if rank is not None and isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ValueError(
                f"the loader's {type(sampler).__name__} shards the seeds across {sampler.num_replicas} processes, but "
                "hyscale shards every mini-batch itself: remove the sampler, or set num_replicas=1, rank=0"
            )
        # Other samplers shuffle with torch's generator, so resuming requires its saved state.
        is_deterministic = isinstance(sampler, (SequentialSampler, DistributedSampler))
        self._uses_rng = not (is_deterministic and type(self.batches) is BatchSampler)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def is_sized(self) -> bool:
        """Whether the number of mini-batches is known."""
        return hasattr(self.batches, "__len__")

    def __getattr__(self, name: str) -> Any:
        """Forward other attributes to the batch sampler: batch_size, drop_last, sampler."""
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[Positions]:
        return (task.seeds for task in self.tasks(0))

    def tasks(self, epoch: int) -> Iterator[BatchTask]:
        """Yield this rank's shard of each mini-batch of an epoch, and append its share to ``shares``."""
        self.shares.clear()
        first, last = self.first_batch(), self.num_batches()
        self.on_epoch(first)
        for number, seeds in enumerate(self._get_order(first, None if last == inf else int(last))):
            if number >= first:
                yield self._make_task(epoch, number, seeds)

    def upcoming(self, epoch: int, first: int) -> Iterator[BatchTask] | None:
        """Return this rank's shards from a mini-batch on; None if the order is random and not known in advance."""
        if self._uses_rng:
            return None
        last = self.num_batches()
        order = islice(enumerate(self.batches), first, None if last == inf else int(last))
        return (self._slice_task(epoch, number, seeds, *self.split(len(seeds), number)) for number, seeds in order)

    def _make_task(self, epoch: int, number: int, seeds: list[int]) -> BatchTask:
        start, stop = self.split(len(seeds), number)
        self.shares.append(BatchShare(number, stop - start, len(seeds)))
        return self._slice_task(epoch, number, seeds, start, stop)

    def _slice_task(self, epoch: int, number: int, seeds: list[int], start: int, stop: int) -> BatchTask:
        if stop > start:
            return BatchTask(epoch, number, seeds[start:stop], start, self.shard)
        return BatchTask(epoch, number, seeds[:1], 0, self.shard)  # a rank without seeds runs its step on one

    def _get_order(self, first: int, last: int | None) -> Iterator[list[int]]:
        """Return an iterator over the seeds of the mini-batches before index ``last``, equal on all ranks."""
        if not self._uses_rng:
            return islice(self.batches, last)
        resumed, self.resumed = self.resumed, None
        if resumed is not None and first:
            torch.set_rng_state(resumed[0])
        self.order_state = torch.get_rng_state()
        order: list[list[int]] = []
        if self._rank in (None, 0):
            order = [list(index) for index in islice(self.batches, last)]
        if self._rank is not None:
            # Broadcast the RNG state after the shuffle too, so that hooks draw the same numbers on all ranks.
            message: list[Any] = [order, torch.get_rng_state()]
            dist.broadcast_object_list(message, 0)
            order = message[0]
            torch.set_rng_state(message[1])
        if resumed is not None and first:
            torch.set_rng_state(resumed[1])
        return iter(order)


class ShardedDataLoader:
    """Wraps a torch ``DataLoader`` so that its mini-batches contain only this rank's seeds."""

    def __init__(
        self,
        loader: DataLoader[Batch],  # has a batch sampler over a map-style dataset
        batches: ShardedBatchSampler,
        on_batch: Callable[[BatchShare], None],  # called with the share of each mini-batch before it is yielded
        staged: StagedBatching | None = None,
        transfer: Transfer | None = None,
        dtype: torch.dtype | None = None,  # target dtype of floating-point attributes
        on_stream: bool = False,  # the loader's own prefetcher runs this rank's tasks, on a stream of its GPU
        collective: CollectiveBatching | None = None,  # runs this rank's tasks on CPU threads and its accelerator
    ) -> None:
        self.loader: Any = copy.copy(loader)
        vars(self.loader)["batch_sampler"] = batches  # bypasses DataLoader's check; it is read at every epoch
        self.loader.in_order = True  # shares are matched to mini-batches by order
        self.batches, self.staged, self.transfer, self.collective = batches, staged, transfer, collective
        if staged is not None or on_stream or collective is not None:
            self.loader.first_batch = None  # the batch sampler skips batches itself
        if staged is not None:
            self.loader.prefetcher = staged
        elif on_stream:
            self.loader.tasks = lambda epoch, first=0, device=None: batches.tasks(epoch)
        elif collective is not None:
            self.loader.prefetcher = partial(_begin_collective, collective, batches)
        self._on_batch, self._dtype, self._on_stream = on_batch, dtype, on_stream

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        source: Iterator[Batch] = iter(self.loader)
        if self.transfer is not None:
            source = ThreadPrefetcher(self._convert_and_transfer, source, 1, 2)
        slot = deque[Batch]()  # a local variable would keep the mini-batch alive while the caller trains on it
        while self._put_next(source, slot):
            yield slot.pop()

    def _put_next(self, source: Iterator[Batch], slot: deque[Batch]) -> bool:
        before = self._preparation_seconds
        for batch in source:
            slot.append(converted(batch, self._dtype) if self.staged is not None else batch)
            share = self.batches.shares.popleft()
            if self._on_stream:
                share.seconds["prepare"] = self._preparation_seconds - before
            elif self.collective is not None:
                share.seconds.update(self.collective.profiler.pop())
            self._on_batch(share)
            return True
        return False

    @property
    def _preparation_seconds(self) -> float:
        """Total seconds in which the training thread has prepared mini-batches."""
        return self.loader.times.sampling_s + self.loader.times.features_s if self._on_stream else 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def resize(self, threads: tuple[int, int]) -> None:
        """Set the threads of Sampling and Feature Loading, also in a running epoch; no effect on other loaders."""
        if self.staged is not None:
            self.staged.resize(threads)
        elif self.collective is not None and self.loader.num_threads:
            self.loader.num_threads = sum(threads)
            self.collective.resize(sum(threads))

    def close(self) -> list[str]:
        """Stop the preparation threads, if any, and return the names of those that hang."""
        if self.collective is not None:
            self.collective.stop()
        return [] if self.staged is None else self.staged.close()

    def _convert_and_transfer(self, batch: Batch) -> Batch:
        assert self.transfer is not None
        return self.transfer(converted(batch, self._dtype)) if isinstance(batch, BaseData) else batch


def _begin_collective(
    batching: CollectiveBatching, batches: ShardedBatchSampler, loader: PipelineLoader, epoch: int, first: int
) -> CollectivePrefetcher:
    """Return the prefetcher of an epoch of shards; the batch sampler determines its first mini-batch."""
    tasks = batches.tasks(epoch)
    begun = list(islice(tasks, 1))  # in this thread, not in a worker: all ranks broadcast the order together
    vars(loader)["tasks"] = lambda epoch, first=0, device=None: chain(begun, tasks)
    return batching(loader, epoch, begun[0].index if begun else len(batches))


class UnshardedDataLoader:
    """Wraps a loader that cannot be sharded: rank 0 gets all seeds of each mini-batch, other ranks none."""

    def __init__(self, loader: Any, on_batch: Callable[[BatchShare], None], rank: int) -> None:
        self.loader = loader
        self._on_batch = on_batch
        self._seeds = int(rank == 0)

    def __len__(self) -> int:
        return len(self.loader)  # raises the TypeError that Lightning expects if the loader has no length

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.loader):
            self._on_batch(BatchShare(number, self._seeds, 1))
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def find_stream_prefetching(loader: object) -> StreamPrefetching | None:
    """Return the prefetching of a loader whose mini-batches a GPU prepares on its own stream, from memory, or None."""
    if not isinstance(loader, PipelineLoader) or loader.pipeline.disk_tables:
        return None
    return loader.prefetcher if isinstance(loader.prefetcher, StreamPrefetching) else None


def find_collective_batching(loader: object) -> CollectiveBatching | None:
    """Return the batching of a loader whose mini-batches CPU threads and the training device prepare, or None."""
    batching = loader.prefetcher if isinstance(loader, PipelineLoader) else None
    return batching if isinstance(batching, CollectiveBatching) and batching.route is not None else None


def is_shardable(loader: object) -> bool:
    """Whether a loader batches indices of a map-style dataset, so that they can be split across ranks."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )
