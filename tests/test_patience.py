"""A hang is ended by its silence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_test_that_hangs_is_ended(tmp_path):
    hang = "import subprocess; subprocess.run(['sleep', '3600'], check=True)"
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_hang.py").write_text(f"def test_hang():\n    {hang}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "TEST_SILENCE": "6", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "nobody has worked for 6 s" in done.stdout + done.stderr
    assert "test_hang" in done.stdout + done.stderr
