"""The page *Add a system* is complete: its classes and its configuration train from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    assert (system / "out" / "metrics.json").exists()
