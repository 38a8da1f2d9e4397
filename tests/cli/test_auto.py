"""``datamodule=auto`` and ``plan.machine``: what is chosen is printed, applied, saved and given to other ranks."""

import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lightning_gnn.cli import choose as cli_choose
from lightning_gnn.cli.saved_run import KEY
from lightning_gnn.planning.choice import Choice, Option
from tests.cli.command import NODE, lgnn
from tests.cli.test_conf import compose_config

MACHINES = Path(__file__).parents[2] / "examples/machines"
pytestmark = pytest.mark.usefixtures("cache")
AUTO = ["strategy=auto", "datamodule=auto"]
WORKSTATION = f"plan.machine={MACHINES}/workstation.yaml"


def test_a_run_on_the_cpu_is_as_with_the_choice_written_and_keeps_it(tmp_path, capfd):
    assert lgnn(tmp_path / "auto", *AUTO) == 0
    out = capfd.readouterr().out
    assert "Chosen: strategy=auto datamodule=neighbor\nWhy: without an accelerator" in out
    assert "To write it yourself: strategy=auto datamodule=neighbor\n" in out
    assert lgnn(tmp_path / "written", "strategy=auto", "datamodule=neighbor") == 0
    capfd.readouterr()
    saved, written = (
        torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True) for name in ("auto", "written")
    )
    for name, value in saved["state_dict"].items():
        assert torch.equal(value, written["state_dict"][name])
    for node in (saved[KEY]["config"]["datamodule"], OmegaConf.load(tmp_path / "auto/.hydra/config.yaml").datamodule):
        assert node["_target_"] == "lightning_gnn.datamodules.NeighborDataModule"
    resumed = ["trainer.max_epochs=3", f"ckpt_path={tmp_path}/auto/checkpoints/last.ckpt"]
    assert lgnn(tmp_path / "more", *AUTO, *resumed, base=["trainer.enable_progress_bar=false"]) == 0
    assert "Chosen" not in capfd.readouterr().out


def test_a_choice_is_applied_and_given_to_other_ranks(tmp_path, monkeypatch):
    cfg = compose_config(*NODE, *AUTO, f"output_dir={tmp_path}")
    chosen = Choice(Option("hyscale", "collective", 1), "", {"datamodule.num_workers": 7})
    monkeypatch.setattr(cli_choose, "choose_run", lambda *given: chosen)
    monkeypatch.setattr(cli_choose, "build_task", lambda *given: (None, None))
    monkeypatch.setattr(sys, "argv", ["lgnn", "seed=1", *AUTO, "+datamodule.cache_bytes=5"])
    cli_choose.choose(cfg, None)
    assert cfg.datamodule._target_ == "lightning_gnn.collective.CollectiveDataModule"
    assert (cfg.datamodule.num_workers, cfg.datamodule.batch_size, cfg.datamodule.gpu_buffer_size) == (7, 64, 10)
    assert cfg.trainer.strategy._target_ == "lightning_gnn.HyScaleStrategy"
    again = compose_config(*NODE, f"output_dir={tmp_path}", *sys.argv[1:])
    again.datamodule.cache_bytes, again.seed = cfg.datamodule.cache_bytes, cfg.seed
    assert again == cfg


@pytest.mark.parametrize(
    ("overrides", "has_stages"),
    [(AUTO, False), (["datamodule=collective"], False), (["datamodule=collective", "strategy=hyscale"], True)],
    ids=["auto", "collective", "both"],
)
def test_a_described_machine_is_planned(overrides, has_stages, tmp_path, capfd):
    assert lgnn(tmp_path, *overrides, WORKSTATION, command=["plan"]) == 0
    out = capfd.readouterr().out
    for text in ("Machine, as described", "Together: seeds", "collective batching", "lower bound", "64 seeds"):
        assert text in out
    assert ("Feature Loading" in out) == has_stages
    assert ("Chosen: strategy=" in out) == (overrides == AUTO)
    state = OmegaConf.load(tmp_path / "plan.yaml")
    assert state.platform.cores == 8
    assert state.node.iteration_s <= min(each.iteration_s for each in state.node.alone.values())
    assert sum(state.node.seeds) == 64


@pytest.mark.parametrize(
    ("command", "overrides", "message"),
    [
        ("plan", [WORKSTATION], "plan.machine is for strategy=hyscale, datamodule=collective and datamodule=auto"),
        ("plan", [*AUTO, "plan.machine=nowhere.yaml"], "nowhere.yaml: "),
        ("", ["task=link", *AUTO], "datamodule=auto is for nodes; give task=link datamodule=link"),
    ],
    ids=["plain", "missing", "link"],
)
def test_what_is_refused(command, overrides, message, tmp_path, capfd):
    assert lgnn(tmp_path, *overrides, command=[command] if command else []) == 2
    assert message in capfd.readouterr().err
