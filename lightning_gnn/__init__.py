"""GNN training on the hardware people really have, as plugins for a PyTorch Lightning ``Trainer``."""

# isort: off
import lightning_gnn.startup  # noqa: F401  before what takes seconds to import

# isort: on
from lightning_gnn.accelerators import NPUAccelerator
from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.persistent.datamodule import PersistentSamplerDataModule
from lightning_gnn.sampling.link_datamodule import LinkDataModule
from lightning_gnn.sampling.node_datamodule import NeighborDataModule
from lightning_gnn.graph import CompressedGraph, CSCGraph, FeatureTable
from lightning_gnn.nn import FullInference
from lightning_gnn.ops import aggregate, edge_softmax, gather_rows, sample_neighbors
from lightning_gnn.persistent.sampler import PersistentNeighborSampler
from lightning_gnn.pyg import enable_pyg_sampling
from lightning_gnn.sampling.neighbor import NeighborSampler
from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy
from lightning_gnn.hyscale.strategy import HyScaleStrategy

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
