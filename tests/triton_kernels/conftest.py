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
    """Results of a script ``compile_*.py``, run in a process without the interpreter and with an empty cache."""

    def results(script):
        def compile_script(folder):
            environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
            environment["TRITON_CACHE_DIR"] = str(folder / "cache")
            command = [sys.executable, "-m", "tests.triton_kernels.compiling", script, str(folder)]
            command.append(request.config.option.slice)
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
            assert done.returncode == 0, done.stderr

        return json.loads((once(tmp_path_factory, script, compile_script) / f"{script}.json").read_text())

    return results
