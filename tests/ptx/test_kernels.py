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
    """Run a module of this folder in a process without Triton's interpreter; return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.ptx.{module}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def list_rows(*arguments):
    """Return the JSON of each line that a module prints."""
    return [json.loads(line) for line in run(*arguments).splitlines()]


@campaign
def test_compiled_kernels_equal_the_reference(number):
    """Common cases in every slice, and a share of the others."""
    rows = list_rows("cases", number, 4, number, SLICES)
    assert len(rows) > 5
    assert not [row for row in rows if row["failure"]]


@campaign
def test_planted_faults_are_found(number):
    rows = list_rows("faults", number, 4, number, "fused")
    assert rows
    assert not [row for row in rows if not row["found"] and not row["explained"]]


def test_layers_read_little_more_than_they_need():
    known = json.loads((ROOT / "benchmarks" / "results" / "gpu_layers.json").read_text())
    case = "GraphSAGE, 100 columns, float32"
    found = json.loads(run("layer_counts", case))
    if found["triton"] == known["triton"]:
        assert found["rows"] == [row for row in known["rows"] if row["case"] == case]
    for row in [*known["rows"], *found["rows"]]:
        assert row["spilled"] == 0
        forward = row["kernel"] in ("sum_kernel", "max_kernel", "attend_kernel", "row_dropout_kernel")
        for kind in {"loads", "stores"} & row.keys():
            sectors, ideal = row[kind]
            assert 0.99 * ideal <= sectors <= (1.2 if forward else 1.5) * ideal
