"""Heterogeneous graphs: two ranks train the same as a plain Trainer, embeddings included."""

import functools

import pytest
import torch

from lightning_gnn import LinkDataModule, NeighborDataModule
from lightning_gnn.nn import RGCN, HeteroGraphSAGE, LinkPredictor, NodeClassifier, NodeRegressor, TypeEmbeddings
from tests.campaigns import cases_of
from tests.full_graph.launch import run
from tests.hyscale.training import copy_state, fit, make_hybrid
from tests.sampling.test_typed import WRITES, typed_data

SGD = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9)
WIDTH = 5


def make_wide_data(venues=True):
    data = typed_data()
    for name in ("paper", "author"):
        data[name].x = data[name].x.double()
    if venues:
        data["venue"].x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    return data


def make_network(kind, data, outputs):
    torch.manual_seed(2)
    return kind(data.metadata(), data.num_features | {"venue": WIDTH}, 8, 2, outputs)


def make_node_case(data, **options):
    return NeighborDataModule(data, num_neighbors=[-1, -1], batch_size=60, seed=0, share_memory=False, **options)


def make_classifier_case(kind=HeteroGraphSAGE, **options):
    data = make_wide_data()
    module = NodeClassifier(make_network(kind, data, 3), 3, target="paper", optimizer=SGD, **options)
    return module.double(), make_node_case(data)


def make_regression_case():
    data = make_wide_data()
    data["paper"].y = data["paper"].x[:, :2] * 3
    return NodeRegressor(make_network(RGCN, data, 2), target="paper", optimizer=SGD).double(), make_node_case(data)


def make_embedding_case(sparse, **options):
    """A node type with a trained embedding table as features."""
    data = make_wide_data(venues=False)
    torch.manual_seed(4)
    embeddings = TypeEmbeddings(data, WIDTH, sparse=sparse, **options.pop("of_tables", {}))
    module = NodeClassifier(make_network(RGCN, data, 3), 3, target="paper", embeddings=embeddings, **options)
    return module.double(), make_node_case(data)


def make_link_case():
    data = make_wide_data()
    edges = (WRITES, data[WRITES].edge_index[:, :200])
    labels = (torch.arange(200) % 3 > 0).double()
    source = LinkDataModule(data, edges, labels, num_neighbors=[-1, -1], batch_size=60, seed=0, share_memory=False)
    return LinkPredictor(make_network(HeteroGraphSAGE, data, 8), target=WRITES, optimizer=SGD).double(), source


KINDS = {
    "GraphSAGE": make_classifier_case,
    "R-GCN": functools.partial(make_classifier_case, RGCN),
    "class weights": functools.partial(make_classifier_case, class_weights=[0.5, 1.0, 4.0], label_smoothing=0.1),
    "numbers": make_regression_case,
    "links": make_link_case,
    "dense tables": functools.partial(make_embedding_case, False, optimizer=SGD),
    "sparse tables": functools.partial(make_embedding_case, True, optimizer=SGD, of_tables={"optimizer": SGD}),
    "sparse tables, SparseAdam": functools.partial(make_embedding_case, True, lr=0.02),
    "sparse tables, clipped": functools.partial(make_embedding_case, True, lr=0.02),
}
OPTIONS = {"sparse tables, clipped": {"gradient_clip_val": 0.05}}


def train_state(name, strategy="auto"):
    module, data = KINDS[name]()
    before = copy_state(module)
    fit(module, strategy, data=data, **OPTIONS.get(name, {}))
    after = copy_state(module)
    assert any(not torch.equal(after[key], before[key]) for key in after)
    return after


def train_all(rank, names):
    return {name: train_state(name, make_hybrid(2)) for name in names}


@functools.cache
def run_ranks(session):
    names = [case["name"] for case in cases_of(session, test_two_ranks_train_what_one_does)]
    return run(train_all, 2, names)


@pytest.mark.medium
@pytest.mark.campaign
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_train_what_one_does(name, request):
    expected = train_state(name)
    for found in run_ranks(request.session):
        assert found[name].keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[name][key], value, rtol=1e-7, atol=1e-9)
