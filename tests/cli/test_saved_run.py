"""Runs that are rebuilt from the configuration in their checkpoint."""

import shutil

import pytest
import torch
from omegaconf import OmegaConf

from lightning_gnn.cli.saved_run import KEY
from tests.cli.command import NODE, lgnn, metrics_of, run_exactly

EXACT = "datamodule.num_neighbors=[-1,-1]"  # the neighbors sampled for a test depend on the epoch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A GAT run whose configuration differs from many defaults."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    more = ["model=gat", "model.heads=2", "model.dropout=0.1", "+callbacks.more._target_=pytorch_lightning.Callback"]
    assert lgnn(folder, EXACT, *more, "~callbacks.curves", "seed=3") == 0
    return folder


def load_config(folder):
    return OmegaConf.load(folder / ".hydra/config.yaml")


def retest(folder, checkpoint, *overrides):
    return lgnn(folder, "mode=test", f"ckpt_path={checkpoint}", *overrides, base=[])


@pytest.mark.slow
def test_a_checkpoint_alone_is_enough(trained, tmp_path, capfd):
    assert retest(tmp_path / "test", trained / "checkpoints/best.ckpt") == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "rebuilt from the configuration saved in" in out
    assert "2-layer GAT" in out
    assert metrics_of(tmp_path / "test")["test_acc"] == metrics_of(trained)["test_acc"]
    assert metrics_of(tmp_path / "test")["test_loss"] == metrics_of(trained)["test_loss"]
    now, then = load_config(tmp_path / "test"), load_config(trained)
    assert "curves" not in now.callbacks
    for key in ("mode", "ckpt_path"):
        del now[key], then[key]
    assert now == then


@pytest.mark.slow
def test_a_checkpoint_of_a_choice_that_is_gone_is_rebuilt(trained, tmp_path):
    """Its configuration is saved whole, so that a file of ``conf/`` may be renamed or removed."""
    checkpoint = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)
    checkpoint[KEY]["choices"]["model"] = "of_a_file_that_is_gone"
    torch.save(checkpoint, tmp_path / "other.ckpt")
    assert retest(tmp_path / "test", tmp_path / "other.ckpt") == 0
    for name in ("test_acc", "test_loss"):
        assert metrics_of(tmp_path / "test")[name] == metrics_of(trained)[name]


@pytest.mark.slow
def test_the_folder_of_a_run_is_answered_with_its_best_checkpoint(trained, tmp_path, capfd):
    assert retest(tmp_path / "test", trained) == 2
    assert f"a folder; give a file, such as {trained}/checkpoints/best.ckpt" in capfd.readouterr().err
    assert retest(tmp_path / "test", tmp_path) == 2
    assert f"ckpt_path={tmp_path}: no such file" in capfd.readouterr().err


@pytest.mark.slow
def test_what_is_typed_wins(trained, tmp_path, capfd):
    best = trained / "checkpoints/best.ckpt"
    assert retest(tmp_path / "value", best, "datamodule.batch_size=32", "model.heads=2", "+callbacks.more.x=1") == 2
    assert "callbacks.more" in capfd.readouterr().err  # Callback takes no x
    assert retest(tmp_path / "value", best, "datamodule.batch_size=32", "~callbacks.more") == 0
    cfg = load_config(tmp_path / "value")
    assert (cfg.datamodule.batch_size, cfg.model.heads, "more" in cfg.callbacks) == (32, 2, False)
    # A group's new option replaces only the saved options of that group.
    assert retest(tmp_path / "group", best, "datamodule=full") == 0
    assert metrics_of(tmp_path / "group")["test_acc"] == metrics_of(trained)["test_acc"]
    assert retest(tmp_path / "inference", best, "inference=full") == 0
    assert load_config(tmp_path / "inference").datamodule.num_neighbors == [-1, -1]
    assert metrics_of(tmp_path / "inference")["test_acc"] == metrics_of(trained)["test_acc"]
    assert retest(tmp_path / "model", best, "model=gcn", "model.num_layers=2") == 2
    assert "does not fit the configured model" in capfd.readouterr().err
    assert retest(tmp_path / "task", best, "experiment=smoke") == 2
    assert "experiment=smoke makes another run than the one saved" in capfd.readouterr().out


def test_flags_may_come_last(trained, capfd):
    run_exactly("mode=test", f"ckpt_path={trained}/checkpoints/best.ckpt", "--cfg", "job")
    out, err = capfd.readouterr()
    assert err == ""
    assert "lightning_gnn.nn.GAT" in out
    assert "LearningCurves" not in out


@pytest.mark.slow
def test_a_moved_folder_and_a_copied_checkpoint(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "moved")
    shutil.copy(trained / "checkpoints/best.ckpt", tmp_path / "copy.ckpt")
    again = OmegaConf.load(trained / ".hydra/overrides.yaml")  # repeating the same overrides changes nothing
    for name, checkpoint, more in (("a", "moved/checkpoints/best.ckpt", []), ("b", "copy.ckpt", again)):
        assert retest(tmp_path / name, tmp_path / checkpoint, *more) == 0
        assert metrics_of(tmp_path / name)["test_loss"] == metrics_of(trained)["test_loss"]


@pytest.mark.slow
def test_a_checkpoint_without_configuration_is_built_from_what_is_typed(trained, tmp_path, capfd):
    path = tmp_path / "bare.ckpt"
    checkpoint = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)
    assert checkpoint.pop(KEY)["config"]["model"]["heads"] == 2
    torch.save(checkpoint, path)
    assert retest(tmp_path / "alone", path, *NODE, EXACT, "model=gat", "model.heads=2") == 0
    assert "no configuration was saved with" in capfd.readouterr().out
    assert metrics_of(tmp_path / "alone")["test_loss"] == metrics_of(trained)["test_loss"]


@pytest.mark.slow
def test_resuming_by_the_checkpoint_alone_is_an_uninterrupted_run(trained, tmp_path):
    base = [*NODE, "model=gcn", "+trainer.max_steps=-1"]
    assert lgnn(tmp_path / "whole", base=base) == 0
    assert lgnn(tmp_path / "half", "trainer.max_epochs=1", base=base) == 0
    last = tmp_path / "half/checkpoints/last.ckpt"
    assert lgnn(tmp_path / "on", f"ckpt_path={last}", "trainer.max_epochs=2", base=[]) == 0
    assert metrics_of(tmp_path / "on")["test_loss"] == metrics_of(tmp_path / "whole")["test_loss"]
    assert load_config(tmp_path / "on").trainer == load_config(tmp_path / "whole").trainer


@pytest.mark.parametrize("size", [0, 20, 5000])
def test_a_file_that_is_no_checkpoint_is_named(trained, tmp_path, capfd, size):
    (tmp_path / "bad.ckpt").write_bytes((trained / "checkpoints/best.ckpt").read_bytes()[:size])
    assert retest(tmp_path / "out", tmp_path / "bad.ckpt") == 2
    err = capfd.readouterr().err
    assert f"{tmp_path}/bad.ckpt is damaged: it is empty, truncated or not a torch file" in err
    assert err.count("\n") == 1
