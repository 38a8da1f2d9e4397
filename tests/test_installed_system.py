"""A system in a package of its own, examples/lgnn_gas: installed by pip, listed, trained with, and tested."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.command import TINY, metrics_of

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "examples" / "lgnn_gas"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pip") is None, reason="needs pip")
def test_an_installed_package_adds_a_system(tmp_path):
    # A copy, since setuptools builds in the folder itself.
    shutil.copytree(SOURCE, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", tmp_path / "site"]
    run("-m", "pip", "install", *options, tmp_path / "source")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}

    (listed,) = (
        line
        for line in run("-m", "lightning_gnn", "doctor", env=environment, cwd=tmp_path).splitlines()
        if "GNNAutoScale" in line
    )
    assert "lgnn-gas: lgnn_gas:SYSTEM" in listed
    small = [*TINY, "model.num_layers=3", "datamodule=clusters", "datamodule.parts=12", "datamodule.batch_size=3"]
    more = ["data=synthetic", "trainer.max_epochs=1", "output_dir=out"]
    printed = run("-m", "lightning_gnn", *small, *more, env=environment, cwd=tmp_path)
    assert "12 clusters, batch 3, full inference" in printed
    assert 0 <= metrics_of(tmp_path / "out")["test_acc"] <= 1
    run("-m", "pytest", SOURCE / "tests", "-n", "0", "-q", "-p", "no:cacheprovider", env=environment)


def run(*arguments, **options):
    """Run Python in a new process that must succeed, and return what it prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
