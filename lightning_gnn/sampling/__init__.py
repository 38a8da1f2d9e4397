"""Samplers: from seeds to PyG's ``SamplerOutput``."""

from lightning_gnn.sampling.hotness import AccessCounts, count_accesses
from lightning_gnn.sampling.neighbor import NeighborSampler
from lightning_gnn.sampling.persistent import PersistentNeighborSampler
from lightning_gnn.sampling.pyg import enable_pyg_sampling

__all__ = ["AccessCounts", "NeighborSampler", "PersistentNeighborSampler", "count_accesses", "enable_pyg_sampling"]
