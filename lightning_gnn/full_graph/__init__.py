"""PLACEHOLDER"""

from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.full_graph.devices import plan_devices
from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy

__all__ = [
    "AscendHybridParallelStrategy",
    "FullGraphDataModule",
    "plan_devices",
]
