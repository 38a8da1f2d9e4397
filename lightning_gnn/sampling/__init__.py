"""PLACEHOLDER"""

from lightning_gnn.sampling.link_datamodule import LinkDataModule
from lightning_gnn.sampling.loader import PreparationTimes, ThreadedLinkLoader, ThreadedNodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler
from lightning_gnn.sampling.node_datamodule import NeighborDataModule

__all__ = [
    "LinkDataModule",
    "NeighborDataModule",
    "NeighborSampler",
    "PreparationTimes",
    "ThreadedLinkLoader",
    "ThreadedNodeLoader",
]
