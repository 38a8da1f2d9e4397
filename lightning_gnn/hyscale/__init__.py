"""HyScale-GNN: CPUs and accelerators train one model together, rebalanced while it runs.

Source: "HyScale-GNN". Each trainer takes a share of every mini-batch's seeds; a performance model gives the first
shares, the dynamic resource manager moves seeds and threads.

Reading order: ``hyscale/strategy.py`` (the plug-in), ``hyscale/loader_setup.py`` (the loaders of a rank),
``hyscale/sharded_loader.py`` (its part of each mini-batch), ``hyscale/staged_prefetcher.py`` (four stages),
``distributed/step_sync.py`` (what ranks exchange in a step), ``hyscale/resource_manager/controller.py`` (the manager at
work), ``resource_manager/resources.py`` (algorithm 1), ``performance_model/model.py`` (equations 5 to 13).
"""

from lightning_gnn.hyscale.performance_model.model import PerformanceModel
from lightning_gnn.hyscale.resource_manager.resources import DynamicResourceManager
from lightning_gnn.hyscale.strategy import HyScaleStrategy

__all__ = [
    "DynamicResourceManager",
    "HyScaleStrategy",
    "PerformanceModel",
]
