"""HyScale-GNN's pipeline of a mini-batch (sections III and V-B): sampling, feature loading and transfer overlap."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.hyscale.transfer import Transfer
from lightning_gnn.loading.batch import BatchTask, PreparedBatch, SampledBatch
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch import Prefetcher
from lightning_gnn.loading.prefetch.lookahead import Lookahead, LookaheadWindow
from lightning_gnn.runtime.precision import converted
from lightning_gnn.runtime.thread_pipeline import Item, StageFunction, StagePipeline
from lightning_gnn.runtime.timeline import profiled


@dataclass
class BatchShare:
    """What this rank has of a mini-batch."""

    number: int  # position of the mini-batch in the epoch
    seeds: int  # of this rank; with 0 there is a mini-batch of one seed that must not count
    total: int  # of all ranks
    seconds: dict[str, float] = field(default_factory=dict)  # thread-seconds that each stage has spent on it
    sampled_there: bool | None = None  # whether an accelerator has sampled it; None where none does


class ShardedTasks(Protocol):
    """This rank's part of each mini-batch."""

    shares: deque[BatchShare]

    @property
    def is_sized(self) -> bool:
        """Whether the number of mini-batches is known."""

    def tasks(self, epoch: int) -> Iterator[BatchTask]:
        """Yield this rank's part of each mini-batch of an epoch, and append its share to ``shares``."""

    def upcoming(self, epoch: int, first: int) -> Iterator[BatchTask] | None:
        """Return the parts from a mini-batch on, as far as they are known now."""


@dataclass
class PipelineSettings:
    """How a :class:`StagedPrefetcher` runs."""

    # 0 prepares a mini-batch when it is asked for; 1 prefetches, with Feature Loading and Data Transfer as one stage; 2
    # makes two stages of them (section V-B)
    prefetch: int = 2
    threads: tuple[int, int] = (1, 1)  # threads of Sampling and of Feature Loading
    ahead: int = 6  # mini-batches under way at most
    stall_timeout: float = 300.0  # seconds without progress after which it gives up
    dtype: torch.dtype | None = None  # what floating attributes are converted to before the transfer


class StagedBatching:
    """Begins the :class:`StagedPrefetcher` of each epoch of a loader."""

    # All ranks sample with the key of the whole mini-batch, so that a node's neighbors (if disjoint, a seed's tree) do
    # not depend on which rank has it.

    def __init__(
        self,
        batches: ShardedTasks,
        settings: PipelineSettings,
        transfer: Transfer | None = None,  # brings mini-batches to a device; None leaves that to the training thread
        sampling: AcceleratorSampling | None = None,
        share: Callable[[], float] = lambda: 0.0,  # returns the part of this rank's sampling that its accelerator does
    ) -> None:
        self.batches, self.settings, self.transfer, self.sampling = batches, settings, transfer, sampling
        self.share = share
        self.hung: list[StagePipeline] = []
        """Of former epochs, whose threads could not be ended."""
        self._current: weakref.ReferenceType[StagedPrefetcher] | None = None

    def __call__(self, loader: PipelineLoader, epoch: int, first: int) -> StagedPrefetcher:
        """Return the prefetcher of an epoch, whose first mini-batch the sharded batch sampler decides."""
        self.close()
        prefetcher = StagedPrefetcher(self, loader, epoch)
        self._current = weakref.ref(prefetcher)
        return prefetcher

    def resize(self, threads: tuple[int, int]) -> None:
        """Change the threads of Sampling and Feature Loading, also of an epoch under way."""
        self.settings.threads = threads
        if (current := self._running()) is not None:
            current.resize()

    def close(self) -> list[str]:
        """Stop preparing and join the threads; return the names of those that hang."""
        if (current := self._running()) is not None:
            current.close()
        hanging = [name for pipeline in self.hung for name in pipeline.close()]
        if not hanging:
            self.hung.clear()
        return hanging

    def _running(self) -> StagedPrefetcher | None:
        return None if self._current is None else self._current()


class StagedPrefetcher(Prefetcher):
    """Runs the stages of an epoch's mini-batches side by side, each on its own threads."""

    def __init__(self, batching: StagedBatching, loader: PipelineLoader, epoch: int) -> None:
        self._settings, self._hung = batching.settings, batching.hung
        self._stages = _Stages(loader.pipeline, batching.settings.dtype, batching.transfer, batching.sampling)
        prefetch = 0 if loader.pipeline.requires_main_thread else self._settings.prefetch
        self._steps = self._stages.steps(prefetch)
        # Lightning takes one more of loaders without a length.
        self._ahead = self._settings.ahead if batching.batches.is_sized else max(1, self._settings.ahead - 1)
        self._items = _items(batching.batches, self._stages, batching.share, loader.lookahead, epoch)
        self._pipeline: StagePipeline | None = None
        if prefetch:
            self._pipeline = StagePipeline(
                self._steps, self._threads(), stall_timeout=self._settings.stall_timeout, name="hyscale"
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
        """Take the numbers of threads of the settings."""
        if self._pipeline is not None:
            self._pipeline.resize(self._threads())

    def close(self) -> None:
        """Stop preparing and join the threads, as far as they can be ended."""
        self._items = iter(())
        pipeline, self._pipeline = self._pipeline, None
        window, self._stages.window = self._stages.window, None
        hanging = pipeline is not None and bool(pipeline.close())
        if pipeline is not None and hanging:
            self._hung.append(pipeline)
        if window is not None and not hanging:
            window.close()

    def _threads(self) -> list[int]:
        there = [] if self._stages.sampling is None else [1]
        return [*there, *self._settings.threads, 1][: len(self._steps)]


def _items(
    batches: ShardedTasks, stages: _Stages, share_there: Callable[[], float], lookahead: Lookahead, epoch: int
) -> Iterator[Item]:
    """Yield what passes through the stages, and sample ahead where rows are on disk."""
    # Not where an accelerator samples, whose mini-batches would be sampled by the CPU, too.
    for place, task in enumerate(batches.tasks(epoch)):
        share = batches.shares[-1]
        if stages.sampling is not None:
            share.sampled_there = stages.sampling.takes(share.number, share_there())
        elif not place and (upcoming := batches.upcoming(epoch, task.index)) is not None:
            stages.window = lookahead.begin(upcoming, task.index)
        yield Item(task, share)


class _Stages:
    """The steps of the stages, which threads call; they must not keep the prefetcher alive."""

    def __init__(
        self,
        pipeline: MiniBatchPipeline,
        dtype: torch.dtype | None,
        transfer: Transfer | None,
        sampling: AcceleratorSampling | None,
    ) -> None:
        self._pipeline, self._dtype, self._transfer, self.sampling = pipeline, dtype, transfer, sampling
        self._finishes = pipeline.has_deferred_work
        self.window: LookaheadWindow | None = None

    def steps(self, prefetch: int) -> list[list[tuple[str, StageFunction]]]:
        """Return the steps of each stage; one that does not exist is left out."""
        stages: list[list[tuple[str, StageFunction]]] = [[("sample", self._sample)], [("load", self._load)]]
        if self.sampling is not None:
            # In front of the CPU's, which sees other mini-batches meanwhile: side by side in effect.
            stages.insert(0, [("sample_accelerator", self._sample_there)])
        if not self._finishes and self._transfer is not None:  # else the training thread does the rest
            if prefetch >= 2:
                stages.append([("transfer", self._move)])
            else:
                stages[-1].append(("transfer", self._move))
        return stages

    @profiled("accelerator_sampling")
    def _sample_there(self, task: BatchTask, share: BatchShare) -> BatchTask | SampledBatch:
        if self.sampling is None or not share.sampled_there:
            return task
        key = self._pipeline.key(task)
        return SampledBatch(task, self.sampling.sample(self._pipeline.inputs(task), key), key)

    def _sample(self, task: BatchTask | SampledBatch, share: BatchShare) -> SampledBatch:
        if isinstance(task, SampledBatch):
            return task  # the accelerator has sampled it
        if self.window is not None:
            return self.window.sampled(task.index, task)
        return self._pipeline.sample(task)

    def _load(self, sampled: SampledBatch, share: BatchShare) -> PreparedBatch:
        if self.window is not None:
            self.window.read(share.number)
        prepared = self._pipeline.gather(sampled)
        return prepared if self._finishes else replace(prepared, batch=converted(prepared.batch, self._dtype))

    @profiled("transfer")
    def _move(self, prepared: PreparedBatch, share: BatchShare) -> PreparedBatch:
        assert self._transfer is not None
        return replace(prepared, batch=self._transfer(prepared.batch))
