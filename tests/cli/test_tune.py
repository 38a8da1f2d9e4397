"""``lgnn tune``: a learning rate where the loss falls fastest, and a plot; nothing else is left behind."""

import re

import pytest

from lightning_gnn.cli.commands import tune as tune_command
from tests.cli.command import NODE


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_suggests_a_learning_rate_that_trains_and_the_same_one_each_time(here, capfd):
    printed = []
    for name in ("one.png", "two.png"):
        assert tune_command.main([*NODE, "--steps", "40", "--to", "0.5", "--plot", name]) == 0
        printed.append(capfd.readouterr().out.replace(name, ""))
        assert (here / name).read_bytes().startswith(b"\x89PNG")
    found = re.search(r"^task\.lr=(\S+) \(the run has 0\.003\)", printed[0], re.MULTILINE)
    assert 1e-5 < float(found.group(1)) < 0.5
    assert printed[0] == printed[1]
    assert {path.name for path in here.iterdir()} == {"one.png", "two.png"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["model=gnc"], "gnc"),
        (["model.dropout=2"], "dropout"),
        (["trainer.devices=2", "strategy=ddp"], "one process"),
    ],
)
def test_a_run_that_is_none(wrong, message, here, capfd):
    assert tune_command.main([*NODE, *wrong]) == 2
    error = capfd.readouterr().err
    assert "error: " in error
    assert message in error
    assert not [*here.iterdir()]


@pytest.mark.parametrize("wrong", [["--steps", "3"], ["--from", "1", "--to", "0.1"], ["--from", "0"]])
def test_options_that_make_no_sense(wrong, here):
    with pytest.raises(SystemExit) as ended:
        tune_command.main([*NODE, *wrong])
    assert ended.value.code == 2
