"""Features: one row per node, in memory, on a device, dealt out, or on disk.

Reading order: ``features/table.py`` (one row per node), ``features/hot_cache.py`` (what a device keeps of it),
``features/memory_pool.py`` (memory that is used again), ``features/arrays.py`` (``.npy`` files),
``features/disk_features.py`` (features that stay on disk) by ``features/disk_cache.py`` (which rows stay in memory) and
``features/disk_reads.py`` (how the others are read).
"""

from lightning_gnn.runtime import kernels  # noqa: F401  finds a folder for what numba compiles

# isort: split
from lightning_gnn.features.disk_features import DiskFeatures
from lightning_gnn.features.hot_cache import CachedAdjacency, RowCache, hottest
from lightning_gnn.features.table import FeatureTable

__all__ = [
    "CachedAdjacency",
    "DiskFeatures",
    "FeatureTable",
    "RowCache",
    "hottest",
]
