"""The debug log names the steps at which a run may stall."""

import logging
import os
import subprocess
import sys

import pytest
import pytorch_lightning as pl

from lightning_gnn import NeighborDataModule
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from tests.batching_data import small_data


def test_a_run_logs_its_steps(caplog, tmp_path):
    data = small_data()
    model = NodeClassifier(GraphSAGE(data.num_features, 8, 1, 4), num_classes=4)
    trainer = pl.Trainer(max_epochs=1, default_root_dir=tmp_path, logger=False, enable_progress_bar=False)
    with caplog.at_level(logging.DEBUG, "lightning_gnn"):
        trainer.fit(model, NeighborDataModule(data, num_neighbors=[2], batch_size=32))
    assert "epoch 0 from mini-batch 0" in caplog.text
    assert "writing the checkpoint" in caplog.text


@pytest.mark.slow
def test_the_environment_sets_the_level():
    script = "import logging, lightning_gnn; print(logging.getLogger('lightning_gnn.loading').getEffectiveLevel())"
    for level, number in {"debug": logging.DEBUG, "": logging.WARNING}.items():
        environment = {**os.environ, "LGNN_LOG": level}
        command = [sys.executable, "-c", script]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert ended.stdout.strip() == str(number)
    environment["LGNN_LOG"] = "loud"
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "LGNN_LOG=loud is not a level of logging" in ended.stderr
