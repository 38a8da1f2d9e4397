"""Neighbor sampling with PyG's sampler interface, used by the loaders of all systems."""

from typing import TYPE_CHECKING

from lightning_gnn.runtime.moved_names import find_moved
from lightning_gnn.sampling.blocks import Block, layer_blocks
from lightning_gnn.sampling.neighbor import NeighborSampler

__all__ = ["Block", "NeighborSampler", "layer_blocks"]

if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute name
    __getattr__ = find_moved(__name__)
