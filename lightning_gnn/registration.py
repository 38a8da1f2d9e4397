"""Registers the strategies ``"hyscale"``, ``"ascend_hybrid"``, ``"monitored_ddp"`` and ``accelerator="npu"``.

A strategy's module is imported when a Trainer first uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import lightning_gnn.accelerators  # noqa: F401  registers eagerly: Lightning calls static methods of the classes
from lightning_gnn.runtime.lightning import Strategy, StrategyRegistry

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "spawn"}
"""Start methods by strategy suffix, as for Lightning's ``"ddp"``."""


def register() -> None:
    """Register the strategies unless they are registered already."""
    if "hyscale" in StrategyRegistry:
        return
    StrategyRegistry.register(
        "hyscale",
        _lazy_factory("hyscale", "HyScaleStrategy"),
        "CPUs and accelerators of each node train one model together",
    )
    StrategyRegistry.register(
        "monitored_ddp",
        _lazy_factory("distributed.monitored_ddp", "MonitoredDDPStrategy"),
        "Lightning's ddp with heartbeats: a rank that dies or stands still ends the run, and is named",
    )
    for suffix, start_method in _START_METHODS.items():
        StrategyRegistry.register(
            f"ascend_hybrid{suffix}",
            _lazy_factory("full_graph", "AscendHybridParallelStrategy"),
            f"Full graphs by tensor-data hybrid parallelism, with `start_method` '{start_method}'",
            start_method=start_method,
        )


def _lazy_factory(package: str, name: str) -> Callable[..., Strategy]:
    def build(**options: object) -> Strategy:
        strategy: Strategy = getattr(import_module(f"lightning_gnn.{package}"), name)(**options)
        return strategy

    return build


register()
