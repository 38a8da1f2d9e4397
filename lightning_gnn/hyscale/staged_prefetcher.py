"""HyScale-GNN's prefetch pipeline (sections III and V-B) with overlapping sampling, feature loading and transfer."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.hyscale.transfer import Transfer
from lightning_gnn.loading.batch import BatchTask, LoaderStats, PreparedBatch, SampledBatch
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch import Prefetcher
from lightning_gnn.loading.prefetch.lookahead import Lookahead, LookaheadWindow
from lightning_gnn.runtime.precision import converted
from lightning_gnn.runtime.thread_pipeline import Item, StageFunction, StagePipeline
from lightning_gnn.runtime.timeline import profiled


@dataclass
class BatchShare:
    """This rank's share of a mini-batch, with its stage times."""

    number: int  # index of the mini-batch in the epoch
    seeds: int  # seeds of this rank; if 0, the mini-batch has one seed whose results are discarded
    total: int  # seeds of all ranks
    seconds: dict[str, float] = field(default_factory=dict)  # thread-seconds per stage
    sampled_on_accelerator: bool | None = None  # None if accelerators do not sample
    is_left_out: bool = False  # whether this rank has no seeds for the rest of the run


class ShardedTasks(Protocol):
    """Source of this rank's shard of each mini-batch."""

    shares: deque[BatchShare]

    @property
    def is_sized(self) -> bool:
        """Whether the number of mini-batches is known."""

    def tasks(self, epoch: int) -> Iterator[BatchTask]:
        """Yield this rank's shard of each mini-batch of an epoch, and append its share to ``shares``."""

    def upcoming(self, epoch: int, first: int) -> Iterator[BatchTask] | None:
        """Return the shards from a mini-batch on; None if the order is not known in advance."""


@dataclass
class PipelineSettings:
    """Settings of a :class:`StagedPrefetcher`."""

    # 0: no prefetching; 1: Feature Loading and Data Transfer in one stage; 2: in two stages (section V-B)
    prefetch: int = 2
    threads: tuple[int, int] = (1, 1)  # threads of Sampling and of Feature Loading
    ahead: int = 6  # maximum number of mini-batches in flight
    stall_timeout: float = 300.0  # seconds without progress until TimeoutError
    dtype: torch.dtype | None = None  # dtype of floating-point attributes, converted before the transfer


class StagedBatching:
    """Creates the :class:`StagedPrefetcher` of each epoch of a loader."""

    # All ranks sample with the key of the whole mini-batch. A node's neighbors (if disjoint, a seed's tree) thus do not
    # depend on the rank that samples it.

    def __init__(
        self,
        batches: ShardedTasks,
        settings: PipelineSettings,
        transfer: Transfer | None = None,  # moves mini-batches to a device; None leaves that to the training thread
        sampling: AcceleratorSampling | None = None,
        share: Callable[[], float] = lambda: 0.0,  # returns the fraction of mini-batches that the accelerator samples
        is_left_out: Callable[[], bool] = lambda: False,  # returns whether this rank has no seeds for the rest
    ) -> None:
        self.batches, self.settings, self.transfer, self.sampling = batches, settings, transfer, sampling
        self.share, self.is_left_out = share, is_left_out
        self.hung: list[StagePipeline] = []
        """Pipelines of previous epochs with threads that could not be stopped."""
        self._current: weakref.ReferenceType[StagedPrefetcher] | None = None

    def __call__(self, loader: PipelineLoader, epoch: int, first: int) -> StagedPrefetcher:
        """Return the prefetcher of an epoch; the sharded batch sampler determines its first mini-batch."""
        self.close()
        prefetcher = StagedPrefetcher(self, loader, epoch)
        self._current = weakref.ref(prefetcher)
        return prefetcher

    def resize(self, threads: tuple[int, int]) -> None:
        """Set the threads of Sampling and Feature Loading, also in a running epoch."""
        self.settings.threads = threads
        if (current := self._get_current()) is not None:
            current.resize()

    def close(self) -> list[str]:
        """Stop prefetching, join the threads, and return the names of those that hang."""
        if (current := self._get_current()) is not None:
            current.close()
        hanging = [name for pipeline in self.hung for name in pipeline.close()]
        if not hanging:
            self.hung.clear()
        return hanging

    def _get_current(self) -> StagedPrefetcher | None:
        return None if self._current is None else self._current()


class StagedPrefetcher(Prefetcher):
    """Runs the stages of an epoch's mini-batches concurrently, each stage on its own threads."""

    def __init__(self, batching: StagedBatching, loader: PipelineLoader, epoch: int) -> None:
        self._settings, self._hung = batching.settings, batching.hung
        self._stages = _Stages(loader.pipeline, batching.settings.dtype, batching.transfer, batching.sampling)
        prefetch = 0 if loader.pipeline.requires_main_thread else self._settings.prefetch
        self._steps = self._stages.steps(prefetch)
        # Lightning fetches one more mini-batch from loaders without a length.
        self._ahead = self._settings.ahead if batching.batches.is_sized else max(1, self._settings.ahead - 1)
        self._items = _make_items(batching, self._stages, loader.lookahead, epoch)
        self._pipeline: StagePipeline | None = None
        if prefetch:
            self._pipeline = StagePipeline(
                self._steps,
                self._thread_counts(),
                stall_timeout=self._settings.stall_timeout,
                name="hyscale",
                owner=self,
            )

    def __next__(self) -> PreparedBatch:
        item = next(self._items, None) if self._pipeline is None else self._pipeline.pull(self._items, self._ahead)
        if item is None:
            raise StopIteration
        if self._pipeline is None:
            item.run([step for stage in self._steps for step in stage])
        elif not self._pipeline.in_flight:
            self.close()  # the threads of an epoch end with its last mini-batch
        share, prepared = item.note, item.value
        share.seconds = item.seconds
        prepared.stats.sampling_s = item.seconds.get("sample", 0.0) + item.seconds.get("sample_accelerator", 0.0)
        prepared.stats.features_s = item.seconds.get("load", 0.0)
        return prepared  # type: ignore[no-any-return]

    def resize(self) -> None:
        """Apply the thread counts of the settings."""
        if self._pipeline is not None:
            self._pipeline.resize(self._thread_counts())

    def close(self) -> None:
        """Stop prefetching and join all threads that can be stopped."""
        self._items = iter(())
        pipeline, self._pipeline = self._pipeline, None
        window, self._stages.window = self._stages.window, None
        hanging = pipeline is not None and bool(pipeline.close())
        if pipeline is not None and hanging:
            self._hung.append(pipeline)
        if window is not None and not hanging:
            window.close()

    def _thread_counts(self) -> list[int]:
        accelerator = [] if self._stages.sampling is None else [1]
        return [*accelerator, *self._settings.threads, 1][: len(self._steps)]


def _make_items(batching: StagedBatching, stages: _Stages, lookahead: Lookahead, epoch: int) -> Iterator[Item]:
    """Yield the pipeline's input items, and start lookahead sampling if rows are on disk."""
    # No lookahead if an accelerator samples: the CPU would sample its mini-batches a second time.
    batches = batching.batches
    for index, task in enumerate(batches.tasks(epoch)):
        share = batches.shares[-1]
        share.is_left_out = not share.seeds and batching.is_left_out()
        if stages.sampling is not None:
            share.sampled_on_accelerator = stages.sampling.should_sample(share.number, batching.share())
        elif not index and (upcoming := batches.upcoming(epoch, task.index)) is not None:
            stages.window = lookahead.begin(upcoming, task.index)
        yield Item(task, share)


class _Stages:
    """The stages' functions, called by the pipeline threads."""

    # Holds no reference to the prefetcher, which would keep an abandoned one and its threads alive.

    def __init__(
        self,
        pipeline: MiniBatchPipeline,
        dtype: torch.dtype | None,
        transfer: Transfer | None,
        sampling: AcceleratorSampling | None,
    ) -> None:
        self._pipeline, self._dtype, self._transfer, self.sampling = pipeline, dtype, transfer, sampling
        self._has_deferred_work = pipeline.has_deferred_work
        self.window: LookaheadWindow | None = None
        self._spare: PreparedBatch | None = None  # of one seed, for every iteration of a rank that is left out

    def steps(self, prefetch: int) -> list[list[tuple[str, StageFunction]]]:
        """Return the named functions of each existing stage."""
        stages: list[list[tuple[str, StageFunction]]] = [[("sample", self._sample)], [("load", self._load)]]
        if self.sampling is not None:
            # An earlier stage than CPU sampling, which samples other mini-batches meanwhile: both run in parallel.
            stages.insert(0, [("sample_accelerator", self._sample_on_accelerator)])
        if not self._has_deferred_work and self._transfer is not None:  # otherwise the training thread does the rest
            if prefetch >= 2:
                stages.append([("transfer", self._run_transfer)])
            else:
                stages[-1].append(("transfer", self._run_transfer))
        return stages

    @profiled("accelerator_sampling")
    def _sample_on_accelerator(self, task: BatchTask, share: BatchShare) -> BatchTask | SampledBatch:
        if self.sampling is None or not share.sampled_on_accelerator:
            return task
        key = self._pipeline.key(task)
        return SampledBatch(task, self.sampling.sample(self._pipeline.inputs(task), key), key)

    def _sample(self, task: BatchTask | SampledBatch, share: BatchShare) -> SampledBatch | PreparedBatch:
        spare = self._spare
        if spare is not None and share.is_left_out and isinstance(task, BatchTask):
            return replace(spare, batch=copy.copy(spare.batch), task=task, stats=LoaderStats())
        if isinstance(task, SampledBatch):
            return task  # already sampled by the accelerator
        if self.window is not None:
            return self.window.sampled(task.index, task)
        return self._pipeline.sample(task)

    def _load(self, sampled: SampledBatch | PreparedBatch, share: BatchShare) -> PreparedBatch:
        if isinstance(sampled, PreparedBatch):
            return sampled
        if self.window is not None:
            self.window.read(share.number)
        prepared = self._pipeline.gather(sampled)
        if self._has_deferred_work:
            return prepared
        prepared = replace(prepared, batch=converted(prepared.batch, self._dtype))
        if share.is_left_out and self.window is None and self._transfer is None:
            self._spare = replace(prepared, batch=copy.copy(prepared.batch))
        return prepared

    @profiled("transfer")
    def _run_transfer(self, prepared: PreparedBatch, share: BatchShare) -> PreparedBatch:
        assert self._transfer is not None
        return replace(prepared, batch=self._transfer(prepared.batch))
