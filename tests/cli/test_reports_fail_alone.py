"""What only reports never ends a run that succeeded: results are printed, one line names file and reason."""

import csv
import signal
import sys

import pytest

from lightning_gnn.report.comparison import compare
from tests.cli.command import lgnn, metrics_of, signal_at

FAST = ["trainer.max_epochs=1", "logger=none"]


def in_the_way(path):
    """Let a folder stand where a file is to be written."""
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
        in_the_way(tmp_path / name)
    assert lgnn(tmp_path, *FAST) == 0
    out, err = capfd.readouterr()
    assert "Test accuracy" in out
    for line, file in zip(err.splitlines(), missing, strict=True):
        assert line.startswith(f"warning: {tmp_path / file} could not be made: "), err
    assert all((tmp_path / other).is_file() for other in {*REPORTS} - {*missing})
    assert not list(tmp_path.glob(".*[0-9]"))


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
    in_the_way(tmp_path / "1/metrics.json")
    in_the_way(tmp_path / "comparison.csv")
    in_the_way(tmp_path / "report.html")
    assert lgnn(tmp_path, "-m", *FAST, "seed=1,2") == 0
    out, err = capfd.readouterr()
    assert "Comparison" in out
    assert "job 1: " in out
    assert "could not be made" in err
    assert f"{tmp_path}/comparison.csv could not be made" in err
    assert f"{tmp_path}/report.html could not be made" in err
    assert [row["status"] for row in compare(tmp_path, {0: 0.5, 1: 0.5})] == ["ok", "ok"]
    assert [row["status"] for row in compare(tmp_path)] == ["ok", "failed"]


@pytest.mark.slow
def test_in_a_sweep_a_damaged_file_costs_one_row_and_a_run_that_cannot_say_that_it_failed_another(tmp_path):
    in_the_way(tmp_path / "0/metrics.json")
    assert lgnn(tmp_path, "-m", *FAST, "model.dropout=2,0.1,0.2") == 1
    path = tmp_path / "2/metrics.json"
    path.write_bytes(path.read_bytes()[:40])
    rows = compare(tmp_path)
    assert [row["status"] for row in rows] == ["failed", "ok", "failed"]
    assert str(path) in rows[2]["error"]
    assert len(list(csv.DictReader((tmp_path / "comparison.csv").open()))) == 3


def test_the_command_that_resumes(tmp_path, capfd, monkeypatch):
    def fail(*args):
        raise RuntimeError("nothing to say")

    monkeypatch.setattr("lightning_gnn.cli.train._say_how_to_resume", fail)
    assert lgnn(tmp_path, *signal_at(2, signal.SIGINT)) == 130
    assert "warning: the command that resumes could not be made" in capfd.readouterr().err


def test_a_reader_who_left(tmp_path, monkeypatch):
    monkeypatch.setattr("rich.console.Console._write_buffer", lambda self: self.on_broken_pipe())
    monkeypatch.setattr("os.dup2", lambda *args: None)
    assert lgnn(tmp_path, *FAST) == 0
    assert metrics_of(tmp_path)["test_acc"] >= 0


@pytest.mark.slow
def test_predictions_are_no_report(tmp_path, capfd):
    assert lgnn(tmp_path / "train", *FAST) == 0
    in_the_way(tmp_path / "predict/predictions.npy")
    checkpoint = f"ckpt_path={tmp_path}/train/checkpoints/best.ckpt"
    capfd.readouterr()
    assert lgnn(tmp_path / "predict", "mode=predict", checkpoint, base=[]) == 2
    err = capfd.readouterr().err
    assert f"{tmp_path}/predict/predictions.npy cannot be written" in err
    assert err.count("\n") == 1
