"""Lightning callbacks: throughput, curves, checkpoints that outlive a run, stopping by signal."""

from typing import TYPE_CHECKING

from lightning_gnn.callbacks.epochs import EpochThroughput, LearningCurves, Throughput
from lightning_gnn.callbacks.interrupt import BestCheckpoint, StopOnSignal
from lightning_gnn.runtime.moved_names import find_moved

__all__ = [
    "BestCheckpoint",
    "EpochThroughput",
    "LearningCurves",
    "StopOnSignal",
    "Throughput",
]

if not TYPE_CHECKING:  # with it, a type checker would take any name for one that is here
    __getattr__ = find_moved(__name__)
