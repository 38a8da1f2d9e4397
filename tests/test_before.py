"""Files of the previous version can be read: checkpoints resume bit for bit, plans and logs load."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_gnn.collective import CollectivePlan
from lightning_gnn.hyscale.resource_manager.decisions import read_decisions

HERE = Path(__file__).parent / "before"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hyscale", "collective"])
def test_a_checkpoint_goes_on_bit_for_bit(kind, tmp_path):
    command = [sys.executable, "-m", "tests.before.run", kind, str(tmp_path), str(HERE / f"{kind}.ckpt")]
    done = subprocess.run(command, cwd=HERE.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    expected = torch.load(HERE / f"{kind}_weights.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_plan_is_read():
    assert CollectivePlan.load(HERE / "plan.yaml").buffers == (2, 1)


def test_a_log_of_decisions_is_read():
    decisions = read_decisions((HERE / "decisions.jsonl").read_text(encoding="utf-8").splitlines())
    assert [decision.mapping.seeds for decision in decisions] == [(4, 4), (6, 2), (7, 1)]
