"""``lgnn tune``: Lightning's learning rate finder on a run, with a plot."""

import argparse
import logging
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytorch_lightning as pl
import torch
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig
from pytorch_lightning.tuner.tuning import Tuner
from rich.console import Console

from lightning_gnn.cli.assemble import build_data, build_task, build_trainer, check_config
from lightning_gnn.cli.command_line import UserError, explained
from lightning_gnn.report.console import be_quiet, say

_QUIET = ["logger=none", "callbacks=none"]
_UNTIL_DONE = ["trainer.max_epochs=-1", "++trainer.check_val_every_n_epoch=1000000"]
"""The number of steps ends it, however few an epoch has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and print; returns 2 where the run is none, or no learning rate stands out."""
    parser = argparse.ArgumentParser(
        "lgnn tune",
        description="Suggest a learning rate for a run: raise it from step to step, and take it where the loss falls "
        "fastest (Lightning's learning rate finder; Smith, arXiv:1506.01186). Nothing of the run is kept but the plot.",
    )
    parser.add_argument("overrides", nargs="*", help="of the run, as behind lgnn")
    parser.add_argument("--steps", type=int, default=100, help="how many learning rates to try (default: %(default)s)")
    parser.add_argument("--from", dest="least", type=float, default=1e-6, metavar="LR", help="(default: %(default)s)")
    parser.add_argument("--to", dest="most", type=float, default=1.0, metavar="LR", help="(default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("learning_rate.png"), help="the plot (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    # The range is logarithmic, and too few steps would show no slope.
    if not 0 < chosen.least < chosen.most or chosen.steps < 10:
        parser.error("give --from below --to, both positive, and at least 10 --steps")
    # Search in a temporary output folder, of which only the plot remains.
    try:
        with (
            initialize_config_module("lightning_gnn.conf", version_base="1.3"),
            tempfile.TemporaryDirectory() as folder,
        ):
            cfg = compose("train", overrides=[*_QUIET, *chosen.overrides, *_UNTIL_DONE, f"output_dir={folder}"])
            found = find(cfg, chosen.steps, chosen.least, chosen.most, chosen.plot)
    except (HydraException, UserError) as error:
        say(f"error: {error}", "red")
        return 2
    # Say what to set, or that no learning rate stands out.
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if found is None:
        console.print(f"No learning rate from {chosen.least:g} to {chosen.most:g} stands out; look at {chosen.plot}")
        return 2
    console.print(f"task.lr={found:.3g} (the run has {cfg.task.lr:g}); the losses are in {chosen.plot}")
    return 0


def find(cfg: DictConfig, steps: int, least: float, most: float, plot: Path) -> float | None:
    """Train with rising learning rates, draw the losses, and return the suggestion, if there is one."""
    be_quiet()
    logging.getLogger("pytorch_lightning.tuner.lr_finder").setLevel(logging.ERROR)  # its advice is about other commands
    with explained():
        check_config(cfg)
        if cfg.torch_threads is not None:
            torch.set_num_threads(cfg.torch_threads)
        pl.seed_everything(cfg.seed, workers=True, verbose=False)
        datamodule, module = build_task(cfg, build_data(cfg))
        trainer = build_trainer(cfg)
    if trainer.world_size > 1:
        raise UserError(
            f"lgnn tune trains in one process, not {trainer.world_size}: give trainer.devices=1 strategy=auto"
        )
    with explained(only_ours=True):
        finder = Tuner(trainer).lr_find(
            module, datamodule=datamodule, min_lr=least, max_lr=most, num_training=steps, update_attr=False
        )
    assert finder is not None  # it is, but in fast_dev_run
    found: float | None = finder.suggestion()
    figure = finder.plot(suggest=found is not None)
    assert figure is not None  # None where it was given axes
    figure.savefig(plot, dpi=120)
    return None if found is None or not math.isfinite(found) else found
