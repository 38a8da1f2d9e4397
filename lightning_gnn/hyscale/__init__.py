"""HyScale-GNN: CPUs and accelerators train one model together, rebalanced while it runs.

Source: "HyScale-GNN". Each trainer takes a share of every mini-batch's seeds; a performance model gives the first
shares, the dynamic resource manager moves seeds and threads.

Reading order. Plan: ``hyscale/mapping.py`` (who does what, and how long it took), ``hyscale/model.py`` (equations 5 to
13 and the best mapping by them), ``hyscale/resources.py`` (algorithm 1), ``hyscale/estimates.py`` (what it knows of
each stage's cost). Hot path: ``hyscale/sharded_loader.py`` (a rank's part of
each mini-batch), ``hyscale/staged_prefetcher.py`` (four stages),
``hyscale/work_balance.py`` (the manager at work on all ranks), ``distributed/step_sync.py`` (what ranks exchange in a
step). Plug-in: ``hyscale/loader_setup.py`` (the loaders of a rank), ``hyscale/strategy.py``.
"""

from lightning_gnn.hyscale.model import PerformanceModel
from lightning_gnn.hyscale.resources import DynamicResourceManager
from lightning_gnn.hyscale.strategy import HyScaleStrategy

__all__ = [
    "DynamicResourceManager",
    "HyScaleStrategy",
    "PerformanceModel",
]
