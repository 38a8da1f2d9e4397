"""Prefetching of mini-batches on the GPU, on a separate CUDA stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning_gnn.gpu_sampling.pipeline import DevicePipeline, PendingLaunch
from lightning_gnn.loading.batch import PreparedBatch, SampledBatch
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.loading.prefetch import Prefetcher
from lightning_gnn.runtime.devices import current_stream, new_stream, on_stream, record_stream
from lightning_gnn.sampling.deferred_edges import apply_now

SAMPLING_GPU_FRACTION = 0.5  # maximum fraction of the GPU for sampling that overlaps training


@dataclass(frozen=True)
class StreamPrefetching:
    """Creates the :class:`StreamPrefetcher` of each epoch of a loader with a :class:`DevicePipeline`."""

    depth: int  # mini-batches prepared ahead of training
    bulk: int  # mini-batches sampled by one launch

    def __call__(self, loader: PipelineLoader, epoch: int, first: int) -> StreamPrefetcher:
        """Return the prefetcher of an epoch; out-of-core features need a long lookahead."""
        pipeline, depth = loader.pipeline, self.depth
        assert isinstance(pipeline, DevicePipeline)
        window = loader.lookahead.begin(loader.tasks(epoch, first), first, loader.next_epoch_tasks(epoch))
        if window is not None:
            return StreamPrefetcher(pipeline, window.numbers(), depth, prepare=window.prepare, on_close=window.close)
        if not pipeline.can_launch:
            return StreamPrefetcher(pipeline, loader.tasks(epoch, first), depth, prepare=pipeline.prepare)
        size = int(pipeline.sampler.bulk_size(self.bulk))
        return StreamPrefetcher(pipeline, loader.tasks(epoch, first, pipeline.device), depth, size)

    @property
    def most_ahead(self) -> int:
        """Upper bound of the mini-batches that are begun and not yet trained on, without features on disk."""
        return self.depth + self.bulk // 2 + self.bulk


class StreamPrefetcher(Prefetcher):
    """Prepares an epoch's mini-batches in order on a separate stream, at most ``depth`` ahead of training.

    One launch samples up to ``bulk`` mini-batches; ``prepare``, if given, samples them one by one. The host waits for
    sizes only if no mini-batch is ready, and for the training step ``depth`` steps ago, so its lead is bounded.
    """

    def __init__(
        self,
        pipeline: DevicePipeline,
        tasks: Iterator[Any],
        depth: int,
        bulk: int = 1,
        prepare: Callable[[Any], PreparedBatch] | None = None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self._pipeline, self._tasks, self._depth, self._on_close = pipeline, tasks, depth, on_close
        self._prepare, self._bulk = prepare, bulk
        # The few programs that read host memory start while the step's kernels wait for multiprocessors.
        self._stream = new_stream(pipeline.device, priority=-1) if depth else None
        self._launch: PendingLaunch | None = None
        self._sampled: deque[SampledBatch] = deque()
        self._ready: deque[tuple[PreparedBatch | BaseException, Any]] = deque()
        self._steps: deque[Any] = deque()
        if self._stream is not None:  # the current stream has copied graph and features to the device
            self._stream.wait_event(current_stream(pipeline.device).record_event())

    def __next__(self) -> PreparedBatch:
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop all pending mini-batches."""
        self._tasks, self._launch = iter(()), None
        for queue in (self._sampled, self._ready, self._steps):
            queue.clear()
        self._on_close()

    def _next(self) -> PreparedBatch:
        if self._stream is None:
            if (prepared := self._prepare_one()) is None:
                raise StopIteration
            return prepared
        consumer = current_stream(self._pipeline.device)
        self._steps.append(consumer.record_event())
        if len(self._steps) > self._depth:
            self._steps.popleft().synchronize()
        with on_stream(self._stream):
            self._advance(waits=True)
        result, completion = self._ready.popleft()
        if isinstance(result, BaseException):
            raise result
        with on_stream(self._stream):
            self._advance()
        consumer.wait_event(completion)
        # The prefetch stream allocated its memory: the allocator must not reuse it before the consumer is done.
        result.batch = apply_now(result.batch, lambda tensor: record_stream(tensor, consumer))
        result.deferred = {name: record_stream(ids, consumer) for name, ids in result.deferred.items()}
        return result

    def _prepare_one(self) -> PreparedBatch | None:
        """Prepare the next mini-batch synchronously; None at the end."""
        if not self._sampled:
            if not (tasks := list(islice(self._tasks, self._bulk))):
                return None
            if self._prepare is not None:
                return self._prepare(tasks[0])
            self._sampled.extend(self._pipeline.result(self._pipeline.launch(tasks)))
        return self._pipeline.gather(self._sampled.popleft())

    def _advance(self, waits: bool = False) -> None:
        """Gather features of sampled mini-batches and launch further sampling; if ``waits``, until one is ready."""
        while True:
            try:
                while self._sampled and len(self._ready) < self._depth:
                    self._append_ready(self._pipeline.gather(self._sampled.popleft()))
                if self._launch is not None and (self._launch.is_ready() or (waits and not self._ready)):
                    launch, self._launch = self._launch, None
                    self._sampled.extend(self._pipeline.result(launch))
                    continue
                # One launch at a time, once half of the previous bulk has been consumed.
                is_low = len(self._sampled) + len(self._ready) < self._depth + self._bulk // 2
                can_launch = self._prepare is None and self._launch is None and is_low
                if can_launch and (tasks := list(islice(self._tasks, self._bulk))):
                    self._launch = self._pipeline.launch(tasks, SAMPLING_GPU_FRACTION)
                    continue
                if self._ready or not waits:
                    return
                if self._prepare is not None and (prepared := self._prepare_one()) is not None:
                    self._append_ready(prepared)
                    return
            except BaseException as error:  # raised after the ready mini-batches; fails all of the same launch
                self._tasks, self._launch = iter(()), None
                self._sampled.clear()
                self._ready.append((error, None))
                return
            raise StopIteration

    def _append_ready(self, prepared: PreparedBatch) -> None:
        assert self._stream is not None
        self._ready.append((prepared, self._stream.record_event()))
