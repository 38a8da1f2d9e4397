"""Runs that are found again, and the pages of runs and sweeps: complete, escaped, and in need of nothing else."""

import csv
import json
import math
import shlex
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_gnn.cli.commands import report as report_command
from lightning_gnn.cli.commands import runs as runs_command
from lightning_gnn.cli.commands.plan import CollectiveForecast
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.report.comparison import (
    compare,
)  # fmt: skip
from lightning_gnn.report.pages import write_plan_page, write_run_page
from lightning_gnn.report.runs import find_runs, read_curves, read_run
from lightning_gnn.runtime.files import read_yaml
from tests.cli.command import NODE, lgnn, metrics_of
from tests.cli.test_plan import HYBRID, plan
from tests.report.reading import Page

NASTY = '</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"'
FAST = ["trainer.max_epochs=2", "logger=none"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Runs of all kinds below one folder: done, failed, and one that has left nothing."""
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


def page_of(folder, name="report.html"):
    page = Page((folder / name).read_text())
    page.needs_nothing_else()
    return page


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


def test_the_page_of_a_run_holds_everything(ran):
    folder, figures = ran / "day/done", metrics_of(ran / "day/done")
    page = page_of(folder)
    for title in ("Scores", "Curves", "Where the time went", "Repeat it", "Configuration", "Environment"):
        assert title in page.text("h2")
    assert "Plan" not in page.text("h2")
    cells = page.text("td")
    assert f"{figures['test_acc']:.2%}" in cells
    assert "of the best checkpoint" in cells
    assert figures["environment"]["torch"] in cells
    assert (folder / ".hydra/config.yaml").read_text() in page.text("pre")
    assert figures["advice"] in page.text("p")
    assert "test, best checkpoint" in page.text("li")
    curves = read_curves(folder)
    assert len(curves) == 2
    lines = [title for title in page.text("title").splitlines() if title in ("training", "validation")]
    assert len(lines) == 4  # training and validation, loss and accuracy
    assert {row["epoch"] for row in csv.DictReader((folder / "curves.csv").open())} == {"0", "1"}


@pytest.mark.slow
def test_the_command_of_a_page_repeats_the_run(ran, tmp_path):
    where, command = page_of(ran / "day/done").text("pre").splitlines()[:2]
    assert Path(where.removeprefix("cd ")) == Path.cwd()
    name, *overrides = shlex.split(command)
    assert name == "lgnn"
    overrides = [item for item in overrides if not item.startswith(("hydra.run.dir", "hydra.sweep.dir"))]
    assert lgnn(tmp_path, *overrides, base=[]) == 0
    assert metrics_of(tmp_path)["test_loss"] == metrics_of(ran / "day/done")["test_loss"]


def test_whatever_is_in_the_files_is_text(ran, tmp_path):
    write_run_page(ran / "day/failed")
    page = page_of(ran / "day/failed")
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
        assert NASTY in page_of(tmp_path / "run").text("pre")


@pytest.mark.slow
def test_a_plan_has_a_page(tmp_path, capfd):
    assert plan(tmp_path, "datamodule.num_workers=1", base=NODE) == 0
    run = read_run(tmp_path)
    assert run.state == "plan"
    printed = capfd.readouterr().out
    page, state = page_of(tmp_path, "plan.html"), read_yaml((tmp_path / "plan.yaml").read_text())
    for title in ("Prediction", "Where a mini-batch's time goes", "Other settings", "Run it", "Plan it again"):
        assert title in page.text("h2")
    for sentence in ("Predicted: ", "Bottleneck: "):
        (shown,) = (line for line in page.text("p").splitlines() if line.startswith(sentence))
        assert shown in printed
    cells = page.text("td")
    tried = [option for option in state["options"] if option["epoch_s"]]
    assert tried
    for option in tried:
        assert f": {option['change']}" in cells
        assert f"{state['epoch_s'] / option['epoch_s']:.2f}x" in cells
    assert (tmp_path / "plan.yaml").read_text() in page.text("pre")
    commands = [shlex.split(line) for line in page.text("pre").splitlines() if line.startswith("lgnn ")]
    assert commands == [["lgnn", *run.overrides], ["lgnn", "plan", *run.overrides]]
    shown = page.elements
    (tmp_path / "plan.html").unlink()
    assert report_command.main([str(tmp_path)]) == 0
    said = capfd.readouterr().out
    assert f"{tmp_path}: plan" in said
    assert said.rstrip().endswith("plan.html")
    again = page_of(tmp_path, "plan.html").elements  # but for the planner's sentences
    assert [item for item in again if item[0] != "p"] == [item for item in shown if item[0] != "p"]


COLLECTIVE = CollectivePlan(
    "collective",
    6,
    2,
    num_batches=16,
    ratio=3.0,
    times=StageTimes(*(Duration(mean / 1e3, 1e-4) for mean in (30, 4, 5, 6, 7)), cpu_workers=2),
    epoch_s={"collective": 1.0, "cpu": 2.0, "gpu": 1.5},
)


def test_the_page_of_a_collective_plan(tmp_path):
    forecast = CollectiveForecast(COLLECTIVE, on_cpu=True)
    forecast.save(tmp_path)
    write_plan_page(tmp_path, NASTY, forecast.notes)
    page = page_of(tmp_path, "plan.html")
    assert page.text("h1") == NASTY
    assert NASTY in page.text("title")
    assert "The CPU has played the GPU's part" in page.text("p")
    assert "Of every 8 mini-batches the GPU prepares 6 and the CPU 2." in page.text("p")
    cells = page.text("td").splitlines()
    for expected in ("this plan", "1.00x", "the CPU alone", "2.00x", "1.50x", "30 ms", "7 ms"):
        assert expected in cells


def test_the_page_of_a_hybrid_plan(tmp_path):
    assert plan(tmp_path / "one", HYBRID) == 0
    page, state = page_of(tmp_path / "one", "plan.html"), read_yaml((tmp_path / "one/plan.yaml").read_text())
    cells = page.text("td").splitlines()
    assert " / ".join(map(str, state["best"]["seeds"])) in cells
    assert {*state["stages_of_best"]} <= {*cells}
    run, again = (shlex.split(line) for line in page.text("pre").splitlines() if line.startswith("lgnn "))
    assert run == ["lgnn", *NODE, HYBRID]
    assert again == ["lgnn", "plan", *NODE, HYBRID]


@pytest.mark.parametrize("kind", ["cpu", "collective", "hybrid"])
@pytest.mark.parametrize("bad", [NASTY, None, [NASTY], {NASTY: NASTY}, -1.0, math.nan, True])
def test_whatever_is_in_a_plan_is_text(kind, bad, tmp_path):
    cpu = {
        "epoch_s": 2.0, "batches": 5, "batch_s": {"seconds": 0.4, "training": 0.3, "preparing": 0.1},
        "bottleneck": "products", "parts_s": {"sampling": 0.05, "products": 0.2}, "preparation": {"workers": 1},
        "options": [{"change": "a=1", "epoch_s": 1.0, "note": "slower", "helps": True}],
    }  # fmt: skip
    times = {"seeds": [1, 2], "threads": [1, 1, 1], "iteration_s": 1.0, "epoch_s": 2.0, "mteps": 3.0}
    hybrid = {"best": times, "begin": times, "stages_of_best": {"Sampling": {"seconds": 1.0, "bound_by": "threads"}}}
    whole = {"cpu": cpu, "hybrid": hybrid, "collective": read_yaml(COLLECTIVE.to_yaml())}[kind]
    for path in paths_of(whole):
        state = json.loads(json.dumps(whole))
        inner = state
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = bad
        (tmp_path / "plan.yaml").write_text(json.dumps(state).replace("NaN", ".nan"))
        write_plan_page(tmp_path, said=[NASTY])
        assert NASTY in page_of(tmp_path, "plan.html").text("p")


def paths_of(value):
    """Return the way to each value inside of lists and mappings, theirs included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in ([key], *([key, *rest] for rest in paths_of(inner)))]


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
    assert "[-1,-1]" in shown.replace("\n", "")  # no style of rich's
    monkeypatch.chdir(ran / "day/left")
    assert runs_command.main([]) == 1
    assert "There are no runs in outputs or multirun" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        runs_command.main(["nowhere"])
    assert "nowhere is no folder" in capsys.readouterr().err


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
    assert page_of(tmp_path / "outputs/run").elements == page_of(ran / "day/done").elements
    for name, said in (("failed", NASTY), ("left", "unfinished")):
        assert report_command.main([str(ran / "day" / name)]) == 0
        assert said in capsys.readouterr().out
    assert report_command.main([str(tmp_path)]) == 1
    assert "is not the folder of a run or a sweep" in capsys.readouterr().err


def test_runs_that_were_started_one_by_one_are_compared(tmp_path, monkeypatch, capsys):
    sweep_of(tmp_path / "multirun", [{"test_acc": 0.25 * job} for job in range(2)])
    apart = tmp_path / "outputs/a day"
    sweep_of(apart, [{"test_acc": 0.7}, None])
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
    page = page_of(tmp_path, "comparison.html")
    assert page.text("h1") == "Comparison over seed"
    assert [link["href"] for link in page.all("a")] == ["multirun/0/report.html", "outputs/a%20day/0/report.html"]
    assert {"70.00%", "25.00%", "0.00%"} <= {data.strip() for tag, data in page.texts if tag == "td"}
    assert report_command.main(["multirun", "nowhere"]) == 1
    assert "nowhere is not the folder of a run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep(tmp_path, capfd):
    folder = tmp_path / "multirun"
    assert lgnn(folder, "-m", *FAST, "model.dropout=2,3") == 1
    failed = page_of(folder)
    assert failed.text("span").count("dropout is a probability in [0, 1)") == 2
    assert not failed.all("svg")
    shutil.rmtree(folder)
    assert lgnn(folder, "-m", *FAST, "model=gcn,sage", "seed=1,2", "model.hidden_channels=8") == 0
    page, rows = page_of(folder), compare(folder)
    cells = page.text("td")
    for row in rows:
        assert f"{row['test_acc']:.2%}" in cells
    assert f"{rows[0]['test_acc_mean']:.2%}" in cells
    assert [link["href"] for link in page.all("a")] == [f"{job}/report.html" for job in range(4)]
    assert [drawn["aria-label"] for drawn in page.all("svg")] == ["test_acc", "val_acc"]
    titles = page.text("title").splitlines()
    for job, (model, seed) in enumerate((model, seed) for model in ("gcn", "sage") for seed in (1, 2)):
        assert titles.count(f"job {job}: model={model}, seed={seed}") == 3  # over two settings, and over the epochs
    command = shlex.split(page.text("pre").splitlines()[1])
    assert command[:2] == ["lgnn", "-m"]
    assert {"model=gcn,sage", "seed=1,2", *NODE} <= {*command}
    capfd.readouterr()
    (folder / "report.html").unlink()
    assert report_command.main([str(folder)]) == 0
    assert "Comparison" in capfd.readouterr().out
    assert page_of(folder).elements == page.elements


def sweep_of(folder, scores):
    """Leave the files of runs with two learning rates and two seeds each, one of which has failed."""
    for job, found in enumerate(scores):
        hidden = folder / str(job) / ".hydra"
        hidden.mkdir(parents=True)
        OmegaConf.save([f"task.lr=0.{1 + job // 2}", f"seed={job % 2}"], hidden / "overrides.yaml")
        OmegaConf.save({"hydra": {"job": {"num": job, "config_name": "train"}}}, hidden / "hydra.yaml")
        metrics = {"error": "it broke"} if found is None else {**found, "epoch_time_s": 1.5, "test_loss": 0.3}
        (folder / str(job) / "metrics.json").write_text(json.dumps({**metrics, "title": NASTY}))
