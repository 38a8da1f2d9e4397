"""Lightning accelerators, registered by name on ``import lightning_gnn``."""

from lightning_gnn.accelerators.npu import NPUAccelerator, SingleNPUStrategy, patch_connector, why_unavailable
from lightning_gnn.runtime.lightning import AcceleratorRegistry, StrategyRegistry, _AcceleratorConnector

if NPUAccelerator.name() not in AcceleratorRegistry:
    NPUAccelerator.register_accelerators(AcceleratorRegistry)
if SingleNPUStrategy.strategy_name not in StrategyRegistry:
    SingleNPUStrategy.register_strategies(StrategyRegistry)
patch_connector(_AcceleratorConnector)

__all__ = ["NPUAccelerator", "SingleNPUStrategy", "why_unavailable"]
