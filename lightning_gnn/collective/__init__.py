"""Collective batching (MorphGL): CPU and GPU prepare the mini-batches of an epoch together, following a plan.

Source: "Efficient GNN Training on Giant Graphs with Collective Batching and Scheduling". Stage times are measured in
the first epoch, the dispatcher assigns mini-batches to CPU and GPU, and they are trained in the order of the epoch.

Reading order: ``plan.py`` (equation 6, repaired), ``dispatcher.py``, ``batch_schedule.py`` (scheduling decisions),
``simulate.py``, ``prefetcher.py`` (training thread), ``workers.py`` (CPU threads), ``routes.py`` (streams). The
published planner and schedule: ``published.py``, ``dual_buffer.py``.
"""

from lightning_gnn.collective.batch_schedule import BatchSchedule
from lightning_gnn.collective.datamodule import CollectiveDataModule, CollectiveLinkDataModule
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.collective.prefetcher import CollectiveBatching
from lightning_gnn.collective.simulate import simulate_dual_buffer

__all__ = [
    "BatchSchedule",
    "CollectiveBatching",
    "CollectiveDataModule",
    "CollectiveLinkDataModule",
    "CollectivePlan",
    "Dispatcher",
    "simulate_dual_buffer",
]
