"""A hang is ended by its silence, and nothing else is."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.patience import Silence

ROOT = Path(__file__).parents[1]


def start(code):
    child = subprocess.Popen([sys.executable, "-c", f"print(1, flush=True)\n{code}"], stdout=subprocess.PIPE)
    child.stdout.readline()
    return child


@pytest.mark.parametrize(("code", "silent"), [("import time; time.sleep(3600)", True), ("while True: pass", False)])
def test_silence_is_that_nobody_works(code, silent):
    with start(code) as child:
        try:
            watched = Silence(psutil.Process(child.pid))
            found = []
            while len(found) < 5 and not (found and found[-1] == 0 and not silent):
                time.sleep(0.5)  # a busy one gets some of it, however busy the machine is
                found.append(watched.look(0.5))
            assert (found[-1] > 0) == silent
        finally:
            child.kill()


def test_a_new_process_breaks_the_silence():
    watched = Silence()
    with start("import time; time.sleep(3600)") as child:
        assert watched.look(1e9) == 0  # however little it has worked
        assert watched.look(1e9) == 1
        child.kill()
    assert watched.look(1e9) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "hang",
    ["import threading; threading.Event().wait()", "import subprocess; subprocess.run(['sleep', '3600'], check=True)"],
)
def test_a_test_that_hangs_is_ended(tmp_path, hang):
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
