"""Lightning callbacks: throughput, learning curves, checkpointing across runs, and stopping on signals."""

from typing import TYPE_CHECKING

from lightning_gnn.callbacks.best_checkpoint import BestCheckpoint
from lightning_gnn.callbacks.epochs import EpochThroughput, LearningCurves, Throughput
from lightning_gnn.distributed.stop_on_signal import StopOnSignal
from lightning_gnn.runtime.moved_names import find_moved

__all__ = [
    "BestCheckpoint",
    "EpochThroughput",
    "LearningCurves",
    "StopOnSignal",
    "Throughput",
]

if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute
    __getattr__ = find_moved(__name__)
