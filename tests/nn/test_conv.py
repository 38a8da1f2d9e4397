"""Our layers on a compressed graph equal PyG's on its edge_index, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import conv as pyg
from torch_geometric.nn import models as pyg_models

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn import GAT, GCN, GATConv, GCNConv, GraphSAGE, NodeClassifier, SAGEConv
from lightning_gnn.nn.conv.graph import layers_without_graph
from tests.strategies import edge_indices

NODES = 40
GENERATOR = torch.Generator().manual_seed(0)
EDGES = torch.cat(
    [
        torch.randint(30, (2, 160), generator=GENERATOR),  # the last ten nodes are isolated
        torch.tensor([[3, 3, 5, 7, 7], [3, 3, 5, 8, 8]]),  # self-loops, one of them twice, and a duplicate
    ],
    dim=1,
)
X = torch.randn(NODES, 6, dtype=torch.double, generator=GENERATOR)
WEIGHT = torch.rand(EDGES.size(1), dtype=torch.double, generator=GENERATOR)
GRAPH = CompressedGraph.from_edge_index(EDGES, NODES)

LAYERS = [
    (GCNConv, pyg.GCNConv, {}),
    (GCNConv, pyg.GCNConv, {"improved": True, "bias": False}),
    (GCNConv, pyg.GCNConv, {"add_self_loops": False}),
    (GCNConv, pyg.GCNConv, {"normalize": False}),
    (GCNConv, pyg.GCNConv, {"cached": True}),
    (GCNConv, pyg.GCNConv, {"aggr": "mean"}),
    (GCNConv, pyg.GCNConv, {"aggr": "max"}),
    (SAGEConv, pyg.SAGEConv, {}),
    (SAGEConv, pyg.SAGEConv, {"aggr": "sum", "normalize": True}),
    (SAGEConv, pyg.SAGEConv, {"aggr": "add", "root_weight": False}),
    (SAGEConv, pyg.SAGEConv, {"aggr": "max", "bias": False}),
    (SAGEConv, pyg.SAGEConv, {"project": True}),
    (GATConv, pyg.GATConv, {}),
    (GATConv, pyg.GATConv, {"heads": 3, "negative_slope": 0.1}),
    (GATConv, pyg.GATConv, {"heads": 2, "concat": False, "residual": True}),
    (GATConv, pyg.GATConv, {"heads": 2, "add_self_loops": False, "bias": False}),
]


def make_pair(ours, theirs, sizes, **kwargs):
    a, b = ours(*sizes, **kwargs).double(), theirs(*sizes, **kwargs).double()
    a.load_state_dict(b.state_dict())
    return a, b


def assert_equal(a, b, inputs, run_a, run_b):
    out_a, out_b = run_a(a), run_b(b)
    torch.testing.assert_close(out_a, out_b, rtol=1e-12, atol=1e-12)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not out_b.requires_grad:
        return
    factor = torch.randn(out_b.shape, dtype=out_b.dtype, generator=torch.Generator().manual_seed(1))
    options = {"allow_unused": True, "materialize_grads": True}
    grad_a = torch.autograd.grad((out_a * factor).sum(), [*wanted, *a.parameters()], **options)
    grad_b = torch.autograd.grad((out_b * factor).sum(), [*wanted, *b.parameters()], **options)
    for one, other in zip(grad_a, grad_b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("sizes", [(6, 4), (6, 14)], ids=["narrower", "wider"])  # both orders of GCN and SAGE
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(("ours", "theirs", "kwargs"), LAYERS)
def test_a_graph_gives_what_its_edge_index_gives(ours, theirs, kwargs, needs_grad, sizes):
    x = X.clone().requires_grad_(needs_grad)
    assert_equal(
        *make_pair(ours, theirs, sizes, **kwargs), [x], lambda layer: layer(x, GRAPH), lambda layer: layer(x, EDGES)
    )


@settings(max_examples=40)
@given(drawn=edge_indices(), which=st.sampled_from([0, 3, 7, 10, 12, 13]))
def test_on_any_graph(drawn, which):
    num_nodes, edges = drawn
    ours, theirs, kwargs = LAYERS[which]
    graph = CompressedGraph.from_edge_index(edges, num_nodes)
    x = torch.randn(num_nodes, 3, dtype=torch.double, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert_equal(
        *make_pair(ours, theirs, (3, 4), **kwargs), [x], lambda layer: layer(x, graph), lambda layer: layer(x, edges)
    )


@pytest.mark.parametrize("kwargs", [{}, {"improved": True}, {"normalize": False}, {"add_self_loops": False}])
def test_edge_weights_are_in_the_users_order(kwargs):
    # If a node has two self-loops, the last one counts, but PyG's gradient goes to both: remove the first one.
    edges, weight = EDGES[:, torch.arange(165) != 160], WEIGHT[torch.arange(165) != 160].requires_grad_()
    graph = CompressedGraph.from_edge_index(edges, NODES)
    x = X.clone().requires_grad_()
    a, b = make_pair(GCNConv, pyg.GCNConv, (6, 4), **kwargs)
    assert_equal(a, b, [x, weight], lambda layer: layer(x, graph, weight), lambda layer: layer(x, edges, weight))


def test_constant_edge_weights_are_normalised_once_and_anew_after_a_change(record_calls):
    graph = CompressedGraph.from_edge_index(EDGES, NODES)
    a, b = make_pair(GCNConv, pyg.GCNConv, (6, 4))
    weight = WEIGHT.clone()
    calls = record_calls(CompressedGraph, "gcn_weight")
    with torch.inference_mode():
        a(X, graph, weight)
    for _ in range(2):
        a(X, graph, weight).sum().backward()
    assert len(calls) == 1
    weight[5] = 7.0
    torch.testing.assert_close(a(X, graph, weight), b(X, EDGES, weight), rtol=1e-12, atol=1e-12)
    other = WEIGHT.flip(0)
    torch.testing.assert_close(a(X, graph, other), b(X, EDGES, other), rtol=1e-12, atol=1e-12)
    assert len(calls) == 3


@pytest.mark.parametrize("kwargs", [{}, {"aggr": "max"}, {"aggr": "sum", "project": True}])
@pytest.mark.parametrize("sizes", [((6, 5), 4), ((6, 5), 20)])
def test_bipartite_sage(kwargs, sizes):
    generator = torch.Generator().manual_seed(3)
    edges = torch.stack([torch.randint(25, (90,), generator=generator), torch.randint(12, (90,), generator=generator)])
    edges = edges[:, edges[1].argsort(stable=True)]
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(edges[1], minlength=14).cumsum(0)])
    graph = CompressedGraph.from_csc(indptr, edges[0], 25)
    source = torch.randn(25, 6, dtype=torch.double, generator=generator).requires_grad_()
    target = torch.randn(14, 5, dtype=torch.double, generator=generator).requires_grad_()
    a, b = make_pair(SAGEConv, pyg.SAGEConv, sizes, **kwargs)
    both = (source, target)
    assert_equal(a, b, both, lambda layer: layer(both, graph), lambda layer: layer(both, edges, size=(25, 14)))
    assert_equal(
        a, b, [source], lambda layer: layer((source, None), graph),
        lambda layer: layer((source, None), edges, size=(25, 14)),
    )  # fmt: skip


def test_a_product_with_hooks_is_called_as_pyg_calls_it():
    calls = []
    for layer in (GCNConv(20, 4), SAGEConv(4, 20)):
        product = layer.lin if isinstance(layer, GCNConv) else layer.lin_l
        product.register_forward_hook(lambda module, args, out: calls.append(args[0].size(1)))
        layer(torch.randn(NODES, layer.in_channels), GRAPH)
    assert calls == [20, 4]


def test_attention_dropout_drops_edges_and_keeps_the_mean():
    layer = GATConv(6, 4, dropout=0.5).double()
    out, (graph, attention) = layer(X, GRAPH, return_attention_weights=True)
    dropped = float((attention == 0).double().mean())
    assert attention.shape == (graph.num_edges, 1)
    assert 0.3 < dropped < 0.7
    layer.eval()
    _, (_, selected) = layer(X, GRAPH, return_attention_weights=True)
    torch.testing.assert_close(attention[attention != 0], 2 * selected[attention != 0])
    assert not torch.equal(layer(X, GRAPH), out)


MODELS = [
    (GCN, pyg_models.GCN, {}),
    (GCN, pyg_models.GCN, {"norm": "batch", "jk": "cat"}),
    (GraphSAGE, pyg_models.GraphSAGE, {"norm": "layer"}),
    (GAT, pyg_models.GAT, {"heads": 3, "act": "elu"}),
]


@pytest.mark.parametrize(("ours", "theirs", "kwargs"), MODELS)
def test_models_on_a_graph(ours, theirs, kwargs):
    a, b = make_pair(ours, theirs, (6, 12, 3, 5), **kwargs)
    x = X.clone().requires_grad_()
    assert list(a.state_dict()) == list(b.state_dict())
    assert_equal(a, b, [x], lambda model: model(x, GRAPH), lambda model: model(x, EDGES))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GATConv(6, 4, edge_dim=2)(X.float(), GRAPH, torch.rand(165, 2)), "compress=False"),
        (lambda: GATConv(6, 4, aggr="mean")(X.float(), GRAPH), "aggr='mean'"),
        (lambda: SAGEConv(6, 4, aggr="lstm")(X.float(), GRAPH), "aggr='lstm'.*use one of add, sum, mean, max"),
        (lambda: SAGEConv(6, 4, aggr=["mean", "max"])(X.float(), GRAPH), "is not supported on a graph"),
        (lambda: GCNConv(6, 4, flow="target_to_source")(X.float(), GRAPH), "from source to target only"),
        (lambda: GCNConv(6, 4)(X[:-1].float(), GRAPH), r"x must be \[40, 6\] for this graph, but is \[39, 6\]"),
        (lambda: GCNConv(6, 4)((X.float(), X.float()), GRAPH), "but is tuple"),
        (lambda: SAGEConv(6, 4)((X.float(), X[:9].float()), GRAPH), "has 40 targets, but their x has 9 rows"),
        (lambda: GCNConv(6, 4)(X.float(), GRAPH, torch.rand(165, 2)), "one number per edge"),
    ],
)
def test_what_a_graph_does_not_support_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class OwnModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv(6, 8), pyg.GINConv(nn.Linear(8, 3))

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index), edge_index)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (pyg_models.GCN(6, 8, 2, 3), "convs.0"),
        (GAT(6, 8, 2, 3, v2=True), "GATv2Conv"),
        (GAT(6, 8, 2, 3, edge_dim=2), "convs.1"),
        (OwnModel(), "second .*GINConv"),
        (pyg.GINConv(nn.Linear(6, 3)), "model .*GINConv"),
    ],
)
def test_layers_of_pygs_own_refuse_a_graph(model, name):
    assert layers_without_graph(model)
    batch = Data(x=X.float(), edge_index=GRAPH, y=torch.zeros(NODES, dtype=torch.int64))
    with pytest.raises(TypeError, match=rf"{name}.*compress=False"):
        NodeClassifier(model, 3)(batch)
    with pytest.raises(ValueError, match=r"edge_index|edge_dim"):
        model(X.float(), GRAPH)
