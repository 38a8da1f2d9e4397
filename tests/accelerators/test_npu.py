import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import AcceleratorRegistry
from pytorch_lightning.strategies import StrategyRegistry
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_gnn.accelerators import NPUAccelerator, SingleNPUStrategy, npu, why_unavailable
from tests.refusals import refuses

ROOT = Path(__file__).parents[2]

without_npu = pytest.mark.skipif(hasattr(torch, "npu"), reason="torch has an NPU backend")


@pytest.mark.slow
def test_training_on_a_simulated_npu():
    """Runs in its own process, because the backend is renamed permanently."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*command, "tests/accelerators/on_simulated_npu.py"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_names_are_registered():
    assert AcceleratorRegistry["npu"]["accelerator"] is NPUAccelerator
    assert StrategyRegistry["single_npu"]["strategy"] is SingleNPUStrategy
    assert NPUAccelerator.name() == "npu"


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Simulate the installed packages: torch_npu (None, or the source of its __init__.py) and CANN."""
    npu._find_import_problem.cache_clear()

    def choose(package, cann):
        def load(name):
            if not cann:
                raise OSError(f"{name}: cannot open shared object file")

        monkeypatch.setattr(ctypes, "CDLL", load)
        if package is None:
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        else:
            (tmp_path / "torch_npu.py").write_text(package)
            monkeypatch.syspath_prepend(tmp_path)

    yield choose
    sys.modules.pop("torch_npu", None)
    npu._find_import_problem.cache_clear()


@without_npu
@pytest.mark.parametrize(
    ("package", "cann", "said", "unsaid"),
    [
        (None, False, ["torch_npu is not installed (pip install", "CANN is not installed", "libascendcl.so"], []),
        (None, True, ["torch_npu is not installed (pip install"], ["CANN is"]),
        ("", False, ["CANN is not installed", "set_env.sh"], ["torch_npu is not"]),
        ("raise ImportError('libhccl.so: no such file')", True, ["incompatible with", "libhccl.so"], ["pip install"]),
        ("raise RuntimeError('wrong torch')", True, ["incompatible with", "RuntimeError: wrong torch"], []),
        ("", True, ["did not register the device"], []),
    ],
)
def test_one_error_says_what_is_missing_and_how_to_get_it(parts, package, cann, said, unsaid):
    parts(package, cann)
    for ask in (
        lambda: pl.Trainer(accelerator="npu", devices=1, logger=False),
        lambda: pl.Trainer(accelerator="npu", devices=2, strategy="single_npu", logger=False),
        SingleNPUStrategy,
        NPUAccelerator,
    ):
        with pytest.raises(MisconfigurationException, match="accelerator='npu' cannot be used") as raised:
            ask()
        for words in said:
            assert words in str(raised.value)
        for words in unsaid:
            assert words not in str(raised.value)
    assert not NPUAccelerator.is_available()
    assert NPUAccelerator.auto_device_count() == 0


@without_npu
def test_without_cann_torch_npu_is_not_imported(parts, tmp_path):
    parts(f"open({str(tmp_path / 'imported')!r}, 'a').write('x')\nraise ImportError('half done')", cann=False)
    assert not NPUAccelerator.is_available()
    assert not (tmp_path / "imported").exists()
    parts(f"open({str(tmp_path / 'imported')!r}, 'a').write('x')\nraise ImportError('half done')", cann=True)
    for _ in range(3):
        assert "half done" in why_unavailable()
    assert (tmp_path / "imported").read_text() == "x"


@without_npu
def test_a_driver_without_devices_is_no_npu_and_others_choose_as_before(monkeypatch):
    monkeypatch.setattr(torch, "npu", SimpleNamespace(device_count=lambda: 0), raising=False)
    assert not NPUAccelerator.is_available()
    refuses(MisconfigurationException, "finds no NPU; check the output of npu-smi info", NPUAccelerator)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for devices, kind in ((1, pl.strategies.SingleDeviceStrategy), (2, pl.strategies.DDPStrategy)):
        assert type(pl.Trainer(accelerator="cpu", devices=devices, **quiet).strategy) is kind
