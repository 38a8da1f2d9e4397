"""What is in memory: topology, features, caches on a device, synthetic graphs."""

from lightning_gnn.graph.cache import CachedAdjacency, DualCachePlan, RowCache, hottest, plan_dual_cache
from lightning_gnn.graph.chunks import Chunks
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.features import FeatureTable
from lightning_gnn.graph.partition import locality_aware_partition

__all__ = [
    "CSCGraph",
    "CachedAdjacency",
    "Chunks",
    "CompressedGraph",
    "DualCachePlan",
    "FeatureTable",
    "RowCache",
    "hottest",
    "locality_aware_partition",
    "plan_dual_cache",
]
