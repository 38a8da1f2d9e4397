"""MorphGL: CPU and GPU prepare the mini-batches of an epoch together, by a plan.

Source: "Efficient GNN Training on Giant Graphs with Collective Batching and Scheduling". Stage times are measured in
the first epoch, the dispatcher plans who prepares which, and mini-batches are trained in the order of the epoch.

Reading order: ``plan.py``, ``dispatcher.py`` (equation 6, repaired), ``batch_schedule.py`` (the schedule as decisions),
``simulate.py``, ``prefetcher.py`` (the training thread), ``workers.py`` (the CPU's threads), ``routes.py`` (streams).
"""

from typing import TYPE_CHECKING

from lightning_gnn.collective.batch_schedule import BatchSchedule
from lightning_gnn.collective.datamodule import CollectiveDataModule, CollectiveLinkDataModule
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.collective.prefetcher import CollectiveBatching
from lightning_gnn.collective.simulate import simulate_dual_buffer
from lightning_gnn.runtime.moved_names import find_moved

__all__ = [
    "BatchSchedule",
    "CollectiveBatching",
    "CollectiveDataModule",
    "CollectiveLinkDataModule",
    "CollectivePlan",
    "Dispatcher",
    "simulate_dual_buffer",
]

if not TYPE_CHECKING:  # with it, a type checker would take any name for one that is here
    __getattr__ = find_moved(__name__)
