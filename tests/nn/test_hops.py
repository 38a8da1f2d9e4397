"""A fanout with more or fewer hops than the model's layers is reported once, in Python and by the command."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GIN, SAGEConv

from lightning_gnn import LinkDataModule, NeighborDataModule, NeighborSampler
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, LinkPredictor, NodeClassifier
from lightning_gnn.nn.models import num_layers
from tests.nn.quiet import trainer

DATA = planted_power_law(300, 2000, 3, 8)
FEWER = "the model has 2 layers, but its mini-batches have 1 hop: nodes of the last hop get no messages"
MORE = "the model has 2 layers, but its mini-batches have 3 hops: nodes sampled beyond the layers have no effect"


class Own(nn.Module):
    """A user's model, whose ``num_layers`` may count something else."""

    def __init__(self, reported, layers=2):
        super().__init__()
        self.num_layers = reported
        self.convs = nn.ModuleList(SAGEConv(8 if i == 0 else 3, 3) for i in range(layers))

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index)
        return x


def get_warnings(module, loaders):
    run = trainer(max_epochs=2, limit_train_batches=2, limit_val_batches=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, loaders)
    return [str(item.message) for item in caught if "hop" in str(item.message)]


def make_batches(*fanouts):
    return NeighborDataModule(DATA, num_neighbors=list(fanouts), batch_size=32)


@pytest.mark.parametrize(("fanouts", "message"), [((4,), FEWER), ((4, 4, 2), MORE), ((4, 4), None)])
@pytest.mark.parametrize("make", [lambda: GraphSAGE(8, 4, 2, 3), lambda: GIN(8, 4, 2, 3), lambda: Own(2)])
def test_models_whose_layers_are_known(make, fanouts, message):
    found = get_warnings(NodeClassifier(make(), 3), make_batches(*fanouts))
    assert len(found) == (message is not None)
    assert all(text.startswith(message) and text.endswith("give num_neighbors one fanout per layer") for text in found)


@pytest.mark.parametrize("model", [Own(None), Own(5), Own(2, layers=1)])
def test_models_whose_layers_are_not_known_are_left_alone(model):
    assert num_layers(model) is None
    assert not get_warnings(NodeClassifier(model, 3), make_batches(4))


@pytest.mark.medium
def test_compiled_models_have_their_layers():
    assert num_layers(torch.compile(GraphSAGE(8, 4, 2, 3))) == 2


def test_other_loaders_and_links():
    loader = NodeLoader(DATA, NeighborSampler(DATA, [4]), input_nodes=DATA.train_mask, batch_size=32)
    assert get_warnings(NodeClassifier(GraphSAGE(8, 4, 2, 3), 3), loader)[0].startswith(FEWER)
    links = LinkDataModule(
        DATA, input_train_edges=DATA.edge_index, num_neighbors=[4], batch_size=64, neg_sampling="binary"
    )
    assert get_warnings(LinkPredictor(GraphSAGE(8, 4, 2, 3)), links)[0].startswith(FEWER)


class Otherwise:
    """A runner, which has another rule for edges."""

    trains = True

    def run(self, model, batch, embeddings=None):
        return model(batch.x, batch.edge_index)


def test_a_runner_selects_its_edges_itself():
    data = copy.copy(DATA)
    data.runner = Otherwise()
    datamodule = NeighborDataModule(data, num_neighbors=[4], batch_size=32)
    assert not get_warnings(NodeClassifier(GraphSAGE(8, 4, 2, 3), 3), datamodule)


def test_exact_evaluation_before_the_first_mini_batch_hides_nothing():
    datamodule = NeighborDataModule(DATA, num_neighbors=[4], batch_size=32, inference="full")
    (found,) = get_warnings(NodeClassifier(GraphSAGE(8, 4, 2, 3), 3), datamodule)
    assert found.startswith(FEWER)
