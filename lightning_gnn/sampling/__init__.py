"""Neighbor sampling with PyG's sampler interface, used by the loaders of all systems."""

from lightning_gnn.sampling.blocks import Block, layer_blocks
from lightning_gnn.sampling.neighbor import NeighborSampler

__all__ = ["Block", "NeighborSampler", "layer_blocks"]
