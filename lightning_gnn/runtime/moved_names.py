"""Import names of earlier releases from their new locations, for scripts, saved configurations and pickles."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_gnn.runtime.messages import removed

_GRAPH, _SAMPLING = "lightning_gnn.graph.", "lightning_gnn.sampling."
MOVED_NAMES = {
    **{f"{_GRAPH}{name}": f"lightning_gnn.compressed.{name}" for name in (
        "Chunks", "CompressedGraph", "locality_aware_partition",
    )},
    **{f"{_GRAPH}{name}": f"lightning_gnn.features.{name}" for name in (
        "CachedAdjacency", "DiskFeatures", "FeatureTable", "RowCache",
    )},
    f"{_GRAPH}hottest": "lightning_gnn.features.top_accessed",
    "lightning_gnn.features.hottest": "lightning_gnn.features.top_accessed",
    "lightning_gnn.collective.ReorderBuffer": "lightning_gnn.collective.BatchSchedule",
    **{f"{_GRAPH}{name}": f"lightning_gnn.datasets.{name}" for name in (
        "convert_tables", "load_hetero_folder", "save_hetero_folder",
    )},
    f"{_SAMPLING}LinkDataModule": "lightning_gnn.datamodules.LinkDataModule",
    f"{_SAMPLING}NeighborDataModule": "lightning_gnn.datamodules.NeighborDataModule",
    f"{_SAMPLING}PreparationTimes": "lightning_gnn.loading.LoaderStats",
    f"{_SAMPLING}ThreadedLinkLoader": "lightning_gnn.loading.LinkLoader",
    f"{_SAMPLING}ThreadedNodeLoader": "lightning_gnn.loading.NodeLoader",
}  # fmt: skip
"""Public names by their former locations."""
MOVED_MODULES = {
    f"{_GRAPH}compress": "lightning_gnn.compressed.graph",
    f"{_GRAPH}datasets": "lightning_gnn.datasets.registry",
    f"{_GRAPH}features": "lightning_gnn.features.table",
    f"{_GRAPH}folder": "lightning_gnn.datasets.folder",
    f"{_GRAPH}hetero_folder": "lightning_gnn.datasets.hetero_folder",
    f"{_GRAPH}synthetic": "lightning_gnn.datasets.synthetic",
    f"{_GRAPH}synthetic_hetero": "lightning_gnn.datasets.synthetic_hetero",
    "lightning_gnn.persistent": "lightning_gnn.gpu_sampling",
}
"""Modules by their former locations, as named in documentation, configurations or pickles."""


def find_moved(module: str) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which finds moved names and raises a helpful error for removed ones."""

    def find(name: str) -> Any:
        old = f"{module}.{name}"
        if (location := MOVED_NAMES.get(old)) is not None:
            _warn(old, location)
            package, _, new = location.rpartition(".")
            return getattr(import_module(package), new)
        if old in MOVED_MODULES:
            return import_module(old)
        if (message := removed(old)) is not None:
            raise ImportError(message)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


class MovedModules(MetaPathFinder, Loader):
    """Imports a moved module under its former name, with a warning; both names refer to the same module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import specification of a moved module or one of its submodules, else None."""
        return None if _new_location(fullname) is None else ModuleSpec(fullname, self)

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module under its new name."""
        location = _new_location(spec.name)
        assert location is not None
        _warn(spec.name, location)
        module = import_module(location)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the specification of the new name; the module has been executed already."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def install() -> None:
    """Register the finder of moved modules with Python; further calls do nothing."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())


def _new_location(name: str) -> str | None:
    """Return the new name of a module that was moved itself or with its package, else None."""
    for old, new in MOVED_MODULES.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def _warn(old: str, location: str) -> None:
    warnings.warn(f"{old} is {location} now", DeprecationWarning, stacklevel=3)
