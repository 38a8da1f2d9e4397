import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.once import once

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def compiled(request, tmp_path_factory):
    """Results of the scripts ``compile_*.py``, run in a process without the interpreter and with an empty cache."""

    def compile_all(folder):
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(folder / "cache")
        command = [sys.executable, "-m", "tests.triton_kernels.compiling", str(folder), request.config.option.slice]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stderr

    folder = once(tmp_path_factory, "compiled", compile_all)
    return lambda script: json.loads((folder / f"{script}.json").read_text())
