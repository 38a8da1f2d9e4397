"""Makes ``Trainer(strategy="hyscale")``, ``"ascend_hybrid"`` and ``accelerator="npu"`` known to Lightning.

A strategy is imported when a Trainer is made that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from pytorch_lightning.strategies import Strategy, StrategyRegistry

import lightning_gnn.accelerators  # noqa: F401  registers its own, whose classes Lightning asks before it makes one

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "spawn"}
"""Of the processes, by the suffix that Lightning's ``"ddp"`` has for them too."""


def register() -> None:
    """Register what is not registered yet."""
    if "hyscale" in StrategyRegistry:
        return
    StrategyRegistry.register(
        "hyscale",
        _imported_on_use("hyscale", "HyScaleStrategy"),
        "CPUs and accelerators of each node train one model together",
    )
    for suffix, start_method in _START_METHODS.items():
        StrategyRegistry.register(
            f"ascend_hybrid{suffix}",
            _imported_on_use("full_graph", "AscendHybridParallelStrategy"),
            f"Full graphs by tensor-data hybrid parallelism, with `start_method` '{start_method}'",
            start_method=start_method,
        )


def _imported_on_use(room: str, name: str) -> Callable[..., Strategy]:
    def build(**options: object) -> Strategy:
        strategy: Strategy = getattr(import_module(f"lightning_gnn.{room}"), name)(**options)
        return strategy

    return build


register()
