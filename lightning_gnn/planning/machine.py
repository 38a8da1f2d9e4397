"""Read the description of a machine, to plan for one that is not there."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_gnn.hyscale.analytic import Platform, Processor

T = TypeVar("T", Platform, Processor)
_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    "float": ((int, float), "a number"),
    "int": ((int,), "a whole number"),
    "bool": ((bool,), "true or false"),
}


def read_machine(path: str | Path) -> Platform:
    """Read the fields of a :class:`~lightning_gnn.hyscale.analytic.Platform` from a YAML file.

    Raises:
        ValueError: A field is unknown, missing or not a valid number.
    """
    try:
        return _make(Platform, OmegaConf.to_container(OmegaConf.load(path)))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"plan.machine={path}: {error}") from None


def _make(cls: type[T], state: Any, prefix: str = "") -> T:
    """Build a platform or a processor from plain values."""
    if not isinstance(state, dict):
        raise ValueError(f"{prefix[:-1] or 'the file'} must hold lines NAME: VALUE, but is {state!r}")
    known = {field.name: field for field in fields(cls)}
    if unknown := [name for name in state if name not in known]:
        raise ValueError(f"{prefix}{unknown[0]} is unknown; use {', '.join(known)}")
    if missing := [name for name, field in known.items() if field.default is MISSING and name not in state]:
        raise ValueError(f"{prefix}{missing[0]} is missing")
    values = dict(state)
    for name, value in state.items():
        if (kind := _TYPES.get(known[name].type)) is None:
            values[name] = None if value is None else _make(Processor, value, f"{prefix}{name}.")
        elif not isinstance(value, kind[0]) or isinstance(value, bool) != (kind[0] == (bool,)) or value != value:
            raise ValueError(f"{prefix}{name} must be {kind[1]}, but is {value!r}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{prefix[:-1]}: {error}" if prefix else str(error)) from None
