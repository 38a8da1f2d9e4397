"""Samplers: from seeds to PyG's ``SamplerOutput``."""

from lightning_gnn.sampling.hotness import AccessCounts, count_accesses
from lightning_gnn.sampling.neighbor import NeighborSampler

__all__ = ["AccessCounts", "NeighborSampler", "count_accesses"]
