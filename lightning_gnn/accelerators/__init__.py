"""Lightning accelerators, registered by name on ``import lightning_gnn``."""

from pytorch_lightning.accelerators import AcceleratorRegistry
from pytorch_lightning.strategies import StrategyRegistry
from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_gnn.accelerators.npu import NPUAccelerator, SingleNPUStrategy, choose_npus, why_unavailable

if NPUAccelerator.name() not in AcceleratorRegistry:
    NPUAccelerator.register_accelerators(AcceleratorRegistry)
if SingleNPUStrategy.strategy_name not in StrategyRegistry:
    SingleNPUStrategy.register_strategies(StrategyRegistry)
choose_npus(_AcceleratorConnector)

__all__ = ["NPUAccelerator", "SingleNPUStrategy", "why_unavailable"]
