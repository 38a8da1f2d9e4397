"""Mini-batches that a GPU prepares ahead of training, on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lightning_gnn.gpu_sampling.pipeline import DevicePipeline, PendingLaunch
from lightning_gnn.loading.batch import PreparedBatch, SampledBatch
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.loading.prefetch import Prefetcher
from lightning_gnn.runtime.devices import current_stream, new_stream, record_stream
from lightning_gnn.sampling.deferred_edges import apply_now

SHARE = 0.5  # of the GPU, how much sampling may fill beside training


def prefetch_on_stream(loader: PipelineLoader, epoch: int, first: int, *, depth: int, bulk: int) -> Prefetcher:
    """Return the prefetcher of a loader with a :class:`DevicePipeline`; rows on disk are sampled for far ahead."""
    pipeline = loader.pipeline
    assert isinstance(pipeline, DevicePipeline)
    window = loader.lookahead.begin(loader.tasks(epoch, first), first, loader.next_epoch_tasks(epoch))
    if window is not None:
        return StreamPrefetcher(pipeline, window.numbers(), depth, prepare=window.prepare, on_close=window.close)
    if not pipeline.can_launch:
        return StreamPrefetcher(pipeline, loader.tasks(epoch, first), depth, prepare=pipeline.prepare)
    size = int(pipeline.sampler.bulk_size(bulk))
    return StreamPrefetcher(pipeline, loader.tasks(epoch, first, pipeline.device), depth, size)


class StreamPrefetcher(Prefetcher):
    """Prepares an epoch's mini-batches in order, on a stream of its own, at most ``depth`` ahead of training.

    Up to ``bulk`` are sampled in one launch, or one by one by ``prepare``. The host waits for sizes only if nothing is
    ready, and for the step ``depth`` before the last, so that it does not run ahead without end.
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
        self._stream = new_stream(pipeline.device) if depth else None
        self._launch: PendingLaunch | None = None
        self._sampled: deque[SampledBatch] = deque()
        self._ready: deque[tuple[PreparedBatch | BaseException, Any]] = deque()
        self._steps: deque[Any] = deque()
        if self._stream is not None:  # graph and features have been placed there by the stream that is current
            self._stream.wait_event(current_stream(pipeline.device).record_event())

    def __next__(self) -> PreparedBatch:
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop what is under way."""
        self._tasks, self._launch = iter(()), None
        for held in (self._sampled, self._ready, self._steps):
            held.clear()
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
        with self._stream:
            self._advance(waits=True)
        made, arrival = self._ready.popleft()
        if isinstance(made, BaseException):
            raise made
        with self._stream:
            self._advance()
        consumer.wait_event(arrival)
        # Its memory belongs to the other stream.
        made.batch = apply_now(made.batch, lambda tensor: record_stream(tensor, consumer))
        made.deferred = {name: record_stream(ids, consumer) for name, ids in made.deferred.items()}
        return made

    def _prepare_one(self) -> PreparedBatch | None:
        """Return what comes next, made now; None at the end."""
        if not self._sampled:
            if not (tasks := list(islice(self._tasks, self._bulk))):
                return None
            if self._prepare is not None:
                return self._prepare(tasks[0])
            self._sampled.extend(self._pipeline.result(self._pipeline.launch(tasks)))
        return self._pipeline.gather(self._sampled.popleft())

    def _advance(self, waits: bool = False) -> None:
        """Gather what has been sampled, and launch what is next; until something is ready if it ``waits``."""
        while True:
            try:
                while self._sampled and len(self._ready) < self._depth:
                    self._put(self._pipeline.gather(self._sampled.popleft()))
                if self._launch is not None and (self._launch.is_ready() or (waits and not self._ready)):
                    launch, self._launch = self._launch, None
                    self._sampled.extend(self._pipeline.result(launch))
                    continue
                few = len(self._sampled) + len(self._ready) < self._depth + self._bulk // 2
                launches = self._prepare is None and self._launch is None and few
                if launches and (tasks := list(islice(self._tasks, self._bulk))):
                    self._launch = self._pipeline.launch(tasks, SHARE)
                    continue
                if self._ready or not waits:
                    return
                if self._prepare is not None and (prepared := self._prepare_one()) is not None:
                    self._put(prepared)
                    return
            except BaseException as error:  # comes after those that are ready: of those sampled together, all fail
                self._tasks, self._launch = iter(()), None
                self._sampled.clear()
                self._ready.append((error, None))
                return
            raise StopIteration

    def _put(self, prepared: PreparedBatch) -> None:
        assert self._stream is not None
        self._ready.append((prepared, self._stream.record_event()))
