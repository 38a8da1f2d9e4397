"""What is in memory: topology, features, caches on a device, synthetic graphs."""

from lightning_gnn.graph.cache import CachedAdjacency, DualCachePlan, RowCache, hottest, plan_dual_cache
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.features import FeatureTable

__all__ = ["CSCGraph", "CachedAdjacency", "DualCachePlan", "FeatureTable", "RowCache", "hottest", "plan_dual_cache"]
