"""Finding runs, and the pages of runs and sweeps: complete, escaped and self-contained."""

import csv
import json
import shlex
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_gnn.cli.commands import report as report_command
from lightning_gnn.cli.commands import runs as runs_command
from lightning_gnn.report.comparison import compare_runs, runs_of_sweep
from lightning_gnn.report.pages import write_run_page
from lightning_gnn.report.runs import find_runs, read_curves, read_run
from tests.cli.command import NODE, lgnn, metrics_of
from tests.cli.test_plan import plan
from tests.report.reading import Page

NASTY = '</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"'
FAST = ["trainer.max_epochs=2", "logger=none"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder with runs of all kinds: finished, failed, and one without files."""
    folder = tmp_path_factory.mktemp("outputs")
    exact = "datamodule.num_neighbors=[-1,-1]"
    assert lgnn(folder / "day/done", *FAST, exact, "seed=3") == 0
    left = folder / "day/left/.hydra"
    shutil.copytree(folder / "day/done/.hydra", left)
    (folder / "day/failed").mkdir()
    (folder / "day/failed/metrics.json").write_text(json.dumps({"error": NASTY, "task": "node", "title": NASTY}))
    (folder / "day/damaged").mkdir()
    (folder / "day/damaged/metrics.json").write_text("{")
    return folder


def read_page(folder, name="report.html"):
    page = Page((folder / name).read_text())
    page.needs_nothing_else()
    return page


@pytest.mark.medium
def test_runs_are_found_with_what_they_were_told_and_what_came_out(ran):
    runs = {run.folder.name: run for run in find_runs([ran, ran / "day"])}
    states = {name: run.state for name, run in runs.items()}
    assert states == {"done": "done", "left": "unfinished", "failed": "failed", "damaged": "failed"}
    done = runs["done"]
    assert done.overrides == list(OmegaConf.load(ran / "day/done/.hydra/overrides.yaml"))
    figures = metrics_of(ran / "day/done")
    assert done.scores == {name: figures[name] for name in ("test_acc", "val_acc")}
    assert done.seconds == figures["total_time_s"]
    assert abs((datetime.now().astimezone() - done.started).total_seconds()) < 3600
    assert done.job is None
    assert Path(done.cwd) == Path.cwd()
    assert "cannot be read" in runs["damaged"].metrics["error"]
    with pytest.raises(FileNotFoundError, match="is not the folder of a run"):
        read_run(ran)


@pytest.mark.medium
def test_the_page_of_a_run_holds_everything(ran):
    folder, figures = ran / "day/done", metrics_of(ran / "day/done")
    page = read_page(folder)
    for title in ("Scores", "Curves", "Where the time went", "Repeat it", "Configuration", "Environment"):
        assert title in page.text("h2")
    assert "Plan" not in page.text("h2")
    cells = page.text("td")
    assert f"{figures['test_acc']:.2%}" in cells
    assert "of the best checkpoint" in cells
    assert figures["environment"]["torch"] in cells
    assert (folder / ".hydra/config.yaml").read_text() in page.text("pre")
    assert figures["advice"] in page.text("p")
    curves = read_curves(folder)
    assert len(curves) == 2
    assert [image["aria-label"] for image in page.all("svg")] == ["loss and scores over the epochs"]
    assert {row["epoch"] for row in csv.DictReader((folder / "curves.csv").open())} == {"0", "1"}


@pytest.mark.slow
def test_the_command_of_a_page_repeats_the_run(ran, tmp_path):
    where, command = read_page(ran / "day/done").text("pre").splitlines()[:2]
    assert Path(where.removeprefix("cd ")) == Path.cwd()
    name, *overrides = shlex.split(command)
    assert name == "lgnn"
    overrides = [item for item in overrides if not item.startswith(("hydra.run.dir", "hydra.sweep.dir"))]
    assert lgnn(tmp_path, *overrides, base=[]) == 0
    assert metrics_of(tmp_path)["test_loss"] == metrics_of(ran / "day/done")["test_loss"]


@pytest.mark.medium
def test_whatever_is_in_the_files_is_text(ran, tmp_path):
    write_run_page(ran / "day/failed")
    page = read_page(ran / "day/failed")
    assert NASTY in page.text("p")
    assert page.text("h1") == page.text("title") == NASTY
    shutil.copytree(ran / "day/done", tmp_path / "run")
    figures = dict.fromkeys(metrics_of(tmp_path / "run"), NASTY)
    given = figures | {"test_acc": 0.5, "time_split": {NASTY: NASTY}, "environment": {NASTY: NASTY}}
    (tmp_path / "run/plan.yaml").write_text(NASTY)
    (tmp_path / "run/.hydra/overrides.yaml").write_text(json.dumps([NASTY]))
    (tmp_path / "run/curves.csv").write_text(f"epoch,val_{NASTY.replace(',', '')}\n0,1.0\n")
    for metrics in (given, figures, {**given, "epoch_time_s": 1.0}, {**given, "plan": {"text": NASTY, "epoch_s": 1}}):
        (tmp_path / "run/metrics.json").write_text(json.dumps(metrics))
        write_run_page(tmp_path / "run")
        assert NASTY in read_page(tmp_path / "run").text("pre")


@pytest.mark.slow
def test_a_plan_is_told_from_a_run(tmp_path, capfd):
    assert plan(tmp_path, "datamodule.num_workers=1", base=NODE) == 0
    assert read_run(tmp_path).state == "plan"
    capfd.readouterr()
    assert report_command.main([str(tmp_path)]) == 0
    assert f"{tmp_path}: plan\nlgnn plan " in capfd.readouterr().out
    assert (tmp_path / "plan.yaml").read_text() in read_page(tmp_path).text("pre")


@pytest.mark.medium
def test_lgnn_runs(ran, monkeypatch, capsys):
    assert runs_command.main([str(ran), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {Path(run["folder"]).name for run in listed} == {"done", "left", "failed", "damaged"}
    assert [run["started"] for run in listed] == sorted((run["started"] for run in listed), reverse=True)
    assert runs_command.main([str(ran), "-n", "2"]) == 0
    assert "2 of 4" in capsys.readouterr().out
    assert runs_command.main([str(ran)]) == 0
    shown = capsys.readouterr().out
    assert f"test_acc {metrics_of(ran / 'day/done')['test_acc']:.2%}" in shown
    assert "unfinished" in shown
    assert "[-1,-1]" in shown.replace("\n", "")  # not interpreted as rich markup
    monkeypatch.chdir(ran / "day/left")
    assert runs_command.main([]) == 1
    assert "There are no runs in outputs or multirun" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        runs_command.main(["nowhere"])
    assert "nowhere is not a folder" in capsys.readouterr().err


@pytest.mark.medium
def test_lgnn_report(ran, tmp_path, monkeypatch, capsys):
    shutil.copytree(ran / "day/done", tmp_path / "outputs/run")
    (tmp_path / "outputs/run/report.html").unlink()
    monkeypatch.chdir(tmp_path)
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert report_command.main(["--open"]) == 0  # the latest
    shown = capsys.readouterr().out
    assert f"{metrics_of('outputs/run')['test_acc']:.2%}" in shown
    assert "outputs/run/report.html" in shown
    assert opened == [(tmp_path / "outputs/run/report.html").as_uri()]
    assert read_page(tmp_path / "outputs/run").elements == read_page(ran / "day/done").elements
    for name, said in (("failed", NASTY), ("left", "unfinished")):
        assert report_command.main([str(ran / "day" / name)]) == 0
        assert said in capsys.readouterr().out
    assert report_command.main([str(tmp_path)]) == 1
    assert "is not the folder of a run or a sweep" in capsys.readouterr().err


def test_runs_that_were_started_one_by_one_are_compared(tmp_path, monkeypatch, capsys):
    write_sweep(tmp_path / "multirun", [{"test_acc": 0.25 * job} for job in range(2)])
    apart = tmp_path / "outputs/a day"
    write_sweep(apart, [{"test_acc": 0.7}, None])
    for job in ("0", "1"):
        OmegaConf.save({"hydra": {"job": {"config_name": "train"}}}, apart / job / ".hydra/hydra.yaml")
    for folder in (tmp_path / "multirun/0", apart / "0"):
        (folder / "report.html").touch()
    (tmp_path / "multirun/multirun.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert report_command.main(["multirun", "outputs/a day/0", "outputs/a day/1/metrics.json"]) == 0
    shown = capsys.readouterr().out
    assert "70.00%" in shown
    assert "outputs/a day/1 failed: it broke" in shown.replace("\n", " ")
    page = read_page(tmp_path, "comparison.html")
    assert page.text("h1") == "Comparison over seed"
    assert [link["href"] for link in page.all("a")] == ["multirun/0/report.html", "outputs/a%20day/0/report.html"]
    assert {"70.00%", "25.00%", "0.00%"} <= {data.strip() for tag, data in page.texts if tag == "td"}
    assert report_command.main(["multirun", "nowhere"]) == 1
    assert "nowhere is not the folder of a run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep(tmp_path, capfd):
    folder = tmp_path / "multirun"
    assert lgnn(folder, "-m", *FAST, "model.dropout=2,3") == 1
    failed = read_page(folder)
    assert failed.text("span").count("dropout is a probability in [0, 1)") == 2
    assert not failed.all("svg")
    shutil.rmtree(folder)
    assert lgnn(folder, "-m", *FAST, "model=gcn,sage", "seed=1,2", "model.hidden_channels=8") == 0
    page, rows = read_page(folder), compare_runs(runs_of_sweep(folder))
    cells = page.text("td")
    for row in rows:
        assert f"{row['test_acc']:.2%}" in cells
    assert f"{rows[0]['test_acc_mean']:.2%}" in cells
    assert [link["href"] for link in page.all("a")] == [f"{job}/report.html" for job in range(4)]
    assert [image["aria-label"] for image in page.all("svg")] == ["test_acc of the runs over the epochs"]
    command = shlex.split(page.text("pre").splitlines()[1])
    assert command[:2] == ["lgnn", "-m"]
    assert {"model=gcn,sage", "seed=1,2", *NODE} <= {*command}
    capfd.readouterr()
    (folder / "report.html").unlink()
    assert report_command.main([str(folder)]) == 0
    assert "Comparison" in capfd.readouterr().out
    assert read_page(folder).elements == page.elements


def write_sweep(folder, scores):
    """Write the files of runs with two learning rates and two seeds each; a score None is a failed run."""
    for job, found in enumerate(scores):
        hidden = folder / str(job) / ".hydra"
        hidden.mkdir(parents=True)
        OmegaConf.save([f"task.lr=0.{1 + job // 2}", f"seed={job % 2}"], hidden / "overrides.yaml")
        OmegaConf.save({"hydra": {"job": {"num": job, "config_name": "train"}}}, hidden / "hydra.yaml")
        metrics = {"error": "it broke"} if found is None else {**found, "epoch_time_s": 1.5, "test_loss": 0.3}
        (folder / str(job) / "metrics.json").write_text(json.dumps({**metrics, "title": NASTY}))
