"""Typing errors: one line with the value and the remedy, exit code 2; nothing is loaded or written."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_gnn.cli.commands import export, partition, train
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.partitioned import partition_graph
from tests.cli.command import NODE, lgnn, run_exactly
from tests.refusals import refuses

BARE = ["torch_threads=1", "trainer.enable_progress_bar=false"]
COMPOSED = {
    "strategy=hyscal": "Could not find 'strategy/hyscal' Available options in 'strategy': ascend_hybrid auto ddp",
    "modle=gcn": "Could not override 'modle'. To append to your config use +modle=gcn: Key 'modle' is not in struct",
    "datamodule.num_neighbors=4,4": "num_neighbors=4,4' 1. To use it as a list, use key=[value1,value2]",
    "hyscale": "Error parsing override 'hyscale' missing EQUAL",
    "mode=test ckpt_path=a/epoch=0-step=9.ckpt": "ckpt_path=a/epoch=0-step=9.ckpt cannot be parsed as KEY=VALUE",
    "~model": "Error resolving interpolation",
    "hydra.run.dir=FILE": "hydra.run.dir=FILE cannot be used: FILE is a file; give another folder",
}
BUILT = {
    "experiment=smoke datamodule=full": "datamodule: ",
    "trainer.devices=-2": "trainer: `devices` selected with `CPUAccelerator` should be an int > 0",
    "strategy=hyscale trainer.strategy.drm=FILE/x": "trainer: drm='FILE/x' is not a file; give a log written by",
    "+trainer.max_epoch=3": "trainer: Trainer.__init__() got an unexpected keyword argument 'max_epoch'",
    "+trainer.logger=true": "trainer.logger=True has no effect, the command sets it; leave it out",
    "+trainer.enable_checkpointing=false": (
        "trainer: Trainer was configured with `enable_checkpointing=False` but found `ModelCheckpoint` in callbacks"
    ),
    "+task.model={}": "task.model={} has no effect, the command sets it; leave it out",
    "task=link +datamodule.input_val_edges=[[0],[1]]": "has no effect, the command sets it; leave it out",
    "seed=-1": "-1 is not in bounds, numpy accepts from 0 to 4294967295",
    "datamodule.num_neighbors=[4]": "model.num_layers=3, but datamodule.num_neighbors=[4] has 1 fanouts",
    "task.label_smoothing=1": "task: label_smoothing must be in [0, 1), got 1",
    "data.num_nodes=2000 data.num_edges=20000 data.labels=several": "y must hold one integer class per node, but is "
    "torch.int64 [2000, 16]; for one class per node use task=node, for several labels per node task=multilabel, for",
    "task=multilabel data.labels=classes data.num_nodes=2000 data.num_edges=20000": "data: y must hold 0 or 1 for "
    "each label of each node, [N, L], but is torch.int64 [2000]; for one class per node use task=node, for several",
    "task=multilabel task.class_weights=[1]": "task: class_weights must be 16 positive numbers, got [1.0]",
    "model.dropout=abc": "model: ",
    "task.lr=nan": "task: lr must be positive, got nan",
    "model._target_=torch_geometric.nn.PNA +model.aggregators=[mean] +model.scalers=[identity] +model.deg=null": (
        "model: cannot build PNA: AttributeError: 'NoneType' object has no attribute 'to'"
    ),
}


OF_SMALL_RUNS = {
    "mode=tset": "mode='tset' is unknown; use one of train, test, predict",
    "mode=test": "mode=test needs a checkpoint; give ckpt_path=PATH",
    "ckpt_path=nowhere.ckpt": "ckpt_path=nowhere.ckpt: no such file",
    "datamodule.num_neighbors=[4,-2]": "num_neighbors holds -2",
    "datamodule.num_workers=-1": "num_workers must not be negative",
    "data.num_edges=10000000": "data: num_edges=10000000 is too dense",
    "data._target_=no.such.function": "data: Error loading 'no.such.function'",
    "model.dropout=1.5": "model: dropout is a probability in [0, 1), got 1.5",
    "task.name=both": "task.name='both' is unknown",
    "trainer=npu": "trainer: accelerator='npu' cannot be used: torch_npu is not installed",
    "data=custom": "data.root is missing; give data.root=VALUE",
    "data=planetoid data.name=Corra": "name='Corra' is not a Planetoid dataset",
    "inference=full datamodule.inference.memory_limit=much": "memory_limit must be a number of bytes",
    "datamodule=persistent_link": "datamodule=link (persistent_link) makes batches of edges",
    "model=rgcn": "model: RGCN is for heterogeneous graphs; use model=sage, gcn, gin or gat",
    "task.target=paper": "task.target=paper, but the graph is homogeneous; leave it out",
    "data=hetero_synthetic": "model: GraphSAGE is for homogeneous graphs, but this one has the node types paper",
    "data=hetero_synthetic model=rgcn task.target=author": "task.target=author is not a node type with labels",
}


def assert_one_line(directory, capfd, overrides, expected, base=BARE):
    file = directory / "file"
    file.write_text("")
    given = overrides.replace("FILE", str(file)).split()
    assert lgnn(directory / "out", *given, base=base) == 2
    out, err = capfd.readouterr()
    assert expected.replace("FILE", str(file)) in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return out


@pytest.mark.campaign
@pytest.mark.parametrize("overrides", COMPOSED)
def test_a_command_line_that_does_not_compose(tmp_path, capfd, overrides):
    assert assert_one_line(tmp_path, capfd, overrides, COMPOSED[overrides]) == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("overrides", BUILT)
def test_a_configuration_that_cannot_be_built(tmp_path, capfd, overrides):
    smoke = [] if "smoke" in overrides else ["data.num_nodes=2000", "data.num_edges=20000"] * ("data" not in overrides)
    assert_one_line(tmp_path, capfd, " ".join([*smoke, overrides]), BUILT[overrides])


@pytest.mark.slow
@pytest.mark.parametrize("overrides", OF_SMALL_RUNS)
def test_a_run_that_cannot_be(tmp_path, capfd, overrides):
    base = [item for item in NODE if not (item.startswith("data.") and "data=" in overrides)]
    assert_one_line(tmp_path, capfd, overrides, OF_SMALL_RUNS[overrides], base)
    assert not (tmp_path / "out/metrics.json").exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc")
def test_a_folder_that_nobody_can_write_to(tmp_path, capfd):
    expected = "hydra.run.dir=/proc/nowhere cannot be used: cannot write to /proc: "
    assert_one_line(tmp_path, capfd, "hydra.run.dir=/proc/nowhere", expected)


def load_nothing(*args, **options):
    raise AssertionError("loaded before the output folder was checked")


@pytest.mark.medium
def test_output_folders_are_checked_first(tmp_path, capfd, monkeypatch):
    for module in (train, partition, export):
        monkeypatch.setattr(module, "build_data", load_nothing)
    file, checkpoint = tmp_path / "file", tmp_path / "some.ckpt"
    file.write_text("")
    torch.save({"state_dict": {}}, checkpoint)
    folder = f"{file}/new"
    said = f"={folder} cannot be used: {file} is a file; give another folder\n"
    calls = {
        "out": lambda: partition.main(["parts=2", f"out={folder}"]),
        "the folder of --to": lambda: export.main([f"ckpt_path={checkpoint}", f"--to={folder}/model.pt2"]),
        "hydra.run.dir": lambda: lgnn(folder),
        "hydra.sweep.dir": lambda: lgnn(folder, "-m", "seed=0,1"),
        "output_dir": lambda: lgnn(tmp_path / "run", f"output_dir={folder}"),
        "callbacks.best.dirpath": lambda: lgnn(tmp_path / "run", f"callbacks.best.dirpath={folder}"),
        "logger.csv.save_dir": lambda: lgnn(tmp_path / "run", f"logger.csv.save_dir=file://{folder}"),
    }
    for name, call in calls.items():
        assert call() == 2, name
        assert capfd.readouterr().err == f"error: {name}{said}"
    (tmp_path / "model").mkdir()
    assert export.main([f"ckpt_path={checkpoint}", f"--to={tmp_path}/model"]) == 2
    assert f"--to={tmp_path}/model is a folder; give a file" in capfd.readouterr().err
    data = planted_power_law(30, 200, 3, 8)
    refuses(ValueError, "folder=.*is a file", partition_graph, data, folder, 2, progress=load_nothing)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "said"), [("model=gnc", "Could not find 'model/gnc'"), ("mode=tset", "is unknown")])
def test_errors_with_their_traceback_on_request(tmp_path, monkeypatch, given, said):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    refuses(Exception, said, lgnn, tmp_path, given)


def test_version(capfd):
    assert lgnn(Path("unused"), "--version") == 0
    shown = capfd.readouterr().out
    assert re.fullmatch(r"lightning-gnn \d\S+, torch \d\S+, pytorch-lightning \d\S+, PyG \d\S+, Python \d\S+\n", shown)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["--config-dir DIR predict K", "predict K --config-dir DIR", "K predict -cd DIR"])
def test_a_command_and_its_options_may_come_in_any_order(tmp_path, capfd, order):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("_target_: lightning_gnn.nn.GraphSAGE\nwidth: 4\n")
    given = order.replace("DIR", str(tmp_path)).replace("K", "model=mine --cfg job seed=3").split()
    _, left = run_exactly(*given)
    shown = capfd.readouterr().out
    assert all(line in shown.splitlines() for line in ("mode: predict", "seed: 3", "  width: 4"))
    assert left == ["mode=predict", *(item for item in given if item != "predict")]


@pytest.mark.slow
def test_a_saved_run_is_rebuilt_with_configurations_from_elsewhere(tmp_path, capfd):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text(
        "_target_: lightning_gnn.nn.GraphSAGE\nhidden_channels: 5\nnum_layers: 2\nin_channels: null\n"
        "out_channels: null\n"
    )
    found = [f"--config-dir={tmp_path}"]
    assert lgnn(tmp_path / "run", *found, "model=mine", "trainer.max_epochs=1", base=[*NODE[:5], *NODE[6:]]) == 0
    saved = f"ckpt_path={tmp_path}/run/checkpoints/best.ckpt"
    assert lgnn(tmp_path / "out", *found, "predict", saved, "seed=1", base=[]) == 0
    assert "rebuilt from the configuration saved in" in capfd.readouterr().out
    assert np.load(tmp_path / "out/predictions.npy").shape == (600, 3)
