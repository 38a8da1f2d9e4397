"""Versions for bug reports, found without importing the packages, and the environment of a run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from lightning_gnn import __version__

if TYPE_CHECKING:
    from lightning_gnn.runtime.lightning import pl

_PACKAGES = {"torch": "torch", "pytorch-lightning": "pytorch-lightning", "PyG": "torch-geometric"}


def versions() -> dict[str, str]:
    """Return the versions of this package, its main dependencies and Python, by name."""
    dependencies = {name: version_of(package) or "missing" for name, package in _PACKAGES.items()}
    return {"lightning-gnn": __version__, **dependencies, "Python": platform.python_version()}


def version_of(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment(trainer: pl.Trainer) -> dict[str, str]:
    """Return the versions, machine, thread counts and device of a run, by name."""
    import torch

    from lightning_gnn.runtime.devices import num_cores

    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        **versions(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(num_cores()),
        "torch threads": str(torch.get_num_threads()),
        "device": name,
        "strategy": type(trainer.strategy).__name__,
        "processes": str(trainer.world_size),
        "precision": str(trainer.precision),
    }
