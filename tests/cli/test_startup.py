"""Imports at startup, and Ctrl-C during imports, which ends the command at once even if code swallows it."""

import ast
import gc
import os
import signal
import subprocess
import sys

import pytest

import lightning_gnn
from lightning_gnn.cli import main
from tests.cli.command import ROOT
from tests.patience import PATIENCE

HOOK = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:  # as some libraries do
                os.write(2, b"swallowed")

sys.meta_path.insert(0, Interrupt())
"""


def start(tmp_path, module, *command):
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command, "--cfg", "job"],
        env={**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": module, "OMP_NUM_THREADS": "1"},
        # A shell starts background processes with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch", "lightning_gnn.cli.commands.train", "numba"])
def test_interrupted_while_importing(module, tmp_path):
    (tmp_path / "lgnn").write_text("from lightning_gnn.cli.main import main\nmain()\n")  # the installed script
    ended = start(tmp_path, module, *([str(tmp_path / "lgnn")] if module == "numba" else ["-m", "lightning_gnn"]))
    assert (ended.returncode, ended.stderr.strip()) == (130, "Interrupted before training began.")
    assert not ended.stdout


def eval_last_line(code, *arguments):
    """Run Python code in a new process, and evaluate the last line of its output."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return ast.literal_eval(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_import_brings_no_library_beside_lightning_s_and_yet_every_name_that_a_trainer_takes():
    code = """
import sys, pytorch_lightning
before = {*sys.modules}
import lightning_gnn
brought = {*sys.modules} - before
from pytorch_lightning.accelerators import AcceleratorRegistry
from pytorch_lightning.strategies import StrategyRegistry
made = {name: StrategyRegistry.get(name) for name in sys.argv[1:]}
print((brought, "npu" in AcceleratorRegistry,
    {name: (type(strategy).__name__, getattr(strategy, "_start_method", "")) for name, strategy in made.items()}))
"""
    names = ["hyscale", "ascend_hybrid", "ascend_hybrid_spawn", "ascend_hybrid_fork", "ascend_hybrid_notebook"]
    brought, npu, made = eval_last_line(code, *names)
    assert {name.partition(".")[0] for name in brought} == {"lightning_gnn"}
    packages = {name.split(".")[1] for name in brought if "." in name}
    assert packages == {"accelerators", "registration", "runtime", "startup", "systems"}
    assert npu
    assert made.pop("hyscale") == ("HyScaleStrategy", "popen")
    assert made == {
        name: ("AscendHybridParallelStrategy", method)
        for name, method in zip(names[1:], ("popen", "spawn", "fork", "spawn"), strict=True)
    }


@pytest.mark.slow
def test_a_run_imports_nothing_that_only_other_commands_use():
    code = """
import sys
import lightning_gnn.cli.commands.train
print({*sys.modules})
"""
    imported = eval_last_line(code)
    assert {"numba", "torch_geometric", "lightning_gnn.loading"} <= imported
    assert imported.isdisjoint({"duckdb", "pyarrow", "pymetis", "fastapi", "ray", "IPython", "joblib", "onnx"})
    assert imported.isdisjoint({"lightning_gnn.report.charts", "lightning_gnn.cli.commands.warmup"})


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_rests_during_imports_and_is_as_before_when_they_fail(enabled, monkeypatch):
    seen = []

    def fail(name):
        seen.append((name, gc.isenabled()))
        raise ImportError("broken")

    monkeypatch.setattr(main, "import_module", fail)
    monkeypatch.setattr(sys, "argv", ["lgnn"])
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError, match="broken"):
            main.main()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [("lightning_gnn.cli.commands.train", False)]


RUN_AND_LIST_PACKAGES = """
import sys
sys.argv[0] = "/opt/bin/lgnn"
from lightning_gnn.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
print({name.partition(".")[0] for name in sys.modules})
"""
HEAVY = {"torch", "pytorch_lightning", "torch_geometric", "numpy", "numba", "matplotlib"}


@pytest.mark.campaign
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--help-all"], ["plan", "-h"], ["-sc", "query=bash"], ["runs"], ["report"]], ids=" ".join
)
def test_help_and_what_reads_files_import_no_heavy_library(arguments, monkeypatch, tmp_path):
    monkeypatch.setenv("COMP_LINE", "lgnn da")
    monkeypatch.setenv("COMP_POINT", "7")
    (tmp_path / "metrics.json").write_text('{"test_acc": 0.5}')
    reads = arguments[0] in ("runs", "report")
    imported = eval_last_line(RUN_AND_LIST_PACKAGES, *arguments, *([str(tmp_path)] if reads else []))
    assert imported.isdisjoint(HEAVY if reads else HEAVY | {"scipy", "rich"})
    assert reads or "hydra" in imported


def test_public_names_are_found_where_they_are():
    found = {name for names in lightning_gnn._NAMES.values() for name in names}
    assert found == {*lightning_gnn.__all__}
    assert found <= {*dir(lightning_gnn)}
    for name in lightning_gnn.__all__:
        assert getattr(lightning_gnn, name).__name__ == name
    for package in lightning_gnn._NAMES:
        assert getattr(lightning_gnn, package).__name__ == f"lightning_gnn.{package}"
    typed = next(
        node
        for node in ast.walk(ast.parse((ROOT / "lightning_gnn/__init__.py").read_text()))
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    assert {(line.module.rpartition(".")[2], alias.name) for line in typed.body for alias in line.names} == {
        (package, name) for package, names in lightning_gnn._NAMES.items() for name in names
    }
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        lightning_gnn.Nothing  # noqa: B018
