"""Lightning callbacks: throughput, learning curves, checkpointing across runs, and stopping on signals."""

from lightning_gnn.callbacks.best_checkpoint import BestCheckpoint
from lightning_gnn.callbacks.epochs import EpochThroughput, LearningCurves, Throughput
from lightning_gnn.distributed.stop_on_signal import StopOnSignal

__all__ = ["BestCheckpoint", "EpochThroughput", "LearningCurves", "StopOnSignal", "Throughput"]
