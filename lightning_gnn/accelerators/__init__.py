"""Lightning accelerators, registered by name on ``import lightning_gnn``."""

from lightning_gnn.accelerators.npu import NPUAccelerator, SingleNPUStrategy, patch_connector, why_unavailable
from lightning_gnn.runtime.lightning import AcceleratorRegistry, StrategyRegistry, _AcceleratorConnector

if NPUAccelerator.name() not in AcceleratorRegistry:
    AcceleratorRegistry.register(NPUAccelerator.name(), NPUAccelerator, description="Ascend NPUs, through torch_npu")
if SingleNPUStrategy.strategy_name not in StrategyRegistry:
    name = SingleNPUStrategy.strategy_name
    StrategyRegistry.register(name, SingleNPUStrategy, description="Training on one Ascend NPU")
patch_connector(_AcceleratorConnector)

__all__ = ["NPUAccelerator", "SingleNPUStrategy", "why_unavailable"]
