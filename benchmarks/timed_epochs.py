"""Callbacks that time training epochs and mini-batches in turns with other contestants."""

from __future__ import annotations

import math
import time
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks.harness import Gate


class TimedEpochs(pl.Callback):
    """Waits for the contestant's turn, runs some epochs, and reports the seconds per epoch."""

    def __init__(self, gate: Gate, epochs: int = 1, unit: float = 1.0) -> None:
        self._gate = gate
        self._epochs = epochs
        self._unit = unit
        self._start = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock when a turn begins."""
        if trainer.current_epoch % self._epochs == 0:
            self._gate.wait()
            self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report when a turn ends."""
        if (trainer.current_epoch + 1) % self._epochs == 0:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            self._gate.report((time.perf_counter() - self._start) / self._epochs * self._unit)


class TimedBatches(pl.Callback):
    """Times mini-batches after the first."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """Record the time."""
        self._ends.append(time.perf_counter())

    def seconds(self) -> float:
        """Return seconds per mini-batch, infinite after a single one."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else math.inf
