"""Compiled kernels: a message while they are compiled, and a cache folder on every machine."""

import os
import pty
import shutil
import subprocess
import sys

import pytest

from tests.cli.command import ROOT
from tests.patience import PATIENCE

GATHER = """
import torch
from lightning_gnn.ops import gather_rows
print(gather_rows(torch.arange(20000, dtype=torch.float32).view(200, 100), torch.arange(199, -1, -1))[0, 0].item())
"""


def run_gather(environment, on_a_screen):
    """Gather rows in a new process; return its output and its error stream."""
    screen, end = pty.openpty() if on_a_screen else os.pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    ended = subprocess.run(
        [sys.executable, "-c", GATHER],
        env=environment, cwd="/", stdout=subprocess.PIPE, stderr=end, text=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    os.close(end)
    said = b""
    try:
        while part := os.read(screen, 4096):
            said += part
    except OSError:  # raised at the end of a terminal's output
        pass
    os.close(screen)
    return ended.stdout.strip(), said.decode().replace("\r", "")


@pytest.mark.slow
def test_the_first_run_says_that_it_compiles_and_the_next_does_not(tmp_path):
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert run_gather(environment, on_a_screen=True) == ("19900.0", "compiling kernels…\n")
    assert run_gather(environment, on_a_screen=True) == ("19900.0", "")
    shutil.rmtree(tmp_path)
    assert run_gather(environment, on_a_screen=False) == ("19900.0", "")  # no message if stderr is a file


@pytest.mark.slow
def test_without_any_folder_each_process_compiles_for_itself_and_says_so(tmp_path):
    package = tmp_path / "lightning_gnn"
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lightning_gnn", package, ignore=leave_out)
    for name in ("triton_kernels", "ascend_ops"):
        shutil.copytree(ROOT / name, package / name, ignore=leave_out)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "no_folder").write_text("")
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").write_text("a file, so that no folder can be made")
    environment = {
        "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path / "temporary"),
        "XDG_CACHE_HOME": str(tmp_path / "no_folder"), "NUMBA_CACHE_DIR": "", "IPYTHONDIR": str(tmp_path / "no_folder"),
        "HOME": str(tmp_path / "no_folder"),
    }  # fmt: skip
    out, said = run_gather(environment, on_a_screen=True)
    assert out == "19900.0"
    assert "compiling kernels…" in said
    assert said.count("cannot be cached") == 1
    assert f"neither {package} nor the user's cache folder can be written to" in said
    assert "set NUMBA_CACHE_DIR" in said
    assert not list((tmp_path / "temporary").iterdir())
