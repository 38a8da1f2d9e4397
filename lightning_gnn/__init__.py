"""GNN training on the hardware people really have, as plugins for a PyTorch Lightning ``Trainer``."""

from lightning_gnn.datamodules import (
    FullGraphDataModule,
    LinkDataModule,
    NeighborDataModule,
    PersistentSamplerDataModule,
)
from lightning_gnn.graph import CSCGraph, FeatureTable
from lightning_gnn.ops import gather_rows, sample_neighbors
from lightning_gnn.sampling import NeighborSampler, PersistentNeighborSampler, enable_pyg_sampling

__version__ = "0.1.0"

__all__ = [
    "CSCGraph",
    "FeatureTable",
    "FullGraphDataModule",
    "LinkDataModule",
    "NeighborDataModule",
    "NeighborSampler",
    "PersistentNeighborSampler",
    "PersistentSamplerDataModule",
    "enable_pyg_sampling",
    "gather_rows",
    "sample_neighbors",
]
