"""Workers of one sweep: they share a study of Optuna, and one comparison has the runs of all."""

import csv
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_gnn.report.comparison import ComparisonTable
from tests.cli.command import NODE, fork
from tests.report.test_pages import write_sweep


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/study.db"
        return
    pytest.importorskip("psycopg2")
    programs = shutil.which("pg_ctl"), *Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")
    if (program := next(filter(None, programs), None)) is None:
        pytest.skip("there is no server of PostgreSQL")
    user = {"user": "postgres"} if os.geteuid() == 0 else {}  # it refuses the superuser
    with tempfile.TemporaryDirectory() as folder:
        if user:
            shutil.chown(folder, "postgres")

        def control(*arguments):
            log = f"{folder}/log"
            subprocess.run([program, "-D", f"{folder}/data", "-l", log, *arguments], check=True, cwd=folder, **user)

        control("initdb", "-o", "--auth=trust --username=postgres")
        control("start", "-o", f"-k {folder} -c listen_addresses=")
        yield f"postgresql://postgres@/postgres?host={folder}"
        control("stop", "-m", "immediate")


@pytest.mark.slow
def test_two_workers_share_a_study(tmp_path, storage):
    import optuna

    study = optuna.create_study(storage=storage, study_name="mine", direction="maximize")
    of_study = [f"hydra.sweeper.storage='{storage}'", "hydra.sweeper.study_name=mine", "hydra.sweeper.n_trials=2"]
    searched = ["hydra/sweeper=optuna", *of_study, "hydra.sweeper.direction=maximize", "task.lr=interval(0.001,0.1)"]
    folder = tmp_path / "sweep"

    def work(name):
        own = [f"hydra.sweep.dir={folder}", f"hydra.sweep.subdir={name}-${{hydra.job.num}}"]
        return fork("-m", *NODE, *searched, *own, "trainer.max_epochs=1")

    with ThreadPoolExecutor() as pool:
        for run in pool.map(work, "ab"):
            assert run.returncode == 0, run.stderr
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4
    assert sorted(path.parent.name for path in folder.glob("*/metrics.json")) == ["a-0", "a-1", "b-0", "b-1"]


def test_one_comparison_has_the_runs_of_all_workers(tmp_path):
    for name, scores in {"a": [{"test_acc": 0.5}, {"test_acc": 0.7}], "b": [{"test_acc": 0.6}, None, {}]}.items():
        write_sweep(tmp_path / name, scores)
        for path in (tmp_path / name).glob("*/.hydra/hydra.yaml"):
            subdir = f"{name}/${{hydra.job.num}}"
            OmegaConf.save(OmegaConf.merge(OmegaConf.load(path), {"hydra": {"sweep": {"subdir": subdir}}}), path)
    (tmp_path / "b/2/metrics.json").unlink()  # still runs
    sweep = {name: {"dir": str(tmp_path), "subdir": f"{name}/${{hydra.job.num}}"} for name in "ab"}
    end = ComparisonTable().on_multirun_end
    end(
        OmegaConf.create({"hydra": {"sweep": sweep["a"], "job": {"num": "???"}}})
    )  # the failed run is of another worker
    rows = {row["job"]: row["status"] for row in csv.DictReader((tmp_path / "comparison.csv").open())}
    assert rows == {"a/0": "ok", "a/1": "ok", "b/0": "ok", "b/1": "failed"}
    assert "b/1" in (tmp_path / "report.html").read_text()
    with pytest.raises(SystemExit):
        end(OmegaConf.create({"hydra": {"sweep": sweep["b"]}}))
    rows = {row["job"]: row["status"] for row in csv.DictReader((tmp_path / "comparison.csv").open())}
    assert rows["b/2"] == "failed"
