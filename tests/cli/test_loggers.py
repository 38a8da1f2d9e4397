"""Loggers from separate packages: offline if installed, one line if not."""

import importlib.util

import pytest

from tests.cli.command import lgnn

FAST = ["trainer.max_epochs=1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named(name, tmp_path, capfd):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    assert lgnn(tmp_path, f"logger={name}", *FAST) == 2
    assert name in capfd.readouterr().err


def scores_of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events.Tags()["scalars"]


def scores_of_mlflow(folder):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("lightning-gnn").experiment_id])
    return run.data.metrics


@pytest.mark.slow
@pytest.mark.parametrize("scores", [scores_of_tensorboard, scores_of_mlflow])
def test_a_logger_has_the_scores(tmp_path, monkeypatch, scores):
    name = scores.__name__.rpartition("_")[2]
    pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert lgnn(tmp_path, f"logger={name}", *FAST) == 0
    assert {"val_acc", "test_acc"} <= {*scores(tmp_path)}


@pytest.mark.slow
def test_weights_and_biases_writes_a_run_that_can_be_sent_later(tmp_path):
    pytest.importorskip("wandb")
    assert lgnn(tmp_path, "logger=wandb", "logger.wandb.offline=true", *FAST) == 0
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert [path for path in run.glob("*.wandb") if path.stat().st_size]
