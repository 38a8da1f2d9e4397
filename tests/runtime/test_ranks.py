"""How the processes of a run end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import atexit
import os

import torch.distributed as dist

atexit.register(lambda: print("open" if dist.is_initialized() else "closed", flush=True))  # the last of all

from lightning_gnn.runtime.ranks import _leave
from tests.hyscale.training import Plain, fit, hybrid


class Failing(Plain):
    def training_step(self, batch, index):
        if {fails}:
            raise ValueError("no more")
        return super().training_step(batch, index)


if __name__ == "__main__":
    fit(Failing(), hybrid(2), epochs=1)
    assert dist.is_initialized()
    _leave(os.getppid())  # in a fork, which has not opened it
    assert dist.is_initialized()
"""


@pytest.mark.campaign
@pytest.mark.parametrize("fails", [False, True])
def test_the_process_group_is_closed_unless_a_rank_may_be_lost(fails, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fails=fails))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode != 0) == fails, done.stderr
    assert done.stdout.count("closed") == (0 if fails else 2), done.stdout
    assert ("no more" in done.stderr) == fails
