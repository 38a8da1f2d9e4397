"""GNN training on the hardware people really have, as plugins for a PyTorch Lightning ``Trainer``."""

# isort: off
import lightning_gnn.startup  # noqa: F401  before what takes seconds to import

# isort: on
from lightning_gnn.accelerators import NPUAccelerator
from lightning_gnn.collective import CollectiveDataModule
from lightning_gnn.full_graph import AscendHybridParallelStrategy, FullGraphDataModule
from lightning_gnn.graph import CompressedGraph, CSCGraph, FeatureTable
from lightning_gnn.hyscale import HyScaleStrategy
from lightning_gnn.nn import FullInference
from lightning_gnn.ops import aggregate, edge_softmax, gather_rows, sample_neighbors
from lightning_gnn.persistent import PersistentNeighborSampler, PersistentSamplerDataModule
from lightning_gnn.pyg import enable_pyg_sampling
from lightning_gnn.sampling import LinkDataModule, NeighborDataModule, NeighborSampler

__version__ = "0.1.0"

__all__ = [
    "AscendHybridParallelStrategy",
    "CSCGraph",
    "CollectiveDataModule",
    "CompressedGraph",
    "FeatureTable",
    "FullGraphDataModule",
    "FullInference",
    "HyScaleStrategy",
    "LinkDataModule",
    "NPUAccelerator",
    "NeighborDataModule",
    "NeighborSampler",
    "PersistentNeighborSampler",
    "PersistentSamplerDataModule",
    "aggregate",
    "edge_softmax",
    "enable_pyg_sampling",
    "gather_rows",
    "sample_neighbors",
]
