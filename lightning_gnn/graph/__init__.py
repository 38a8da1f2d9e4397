"""What is in memory: topology, features, synthetic graphs."""

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.features import FeatureTable

__all__ = ["CSCGraph", "FeatureTable"]
