"""Lightning callbacks: throughput, timelines, curves, progress, checkpoints that outlive a run, stopping by signal."""

from lightning_gnn.callbacks.epochs import EpochThroughput, LearningCurves, ShortProgressBar, Throughput
from lightning_gnn.callbacks.interrupt import BestCheckpoint, StopOnSignal
from lightning_gnn.callbacks.stage_timeline import StageTimeline

__all__ = [
    "BestCheckpoint",
    "EpochThroughput",
    "LearningCurves",
    "ShortProgressBar",
    "StageTimeline",
    "StopOnSignal",
    "Throughput",
]
