"""Console output of the command, and the log lines and warnings that it suppresses."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from lightning_gnn.runtime.messages import OF_NEWER_TORCH

if TYPE_CHECKING:
    from lightning_gnn.runtime.lightning import pl

OURS = ("hyscale: ", "collective batching", "persistent sampling")
"""Prefixes of this package's log lines on plans and decisions, which the command shows."""


def console() -> Console:
    """Return the console for results, 120 columns wide if stdout is not a terminal."""
    return _PipeSafeConsole(width=None if sys.stdout.isatty() else 120)


class _PipeSafeConsole(Console):
    """A console that ignores a closed pipe: ``lgnn | head`` must not end the run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(message: str, style: str) -> None:
    """Print a message to stderr."""
    Console(stderr=True, width=None if sys.stderr.isatty() else 120).print(
        message, style=style, markup=False, highlight=False, soft_wrap=True
    )


def warn(message: str) -> None:
    """Print a warning to stderr."""
    say(f"warning: {message}", "yellow")


def be_quiet() -> None:
    """Suppress log lines and warnings that a user cannot act on."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # repeats the error that it raises
    # This package logs plans and decisions by rank_zero_info, whose logger is that of the package imported last.
    for name in ("pytorch_lightning", "lightning.pytorch"):
        ours = logging.getLogger(f"{name}.utilities.rank_zero")
        ours.setLevel(logging.INFO)
        ours.addFilter(_is_ours)
    for message in (
        OF_NEWER_TORCH,
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*Experiment logs directory .* exists.*",
        ".*your dataloader is not resumable.*",
        ".*The dirpath has changed from.*",
        ".*sync_dist=True.*",
        ".*callbacks used to create the checkpoint need to be provided.*",
        ".*You're using the WeightAveraging callback.*",
        ".*could not find the monitored key in the returned metrics.*",  # resumed after the validation of an epoch
    ):
        warnings.filterwarnings("ignore", message)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.getMessage().startswith(OURS)


def describe(cfg: DictConfig, datamodule: pl.LightningDataModule, module: pl.LightningModule) -> str:
    """Describe model, data and batches in one line."""
    graph = cfg.data.get("name") or (
        HydraConfig.get().runtime.choices.get("data") if HydraConfig.initialized() else None
    )
    # A user's own DataModule may have no description.
    batches = datamodule.describe() if hasattr(datamodule, "describe") else type(datamodule).__name__
    depth = f"{cfg.model.num_layers}-layer " if cfg.model.get("num_layers") else ""
    network = getattr(module, "model", module)  # a user's own module may use another attribute
    return f"{depth}{type(network).__name__} on {graph or 'data'} · {batches}"
