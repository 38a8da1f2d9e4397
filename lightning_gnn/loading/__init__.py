"""Mini-batch preparation as an explicit pipeline of stages, run by interchangeable prefetchers.

Reading order: ``batch.py`` (data passed between stages), ``pipeline.py`` (sample, gather, finish), ``collate.py`` (from
a subgraph to PyG's batch), ``loaders.py`` (PyG's loaders, epochs and tasks), ``prefetch/`` (schedules).
"""

from lightning_gnn.loading.batch import BatchTask, LoaderStats, PreparedBatch, SampledBatch
from lightning_gnn.loading.loaders import LinkLoader, NodeLoader
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.loading.prefetch import Prefetcher, ThreadPrefetcher

__all__ = [
    "BatchTask",
    "LinkLoader",
    "LoaderStats",
    "MiniBatchPipeline",
    "NodeLoader",
    "Prefetcher",
    "PreparedBatch",
    "SampledBatch",
    "ThreadPrefetcher",
]
