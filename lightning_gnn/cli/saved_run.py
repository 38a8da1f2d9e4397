"""Save the configuration of a run in its checkpoints, and rebuild runs from it."""

import zipfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.utils import get_original_cwd
from omegaconf import DictConfig, OmegaConf

from lightning_gnn.runtime.checkpoint_io import damage_of
from lightning_gnn.runtime.lightning import pl
from lightning_gnn.runtime.urls import cached_path

KEY = "lgnn"  # the checkpoint entry that holds it
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
"""Configuration key that each config group fills."""
_WHOLE_RUN_GROUPS = ("task", "experiment")  # groups that also fill keys of other groups
_PER_START_KEYS = ("mode", "ckpt_path", "output_dir", "plan", "predictions")  # never restored from a checkpoint


class KeepConfig(pl.Callback):
    """Saves the configuration of a run in its checkpoints, as plain dictionaries under :data:`KEY`."""

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
        """Add the configuration to the checkpoint."""
        checkpoint[KEY] = self.state


@dataclass
class Rebuilt:
    """A configuration that Hydra can compose like one of its files."""

    config_name: str
    note: str = ""  # printed for the user; may be empty
    deletions: list[str] = field(default_factory=list)  # overrides that delete keys the saved run did not have


def rebuild(config_name: str, overrides: Sequence[Override]) -> Rebuilt:
    """Register the configuration saved in ``ckpt_path`` with Hydra, which must be initialized.

    A group that is overridden replaces its saved keys. Returns ``config_name`` itself if ``ckpt_path`` is not a file
    and, with a note, if it holds no configuration or if another task or experiment is requested.
    """
    # Find the checkpoint override; a sweep over several has no single configuration.
    typed = [item for item in overrides if item.key_or_group == "ckpt_path"]
    if not typed:
        return Rebuilt(config_name)
    if typed[-1].is_sweep_override():
        return Rebuilt(config_name, "ckpt_path has several values: the configurations saved with them are not used")
    value = typed[-1].value()
    path = cached_path(str(value)).expanduser()
    if value is None or not path.is_file():
        return Rebuilt(config_name)
    # Without a configuration, the run is built from the defaults, and a note says why.
    saved = _load_state(path)
    if saved is None:
        return Rebuilt(config_name, f"no configuration was saved with {path}: the run is built from the defaults")
    config, choices = saved["config"], saved.get("choices", {})
    config = {key: value for key, value in config.items() if key not in _PER_START_KEYS}
    # Groups overridden with another option are not restored from the saved run.
    chosen = [
        item
        for item in overrides
        if item.key_or_group in (*GROUPS, *_WHOLE_RUN_GROUPS)
        and (item.is_sweep_override() or item.value() != choices.get(item.key_or_group))
    ]
    # Another task or experiment is another run: ignore the saved configuration.
    for item in chosen:
        if item.key_or_group in _WHOLE_RUN_GROUPS:
            return Rebuilt(config_name, f"{item.input_line} makes another run than the one saved in {path}")
    # Register the saved configuration under a separate name, from which Hydra composes.
    name = f"{config_name}_rebuilt"
    config = _prune(config, str(saved.get("cwd", "")), {item.key_or_group for item in chosen}, overrides)
    ConfigStore.instance().store(name, OmegaConf.create({"defaults": _defaults(config_name, choices), **config}))
    # Delete keys of the defaults that the saved run lacks, except those that the command line sets.
    default = _to_dict(compose(name))
    replaced = tuple(GROUPS[item.key_or_group] for item in chosen)
    overridden = tuple(str(item.key_or_group) for item in overrides)
    deletions = [
        f"~{key}"
        for key in _keys_only_in(default, config)
        if key.partition(".")[0] in (*GROUPS, "task")
        and not any(key == other or key.startswith(f"{other}.") for other in replaced)
        and not any(other == key or other.startswith(f"{key}.") for other in overridden)
    ]
    return Rebuilt(name, f"rebuilt from the configuration saved in {path}; the command line overrides it", deletions)


def _load_state(path: Path) -> dict[str, Any] | None:
    """Return the state that :class:`KeepConfig` saved in a checkpoint, or None."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise ValueError(damage_of(path) or f"ckpt_path={path} cannot be read as a checkpoint: {error}") from None
    state = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    return state if isinstance(state, dict) and isinstance(state.get("config"), dict) else None


def _prune(saved: dict[str, Any], cwd: str, chosen: set[str], overrides: Sequence[Override]) -> dict[str, Any]:
    """Remove from a saved configuration the groups replaced and the keys added."""
    config = OmegaConf.create(deepcopy(saved))
    inner = {key: group for group, key in GROUPS.items() if "." in key}
    for key in (GROUPS[group] for group in chosen):
        # A nested group that is not replaced survives the removal of the outer one.
        nested_keys = [other for other in inner if other.startswith(f"{key}.") and inner[other] not in chosen]
        nested = {other: OmegaConf.select(config, other) for other in nested_keys}
        _remove(config, key)
        for other, node in nested.items():
            if node is not None:
                OmegaConf.update(config, other, node, force_add=True)
    for item in overrides:
        if item.is_add():
            _remove(config, str(item.key_or_group))
    for key in ("data", "datamodule"):
        node = config.get(key)
        if not isinstance(node, DictConfig) or OmegaConf.is_interpolation(node, "root"):
            continue
        root = node.get("root")
        if isinstance(root, str) and cwd and (path := Path(cwd) / root).exists():
            node.root = root if Path(cwd) == Path.cwd() else str(path)
    return _to_dict(config)


def _to_dict(config: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(config, resolve=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _remove(config: DictConfig, key: str) -> None:
    *parents, last = key.split(".")
    node = OmegaConf.select(config, ".".join(parents)) if parents else config
    if isinstance(node, DictConfig) and last in node:
        del node[last]


def _defaults(config_name: str, choices: dict[str, object]) -> list[str | dict[str, str | None]]:
    """Return a Hydra defaults list that selects the same group options, if they still exist."""
    loader = GlobalHydra.instance().config_loader()
    defaults: list[str | dict[str, str | None]] = [config_name]
    for group in (*GROUPS, *_WHOLE_RUN_GROUPS):
        if isinstance(name := choices.get(group), str):
            defaults.append({f"override /{group}": name if name in loader.get_group_options(group) else None})
    return [*defaults, "_self_"]


def _keys_only_in(first: dict[str, Any], second: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys that only the first nested dictionary has, except null ones: Hydra cannot delete these."""
    for key, value in first.items():
        if key not in second:
            if value is not None:
                yield f"{prefix}{key}"
        elif isinstance(value, dict) and isinstance(second[key], dict):
            yield from _keys_only_in(value, second[key], f"{prefix}{key}.")
