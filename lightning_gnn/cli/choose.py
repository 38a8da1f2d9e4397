"""Resolve ``datamodule=auto`` in a configuration."""

import sys
from importlib.resources import files
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from torch_geometric.data import Data, HeteroData

from lightning_gnn.cli.assemble import build_quiet_trainer, build_task
from lightning_gnn.cli.targets import is_a
from lightning_gnn.hyscale.analytic import Platform
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.planning.choice import AutoDataModule, Choice, Option, choose_run
from lightning_gnn.report.console import console
from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.lightning import isolate_rng

_CONF = files("lightning_gnn.conf")
_REPLACED = ("datamodule=auto", "strategy=auto")
_NAMES = ("neighbor", "link", "persistent", "collective")


def select_datamodule(cfg: DictConfig, name: str) -> None:
    """Replace the DataModule by another one, with those of the configured options that it has."""
    nodes = {each: OmegaConf.load(_CONF.joinpath(f"datamodule/{each}.yaml")) for each in _NAMES}  # type: ignore[arg-type]
    foreign = {key for node in nodes.values() for key in node} - {*nodes[name]} | {"_target_"}
    given = {key: value for key, value in cfg.datamodule.items() if value is not None and key not in foreign}
    cfg.datamodule = OmegaConf.merge(nodes[name], given)


def choose(cfg: DictConfig, data: Data | HeteroData, machine: Platform | None = None) -> Choice | None:
    """Replace ``datamodule=auto`` and, if it may gain, the strategy; print and return the choice."""
    if not is_a(cfg.datamodule, AutoDataModule):
        return None
    if cfg.task.name in ("link", "recommend"):
        raise ValueError(f"datamodule=auto is for nodes; give task={cfg.task.name} datamodule=link or persistent_link")
    given = cfg.trainer.strategy
    strategy = given if isinstance(given, str) else "hyscale" if is_a(given, HyScaleStrategy) else given["_target_"]
    probe = cfg.copy()
    select_datamodule(probe, "neighbor")
    if cfg.mode != "train":
        choice = Choice(Option(strategy, "neighbor"), f"mode={cfg.mode} does not train")
    else:
        with isolate_rng():  # as if the choice was given
            trainer = build_quiet_trainer(probe)
            if cfg.datamodule.num_workers is None:
                processes = 1 if strategy == "hyscale" else max(1, trainer.num_devices)
                probe.datamodule.num_workers = max(1, (num_cores() - 1) // processes)
            choice = choose_run(*build_task(probe, data), trainer, strategy, machine)
    console().print(str(choice), soft_wrap=True, highlight=False, markup=False)
    select_datamodule(cfg, choice.option.datamodule)
    if choice.option.strategy != strategy:
        cfg.trainer.strategy = OmegaConf.load(_CONF.joinpath("strategy/hyscale.yaml")).strategy  # type: ignore[arg-type]
        cfg.trainer.strategy.cpu_trainers = choice.option.cpu_trainers
    for key, value in choice.overrides.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    # The other ranks, which compose this command again, and later readers of the run's folder get the choice.
    sys.argv = [item.replace("+datamodule.", "++datamodule.", 1) for item in sys.argv if item not in _REPLACED]
    sys.argv += [
        *str(choice.option).split()[strategy == choice.option.strategy :],
        *(f"{key}={value}" for key, value in choice.overrides.items()),
    ]
    if (saved := Path(cfg.output_dir) / ".hydra/config.yaml").is_file():
        OmegaConf.save(cfg, saved)
    return choice
