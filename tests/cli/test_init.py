"""``lgnn init``: the generated project runs unchanged and offline."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from lightning_gnn.cli.commands import init as init_command
from tests.cli.command import ROOT
from tests.patience import PATIENCE

OFFLINE = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def project(tmp_path, capsys):
    assert init_command.main([str(tmp_path / "mine")]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"Try it: cd {tmp_path / 'mine'} && python train.py\n")
    listed = {line.strip() for line in said.splitlines()[:-1]}
    assert listed == {str(path) for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    return tmp_path / "mine"


def run_python(project, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=project, env={**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_script_learns_and_takes_settings(project):
    ran = run_python(project, "train.py", "datamodule.num_workers=0")
    assert ran.returncode == 0, ran.stderr
    assert float(re.search(r"test_acc\s*│?\s*(\d\.\d+)", ran.stdout)[1]) > 0.5  # random guessing gives 0.125
    folder = project / re.search(r"files in (.+)", ran.stdout)[1]
    assert folder.is_relative_to(project / "outputs")
    assert (folder / "checkpoints/best.ckpt").is_file()
    assert (folder / "logs/metrics.csv").is_file()
    assert "site-packages" not in ran.stderr  # no warnings that users cannot act on
    ran = run_python(project, "train.py", "model.num_layers=1", "datamodule.num_neighbors=[5]", "trainer.max_epochs=1")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_the_notebook_runs(project, monkeypatch, interruptible):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(project / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    options = {"kernel_name": "python3", "resources": {"metadata": {"path": str(project)}}}
    NotebookClient(notebook, timeout=PATIENCE, **options).execute()
    printed = "".join(item.get("text", "") for cell in notebook.cells for item in cell.get("outputs", []))
    assert float(re.search(r"test accuracy (\d\.\d+)", printed)[1]) > 0.5
    assert "256 seeds" in printed


def test_every_setting_is_explained_and_taken(project):
    from inspect import signature

    from omegaconf import OmegaConf

    path = project / "conf/config.yaml"
    assert all("#" in line for line in path.read_text().splitlines() if line.strip())
    cfg = OmegaConf.load(path)
    names = {}
    exec(compile((project / "train.py").read_text(), "train.py", "exec"), names)
    assert {*cfg.model} <= {*signature(names["Classifier"]).parameters}
    assert {*cfg.trainer} <= {*signature(names["pl"].Trainer).parameters}
    assert cfg.model.num_layers == len(cfg.datamodule.num_neighbors)


def test_what_is_there_is_left_alone(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for taken in (tmp_path, tmp_path / "file"):
        assert init_command.main([str(taken)]) == 2
        assert "exists already" in capsys.readouterr().err
    assert init_command.main([str(tmp_path / "file/below")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    assert init_command.main([str(tmp_path / "empty")]) == 0
