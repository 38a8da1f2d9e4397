"""What hybrid training cannot do is said before it begins, with what to do instead."""

import os
import threading

import pytest
import torch
from torch_geometric.loader import DataLoader, LinkLoader
from torchmetrics import MeanMetric

from lightning_gnn import FullGraphDataModule, LinkDataModule
from lightning_gnn.hyscale.decisions import Decision
from lightning_gnn.hyscale.mapping import TaskMapping
from lightning_gnn.hyscale.options import num_cores
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from tests.hyscale.models import CLASSES, Module, data_module, fit, graph, hybrid, left_threads, trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_share": 0.0}, r"in \(0, 1\], but is 0.0"),
        ({"cpu_share": 1.2}, r"in \(0, 1\], but is 1.2"),
        ({"cpu_share": "half"}, "'half'"),
        ({"shares": [0.5, 0.6]}, "add up to 1"),
        ({"shares": [-0.5, 1.5]}, "add up to 1"),
        ({"cpu_share": None}, "but is None"),
        ({"shares": "auto"}, "one number for each trainer"),
        ({"cpu_trainers": -1}, "must not be negative"),
        ({"cpu_trainers": 1.5}, "whole number, but is 1.5"),
        ({"drm": None}, "drm is True, False or the path"),
        ({"drm": 1}, "drm is True, False or the path"),
        ({"prefetch": 3}, "prefetch"),
        ({"stall_timeout": 0}, "stall_timeout"),
        ({"stall_timeout": float("nan")}, "stall_timeout"),
        ({"stall_timeout": "5"}, "stall_timeout"),
        ({"threads": 3}, "at least 1, but are 3"),
        ({"threads": [1.5, 1, 1]}, "at least 1"),
        ({"transfer_dtype": "int4"}, "transfer_dtype"),
        ({"threads": [1, 0, 1]}, "at least 1"),
        ({"threads": [1, 1]}, "at least 1"),
        ({"threads": [1, 1, num_cores() + 5]}, f"may use {num_cores()} cores"),
    ],
    ids=str,
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        HyScaleStrategy(**options)


@pytest.mark.parametrize(("typo", "meant"), [("drn", "drm"), ("cpu_trainer", "cpu_trainers")])
def test_an_option_that_nobody_knows(typo, meant):
    with pytest.raises(TypeError, match=f"there is no option {typo}; did you mean {meant}"):
        HyScaleStrategy(**{typo: False})


def test_nobody_to_train():
    with pytest.raises(ValueError, match="cpu_trainers=0 and no accelerator"):
        fit(Module(), hybrid(0))


def test_shares_for_other_trainers():
    with pytest.raises(ValueError, match="3 entries, but there are 2 trainers"):
        fit(Module(), hybrid(2, shares=[0.2, 0.3, 0.5]))


def test_several_devices_that_are_the_cpu():
    with pytest.raises(ValueError, match="set its cpu_trainers=2"):
        fit(Module(), hybrid(1), devices=2)
    fit(Module(), hybrid(2), devices=2, max_epochs=1)


@pytest.mark.parametrize("precision", ["16-true"])
def test_a_precision_that_one_device_does_not_have(precision):
    with pytest.raises(ValueError, match=r"trainer 0 \(CPU\) of hyscale: which CPUs do not train in"):
        fit(Module(), hybrid(), precision=precision)


def test_full_graphs():
    with pytest.raises(TypeError, match="yields the full graph as one"):
        fit(NodeClassifier(GraphSAGE(6, 8, CLASSES, 2), CLASSES), hybrid(), FullGraphDataModule(graph()))


def test_links():
    data = graph()
    links = LinkDataModule(data, input_train_edges=data.edge_index, num_neighbors=[2], batch_size=10)
    with pytest.raises(TypeError, match=r"needs a torch_geometric\.loader\.NodeLoader.*it got ThreadedLinkLoader"):
        fit(Module(), hybrid(), links)
    assert issubclass(type(links.train_dataloader()), LinkLoader)


def test_loaders_of_other_kinds():
    class Other(Module):
        def train_dataloader(self):
            return DataLoader([graph()], batch_size=1)

    with pytest.raises(TypeError, match="it got DataLoader"):
        trainer(hybrid()).fit(Other())


def test_loaders_that_plan_by_themselves():
    loader = data_module().train_dataloader()
    loader.__class__ = type("CollectiveLoader", (type(loader),), {})

    class Own(Module):
        def train_dataloader(self):
            return loader

    with pytest.raises(ValueError, match="both plan the use of the same cores"):
        trainer(hybrid()).fit(Own().double())


def test_several_loaders():
    class Two(Module):
        def train_dataloader(self):
            return {"a": data_module().train_dataloader(), "b": data_module().train_dataloader()}

    with pytest.raises(ValueError, match="one loader"):
        trainer(hybrid()).fit(Two().double())
    assert not left_threads()


def test_a_step_that_fetches_its_batches():
    class Fetching(Module):
        def training_step(self, dataloader_iter):
            return self.loss(next(dataloader_iter)[0])

    with pytest.raises(TypeError, match="dataloader_iter"):
        fit(Fetching(), hybrid())


class WithLock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.guard = threading.Lock()


class Guarded(Module):
    def __init__(self):
        super().__init__()
        self.net.locked = torch.nn.ModuleList([WithLock()])
        self.net.locked[0].inner = [MeanMetric(), threading.Lock()]


def test_a_module_that_cannot_be_copied_names_the_attribute():
    with pytest.raises(TypeError, match=r"attribute 'net\.locked\.0\.inner' \(list\) cannot be copied"):
        fit(Guarded(), hybrid())
    assert not left_threads()


def test_what_holds_no_module_need_not_be_copied():
    class Fine(Module):
        def __init__(self):
            super().__init__()
            self.lock, self.file = threading.Lock(), open(__file__)  # noqa: SIM115

    module = Fine()
    fit(module, hybrid(), max_epochs=1)
    module.file.close()


def test_lazy_layers():
    from torch_geometric.nn import SAGEConv

    class Lazy(Module):
        def __init__(self):
            super().__init__()
            self.net.first = SAGEConv(-1, 8)

    with pytest.raises((ValueError, RuntimeError), match=r"no shape yet|uninitialized"):
        fit(Lazy(), hybrid(), double=False)


def test_decisions_of_another_run(tmp_path):
    record = tmp_path / "decisions.jsonl"
    record.write_text(Decision(TaskMapping((10, 10, 10), 3), "start", "start").to_json())
    with pytest.raises(ValueError, match="recorded with 3 trainers"):
        fit(Module(), hybrid(2, drm=record))
    with pytest.raises(ValueError, match=r"drm='.*none' is no file; give a log that decision_log= has left"):
        hybrid(2, drm=tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe.* is no (regular )?file"):
        fit(Module(), hybrid(2, drm=tmp_path / "pipe"))


def test_processes_that_nobody_waits_for():
    class TwoProcesses(torch.nn.Module):
        pass

    from lightning_fabric.plugins.environments import LightningEnvironment

    environment = LightningEnvironment()
    environment.set_world_size(2)
    run = trainer(hybrid(), plugins=[environment])
    environment.set_world_size(2)
    with pytest.raises(ValueError, match="one process per node"):
        run.fit(Module().double(), datamodule=data_module())
