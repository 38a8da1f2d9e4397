"""Sums of the first layer that are computed ahead of training leave every weight as it is."""

import importlib

import pytest
import pytorch_lightning as pl
import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn import NeighborDataModule
from lightning_gnn.nn import GAT, GCN, GraphSAGE, NodeClassifier
from lightning_gnn.nn.conv import fused
from lightning_gnn.ops.aggregate_update import definition
from tests.nn.fusing import fuse_from

N, CLASSES = 600, 4
MODELS = {
    "mean": lambda: GraphSAGE(12, 24, 2, CLASSES, dropout=0.5),
    "sum": lambda: GraphSAGE(12, 24, 2, CLASSES, aggr="sum"),
    "GCN": lambda: GCN(12, 24, 2, CLASSES, dropout=0.5),
    "GCN, improved": lambda: GCN(12, 24, 2, CLASSES, improved=True),
}
OTHERS = {
    "max": lambda: GraphSAGE(12, 24, 2, CLASSES, aggr="max"),
    "input dropout": lambda: GraphSAGE(12, 24, 2, CLASSES, input_dropout=0.5),
    "product first": lambda: GraphSAGE(12, 4, 2, CLASSES),
    "GAT": lambda: GAT(12, 24, 2, CLASSES, heads=2),
}


@pytest.fixture
def used(monkeypatch):
    """Fuse batches of any size, in bfloat16 where asked for; return the list of calls that took known sums."""
    fuse_from(1, monkeypatch)
    calls, update = [], definition.numba_update
    monkeypatch.setattr(definition, "numba_update", lambda *given: calls.append(1) or update(*given))
    for module in (definition, fused):
        monkeypatch.setattr(module, "multiplies_bfloat16", lambda: True)
    return calls


def draw():
    some = torch.Generator().manual_seed(0)
    edge_index = torch.randint(N, (2, 10 * N), generator=some)
    y = torch.randint(CLASSES, (N,), generator=some)
    return Data(x=torch.randn(N, 12, generator=some), edge_index=edge_index, y=y, train_mask=torch.arange(N) < N // 2)


def train(model, sums_ahead, precision="32-true", module=NodeClassifier, **options):
    pl.seed_everything(1, verbose=False)
    module = module(model(), CLASSES)
    if precision != "32-true":
        options["feature_dtype"] = "bfloat16"
    datamodule = NeighborDataModule(
        draw(), num_neighbors=[5, 3], batch_size=50, seed=1, sums_ahead=sums_ahead, **options
    )
    pl.Trainer(
        accelerator="cpu", max_epochs=2, precision=precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, datamodule)  # fmt: skip
    return list(module.state_dict().values())


def assert_same(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_weights_are_those_without(used, model, precision, workers):
    want = train(MODELS[model], False, precision)
    assert not used
    assert_same(train(MODELS[model], True, precision, num_workers=workers), want)
    assert 0 < len(used) < 12  # not in the first mini-batches, which show what the model reads


@pytest.mark.parametrize("model", OTHERS)
def test_models_that_read_no_sums_of_features_train_as_before(used, model):
    assert_same(train(OTHERS[model], True), train(OTHERS[model], False))
    assert not used


def scale_in_place(batch):
    batch.x.mul_(2)
    return batch


def replace_features(batch):
    batch.x = batch.x + 1
    return batch


def reverse_in_place(batch):
    batch.edge_index[0] = batch.edge_index[0].flip(0)
    return batch


def replace_edges(batch):
    batch.edge_index = batch.edge_index.flip(1)
    return batch


def write_by_numpy(batch):
    batch.x.numpy()[:] *= 2
    return batch


@pytest.mark.parametrize("thread_safe", [False, True])
@pytest.mark.parametrize(
    "transform", [scale_in_place, write_by_numpy, replace_features, reverse_in_place, replace_edges]
)
def test_transforms_are_seen(used, transform, thread_safe):
    options = {"transform": transform, "thread_safe": thread_safe}
    assert_same(train(MODELS["mean"], True, **options), train(MODELS["mean"], False, **options))
    # In the training thread the transform runs last; edges of another order are not trimmed by layer.
    assert bool(used) == (thread_safe and transform in (scale_in_place, write_by_numpy, replace_features))


def test_a_module_that_writes_features_trains_on_what_it_wrote(used):
    class Doubling(NodeClassifier):
        def on_train_batch_start(self, batch, batch_idx):
            batch.x.mul_(2)

    assert_same(train(MODELS["mean"], True, module=Doubling), train(MODELS["mean"], False, module=Doubling))
    assert not used


class SeveralModels(torch.nn.Module):
    """Sums the outputs of all models, whose first layers read different sums of the same mini-batch."""

    def __init__(self):
        super().__init__()
        self.models = torch.nn.ModuleList(make() for make in MODELS.values())

    def forward(self, *arguments, num_sampled_nodes_per_hop=None, num_sampled_edges_per_hop=None):
        hops = {
            "num_sampled_nodes_per_hop": num_sampled_nodes_per_hop,
            "num_sampled_edges_per_hop": num_sampled_edges_per_hop,
        }
        return sum(model(*arguments, **hops) for model in self.models)


def test_models_that_read_different_sums_share_a_loader(used):
    assert_same(train(SeveralModels, True), train(SeveralModels, False))
    assert used


@pytest.mark.parametrize("options", [{"disjoint": True}, {"sampling": "labor"}, {"replace": True}])
def test_other_samplers_have_sums_ahead_too(used, options):
    assert_same(train(MODELS["GCN"], True, **options), train(MODELS["GCN"], False, **options))
    assert used


def test_a_heterogeneous_graph_is_refused():
    data = HeteroData()
    data["a"].x, data["a"].train_mask = torch.rand(9, 2), torch.ones(9, dtype=torch.bool)
    data["a", "to", "a"].edge_index = torch.randint(9, (2, 30))
    with pytest.raises(ValueError, match="sums_ahead=True supports graphs with one node and edge type only"):
        NeighborDataModule(data, num_neighbors=[2], sums_ahead=True).train_dataloader()


def test_memory_is_freed_with_the_mini_batch(used):
    ahead = importlib.import_module("lightning_gnn.ops.aggregate_update.edge_order").prepared
    before = len(ahead)
    train(MODELS["GCN"], True)
    assert used
    assert len(ahead) == before


def test_evaluation_takes_them_too(used):
    options = {"num_neighbors": [5, 3], "batch_size": 50, "seed": 1, "num_workers": 1}
    datamodule = NeighborDataModule(draw(), sums_ahead=True, **options)
    module = NodeClassifier(MODELS["mean"](), CLASSES)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    got = torch.cat(trainer.predict(module, datamodule))
    assert used
    assert torch.equal(got, torch.cat(trainer.predict(module, NeighborDataModule(draw(), **options))))
