"""``lgnn export``: a checkpoint's model as an exported program, and one-line errors."""

import numpy as np
import pytest
import torch

from lightning_gnn.cli.commands import export as export_command
from tests.cli.command import NODE, lgnn


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert lgnn(folder, "trainer.max_epochs=1", "model=gcn") == 0
    return folder / "checkpoints/best.ckpt"


@pytest.mark.slow
def test_the_program_gives_the_predictions_of_the_run(checkpoint, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert lgnn(tmp_path / "predict", "mode=predict", "inference=full", f"ckpt_path={checkpoint}", base=[]) == 0
    assert export_command.main([f"ckpt_path={checkpoint}"]) == 0
    said = capfd.readouterr().out.splitlines()[-1]
    assert said.startswith("model.pt2: x [num_nodes, 8], edge_index [2, num_edges] -> [num_nodes, 3]; on a graph of")
    assert float(said.rpartition(" ")[2]) < 1e-5
    with export_command.initialize():
        data = export_command.build_data(export_command.compose("train", overrides=NODE))
    rows = torch.export.load("model.pt2").module()(data.x, data.edge_index)
    np.testing.assert_allclose(rows.numpy(), np.load("predict/predictions.npy"), rtol=1e-4, atol=1e-5)


def test_one_row_and_another_place(checkpoint, tmp_path, capfd):
    path = tmp_path / "new/one.pt2"
    assert export_command.main([f"ckpt_path={checkpoint}", "--seeds", "1", f"--to={path}"]) == 0
    assert f"{path}: x [num_nodes, 8], edge_index [2, num_edges] -> [1, 3]" in capfd.readouterr().out
    rows = torch.export.load(path).module()(torch.randn(9, 8), torch.randint(9, (2, 30)))
    assert rows.shape == (1, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "mode=predict needs a checkpoint; give ckpt_path=PATH"),
        (["ckpt_path=nowhere.ckpt"], "no such file"),
        (["ckpt_path=CKPT", "model.hidden_channels=8"], "does not fit the configured model"),
        (["ckpt_path=CKPT", "--seeds=0"], "num_seeds must be at least 1"),
    ],
)
def test_mistakes(given, message, checkpoint, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    given = [item.replace("CKPT", str(checkpoint)) for item in given]
    assert export_command.main(given or ["seed=1"]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not [*tmp_path.iterdir()]
