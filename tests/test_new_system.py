"""The page *Add a system* is complete: its classes and its configuration train from the command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gnn.systems import installed, load_system
from tests.cli.command import TINY, lgnn, metrics_of
from tests.cli.test_installed_systems import install
from tests.test_docs import find_blocks

PAGE = "docs/how-to/add-a-system.md"


@pytest.fixture
def system(tmp_path):
    """Write the files of the page to a folder."""
    *parts, _ = (code for _, _, code in find_blocks(PAGE, "python"))
    (tmp_path / "walks.py").write_text("\n".join(parts), encoding="utf-8")
    folder = tmp_path / "my_conf" / "datamodule"
    folder.mkdir(parents=True)
    ((_, _, configuration),) = find_blocks(PAGE, "yaml")
    (folder / "walks.yaml").write_text(configuration, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_the_command_trains_with_it(system):
    ((_, _, command),) = find_blocks(PAGE, "sh")
    small = ["data=synthetic", "data.num_nodes=600", "data.num_edges=4000", "output_dir=out"]
    program = [str(Path(sys.executable).with_name("lgnn")), *command.split()[1:], *small]
    done = subprocess.run(program, cwd=system, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "· 4 walks of 2 steps, batch 64 ·" in done.stdout
    assert (system / "out" / "metrics.json").exists()


@pytest.mark.medium
def test_it_is_a_package_of_its_own(tmp_path, monkeypatch):
    *parts, _ = (code for _, _, code in find_blocks(PAGE, "python"))
    ((_, _, declaration),) = find_blocks(PAGE, "py")
    ((_, _, configuration),) = find_blocks(PAGE, "yaml")
    ((_, _, project),) = find_blocks(PAGE, "toml")
    groups = re.findall(r'\[project.entry-points."(.+)"\]\n(.+) = "(.+)"', project)
    entries = "\n".join(f"[{group}]\n{name} = {value}" for group, name, value in groups)
    configuration = configuration.replace("walks.Walk", "lgnn_walks.Walk")
    install(tmp_path, "lgnn_walks", "\n".join([*parts, declaration]), entries, configuration)
    monkeypatch.syspath_prepend(tmp_path)
    small = [*TINY[:-3], "datamodule=walks", "model.num_layers=2", "trainer.max_epochs=1"]
    assert lgnn(tmp_path / "run", base=small) == 0
    assert "test_acc" in metrics_of(tmp_path / "run")
    (entry,) = installed()
    assert load_system(entry).page == "https://example.org/walks"
    assert sys.modules.pop("lgnn_walks").WalkDataModule
