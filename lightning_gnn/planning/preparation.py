"""Measure the cost of preparing a mini-batch on a few mini-batches of the training loader, in one thread."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import Any

from torch import Tensor

from lightning_gnn.loading.loaders import PipelineLoader

NUM_REPLAYED, TIMED = 4, 5
"""Number of mini-batches for timing steps, and of others that are timed and dropped, so that buffers are reused."""


@dataclass(frozen=True)
class Preparation:
    """Average cost of preparing a mini-batch."""

    sampling_s: float = 0.0  # thread-seconds of sampling; 0 for another package's loader
    features_s: float = 0.0  # thread-seconds of loading features; 0 for another package's loader
    training_thread_s: float = 0.0  # seconds of preparing in the training thread: deferred work, or all without workers
    ready_s: float = 0.0  # seconds between mini-batches of another package's loader without training
    workers: int = 0  # threads (or processes) that prepare
    nodes: float = 0.0
    edges: float = 0.0
    feature_bytes: float = 0.0  # bytes of the features x
    known: bool = True  # whether the loader is this package's, which measures its stages

    @property
    def seconds(self) -> float:
        """Thread-seconds of workers, or of the training thread without workers, for one mini-batch."""
        if self.known:
            return self.sampling_s + self.features_s
        return self.ready_s * max(1, self.workers)

    @property
    def deferred_s(self) -> float:
        """Seconds of the training thread that remain with any number of workers."""
        return max(0.0, self.training_thread_s - (0.0 if self.workers else self.seconds))


def prepare(loader: Iterable[object]) -> tuple[list[object], Preparation]:
    """Prepare a few mini-batches of the first epoch; return them and their average cost."""
    if isinstance(loader, PipelineLoader):
        return _prepare_by_stage(loader)
    return _prepare_by_iterating(loader)


def _prepare_by_stage(loader: PipelineLoader) -> tuple[list[object], Preparation]:
    tasks, pipeline = [*islice(loader.tasks(0), NUM_REPLAYED)], loader.pipeline
    if not tasks:
        raise ValueError("the training loader is empty: there is nothing to plan")
    batches = [pipeline.finish(pipeline.prepare(task)) for task in tasks]
    sampling, features, own = [], [], []
    for epoch in range(1, 1 + TIMED):
        prepared = pipeline.prepare(replace(tasks[epoch % len(tasks)], epoch=epoch))  # a new epoch samples differently
        features_s = prepared.stats.features_s  # before finish, which adds the deferred work
        start = time.perf_counter()
        pipeline.finish(prepared)
        own.append(time.perf_counter() - start if pipeline.has_deferred_work else 0.0)
        sampling.append(prepared.stats.sampling_s)
        features.append(features_s)
        del prepared
    no_workers = loader.num_threads == 0
    times = (median(sampling), median(features))
    return batches, Preparation(
        *times,
        training_thread_s=median(own) + (sum(times) if no_workers else 0.0),
        workers=loader.num_threads,
        **_sizes(batches),
    )


def _prepare_by_iterating(loader: Iterable[object]) -> tuple[list[object], Preparation]:
    workers, ahead = int(getattr(loader, "num_workers", 0) or 0), ahead_of(loader)
    iterator = iter(loader)
    batches = list(islice(iterator, NUM_REPLAYED))
    if not batches:
        raise ValueError("the training loader is empty: there is nothing to plan")
    for _ in islice(iterator, ahead):
        pass  # already prefetched
    start = time.perf_counter()
    count = sum(1 for _ in islice(iterator, TIMED))
    ready = (time.perf_counter() - start) / count if count else 0.0
    return batches, Preparation(
        training_thread_s=0.0 if workers else ready, ready_s=ready, workers=workers, known=False, **_sizes(batches)
    )


def ahead_of(loader: object) -> int:
    """Return the number of mini-batches that a loader's workers prefetch; 0 without workers."""
    if isinstance(loader, PipelineLoader):
        return loader.num_ahead
    return int(getattr(loader, "num_workers", 0) or 0) * int(getattr(loader, "prefetch_factor", None) or 2)


def _sizes(batches: list[object]) -> dict[str, Any]:
    nodes, edges, size = 0.0, 0.0, 0.0
    for batch in batches:
        x = getattr(batch, "x", None)
        edges += edges_of(batch)
        if isinstance(x, Tensor):
            nodes, size = nodes + x.size(0), size + x.nbytes
    return {"nodes": nodes / len(batches), "edges": edges / len(batches), "feature_bytes": size / len(batches)}


def edges_of(batch: object) -> int:
    """Return the number of message-passing edges in a PyG batch; 0 for other batches."""
    if isinstance(batch, (list, tuple)):
        return sum(edges_of(item) for item in batch)
    edge_index = getattr(batch, "edge_index", None)
    if isinstance(edge_index, Tensor):
        return int(edge_index.size(1))
    if (in_degrees := getattr(edge_index, "in_degrees", None)) is not None:
        # In a sharded graph, count the in-edges of the device's own rows: their sum over the devices is all edges.
        return int(in_degrees.sum())
    return int(getattr(edge_index, "num_edges", None) or getattr(batch, "num_edges", 0) or 0)
