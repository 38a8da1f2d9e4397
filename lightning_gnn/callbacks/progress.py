"""Lightning's progress bar, short enough for a terminal of eighty columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar
from rich.progress import BarColumn


class ShortProgressBar(RichProgressBar):
    """Lightning's ``RichProgressBar`` with a choice of figures behind it.

    Args:
        metrics: Names of logged figures; those that a task does not log are left out.
    """

    def __init__(self, metrics: Sequence[str] = ("train_loss", "val_acc", "val_auc")) -> None:
        super().__init__()
        self.metrics_shown = tuple(metrics)

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Return Lightning's columns without the speed, which the report tells, and with a bar that leaves room."""
        columns = super().configure_columns(trainer)[:4]
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = 12
        return columns

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the figures to show."""
        values = super().get_metrics(trainer, pl_module)
        chosen = {name: values.get(name, values.get(f"{name}_step")) for name in self.metrics_shown}
        return {name: value for name, value in chosen.items() if value is not None}
