"""HyScale-GNN: hybrid training of one model on CPUs and accelerators, with dynamic load balancing.

Source: "HyScale-GNN". Each trainer receives a share of every mini-batch's seeds. A performance model predicts the
initial shares; the dynamic resource manager moves seeds and threads during training.

Reading order: ``hyscale/strategy.py`` (the Lightning strategy), ``hyscale/loader_setup.py`` (the loaders of a rank),
``hyscale/sharded_loader.py`` (a rank's shard of each mini-batch), ``hyscale/staged_prefetcher.py`` (four stages),
``distributed/step_sync.py`` (the metadata exchanged in a step), ``hyscale/drm.py`` (decides on the mapping, and applies
decisions), ``hyscale/analytic.py`` (equations 5 to 13), ``hyscale/plan.py`` (the plan of a node).
"""

from lightning_gnn.hyscale.analytic import PerformanceModel
from lightning_gnn.hyscale.drm import DynamicResourceManager
from lightning_gnn.hyscale.strategy import HyScaleStrategy

__all__ = [
    "DynamicResourceManager",
    "HyScaleStrategy",
    "PerformanceModel",
]
