"""Constant features of a full graph are aggregated once; any change is detected."""

import pytest
import torch

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn import GCN, GraphSAGE
from lightning_gnn.nn.conv import graph as layers
from lightning_gnn.nn.conv.graph import keep_constant


@pytest.fixture
def counted(record_calls):
    """Records the aggregations."""
    return record_calls(layers, "aggregate")


def make_data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(30, (2, 150), generator=generator)
    x = torch.randn(30, 6, dtype=torch.float64, generator=generator)
    return edge_index, CompressedGraph.from_edge_index(edge_index, 30), x


MODELS = [(GCN, {}), (GCN, {"normalize": False}), (GraphSAGE, {}), (GraphSAGE, {"aggr": "max"})]


def make_model(kind, kwargs):
    torch.manual_seed(0)
    return kind(6, 16, 2, 3, **kwargs).double()


def compute_results(model, x, graph, weight=None):
    more = {} if weight is None else {"edge_weight": weight}
    model.zero_grad()
    out = model(x, graph, **more)
    out.square().sum().backward()
    return [out.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_close(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "kwargs"), MODELS)
@pytest.mark.parametrize("weighted", [False, True])
def test_features_are_aggregated_once_and_results_are_those_of_the_edge_index(kind, kwargs, weighted, counted):
    edge_index, graph, x = make_data()
    weighted = weighted and kind is GCN
    weight = torch.rand(150, dtype=torch.float64) + 0.5 if weighted else None
    model = make_model(kind, kwargs)
    keep_constant(graph, x)
    with torch.inference_mode():  # validation may run first
        more = {"edge_weight": weight} if weighted else {}
        model(x, graph, **more)
    for _ in range(3):
        assert_close(compute_results(model, x, graph, weight), compute_results(model, x, edge_index, weight))
    changes_weights = weighted and kwargs.get("normalize") is False  # reordering the weights makes a new tensor
    assert sum(given[1] is x for given in counted) == (4 if changes_weights else 1)


@pytest.mark.parametrize("change", ["features", "result", "object", "weight"])
def test_what_changes_is_aggregated_anew(change):
    edge_index, graph, x = make_data()
    model = make_model(GCN, {})
    weight = torch.rand(150, dtype=torch.float64) + 0.5
    keep_constant(graph, x)
    compute_results(model, x, graph, weight)
    if change == "features":
        x.mul_(2)
    elif change == "result":
        graph.cache["aggregated constant features"][2].zero_()
    elif change == "object":
        x = x + 1
    else:
        weight.mul_(torch.linspace(1, 2, 150, dtype=torch.float64))
    assert_close(compute_results(model, x, graph, weight), compute_results(model, x, edge_index, weight))


def test_trained_features_are_not_kept():
    edge_index, graph, x = make_data()
    model = make_model(GCN, {})
    keep_constant(graph, x.requires_grad_())
    gradients = []
    for edges in (graph, edge_index):
        x.grad = None
        compute_results(model, x, edges)
        gradients.append(x.grad)
    assert_close(gradients[:1], gradients[1:])
    assert "aggregated constant features" not in graph.cache
