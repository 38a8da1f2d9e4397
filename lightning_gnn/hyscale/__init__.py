"""PLACEHOLDER"""

from lightning_gnn.hyscale.model import PerformanceModel
from lightning_gnn.hyscale.resources import DynamicResourceManager
from lightning_gnn.hyscale.strategy import HyScaleStrategy

__all__ = [
    "DynamicResourceManager",
    "HyScaleStrategy",
    "PerformanceModel",
]
