"""PLACEHOLDER"""

from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.dual_buffer import DualBuffer
from lightning_gnn.collective.loader import CollectiveLoader
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.collective.simulate import simulate_dual_buffer

__all__ = [
    "CollectiveDataModule",
    "CollectiveLoader",
    "CollectivePlan",
    "Dispatcher",
    "DualBuffer",
    "simulate_dual_buffer",
]
