"""Lightning callbacks: throughput, timelines, curves, progress, checkpoints that outlive a run, stopping by signal."""

from lightning_gnn.callbacks.checkpoint import BestCheckpoint
from lightning_gnn.callbacks.curves import LearningCurves
from lightning_gnn.callbacks.interrupt import StopOnSignal
from lightning_gnn.callbacks.progress import ShortProgressBar
from lightning_gnn.callbacks.stage_timeline import StageTimeline
from lightning_gnn.callbacks.throughput import EpochThroughput, Throughput

__all__ = [
    "BestCheckpoint",
    "EpochThroughput",
    "LearningCurves",
    "ShortProgressBar",
    "StageTimeline",
    "StopOnSignal",
    "Throughput",
]
