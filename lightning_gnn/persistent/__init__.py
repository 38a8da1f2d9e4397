"""PLACEHOLDER"""

from lightning_gnn.persistent.datamodule import PersistentSamplerDataModule
from lightning_gnn.persistent.hotness import AccessCounts, count_accesses
from lightning_gnn.persistent.sampler import PersistentNeighborSampler

__all__ = [
    "AccessCounts",
    "PersistentNeighborSampler",
    "PersistentSamplerDataModule",
    "count_accesses",
]
