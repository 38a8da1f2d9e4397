"""Lightning DataModules: the one line that a user changes."""

from lightning_gnn.datamodules.collective import CollectiveDataModule
from lightning_gnn.datamodules.full import FullGraphDataModule
from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datamodules.neighbor import NeighborDataModule
from lightning_gnn.datamodules.persistent import PersistentSamplerDataModule

__all__ = [
    "CollectiveDataModule",
    "FullGraphDataModule",
    "LinkDataModule",
    "NeighborDataModule",
    "PersistentSamplerDataModule",
]
