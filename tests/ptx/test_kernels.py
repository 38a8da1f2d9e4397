"""The compiled kernels, on the emulator: samples equal the CPU's, and planted faults are found."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

from tests.campaigns import SLICES, campaign

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator compiles C++ by g++, which is not installed"),
]


def run(module, *arguments):
    """Run a module of this folder in a process without Triton's interpreter; return the lines that it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.ptx.{module}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@campaign
def test_compiled_kernels_equal_the_reference(number):
    """Common cases in every slice, and a share of the others."""
    rows = run("cases", number, 4, number, SLICES)
    assert len(rows) > 5
    assert not [row for row in rows if row["failure"]]


@campaign
def test_planted_faults_are_found(number):
    rows = run("faults", number, 4, number, "fused")
    assert rows
    assert not [row for row in rows if not row["found"] and not row["explained"]]
