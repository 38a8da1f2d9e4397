"""Neighbor sampling in PyG's sampler interface: the ground on which the mini-batches of all systems stand."""

from typing import TYPE_CHECKING

from lightning_gnn.runtime.moved_names import find_moved
from lightning_gnn.sampling.neighbor import NeighborSampler

__all__ = ["NeighborSampler"]

if not TYPE_CHECKING:  # with it, a type checker would take any name for one that is here
    __getattr__ = find_moved(__name__)
