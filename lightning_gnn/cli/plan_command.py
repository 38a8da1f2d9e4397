"""``lgnn plan``: tell how a run would use the machine, without running it to the end."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from lightning_gnn.cli.assemble import build, build_data, build_task, check_config
from lightning_gnn.cli.command_line import start
from lightning_gnn.cli.errors import UserError, explained
from lightning_gnn.cli.plan_collective import profile, progress_bar
from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.graph.csc import count_edges
from lightning_gnn.hyscale.platform_numbers import given_numbers
from lightning_gnn.hyscale.report import forecast, print_forecast
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.report.console import be_quiet, console, describe, say


def main() -> None:
    """Run ``lgnn plan ...``; exit codes as of ``lgnn``."""
    del sys.argv[1]
    try:
        start(_plan_one, "plan")
    except KeyboardInterrupt:
        say("Interrupted; there is no plan.", "yellow")
        sys.exit(128 + signal.SIGINT)


def _plan_one(cfg: DictConfig) -> None:
    try:
        run(cfg)
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        say(f"error: {error}", "red")
        raise SystemExit(2) from None


def run(cfg: DictConfig) -> None:
    """Plan the run that a composed configuration describes, print the plan and save it.

    Args:
        cfg: As Hydra composes it from ``conf/plan.yaml``; under the compose API give ``output_dir``.

    Raises:
        UserError: There is nothing to plan, or the run could not be started.
    """
    be_quiet()
    with explained():
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            raise ValueError("lgnn plan makes one plan at a time: leave out -m, and call it once for each choice")
        kind = what_to_plan(cfg)
        check_config(cfg)
        if cfg.torch_threads is not None:
            torch.set_num_threads(cfg.torch_threads)
        given = given_numbers(cfg.plan.platform_file, OmegaConf.to_container(cfg.plan.platform))  # type: ignore[arg-type]
        pl.seed_everything(cfg.seed, workers=True, verbose=False)
        data = build_data(cfg)
        datamodule, module = build_task(cfg, data)
        title = describe(cfg, module)
        size = f"{data.num_nodes:,} nodes, {count_edges(data):,} edges"
        console().print(title, size, sep=" · ", style="bold", highlight=False)
        if kind == "hybrid":
            hybrid = forecast(given, cfg.plan, datamodule, module, _trainer(cfg))
            print_forecast(hybrid, console())
            hybrid.save(cfg.output_dir)
    if kind == "collective":
        assert isinstance(datamodule, CollectiveDataModule)
        with explained(only_ours=True):
            bar = progress_bar(console(), cfg.trainer.get("enable_progress_bar", True))
            collective = profile(datamodule, module, partial(_trainer, cfg), cfg.plan.max_batches, bar)
        collective.print(console())
        collective.save(title, cfg.output_dir)
        plan = f"The run takes this plan with datamodule.plan={Path(cfg.output_dir) / 'plan.yaml'}"
        console().print(plan, soft_wrap=True, highlight=False)
    console().print(f"files in {cfg.output_dir}", soft_wrap=True, highlight=False)


def what_to_plan(cfg: DictConfig) -> Literal["hybrid", "collective"]:
    """Return which of the two planners a configuration asks for.

    Raises:
        ValueError: None, or both.
    """
    if cfg.mode != "train":
        raise ValueError(f"lgnn plan plans training, not mode={cfg.mode}; leave mode out")
    strategy = OmegaConf.select(cfg, "trainer.strategy")
    hybrid = strategy == "hyscale" or _is_a(strategy, HyScaleStrategy)
    collective = _is_a(cfg.datamodule, CollectiveDataModule)
    if hybrid and collective:
        raise ValueError(
            "strategy=hyscale with datamodule=collective: both plan the use of the same cores and of the same bus; "
            "choose one of them"
        )
    if not hybrid and not collective:
        raise ValueError(
            "there is nothing to plan: give datamodule=collective (CPU and GPU prepare mini-batches together) or "
            "strategy=hyscale (CPUs and accelerators train together); the other DataModules and strategies need no plan"
        )
    return "hybrid" if hybrid else "collective"


def _is_a(node: Any, kind: type) -> bool:
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    return isinstance(target, str) and issubclass(get_class(target), kind)


def _trainer(cfg: DictConfig, **more: Any) -> pl.Trainer:
    """Build the configured Trainer, but one that leaves nothing behind.

    Args:
        cfg: The whole configuration.
        **more: Arguments that win over it.
    """
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    arguments = {**quiet, "default_root_dir": cfg.output_dir, **more}
    kept = OmegaConf.masked_copy(cfg.trainer, [key for key in cfg.trainer if key not in arguments])
    with explained():
        trainer: pl.Trainer = build(kept, "trainer", **arguments)
    return trainer
