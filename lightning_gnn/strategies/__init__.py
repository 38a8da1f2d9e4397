"""Lightning strategies, registered by name on ``import lightning_gnn``."""

from pytorch_lightning.strategies import StrategyRegistry

from lightning_gnn.strategies.ascend_hybrid import AscendHybridParallelStrategy
from lightning_gnn.strategies.hyscale import HyScaleStrategy

if AscendHybridParallelStrategy.strategy_name not in StrategyRegistry:
    AscendHybridParallelStrategy.register_strategies(StrategyRegistry)

__all__ = ["AscendHybridParallelStrategy", "HyScaleStrategy"]
