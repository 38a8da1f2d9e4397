"""The versions that a report of a fault should begin with, found without importing anything."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from lightning_gnn import __version__

_PACKAGES = {"torch": "torch", "pytorch-lightning": "pytorch-lightning", "PyG": "torch-geometric"}


def versions() -> dict[str, str]:
    """Return the versions of this package, of what it stands on, and of Python, by name."""
    found = {name: version_of(package) or "missing" for name, package in _PACKAGES.items()}
    return {"lightning-gnn": __version__, **found, "Python": platform.python_version()}


def version_of(package: str) -> str | None:
    """Return the version of an installed distribution; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
