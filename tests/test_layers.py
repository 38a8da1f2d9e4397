"""Dependencies between packages point one way, and there are no import cycles."""

import ast
import functools
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_GROUND = {"runtime", "features", "graph", "compressed", "ops"}
BELOW = {
    "runtime": set(),
    "distributed": {"runtime"},
    "triton_kernels": set(),
    "ascend_ops": {"runtime"},
    "features": {"runtime"},
    "graph": {"runtime", "features"},
    "compressed": {"runtime", "graph"},
    "datasets": {"runtime", "features", "graph"},
    "ops": {"runtime", "features", "graph", "compressed", "triton_kernels", "ascend_ops"},
    "accelerators": {"runtime"},
    "nn": {"runtime", "features", "graph", "compressed", "ops"},
    "sampling": {"runtime", "features", "graph", "ops"},
    "loading": {"runtime", "features", "graph", "ops", "sampling"},
    "datamodules": _GROUND | {"distributed", "nn", "sampling", "loading"},
    "full_graph": _GROUND | {"distributed", "nn", "datamodules"},
    "partitioned": _GROUND | {"distributed", "nn", "sampling", "loading", "datamodules"},
    "gpu_sampling": _GROUND | {"nn", "sampling", "loading", "datamodules"},
    "collective": _GROUND | {"nn", "sampling", "loading", "datamodules", "gpu_sampling"},
    "hyscale": _GROUND | {"distributed", "nn", "sampling", "loading", "datamodules", "gpu_sampling", "collective"},
    "pyg": _GROUND | {"nn", "sampling", "gpu_sampling"},
    "planning": _GROUND | {"sampling", "loading", "partitioned", "hyscale", "report"},
    "report": {"runtime"},
    "registration": {"accelerators"},
    "callbacks": {"runtime", "distributed", "nn", "loading", "collective", "hyscale", "planning", "report"},
}
"""Allowed imports of each package; the command may import all of them and is omitted."""
MOST_LINES_OF_A_CLASS = 400

MOST_FILES = 16
"""A folder without its subfolders."""


def _find_modules(folders):
    for folder, prefix in folders.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield prefix + name, path


MODULES = dict(_find_modules({"lightning_gnn": "", "triton_kernels": "lightning_gnn.", "ascend_ops": "lightning_gnn."}))
BENCHMARKS = dict(_find_modules({"benchmarks": ""}))
FILES = MODULES | BENCHMARKS


def find_room(module):
    return module.split(".")[1] if "." in module else ""


@cache
def find_imports(module):
    """Return the modules of the repository that a file imports anywhere, also for type checking."""
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {name if (name := f"{base}.{alias.name}") in FILES else base for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # A name computed at run time is a public one, or one of the command.
            found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return {name for name in found if name in FILES and name != module}


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_those_below(room):
    for module in (module for module in MODULES if find_room(module) == room):
        rooms = {find_room(name) for name in find_imports(module)} - {room}
        assert rooms <= BELOW[room], f"{module} imports {sorted(rooms - BELOW[room])}"


@pytest.mark.medium
@pytest.mark.parametrize("modules", [MODULES, BENCHMARKS], ids=["library", "benchmarks"])
def test_no_files_import_each_other_in_a_circle(modules):
    # Packages re-export names, so an import from one counts as an import of the defining file.
    left = {module: find_imports(module) for module in modules}
    while leaves := {module for module, names in left.items() if not names & left.keys()}:
        left = {module: names for module, names in left.items() if module not in leaves}
    assert not left, f"circles among {sorted(left)}"


def test_files_are_named_after_what_they_hold():
    assert not {"utils.py", "helpers.py", "manager.py"} & {path.name for path in MODULES.values()}


@functools.cache
def find_classes():
    trees = [ast.parse(path.read_text()) for path in MODULES.values()]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


@pytest.mark.medium
def test_no_class_is_too_large():
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in find_classes()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES_OF_A_CLASS}


@pytest.mark.medium
def test_hyscales_strategy_holds_what_is_hyscales_alone():
    (strategy,) = (node for node in find_classes() if node.name == "HyScaleStrategy")
    names = [node for node in ast.walk(strategy) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    assert sum(isinstance(node, ast.FunctionDef) for node in strategy.body) <= 25
    assert len({node.attr for node in names if ast.unparse(node.value) == "self"}) <= 15


@pytest.mark.slow
def test_everything_but_the_command_works_without_hydra():
    packages = ", ".join(f"lightning_gnn.{package}" for package in BELOW)
    check = f"import sys; sys.modules['hydra'] = None; import {packages}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", check], check=True)


def test_no_folder_has_more_files_than_one_overlooks():
    folders = {path.parent for path in (ROOT / "lightning_gnn").rglob("*.py")} | {ROOT / "triton_kernels"}
    counts = {folder.relative_to(ROOT).as_posix(): len([*folder.glob("*.py")]) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


@pytest.mark.medium
def test_prefetchers_alone_are_iterators():
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(getattr(item, "name", "") == "__next__" for item in node.body):
                assert node.name.endswith("Prefetcher"), f"{module}.{node.name} has a __next__"
