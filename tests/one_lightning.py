"""Lets the tests, which import pytorch_lightning, use the package that ``LGNN_LIGHTNING`` names."""

import os
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class _Aliases(MetaPathFinder, Loader):
    """Finds the modules of one package under the names of the other."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] in _NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        top, dot, rest = spec.name.partition(".")
        module = import_module(f"{_NAMES[top]}{dot}{rest}")
        spec.loader_state = module.__spec__  # the import system replaces it by the alias's
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state


def use_one_package() -> None:
    """Serve one package under the names of the other, or hide the other one, which PyG would import."""
    if os.environ.get("LGNN_LIGHTNING") == "lightning":
        sys.meta_path.insert(0, _Aliases())
    else:
        sys.modules["lightning"] = None  # type: ignore[assignment]
