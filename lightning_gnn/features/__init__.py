"""Features: one row per node, in memory, on a device, dealt out, or on disk.

Reading order: ``table.py``, ``hot_cache.py`` (what a device keeps of it), ``memory_pool.py``, ``arrays.py`` (``.npy``
files), ``disk_features.py`` by ``disk_cache.py`` (which rows stay in memory) and ``disk_reads.py``.
"""

from lightning_gnn.runtime import kernels  # noqa: F401  finds a folder for what numba compiles

# isort: split
from lightning_gnn.features.disk_features import DiskFeatures
from lightning_gnn.features.hot_cache import CachedAdjacency, RowCache, top_accessed
from lightning_gnn.features.table import FeatureTable
from lightning_gnn.runtime.moved_names import find_moved

__all__ = [
    "CachedAdjacency",
    "DiskFeatures",
    "FeatureTable",
    "RowCache",
    "top_accessed",
]

__getattr__ = find_moved(__name__)
