"""A model on aggregated features equals PyG's layers: the first on the whole graph, the others on the mini-batch."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch_geometric.nn import GraphSAGE as PyGGraphSAGE
from torch_geometric.nn import conv as pyg

from lightning_gnn.graph import CSCGraph
from lightning_gnn.nn import GAT, GCN, GIN, GraphSAGE
from lightning_gnn.nn.aggregated_features import aggregated_features
from lightning_gnn.nn.first_layer import NAMED, StaticAggregation, aggregation_of_layer, static_aggregation
from lightning_gnn.ops import sample_neighbors

MODELS = {
    "SAGE": lambda **kwargs: GraphSAGE(6, 8, out_channels=3, **kwargs),
    "SAGE sum": lambda **kwargs: GraphSAGE(6, 8, out_channels=3, aggr="sum", **kwargs),
    "SAGE max, normalize": lambda **kwargs: GraphSAGE(6, 8, out_channels=3, aggr="max", normalize=True, **kwargs),
    "SAGE without root": lambda **kwargs: GraphSAGE(6, 8, out_channels=3, root_weight=False, bias=False, **kwargs),
    "SAGE batch norm": lambda **kwargs: GraphSAGE(6, 8, out_channels=3, norm="batch", act_first=True, **kwargs),
    "SAGE jk last": lambda **kwargs: GraphSAGE(6, 8, out_channels=3, jk="last", **kwargs),
    "SAGE narrow": lambda **kwargs: GraphSAGE(6, 2, out_channels=3, **kwargs),
    "SAGE lazy": lambda **kwargs: GraphSAGE(-1, 8, out_channels=3, **kwargs),
    "GIN": lambda **kwargs: GIN(6, 8, out_channels=3, train_eps=True, norm=None, **kwargs),
    "GIN mean": lambda **kwargs: GIN(6, 8, out_channels=3, aggr="mean", norm=None, **kwargs),
    "GCN": lambda **kwargs: GCN(6, 8, out_channels=3, **kwargs),
    "GCN narrow": lambda **kwargs: GCN(6, 2, out_channels=3, **kwargs),
    "GCN without loops": lambda **kwargs: GCN(6, 8, out_channels=3, add_self_loops=False, **kwargs),
    "GCN improved": lambda **kwargs: GCN(6, 8, out_channels=3, improved=True, bias=False, **kwargs),
    "GCN not normalised": lambda **kwargs: GCN(6, 8, out_channels=3, normalize=False, **kwargs),
}


def plain_layer(conv):
    """Return PyG's own layer with the same parameters."""
    kind = next(kind for kind in (pyg.SAGEConv, pyg.GCNConv, pyg.GINConv) if isinstance(conv, kind))
    other = copy.copy(conv)
    other.__class__ = kind
    return other


def reference(model, x, edge_index, edge_weight, out, weights):
    """Rows of the seeds by the definition: no trimming, no fused operator, PyG's layers."""
    for i, (conv, norm) in enumerate(zip(model.convs, model.norms, strict=True)):
        plain = plain_layer(conv)
        given = isinstance(conv, pyg.GCNConv)
        if i == 0:
            x = plain(x, edge_index, edge_weight) if given else plain(x, edge_index)
            x = x[out.node]
        else:
            x = plain(x, out.edge_index, weights) if given else plain(x, out.edge_index)
        if i == model.num_layers - 1 and model.jk_mode is None:
            break
        x = norm(model.act(x)) if model.act_first else model.act(norm(x))
    return (model.lin(x) if model.jk_mode is not None else x)[: out.num_sampled_nodes[0]]


def case(weighted, fanouts, num_nodes=60, num_edges=500):
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    edge_index[:, :20] = edge_index[0, :20]  # self-loops
    x = torch.randn(num_nodes, 6, dtype=torch.float64, generator=generator)
    weight = torch.rand(num_edges, dtype=torch.float64, generator=generator) + 0.1 if weighted else None
    if weight is not None:  # of several self-loops any one may count in PyG
        loops = edge_index[0] == edge_index[1]
        weight[loops] = 1 + edge_index[0][loops].double() / 7
    graph = CSCGraph.from_edge_index(edge_index, num_nodes)
    out = sample_neighbors(graph, torch.arange(10, 25), fanouts, key=1)
    edges = out.edge if graph.edge_ids is None else graph.edge_ids[out.edge]
    return graph, edge_index, x, weight, out, None if weight is None else weight[edges]


@pytest.mark.campaign
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_definition(name, layers, weighted, fused, monkeypatch):
    if fused:  # also such small mini-batches
        monkeypatch.setattr("lightning_gnn.nn.conv.fused.UNFUSED_UP_TO", 0)
    torch.manual_seed(0)
    model = MODELS[name](num_layers=layers).double()
    weighted = weighted and isinstance(model, GCN)
    graph, edge_index, x, weight, out, weights = case(weighted, [4, 3][: layers - 1] or [0])
    aggregated = aggregated_features(graph, x, aggregation_of_layer(model.convs[0]), weight)
    arguments = (x[out.node], out.edge_index) if weights is None else (x[out.node], out.edge_index, weights)
    more = {"x_aggregated": aggregated[out.node]}
    if "lazy" in name:
        model(*arguments, **more)
    hops = {"num_sampled_nodes_per_hop": out.num_sampled_nodes, "num_sampled_edges_per_hop": out.num_sampled_edges}
    if "batch norm" in name:
        model.eval()  # else statistics are those of the rows that are left
    expected = reference(model, x, edge_index, weight, out, weights)
    outer = torch.randn_like(expected)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(expected, parameters, outer, allow_unused=True)
    for found in (model(*arguments, **more, **hops), model(*arguments, **more)[:15]):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        for mine, theirs in zip(torch.autograd.grad(found, parameters, outer, allow_unused=True), wanted, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in MODELS if "SAGE" in name or "not normalised" in name])
def test_with_all_neighbours_it_is_the_whole_graphs_output(name):
    model = MODELS[name](num_layers=2).double().eval()
    graph, edge_index, x, _, out, _ = case(False, [-1])
    aggregated = aggregated_features(graph, x, static_aggregation(model))
    found = model(x[out.node], out.edge_index, x_aggregated=aggregated[out.node])[:15]
    torch.testing.assert_close(found, model(x, edge_index)[10:25], rtol=1e-10, atol=1e-10)


def test_hooks_of_the_first_layer_are_called():
    model = GraphSAGE(6, 8, 2, 3).double()
    graph, _, x, _, out, _ = case(False, [4])
    seen = []
    model.convs[0].register_forward_hook(lambda layer, args, result: seen.append(result.shape))
    aggregated = aggregated_features(graph, x, static_aggregation(model))
    model(x[out.node], out.edge_index, x_aggregated=aggregated[out.node])
    assert seen == [(out.node.numel(), 8)]


def hooked_messages():
    model = GraphSAGE(6, 8, 2)
    model.convs[0].register_message_forward_hook(lambda layer, args, result: result)
    return model


def replaced(model, name, module):
    setattr(model.convs[0], name, module)
    return model


class OwnLayer(pyg.SAGEConv):
    def message(self, x_j):
        return 2 * x_j


def with_first(model, conv):
    model.convs[0] = conv
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PyGGraphSAGE(6, 8, 2), "takes no precomputed first layer"),
        (lambda: nn.Linear(6, 8), "takes no precomputed first layer"),
        (lambda: GraphSAGE(6, 8, 2, input_dropout=0.1), "input_dropout"),
        (lambda: GCN(6, 8, 2, jk="cat"), "jk='cat'"),
        (lambda: GAT(6, 8, 2), "attention"),
        (lambda: GAT(6, 8, 2, v2=True), "attention"),
        (lambda: GraphSAGE(6, 8, 2, aggr="lstm"), "aggr"),
        (lambda: GraphSAGE(6, 8, 2, aggr=["mean", "max"]), "aggr"),
        (lambda: GraphSAGE(6, 8, 2, project=True), "project"),
        (lambda: GraphSAGE(6, 8, 2, flow="target_to_source"), "flow"),
        (lambda: GCN(6, 8, 2, aggr="max"), "aggr='max'"),
        (lambda: GCN(6, 8, 2), "degrees in the mini-batch"),
        (hooked_messages, "hooks"),
        (lambda: replaced(GCN(6, 8, 2), "lin", nn.Linear(6, 8)), "lin"),
        (lambda: with_first(GraphSAGE(6, 8, 2), OwnLayer(6, 8)), "OwnLayer is not SAGEConv"),
    ],
)
def test_what_cannot_be_computed_once_is_refused_with_the_reason(make, message):
    with pytest.raises(ValueError, match=message):
        static_aggregation(make())


def test_the_aggregation_is_that_of_the_first_layer():
    assert static_aggregation(GraphSAGE(6, 8, 2)) == NAMED["mean"]
    assert static_aggregation(SimpleNamespace(_orig_mod=GraphSAGE(6, 8, 2, aggr="max"))) == NAMED["max"]
    assert static_aggregation(GCN(6, 8, 1)) == NAMED["gcn"]
    assert static_aggregation(GCN(6, 8, 2, normalize=False)) == StaticAggregation("sum", weighted=True)
    assert {str(how) for how in NAMED.values()} == {
        "mean of the in-neighbours' features",
        "sum of the in-neighbours' features",
        "max of the in-neighbours' features",
        "GCN-normalised sum of the in-neighbours' features with self-loops",
    }


def test_models_check_what_they_are_given():
    x, edges = torch.rand(5, 6), torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="x_aggregated is"):
        GraphSAGE(6, 8, 2)(x, edges, x_aggregated=x[:4])
    dropping = GraphSAGE(6, 8, 2, input_dropout=0.5)
    with pytest.raises(ValueError, match="input_dropout"):
        dropping(x, edges, x_aggregated=x)
    dropping.eval()(x, edges, x_aggregated=x)
    with pytest.raises(ValueError, match="jk"):
        GCN(6, 8, 2, jk="max")(x, edges, x_aggregated=x)
    with pytest.raises(ValueError, match="attention"):
        GAT(6, 8, 2)(x, edges, x_aggregated=x)
