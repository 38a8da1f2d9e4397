"""The CPU trains together with a device that is another one, simulated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_cpu_and_a_simulated_npu():
    """In a process of its own: the backend is renamed for good."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "tests/hyscale/on_simulated_npu.py",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
