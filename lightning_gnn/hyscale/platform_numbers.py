"""The numbers of a machine that HyScale's performance model takes in: given, or measured where nobody gives them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

from hydra.utils import to_absolute_path
from omegaconf import OmegaConf

from lightning_gnn.graph.workload import Platform, Processor
from lightning_gnn.runtime.files import check_yaml, read_text

_PROCESSOR = ("flops", "memory_bandwidth", "pipelined")
_WHOLE = ("cores", "num_accelerators", "num_nodes")
NAMES = (
    *(f"cpu.{name}" for name in _PROCESSOR),
    "cores",
    *(f"accelerator.{name}" for name in _PROCESSOR),
    "num_accelerators",
    "pcie_bandwidth",
    "sampling",
    "accelerator_sampling",
    "core_bandwidth",
    "num_nodes",
    "network_bandwidth",
    "network_latency",
)
"""Fields of :class:`~lightning_gnn.graph.workload.Platform`, dotted."""
OF_THE_CPU = ("cpu.flops", "cpu.memory_bandwidth", "cores", "core_bandwidth", "sampling")
OF_ACCELERATORS = ("accelerator.flops", "accelerator.memory_bandwidth", "pcie_bandwidth")

Numbers = dict[str, Any]
"""Values by dotted name; those that are not known are left out."""


def given_numbers(file: str | None, keys: Mapping[str, Any]) -> Numbers:
    """Return what the user gives.

    Args:
        file: YAML or JSON with fields of :class:`~lightning_gnn.graph.workload.Platform`, or None.
        keys: Likewise, nested; they win. None stands for what is not given.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A name is unknown or a value is no number; the message tells where.
    """
    numbers: Numbers = {}
    if file is not None:
        path = Path(to_absolute_path(file))
        if not path.is_file():
            raise FileNotFoundError(f"plan.platform_file={file}: there is no such file")
        try:
            check_yaml(text := read_text(path))
            content = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
        except Exception as error:
            raise ValueError(f"plan.platform_file={file} is neither YAML nor JSON: {error}") from error
        numbers.update(_flat(content, f"plan.platform_file={file}"))
    return numbers | _flat(dict(keys), "plan.platform")


def complete(given: Numbers, measure: Callable[[], Platform], num_nodes: int = 1) -> tuple[Platform, dict[str, str]]:
    """Put given and measured numbers together.

    Args:
        given: As :func:`given_numbers` returns them.
        measure: Called where something that can be measured is not given; it tells what this machine has.
        num_nodes: Where they are not given.

    Returns:
        The platform, and for each known number ``"given"``, ``"measured"`` or ``"configured"``.

    Raises:
        ValueError: Accelerators are given that this machine does not have, without all of their numbers.
    """
    count = given.get("num_accelerators")
    needed = [*OF_THE_CPU, *(OF_ACCELERATORS if count else ())]
    measured: Numbers = {}
    if count is None or any(name not in given for name in needed):
        measured = flat_numbers(measure())
        del measured["num_nodes"]
    found = measured | {"num_nodes": num_nodes} | given
    if count is None and not found["num_accelerators"]:
        found["num_accelerators"] = int(any(name.startswith("accelerator.") for name in given))
    if not found["num_accelerators"]:
        found = {name: value for name, value in found.items() if name not in OF_ACCELERATORS}
    elif missing := [name for name in OF_ACCELERATORS if name not in found]:
        raise ValueError(
            f"num_accelerators={found['num_accelerators']}, but there is none here to measure; also give "
            + ", ".join(f"plan.platform.{name}" for name in missing)
        )
    origin = {name: "given" if name in given else "measured" if name in measured else "configured" for name in found}
    return _platform(found), {name: origin[name] for name in NAMES if name in origin}


def flat_numbers(platform: Platform) -> Numbers:
    """Return a platform's numbers by dotted name, without those of parts that it does not have or leaves out."""
    numbers: Numbers = {}
    for name in NAMES:
        value: Any = platform
        for part in name.split("."):
            value = None if value is None else getattr(value, part)
        measured = name in OF_THE_CPU or (name in OF_ACCELERATORS and platform.num_accelerators)
        if measured or name == "num_accelerators" or value not in (None, False, inf, 0.0):
            numbers[name] = value
    return numbers


def save_numbers(platform: Platform, path: str | Path) -> Path:
    """Write a file that ``plan.platform_file`` takes."""
    config = OmegaConf.create()
    numbers = flat_numbers(platform)
    del numbers["num_nodes"]  # which is the run's
    for name, value in numbers.items():
        OmegaConf.update(config, name, [list(point) for point in value] if isinstance(value, tuple) else value)
    text = "# Numbers of a machine, for plan.platform_file: seconds, bytes and operations without prefixes.\n"
    Path(path).write_text(text + OmegaConf.to_yaml(config))
    return Path(path)


def _flat(content: Any, where: str) -> Numbers:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must hold names and numbers, but holds {reprlib.repr(content)}")
    numbers: Numbers = {}
    for name, value in content.items():
        nested = value if isinstance(value, Mapping) else None
        for dotted, number in (
            {name: value} if nested is None else {f"{name}.{k}": v for k, v in nested.items()}
        ).items():
            if dotted not in NAMES:
                raise ValueError(f"{where}: {dotted} is unknown; use {', '.join(NAMES)}")
            if number is not None:
                numbers[dotted] = _checked(dotted, number, where)
    return numbers


def _checked(name: str, value: Any, where: str) -> Any:
    if name.endswith("pipelined"):
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {name} is true or false, but is {reprlib.repr(value)}")
        return value
    try:
        if name == "sampling" and isinstance(value, (list, tuple)):
            return tuple((int(threads), float(rate)) for threads, rate in value)
        number = float(value)
        if isinstance(value, bool) or (name in _WHOLE and number != int(number)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        kind = "a whole number" if name in _WHOLE else "a number"
        raise ValueError(f"{where}: {name} must be {kind}, but is {reprlib.repr(value)}") from None
    return int(number) if name in _WHOLE else number


def _platform(numbers: Numbers) -> Platform:
    """Build it.

    Raises:
        ValueError: A number is out of range.
    """
    fields = {name: value for name, value in numbers.items() if "." not in name}
    for owner in ("cpu", "accelerator"):
        if owner == "accelerator" and not numbers["num_accelerators"]:
            continue
        fields[owner] = Processor(
            **{name: numbers[f"{owner}.{name}"] for name in _PROCESSOR if f"{owner}.{name}" in numbers}
        )
    return Platform(**fields)
