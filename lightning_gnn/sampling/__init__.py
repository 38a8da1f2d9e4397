"""Samplers: from seeds to PyG's ``SamplerOutput``."""

from lightning_gnn.sampling.neighbor import NeighborSampler

__all__ = ["NeighborSampler"]
