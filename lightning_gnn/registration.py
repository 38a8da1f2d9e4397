"""Registers the strategies of all systems, and ``accelerator="npu"``, with Lightning.

A strategy's module is imported when a Trainer first uses it; then the class registers itself, as Lightning's own do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint

import lightning_gnn.accelerators  # noqa: F401  registers eagerly: Lightning calls static methods of the classes
from lightning_gnn.runtime.lightning import PACKAGE, Strategy, StrategyRegistry, _StrategyRegistry
from lightning_gnn.systems import STRATEGY_GROUP, SYSTEMS, describe, installed, load


def register() -> None:
    """Register the names of all strategies, those of installed packages last, unless they are registered already."""
    if "hyscale" in StrategyRegistry:
        return
    for system in SYSTEMS:
        for plugin in system.strategies:
            for name in (plugin.option, *plugin.variants):
                entry = EntryPoint(name, f"lightning_gnn.{system.package}:{plugin.name}", STRATEGY_GROUP)
                StrategyRegistry.register(name, _lazy_factory(entry), plugin.what)
    for entry in installed(STRATEGY_GROUP):
        if entry.name in StrategyRegistry:
            warnings.warn(
                f"strategy {entry.name!r} of {describe(entry)} is left out, because the name is taken", stacklevel=2
            )
        else:
            StrategyRegistry.register(entry.name, _lazy_factory(entry), describe(entry))


def _lazy_factory(entry: EntryPoint) -> Callable[..., Strategy]:
    """Return a function that builds the strategy with the options that its class registers under the entry's name."""

    def build(**options: object) -> Strategy:
        strategy = load(entry)
        if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
            raise ImportError(f"{describe(entry)} is not a subclass of {PACKAGE}'s Strategy")
        registry = _StrategyRegistry()
        strategy.register_strategies(registry)
        if entry.name not in registry:
            registry.register(entry.name, strategy)
        registry[entry.name]["init_params"].update(options)
        built: Strategy = registry.get(entry.name)
        return built

    return build


register()
