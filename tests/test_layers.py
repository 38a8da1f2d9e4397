"""The dependencies between the packages point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = [
    "runtime",
    "planning",
    "graph",
    "ops",
    "nn",
    "sampling",
    "batching",
    "datamodules",
    "strategies",
    "accelerators",
    "callbacks",
]
FILES = sorted((ROOT / "lightning_gnn").rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1:] for name in names if name.startswith("lightning_gnn."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_only_lower_ones(path):
    parts = path.relative_to(ROOT / "lightning_gnn").parts
    if parts[0] not in ORDER:
        return
    for names in imported(path):
        assert names[0] not in ORDER or ORDER.index(names[0]) <= ORDER.index(parts[0]), f"{path} imports {names[0]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_named_after_what_they_hold(path):
    assert path.name not in ("utils.py", "helpers.py", "manager.py")


def test_everything_but_the_command_works_without_hydra():
    packages = ", ".join(f"lightning_gnn.{package}" for package in ORDER)
    check = f"import sys; sys.modules['hydra'] = None; import {packages}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", check], check=True)
