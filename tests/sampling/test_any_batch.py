"""A transform may return what Lightning moves to a device: a dict, list, tuple or dataclass of tensors and graphs."""

import copy
from dataclasses import dataclass

import pytest
import pytorch_lightning as pl
import torch
from torch_geometric.data import Data

from lightning_gnn import CollectiveDataModule, LinkDataModule, NeighborDataModule
from lightning_gnn.collective.routes import PinnedBuffer
from lightning_gnn.hyscale.transfer import Transfer
from lightning_gnn.nn import GCN, LinkPredictor, NodeClassifier
from lightning_gnn.runtime.any_batch import copy_to, map_tensors
from lightning_gnn.sampling.deferred_edges import apply_now
from tests.batch_checks import assert_equal, assert_same
from tests.batching_data import small_data
from tests.refusals import refuses

SIZES = {"num_neighbors": [3, 2], "batch_size": 64, "seed": 1}
MODULES = {
    "neighbor": lambda **more: NeighborDataModule(small_data(), num_workers=1, pin_memory=True, **SIZES, **more),
    "collective": lambda **more: CollectiveDataModule(small_data(), num_workers=1, gpu_route="cpu", **SIZES, **more),
}


@dataclass
class Named:
    x: torch.Tensor
    graph: Data


def as_dict(batch):
    return {"x": batch.x, "graph": batch, "size": batch.batch_size, "none": None}


def as_tuple(batch):
    return batch.x, [batch], "a text"


def as_dataclass(batch):
    return Named(batch.x, batch)


class Opaque:
    def __init__(self, batch):
        self.x = batch.x


def parts_of(batch):
    if isinstance(batch, dict):
        return batch["x"], batch["graph"]
    return (batch[0], batch[1][0]) if isinstance(batch, tuple) else (batch.x, batch.graph)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = GCN(small_data().num_features, 8, 2, 3), []

    def training_step(self, batch, batch_idx):
        x, graph = (batch.x, batch) if isinstance(batch, Data) else parts_of(batch)
        loss = self.net(x, graph.edge_index)[: graph.batch_size].square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def train(name, strategy, **options):
    pl.seed_everything(0, verbose=False)
    model = Model()
    pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, limit_train_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, MODULES[name](**options))  # fmt: skip
    return model.losses


@pytest.mark.medium
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("strategy", ["auto", "hyscale"])
def test_training_is_that_of_the_graphs(name, strategy):
    expected = train(name, strategy)
    assert expected
    for transform in (as_dict, as_tuple, as_dataclass):
        for safe in (False, True):
            assert train(name, strategy, transform=transform, thread_safe=safe) == expected


def draw_batch():
    return next(iter(NeighborDataModule(small_data(), **SIZES).train_dataloader()))


@pytest.mark.parametrize("wrap", [as_dict, as_tuple, as_dataclass, lambda batch: batch])
def test_the_functions_of_accelerators(wrap):
    batch = draw_batch()
    whole = wrap(copy.copy(batch))
    moved = copy_to(whole, torch.device("meta"))
    x, graph = (moved.x, moved) if isinstance(moved, Data) else parts_of(moved)
    assert {x.device.type, graph.x.device.type, graph.edge_index.device.type, graph.e_id.device.type} == {"meta"}
    for found in (
        apply_now(wrap(copy.copy(batch)), torch.clone),
        Transfer(torch.device("cpu"))(wrap(copy.copy(batch))),
        PinnedBuffer(lambda size: torch.empty(size, dtype=torch.uint8)).hold(wrap(copy.copy(batch))),
    ):
        x, graph = (found.x, found) if isinstance(found, Data) else parts_of(found)
        assert_equal(x, batch.x)
        assert_same(graph, draw_batch())


def test_a_collection_is_not_changed():
    batch = as_dict(draw_batch())
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert torch.equal(doubled["graph"].x, 2 * batch["graph"].x)
    assert torch.equal(batch["graph"].x, batch["x"])


def test_objects_with_hidden_tensors_are_named():
    hold = PinnedBuffer(lambda size: torch.empty(size, dtype=torch.uint8)).hold
    for found in (Opaque(draw_batch()), {"a": [Opaque(draw_batch())]}):
        refuses(TypeError, "a transform returned a Opaque, whose tensors", hold, found)
    refuses(TypeError, "returned a ndarray", map_tensors, (draw_batch().x.numpy(),), torch.clone)


@pytest.mark.parametrize("links", [False, True])
def test_modules_that_need_a_graph_say_so(links):
    data = small_data()
    net = GCN(data.num_features, 8, 2, 3)
    module = LinkPredictor(net) if links else NodeClassifier(net, num_classes=3)
    make = LinkDataModule if links else NeighborDataModule
    more = {"neg_sampling": "binary"} if links else {}
    datamodule = make(data, transform=lambda batch: {"x": batch.x}, **SIZES, **more)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False)
    refuses(TypeError, "needs a batch of .*Data or HeteroData, but got dict: let", trainer.fit, module, datamodule)
    refuses(TypeError, "but got dict", module, {"x": data.x})
