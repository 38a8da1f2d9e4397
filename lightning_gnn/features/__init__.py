"""Node features: one row per node, in host memory, on a device, sharded across devices, or on disk.

Reading order: ``table.py``, ``hot_cache.py`` (rows cached on a device), ``memory_pool.py``, ``arrays.py`` (``.npy``
files), ``disk_features.py`` with ``disk_cache.py`` (eviction) and ``disk_reads.py`` (direct I/O).
"""

from lightning_gnn.runtime import kernels  # noqa: F401  sets Numba's cache folder

# isort: split
from lightning_gnn.features.disk_features import DiskFeatures
from lightning_gnn.features.hot_cache import CachedAdjacency, RowCache, top_accessed
from lightning_gnn.features.table import FeatureTable

__all__ = ["CachedAdjacency", "DiskFeatures", "FeatureTable", "RowCache", "top_accessed"]
