"""The configuration of a run, kept in its checkpoints, and runs that are rebuilt from it."""

import zipfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.utils import get_original_cwd
from omegaconf import DictConfig, OmegaConf

from lightning_gnn.runtime.checkpoint_io import damage_of
from lightning_gnn.runtime.messages import REMOVED

KEY = "lgnn"  # where it is in a checkpoint
GROUPS = {
    "data": "data",
    "model": "model",
    "datamodule": "datamodule",
    "inference": "datamodule.inference",
    "trainer": "trainer",
    "strategy": "trainer.strategy",
    "logger": "logger",
    "callbacks": "callbacks",
}
"""The key of the configuration that a group fills."""
_OTHER_RUNS = ("task", "experiment")  # groups that fill the keys of others
_NOT_KEPT = ("mode", "ckpt_path", "output_dir", "plan", "predictions")  # keys that belong to one start alone


class KeepConfig(pl.Callback):
    """Puts the configuration of a run into its checkpoints, as plain dictionaries under :data:`KEY`."""

    def __init__(self, cfg: DictConfig) -> None:
        initialized = HydraConfig.initialized()
        choices = HydraConfig.get().runtime.choices if initialized else {}
        self.state = {
            "config": OmegaConf.to_container(cfg, resolve=False),
            "choices": {group: name for group, name in choices.items() if isinstance(name, str)},
            "cwd": get_original_cwd() if initialized else str(Path.cwd()),
        }

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add it."""
        checkpoint[KEY] = self.state


@dataclass
class Rebuilt:
    """A configuration that Hydra can compose like one of its files."""

    config_name: str
    note: str = ""  # what was found, for the user; empty for nothing to tell
    deletions: list[str] = field(default_factory=list)  # overrides that delete what the saved run did not have


def rebuild(config_name: str, overrides: Sequence[Override]) -> Rebuilt:
    """Prepare the configuration that was saved with ``ckpt_path``; call it where Hydra is initialized.

    A group's new option takes the place of what was saved of that group. Returns ``config_name`` itself without such a
    file and, with a note, where nothing was saved with it, or another task or experiment is asked for.
    """
    # Find the checkpoint that was typed; a sweep over several has no single configuration.
    typed = [item for item in overrides if item.key_or_group == "ckpt_path"]
    if not typed:
        return Rebuilt(config_name)
    if typed[-1].is_sweep_override():
        return Rebuilt(config_name, "ckpt_path has several values: the configurations saved with them are not used")
    value = typed[-1].value()
    path = Path(str(value)).expanduser()
    if value is None or not path.is_file():
        return Rebuilt(config_name)
    # Without a configuration, the run is built from the defaults, and a note says why.
    saved = _saved_with(path)
    if saved is None:
        return Rebuilt(config_name, f"no configuration was saved with {path}: the run is built from the defaults")
    config, choices = _kept(saved["config"]), saved.get("choices", {})
    # Groups for which another option was typed are not taken from the saved run.
    chosen = [
        item
        for item in overrides
        if item.key_or_group in (*GROUPS, *_OTHER_RUNS)
        and (item.is_sweep_override() or item.value() != choices.get(item.key_or_group))
    ]
    # Another task or experiment is another run, for which the saved configuration does not count.
    for item in chosen:
        if item.key_or_group in _OTHER_RUNS:
            return Rebuilt(config_name, f"{item.input_line} makes another run than the one saved in {path}")
    # Register the saved configuration under a name of its own, from which Hydra composes.
    name = f"{config_name}_rebuilt"
    config = _pruned(config, str(saved.get("cwd", "")), {item.key_or_group for item in chosen}, overrides)
    ConfigStore.instance().store(name, OmegaConf.create({"defaults": _defaults(config_name, choices), **config}))
    # Delete the keys that the defaults have beyond the saved ones, apart from what was typed.
    default = _plain(compose(name))
    fresh = tuple(GROUPS[item.key_or_group] for item in chosen)
    given = tuple(str(item.key_or_group) for item in overrides)
    deletions = [
        f"~{key}"
        for key in _keys_only_in(default, config)
        if key.partition(".")[0] in (*GROUPS, "task")
        and not any(key == other or key.startswith(f"{other}.") for other in fresh)
        and not any(other == key or other.startswith(f"{key}.") for other in given)
    ]
    return Rebuilt(name, f"rebuilt from the configuration saved in {path}; what you typed wins", deletions)


def _saved_with(path: Path) -> dict[str, Any] | None:
    """Return what :class:`KeepConfig` saved in a checkpoint; None where there is nothing."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise ValueError(damage_of(path) or f"ckpt_path={path} cannot be read as a checkpoint: {error}") from None
    state = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    return state if isinstance(state, dict) and isinstance(state.get("config"), dict) else None


def _kept(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in _NOT_KEPT}
    if isinstance(callbacks := kept.get("callbacks"), dict):  # of an older version they may be gone
        kept["callbacks"] = {
            name: node
            for name, node in callbacks.items()
            if not isinstance(node, dict) or node.get("_target_") not in REMOVED
        }
    return kept


def _pruned(saved: dict[str, Any], cwd: str, chosen: set[str], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return the saved configuration without what is chosen or added now, and without options that are gone."""
    config = OmegaConf.create(deepcopy(saved))
    inner = {key: group for group, key in GROUPS.items() if "." in key}
    for key in (GROUPS[group] for group in chosen):
        parts = [other for other in inner if other.startswith(f"{key}.") and inner[other] not in chosen]
        kept = {part: OmegaConf.select(config, part) for part in parts}
        _remove(config, key)
        for part, node in kept.items():
            if node is not None:
                OmegaConf.update(config, part, node, force_add=True)
    for key in ("data.memory", "datamodule.inference.resume"):  # of earlier releases, and changed no result
        _remove(config, key)
    for item in overrides:
        if item.is_add():
            _remove(config, str(item.key_or_group))
    for key in ("data", "datamodule"):
        node = config.get(key)
        if not isinstance(node, DictConfig) or OmegaConf.is_interpolation(node, "root"):
            continue
        root = node.get("root")
        if isinstance(root, str) and cwd and (there := Path(cwd) / root).exists():
            node.root = root if Path(cwd) == Path.cwd() else str(there)
    return _plain(config)


def _plain(config: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(config, resolve=False)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _remove(config: DictConfig, key: str) -> None:
    *parents, last = key.split(".")
    node = OmegaConf.select(config, ".".join(parents)) if parents else config
    if isinstance(node, DictConfig) and last in node:
        del node[last]


def _defaults(config_name: str, choices: dict[str, object]) -> list[str | dict[str, str | None]]:
    """Return a defaults list that makes the same choices, as far as they still exist."""
    loader = GlobalHydra.instance().config_loader()
    found: list[str | dict[str, str | None]] = [config_name]
    for group in (*GROUPS, *_OTHER_RUNS):
        if isinstance(name := choices.get(group), str):
            found.append({f"override /{group}": name if name in loader.get_group_options(group) else None})
    return [*found, "_self_"]


def _keys_only_in(whole: dict[str, Any], part: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys that only the first of two nested dictionaries has; Hydra cannot delete those of null."""
    for key, value in whole.items():
        if key not in part:
            if value is not None:
                yield f"{prefix}{key}"
        elif isinstance(value, dict) and isinstance(part[key], dict):
            yield from _keys_only_in(value, part[key], f"{prefix}{key}.")
