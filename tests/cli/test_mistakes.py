"""What users mistype: one line that names the value and what to do, exit code 2, and nothing is loaded or left."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_gnn.cli import main as cli
from tests.cli.command import NODE, lgnn
from tests.refusals import refuses

BARE = ["torch_threads=1", "trainer.enable_progress_bar=false"]
COMPOSED = {
    "strategy=hyscal": "strategy=hyscal is unknown (did you mean hyscale?): there are ascend_hybrid, auto, ddp, ",
    "-m model=gcn,gcnn": "model=gcnn is unknown (did you mean gcn?): there are gat, gcn, gin, hetero_sage",
    "callbacks=timeline": "callbacks=timeline was removed: Lightning's PyTorchProfiler writes a trace in which the",
    "modle=gcn": "modle is unknown; did you mean mode?; +modle=VALUE adds a key",
    "trainer.max_epoch=3": "trainer.max_epoch is unknown; did you mean max_epochs?",
    "datamodule.precompute=first_layer": "datamodule.precompute was removed: epochs took as long with it; leave it out",
    "batch_size=3": "batch_size is unknown; there are ",
    "data=custom data.num_nodes=3": "data.num_nodes is unknown; there are _target_, root, labels; +data.num",
    "data=custom data.memory=8GB": "data.memory was removed: datamodule.memory= alone says that",
    "inference=full datamodule.inference.resume=false": "datamodule.inference.resume was removed: an "
    "interrupted inference='full' starts again; leave it out",
    "datamodule.verify_store=true": "datamodule.verify_store was removed: files of features have no",
    "datamodule.num_neighbors=4,4": "num_neighbors=4,4' 1. To use it as a list, use key=[value1,value2]",
    "datamodule.num_neighbors=[4,": "num_neighbors=[4, cannot be read, as KEY=VALUE: no viable alternative",
    "hyscale": "hyscale cannot be read, as KEY=VALUE: Error parsing override 'hyscale' missing EQUAL",
    "seed=1 doctor": "doctor is a command: put it first, lgnn doctor",
    "mode=test ckpt_path=a/epoch=0-step=9.ckpt": "ckpt_path=a/epoch=0-step=9.ckpt cannot be read, as KEY=VALUE",
    "datamodule.num_neighbors={a:[3]}": "Error merging override datamodule.num_neighbors={a:[3]}",
    "+strategy=hyscale": "Multiple values for strategy",
    "data=null": "Config group override must be a string or a list",
    "~model": "Error resolving interpolation",
    "hydra.run.dir=FILE": "hydra.run.dir=FILE cannot be used: FILE is a file; give another folder",
    "-m hydra.sweep.dir=FILE seed=1,2": "hydra.sweep.dir=FILE cannot be used: FILE is a file; give another folder",
}
BUILT = {
    "experiment=smoke datamodule=full": "datamodule: FullGraphDataModule does not take batch_size=256, num_workers=0, "
    "which experiment=smoke sets; leave it out: give ~datamodule.batch_size ~datamodule.num_workers",
    "trainer.max_epochs=abc": "trainer.max_epochs='abc' must be a whole number or null",
    "trainer.devices=-2": "trainer.devices=-2 must be a whole number of at least 1 with accelerator=cpu",
    "callbacks.best.dirpath=FILE/x": "callbacks.best.dirpath=FILE/x cannot be used: FILE is a file; give another",
    "strategy=hyscale trainer.strategy.drm=FILE/x": "trainer: drm='FILE/x' is no file; give a log that decision_log=",
    "ckpt_path=5": "ckpt_path=5 must be the path of a file",
    "trainer.devices=two": "trainer.devices='two' must be a number of devices, a list of their numbers, or auto",
    "trainer.check_val_every_n_epoch=0": "trainer.check_val_every_n_epoch=0 must be at least 1",
    "trainer.strategy=hyscal": "trainer.strategy=hyscal is unknown (did you mean hyscale?)",
    "+trainer.max_epoch=3": "trainer: Trainer does not take max_epoch=3 (did you mean max_epochs?); leave it out",
    "+trainer.logger=true": "trainer.logger=true has no effect, the command sets it: choose logger=OPTION, or add one "
    "with +logger.NAME._target_=CLASS",
    "+trainer.default_root_dir=x": "trainer.default_root_dir='x' has no effect, the command sets it: give output_dir=",
    "+trainer.callbacks=[{_target_:lightning_gnn.callbacks.Throughput,epoch:3}]": "trainer.callbacks[0]: Throughput "
    "does not take epoch=3",
    "+trainer.enable_checkpointing=false +trainer.callbacks._target_=pytorch_lightning.callbacks.ModelCheckpoint": (
        "trainer: Trainer was configured with `enable_checkpointing=False` but found `ModelCheckpoint` in callbacks"
    ),
    "+task.model={}": "task.model={} has no effect, the command sets it: choose model=OPTION",
    "task=link +datamodule.input_val_edges=[[0],[1]]": "has no effect, the command sets it: task.split decides",
    "seed=-1": "seed=-1 must be a whole number from 0 to 4294967295",
    "seed=first": "seed='first' must be a whole number",
    "datamodule.num_neighbors=4": "datamodule.num_neighbors=4 must be a list of whole numbers or a mapping or null",
    "datamodule.num_neighbors=[4]": "model.num_layers=3, but datamodule.num_neighbors=[4] has 1 fanouts",
    "data.num_nodes=1e3": "data.num_nodes=1000.0 must be a whole number",
    "data.split=0.5": "data.split=0.5 must be a list of numbers",
    "task.label_smoothing=1": "task: label_smoothing is a part of a label, in [0, 1), got 1",
    "task.embeddings=wide": "task.embeddings='wide' must be a whole number of at least 1, or null",
    "data.labels=some": "data.labels='some' must be 'classes' or 'several' or 'numbers'",
    "data.num_nodes=2000 data.num_edges=20000 data.labels=several": "y must hold one integer class per node, but is "
    "torch.int64 [2000, 16]; for several labels per node use task=multilabel, for numbers task=regression",
    "task=multilabel data.labels=classes data.num_nodes=2000 data.num_edges=20000": "data: y must hold 0 or 1 for "
    "each label of each node, [N, L], but is torch.int64 [2000]; for one class per node use task=node, for numbers",
    "task=multilabel task.class_weights=[1]": "task: class_weights must be 16 positive numbers, got [1.0]",
    "model.dropout=abc": "model.dropout='abc' must be a number",
    "task.lr=nan": "task: lr must be positive, got nan",
    "task.optimizer=adam": "task.optimizer='adam' must be an object, as {_target_: …} or null",
    "task=link task.split.num_val=abc": "task.split.num_val=abc must be a number of at least 0",
    "model._target_=torch_geometric.nn.PNA +model.aggregators=[mean] +model.scalers=[identity] +model.deg=null": (
        "model: PNA cannot be built so: AttributeError: 'NoneType' object has no attribute 'to'"
    ),
}


OF_SMALL_RUNS = {
    "mode=tset": "mode='tset' is unknown; use one of train, test, predict",
    "mode=test": "mode=test needs a checkpoint; give ckpt_path=PATH",
    "ckpt_path=nowhere.ckpt": "ckpt_path=nowhere.ckpt: there is no such file",
    "datamodule.num_neighbors=[4,-2]": "num_neighbors holds -2",
    "datamodule.num_workers=-1": "num_workers must not be negative",
    "data.num_edges=10000000": "data: num_edges=10000000 is too dense",
    "data._target_=no.such.function": "data: Error loading 'no.such.function'",
    "+data.colour=red": "data: planted_power_law does not take colour='red'; leave it out",
    "model.dropout=1.5": "model: dropout is a probability in [0, 1), got 1.5",
    "task.name=both": "task.name='both' is unknown",
    "trainer.precision=7": "trainer.precision=7 must be 64 or 32",
    "trainer=npu": "torch_npu is not installed",
    "data=custom": "data.root is missing; give data.root=VALUE",
    "data=planetoid data.name=Corra": "name='Corra' is no Planetoid dataset",
    "inference=full datamodule.inference.memory_limit=much": "memory_limit must be a number of bytes",
    "datamodule=persistent_link": "datamodule=link (persistent_link) makes batches of edges",
    "model=rgcn": "model: RGCN is for graphs with types; use model=sage, gcn, gin or gat",
    "task.target=paper": "task.target=paper, but the graph has no types; leave it out",
    "data=hetero_synthetic": "model: GraphSAGE is for graphs without types, but this one has paper, author, topic; use",
    "data=hetero_synthetic model=rgcn task.target=author": "task.target=author is not a node type with labels",
}


def one_line(directory, capfd, overrides, expected, base=BARE):
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
    assert one_line(tmp_path, capfd, overrides, COMPOSED[overrides]) == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("overrides", BUILT)
def test_a_configuration_that_cannot_be_built(tmp_path, capfd, overrides):
    smoke = [] if "smoke" in overrides else ["data.num_nodes=2000", "data.num_edges=20000"] * ("data" not in overrides)
    one_line(tmp_path, capfd, " ".join([*smoke, overrides]), BUILT[overrides])


@pytest.mark.slow
@pytest.mark.parametrize("overrides", OF_SMALL_RUNS)
def test_a_run_that_cannot_be(tmp_path, capfd, overrides):
    base = [item for item in NODE if not (item.startswith("data.") and "data=" in overrides)]
    one_line(tmp_path, capfd, overrides, OF_SMALL_RUNS[overrides], base)
    assert not (tmp_path / "out/metrics.json").exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc")
def test_a_folder_that_nobody_can_write_to(tmp_path, capfd):
    expected = "hydra.run.dir=/proc/nowhere cannot be used: no folder can be made in /proc: "
    one_line(tmp_path, capfd, "hydra.run.dir=/proc/nowhere", expected)


@pytest.mark.parametrize(("given", "said"), [("model=gnc", "Could not find 'model/gnc'"), ("mode=tset", "is unknown")])
def test_errors_with_their_traceback_on_request(tmp_path, monkeypatch, given, said):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    refuses(Exception, said, lgnn, tmp_path, given)


def test_flags_may_stand_between_overrides(monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["lgnn", "hydra/sweeper=basic", "seed=3", "--cfg", "job", "torch_threads=1"])
    cli.main()
    shown = capfd.readouterr().out
    assert "seed: 3" in shown
    assert "torch_threads: 1" in shown


def test_version(capfd):
    assert lgnn(Path("unused"), "--version") == 0
    shown = capfd.readouterr().out
    assert re.fullmatch(r"lightning-gnn \d\S+, torch \d\S+, pytorch-lightning \d\S+, PyG \d\S+, Python \d\S+\n", shown)


@pytest.mark.parametrize("order", ["--config-dir DIR predict K", "predict K --config-dir DIR", "K predict -cd DIR"])
def test_a_command_and_its_options_may_come_in_any_order(tmp_path, monkeypatch, capfd, order):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("_target_: lightning_gnn.nn.GraphSAGE\nwidth: 4\n")
    given = order.replace("DIR", str(tmp_path)).replace("K", "model=mine --cfg job seed=3").split()
    monkeypatch.setattr("sys.argv", ["lgnn", *given])
    cli.main()
    shown = capfd.readouterr().out
    assert all(line in shown.splitlines() for line in ("mode: predict", "seed: 3", "  width: 4"))
    assert sys.argv == ["lgnn", "mode=predict", *(item for item in given if item != "predict")]


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
    assert lgnn(tmp_path / "again", "--config-dir=nowhere", "predict", saved, base=[]) == 2
    assert "error: --config-dir nowhere: there is no such folder" in capfd.readouterr().err
