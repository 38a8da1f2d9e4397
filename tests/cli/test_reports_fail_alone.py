"""Failing reports do not end a successful run: results are printed, and one line names file and reason."""

import sys

import pytest

from lightning_gnn.report.comparison import compare_runs, runs_of_sweep
from tests.cli.command import lgnn, metrics_of

FAST = ["trainer.max_epochs=1", "logger=none"]


def block_path(path):
    """Create a folder at the path of an output file."""
    (path / "full").mkdir(parents=True)


REPORTS = ["metrics.json", "curves.csv", "report.png", "report.html"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REPORTS, "no matplotlib"])
def test_a_file_that_cannot_be_made(tmp_path, capfd, monkeypatch, name):
    missing = [name]
    if name == "no matplotlib":
        missing = ["report.png", "report.html"]
        monkeypatch.delitem(sys.modules, "lightning_gnn.report.charts", raising=False)
        monkeypatch.delattr("lightning_gnn.report.charts", raising=False)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    else:
        block_path(tmp_path / name)
    assert lgnn(tmp_path, *FAST) == 0
    out, err = capfd.readouterr()
    assert "Test accuracy" in out
    for line, file in zip(err.splitlines(), missing, strict=True):
        assert line.startswith(f"warning: {tmp_path / file} could not be made: "), err
    assert all((tmp_path / other).is_file() for other in {*REPORTS} - {*missing})
    assert not list(tmp_path.glob(".*[0-9]"))


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path, capfd, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_gnn.runtime.files.whole_file", full)
    assert lgnn(tmp_path, *FAST) == 0
    out, err = capfd.readouterr()
    assert "Test accuracy" in out
    said = [line.split(" could not be made")[0] for line in err.splitlines()]
    assert said == [f"warning: {tmp_path}/{name}" for name in REPORTS]
    assert err.count("No space left on device") == len(REPORTS)


@pytest.mark.slow
def test_in_a_sweep_the_runs_that_succeeded_count(tmp_path, capfd, monkeypatch):
    block_path(tmp_path / "1/metrics.json")
    block_path(tmp_path / "comparison.csv")
    block_path(tmp_path / "report.html")
    assert lgnn(tmp_path, "-m", *FAST, "seed=1,2") == 0
    out, err = capfd.readouterr()
    assert "Comparison" in out
    assert "job 1: " in out
    assert "could not be made" in err
    assert f"{tmp_path}/comparison.csv could not be made" in err
    assert f"{tmp_path}/report.html could not be made" in err
    assert [row["status"] for row in compare_runs(runs_of_sweep(tmp_path), {0: 0.5, 1: 0.5})] == ["ok", "ok"]
    assert [row["status"] for row in compare_runs(runs_of_sweep(tmp_path))] == ["ok", "failed"]


@pytest.mark.slow
def test_a_reader_who_left(tmp_path, monkeypatch):
    monkeypatch.setattr("rich.console.Console._write_buffer", lambda self: self.on_broken_pipe())
    monkeypatch.setattr("os.dup2", lambda *args: None)
    assert lgnn(tmp_path, *FAST) == 0
    assert metrics_of(tmp_path)["test_acc"] >= 0
