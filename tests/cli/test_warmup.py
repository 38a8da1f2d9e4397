"""``lgnn warmup``: subsequent runs compile nothing."""

import os
import subprocess
import sys

import pytest

from lightning_gnn.cli.commands import warmup as warmup_command
from tests.cli.command import ROOT
from tests.patience import PATIENCE

COUNTED = """
import sys
from lightning_gnn.cli import main
from lightning_gnn.cli.commands import warmup as warmup_command
from lightning_gnn.runtime.kernels import num_compiled
warmup_command.USUAL = {"mini-batches": warmup_command.USUAL["mini-batches"][:2]}  # those of the model of the defaults
sys.argv = ["lgnn", *sys.argv[1:]]
try:
    main.main()
finally:
    print("compiled", num_compiled())
"""
DEFAULT = ["data.num_nodes=20000", "data.num_edges=200000", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"]


def count_compiled(tmp_path, *arguments):
    """Run the command in a new process whose kernel cache is below ``tmp_path``; return its output."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "LIGHTNING_GNN_CACHE": str(tmp_path / "cache")}
    return subprocess.run(
        [sys.executable, "-c", COUNTED, *arguments],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=PATIENCE, check=True,
    ).stdout.splitlines()  # fmt: skip


@pytest.mark.slow
def test_after_it_the_default_run_compiles_nothing(tmp_path):
    *_, message, number = count_compiled(tmp_path, "warmup")
    assert message.endswith(f"stored in {tmp_path / 'kernels'}")
    assert int(number.removeprefix("compiled ")) > 10
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "kernels"}
    assert count_compiled(tmp_path, *DEFAULT)[-1] == "compiled 0"


@pytest.mark.parametrize("wrong", ["model=gnc", "model.dropout=2"])
def test_a_run_that_is_none(wrong, capfd):
    assert warmup_command.main([wrong]) == 2
    assert capfd.readouterr().err.startswith("error: ")
