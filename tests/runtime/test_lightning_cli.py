"""LightningCLI builds every DataModule and strategy, with the options for loaders and samplers."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import SubsetRandomSampler

import lightning_gnn
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.partitioned import partition_graph

cli = pytest.importorskip("pytorch_lightning.cli")
pytest.importorskip("jsonargparse")
GRAPH = {"num_nodes": 90, "num_edges": 400, "num_classes": 3, "num_features": 4, "split": [0.6, 0.2, 0.2]}
DATA = {"class_path": "lightning_gnn.datasets.synthetic.planted_power_law", "init_args": GRAPH}
SILENT = {
    "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
MODULES = [name for name in dir(lightning_gnn) if name.endswith("DataModule")]
STRATEGIES = ["auto", "ddp", "hyscale", "ascend_hybrid"]
STRATEGIES += [{"class_path": f"lightning_gnn.{name}"} for name in dir(lightning_gnn) if name.endswith("Strategy")]


class Classifier(NodeClassifier):
    def __init__(self, width: int = 8) -> None:
        super().__init__(GraphSAGE(4, width, num_layers=1, out_channels=3), 3)


class UserDataModule(lightning_gnn.NeighborDataModule):
    def __init__(self, num_nodes: int, **kwargs) -> None:
        super().__init__(planted_power_law(**{**GRAPH, "num_nodes": num_nodes}), **kwargs)


@pytest.fixture(autouse=True)
def nothing_typed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])


def build(datamodule, options, strategy="auto"):
    given = {"seed_everything": 3, "trainer": {**SILENT, "strategy": strategy}, "data": options, "model": {"width": 5}}
    return cli.LightningCLI(Classifier, datamodule, run=False, save_config_callback=None, args=given)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    partition_graph(planted_power_law(**GRAPH), folder, parts=2, method="ldg")
    return str(folder)


@pytest.mark.medium
@pytest.mark.parametrize("name", MODULES)
def test_every_data_module_takes_the_options_of_its_loaders(name, parts):
    kind = getattr(lightning_gnn, name)
    given = {"root": parts} if "Partitioned" in name else {"data": DATA}
    if kind is FullGraphDataModule:
        assert build(kind, {**given, "compress": False}).datamodule.graph is None
        return
    own = {"num_neighbors": [3], "batch_size": 16, "shuffle": False, "drop_last": True}
    if name == "PartitionedLinkDataModule":
        own |= {"input_train_edges": [[0] * 20, [1] * 20]}
    datamodule = build(kind, {**given, **own, "sampling": "labor"}).datamodule
    assert not datamodule.shuffle
    assert datamodule.loader_kwargs["drop_last"]
    assert datamodule.sampling_options.sampling == "labor"


@pytest.mark.medium
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_strategy_is_built(strategy):
    made = build(lightning_gnn.NeighborDataModule, {"data": DATA, "num_neighbors": [3]}, strategy).trainer.strategy
    if strategy not in ("auto", "ddp"):
        assert type(made).__name__ in ("HyScaleStrategy", "AscendHybridParallelStrategy", "MonitoredDDPStrategy")


@pytest.mark.medium
def test_a_run_is_that_of_the_same_objects():
    own = {"num_neighbors": [2], "batch_size": 2}
    order = {"class_path": "torch.utils.data.SubsetRandomSampler", "init_args": {"indices": [3, 1, 7]}}
    started = build(UserDataModule, {"num_nodes": 80, **own, "sampler": order})
    assert isinstance(started.datamodule.loader_kwargs["sampler"], SubsetRandomSampler)

    started = build(UserDataModule, {"num_nodes": 80, **own, "shuffle": False})
    plain = copy.deepcopy(started.model)
    started.trainer.fit(started.model, started.datamodule)
    torch.manual_seed(3)
    pl.Trainer(**SILENT).fit(plain, UserDataModule(80, **own, shuffle=False))
    for name, value in started.model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
