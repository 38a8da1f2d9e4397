"""What the command says, and what it keeps to itself."""

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
    import pytorch_lightning as pl

OURS = ("hyscale: ", "collective batching", "persistent sampling")
"""What the log lines begin with that tell of plans and decisions."""


def console() -> Console:
    """Return where results go; no narrower than 120 columns in a file."""
    return _Patient(width=None if sys.stdout.isatty() else 120)


class _Patient(Console):
    """Goes on without a reader: `lgnn | head` must not end the run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(message: str, style: str) -> None:
    """Print to the standard error stream."""
    Console(stderr=True, width=None if sys.stderr.isatty() else 120).print(
        message, style=style, markup=False, highlight=False, soft_wrap=True
    )


def warn(message: str) -> None:
    """Print a warning to the standard error stream."""
    say(f"warning: {message}", "yellow")


def be_quiet() -> None:
    """Silence what a user cannot act on."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # says what the error that it raises says
    ours = logging.getLogger("pytorch_lightning.utilities.rank_zero")  # where this package's plans and decisions go too
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
        ".*could not find the monitored key in the returned metrics.*",  # resumed behind the validation of an epoch
    ):
        warnings.filterwarnings("ignore", message)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.getMessage().startswith(OURS)


def describe(cfg: DictConfig, module: pl.LightningModule) -> str:
    """Return model, data and mini-batches in one line."""
    graph = cfg.data.get("name") or (
        HydraConfig.get().runtime.choices.get("data") if HydraConfig.initialized() else None
    )
    fanouts = cfg.datamodule.get("num_neighbors")
    batches = "full graph" if fanouts is None else f"fanouts {list(fanouts)}, batch {cfg.datamodule.get('batch_size')}"
    if cfg.datamodule.get("inference") is not None:
        batches += ", full inference"
    depth = f"{cfg.model.num_layers}-layer " if cfg.model.get("num_layers") else ""
    network = getattr(module, "model", module)  # a user's own module may call it otherwise
    return f"{depth}{type(network).__name__} on {graph or 'data'} · {batches}"
