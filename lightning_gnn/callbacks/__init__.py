"""Lightning callbacks: throughput, curves, progress, checkpoints that outlive a run, stopping by signal."""

from typing import NoReturn

from lightning_gnn.callbacks.epochs import EpochThroughput, LearningCurves, ShortProgressBar, Throughput
from lightning_gnn.callbacks.interrupt import BestCheckpoint, StopOnSignal
from lightning_gnn.runtime.messages import removed

__all__ = [
    "BestCheckpoint",
    "EpochThroughput",
    "LearningCurves",
    "ShortProgressBar",
    "StopOnSignal",
    "Throughput",
]


def __getattr__(name: str) -> NoReturn:
    if (gone := removed(f"{__name__}.{name}")) is not None:
        raise ImportError(gone)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
