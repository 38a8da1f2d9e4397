"""Loggers that are packages of their own: no network where they are installed, and an error that says how where not."""

import importlib.util

import pytest

from lightning_gnn.cli.assemble import LOGGERS
from tests.cli.command import lgnn

FAST = ["trainer.max_epochs=1"]


def installed(name):
    return importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_named_with_its_extra(name, tmp_path, capfd):
    if installed(name):
        pytest.skip(f"{name} is installed")
    assert lgnn(tmp_path, f"logger={name}", *FAST) == 2
    assert f"pip install 'lightning-gnn[{name}]'" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not installed("tensorboard"), reason="tensorboard is not installed")
def test_tensorboard_has_the_scores(tmp_path):
    assert lgnn(tmp_path, "logger=tensorboard", *FAST) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"val_acc", "test_acc"} <= {*events.Tags()["scalars"]}


@pytest.mark.slow
@pytest.mark.skipif(not installed("wandb"), reason="wandb is not installed")
def test_weights_and_biases_writes_a_run_that_can_be_sent_later(tmp_path):
    assert lgnn(tmp_path, "logger=wandb", "logger.wandb.offline=true", *FAST) == 0
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert [path for path in run.glob("*.wandb") if path.stat().st_size]


@pytest.mark.slow
@pytest.mark.skipif(not installed("mlflow"), reason="mlflow is not installed")
def test_mlflow_has_the_scores(tmp_path, monkeypatch):
    store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert lgnn(tmp_path, "logger=mlflow", *FAST) == 0
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("lightning-gnn").experiment_id])
    assert {"val_acc", "test_acc"} <= {*run.data.metrics}
