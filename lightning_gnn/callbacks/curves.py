"""The figures of each epoch, kept for the report."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl


class LearningCurves(pl.Callback):
    """Keeps what was logged in each epoch, in ``epochs``: dictionaries such as ``{"epoch": 0, "val_acc": 0.9}``."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the epoch's figures; those of its validation are already there."""
        row = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        self.epochs.append({"epoch": trainer.current_epoch, **row})

    def state_dict(self) -> dict[str, Any]:
        """Return the figures so far, so that those of a resumed run begin with them."""
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the figures of the interrupted run."""
        self.epochs = list(state_dict["epochs"])
