"""HyScale-GNN: CPUs and accelerators train one model together, rebalanced while it runs.

Source: "HyScale-GNN". Each trainer takes a share of every mini-batch's seeds; a performance model gives the first
shares, the dynamic resource manager moves seeds and threads.

Reading order: ``hyscale/model.py`` (equations 5 to 13), ``hyscale/mapping.py`` (the first shares),
``hyscale/resources.py`` (algorithm 1), ``hyscale/pipeline.py`` (four stages, prefetched), ``hyscale/trainers.py`` (one
step in all trainers), ``hyscale/replicas.py`` (their copies of the module), ``hyscale/work_balance.py``,
``hyscale/strategy.py``.
"""

from lightning_gnn.hyscale.model import PerformanceModel
from lightning_gnn.hyscale.resources import DynamicResourceManager
from lightning_gnn.hyscale.strategy import HyScaleStrategy

__all__ = [
    "DynamicResourceManager",
    "HyScaleStrategy",
    "PerformanceModel",
]
