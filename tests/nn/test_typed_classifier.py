import pytest
import pytorch_lightning as pl
import torch
from torch_geometric.nn import HeteroConv, SAGEConv, to_hetero

from lightning_gnn import LinkDataModule, NeighborDataModule
from lightning_gnn.nn import LinkPredictor, NodeClassifier
from tests.batching_data import small_data
from tests.nn.quiet import trainer
from tests.sampling.test_typed import CITES, SIZES, WRITES, typed_data


def make_featured_data():
    """Return data in which a paper's class is the sign of its first feature, and venues have trained features."""
    data = typed_data()
    data["venue"].x = torch.nn.Parameter(torch.randn(SIZES["venue"], 4))
    data["paper"].y = (data["paper"].x[:, 0] > 0).long()
    return data


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = SAGEConv((-1, -1), 16), SAGEConv((-1, -1), 2)

    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)


class Convolutions(torch.nn.Module):
    """PyG's other convention, which returns only the types with incoming edges."""

    def __init__(self, data):
        super().__init__()
        self.conv = HeteroConv({name: SAGEConv((-1, -1), 2) for name in data.edge_types})

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, edge_index_dict)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["to_hetero", "HeteroConv"])
def test_it_learns_and_predicts(kind, tmp_path):
    pl.seed_everything(1, verbose=False)
    data = make_featured_data()
    model = to_hetero(Layers(), data.metadata()) if kind == "to_hetero" else Convolutions(data)
    module = NodeClassifier(model, 2, lr=0.05, target="paper")
    data["paper"].test_mask = data["paper"].val_mask
    datamodule = NeighborDataModule(
        data, num_neighbors=[5, 5], batch_size=64, input_pred_nodes=("paper", torch.arange(7)), sparse_grad=False
    )
    with torch.no_grad():
        module(next(iter(datamodule.val_dataloader())))
    run = trainer(tmp_path, max_epochs=6)
    run.fit(module, datamodule=datamodule)
    assert run.callback_metrics["train_acc"] > 0.8
    assert run.test(module, datamodule, verbose=False)[0]["test_acc"] > 0.7
    (logits,) = run.predict(module, datamodule)
    assert logits.shape == (7, 2)


def test_losses_are_those_of_the_model_by_hand():
    data = make_featured_data()
    torch.manual_seed(0)
    module = NodeClassifier(Convolutions(data), 2, target="paper")
    batch = next(iter(NeighborDataModule(data, num_neighbors=[3], batch_size=20).train_dataloader()))
    loss = module.training_step(batch, 0)
    rows = module.model(batch.x_dict, batch.edge_index_dict)["paper"][:20]
    torch.testing.assert_close(loss["loss"], torch.nn.functional.cross_entropy(rows, batch["paper"].y[:20]))
    assert loss["weight"] == 20


@pytest.mark.parametrize(
    ("target", "change", "error", "message"),
    [
        (None, None, ValueError, r"the batch has the node types .*: give NodeClassifier\(target=…\)"),
        ("editor", None, ValueError, "the batch has no node type 'editor', only paper, author, venue"),
        ("paper", "x", ValueError, "nodes of 'venue' have no features x: add features, or trainable embeddings"),
        ("paper", "y", ValueError, "the batch has no labels 'y'"),
    ],
)
def test_mistakes_are_named(target, change, error, message):
    data = make_featured_data()
    if change == "x":
        del data["venue"].x
    elif change == "y":
        del data["paper"].y
    batch = next(iter(NeighborDataModule(data, num_neighbors=[3], batch_size=20).train_dataloader()))
    with pytest.raises(error, match=message):
        NodeClassifier(Convolutions(data), 2, target=target).training_step(batch, 0)


def test_a_target_needs_types():
    batch = next(iter(NeighborDataModule(small_data(), num_neighbors=[3], batch_size=20).train_dataloader()))
    with pytest.raises(ValueError, match="target='paper' needs heterogeneous batches"):
        NodeClassifier(torch.nn.Identity(), 2, target="paper").training_step(batch, 0)


@pytest.mark.medium
@pytest.mark.parametrize("negatives", ["binary", "triplet"])
@pytest.mark.parametrize("name", [CITES, WRITES])
def test_links_of_a_type(name, negatives, tmp_path):
    pl.seed_everything(2, verbose=False)
    data = make_featured_data()
    model = to_hetero(Layers(), data.metadata())
    edges = data[name].edge_index
    datamodule = LinkDataModule(
        data, (name, edges), None, None, (name, edges[:, :200]), num_neighbors=[4, 4], batch_size=128,
        neg_sampling=negatives, exclude_seed_edges=True, eval_loader_kwargs={"neg_sampling": "binary"},
    )  # fmt: skip
    module = LinkPredictor(model, lr=0.05, target=name)
    batch = next(iter(datamodule.train_dataloader()))
    with torch.no_grad():
        module(batch)
    losses, scores, labels = module._step(batch, "train")
    z = model(batch.x_dict, batch.edge_index_dict)
    source, target, _ = module._get_pairs(batch)
    torch.testing.assert_close(scores, (z[name[0]][source] * z[name[2]][target]).sum(-1))
    assert losses.shape == labels.shape == scores.shape
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, datamodule=datamodule)
    assert 0 <= run.callback_metrics["val_auc"] <= 1
