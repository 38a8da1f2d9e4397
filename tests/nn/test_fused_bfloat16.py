"""Layers on mini-batches under autocast and in bfloat16 use the fused operators and are close to float32."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch_geometric.nn.conv import MessagePassing

from lightning_gnn.nn import (
    GAT,
    GCN,
    GIN,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphSAGE,
    GraphTransformer,
    SAGEConv,
    TransformerConv,
)
from lightning_gnn.nn.conv import attention, fused
from lightning_gnn.ops.aggregate_update import definition
from tests.nn.fusing import fuse_from

LAYERS = {
    "mean": lambda: SAGEConv(12, 10),
    "sum, no root": lambda: SAGEConv(12, 10, aggr="sum", root_weight=False),
    "wide": lambda: SAGEConv(12, 40),
    "max": lambda: SAGEConv(12, 10, aggr="max"),
    "projected": lambda: SAGEConv(12, 10, project=True),
    "GCN": lambda: GCNConv(12, 10),
    "GIN": lambda: GINConv(nn.Linear(12, 10)),
    "GraphSAGE": lambda: GraphSAGE(12, 16, num_layers=2, out_channels=10),
    "GCN, model": lambda: GCN(12, 16, num_layers=2, out_channels=10),
}
ATTENTION = {
    "GAT": lambda: GATConv(12, 5, heads=2),
    "GAT, averaged": lambda: GATConv(12, 10, heads=2, concat=False, residual=True),
    "GATv2": lambda: GATv2Conv(12, 5, heads=2),
    "GATv2, shared": lambda: GATv2Conv(12, 10, share_weights=True, residual=True),
    # Without biases: the gradient of the keys' one is 0.
    "transformer": lambda: TransformerConv(12, 5, heads=2, bias=False),
    "transformer, averaged": lambda: TransformerConv(12, 10, heads=2, concat=False, beta=True, bias=False),
    "GAT, model": lambda: GAT(12, 16, num_layers=2, out_channels=10, heads=2),
}
MODELS = {
    "SAGE": lambda: GraphSAGE(12, 16, num_layers=2, out_channels=10),
    "GCN": lambda: GCN(12, 16, num_layers=2, out_channels=10),
    "GIN": lambda: GIN(12, 16, num_layers=2, out_channels=10, norm=None),
    "GAT": lambda: GAT(12, 16, num_layers=2, out_channels=10, heads=2),
    "GATv2": lambda: GAT(12, 16, num_layers=2, out_channels=10, heads=2, v2=True),
    "transformer": lambda: GraphTransformer(12, 16, num_layers=2, out_channels=10, heads=2, bias=False),
}

TOLERANCE = 0.06
"""Relative to a matrix's norm: products and sums are rounded to 8 bits, and ReLU may flip near zero."""
CANCELING = 0.15
"""The same where gradients of scores are rounded, whose sums cancel."""


def refuse_pygs_path(monkeypatch):
    """Let PyG's layers fail where they aggregate; each class gets its own propagate() as it is instantiated."""

    @functools.wraps(MessagePassing.aggregate)  # PyG inspects the signature
    def refuse(*_, **__):
        raise AssertionError("PyG's path was taken")

    monkeypatch.setattr(MessagePassing, "aggregate", refuse)


@pytest.fixture(params=[True, False], ids=["products in bfloat16", "products in float32"])
def narrow(monkeypatch, request):
    """Compute as on a CPU that multiplies faster in bfloat16, and as on one that does not."""
    for module in (attention, definition, fused):
        monkeypatch.setattr(module, "multiplies_bfloat16", lambda: request.param)
    return request.param


@pytest.fixture
def always(monkeypatch, fused_always, narrow):
    """Fuse batches of any size, and reject PyG's path."""
    refuse_pygs_path(monkeypatch)


def differentiate(model, x, edge_index, low):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        out = model(x, edge_index)
    grads = torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])
    return [out, *grads]


@pytest.mark.slow
@pytest.mark.parametrize("features", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS | ATTENTION)
def test_autocast_gives_what_float32_gives_but_for_rounding(always, narrow, layer, features):
    torch.manual_seed(0)
    edge_index = torch.randint(50, (2, 400))
    x, model = torch.randn(50, 12).to(features), (LAYERS | ATTENTION)[layer]()
    got, want = differentiate(model, x, edge_index, True), differentiate(model, x.float(), edge_index, False)
    if "transformer" in layer or (narrow and layer in LAYERS):
        assert got[0].dtype == torch.bfloat16
    else:  # not rounded where the next layer would widen it, or by PyG's bias
        assert got[0].dtype == torch.float32
    assert got[1].dtype == features
    for a, b in zip(got, want, strict=True):
        # Compared as a whole: where a sum is close to zero, only rounding errors of its terms remain.
        assert (a.float() - b).norm() <= (CANCELING if narrow and layer in ATTENTION else TOLERANCE) * b.norm()


@pytest.mark.parametrize("features", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
def test_trimmed_models_fuse_every_layer_under_autocast(always, narrow, model, features):
    torch.manual_seed(0)
    nodes, num_edges = [40, 80, 200], [200, 800]
    source = torch.cat([torch.randint(120, (200,)), torch.randint(320, (800,))])
    edge_index = torch.stack([source, torch.cat([torch.arange(200) % 40, 40 + torch.arange(800) % 80])])
    x, whole = torch.randn(320, 12).to(features), MODELS[model]()

    def trimmed(x, edge_index):
        return whole(x, edge_index, num_sampled_nodes_per_hop=nodes, num_sampled_edges_per_hop=num_edges)

    trimmed.parameters = whole.parameters
    got, want = differentiate(trimmed, x, edge_index, True), differentiate(trimmed, x.float(), edge_index, False)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b).norm() <= (CANCELING if narrow and "GAT" in model else TOLERANCE) * b.norm()


@pytest.mark.parametrize("layer", ATTENTION)
def test_attention_under_autocast_is_as_near_float32_as_pygs(monkeypatch, narrow, layer):
    torch.manual_seed(0)
    edge_index, x, model = torch.randint(50, (2, 400)), torch.randn(50, 12).bfloat16(), ATTENTION[layer]()
    exact = differentiate(model, x.float(), edge_index, False)  # few edges are not fused
    unfused = differentiate(model, x, edge_index, True)
    fuse_from(1, monkeypatch)
    fused = differentiate(model, x, edge_index, True)
    assert (fused[0] - unfused[0]).norm() <= TOLERANCE * unfused[0].norm()
    for a, b, want in zip(fused, unfused, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a.float() - want).norm() < (3 if narrow else 1) * (b.float() - want).norm()


@pytest.mark.parametrize("kind", ["max", "projected", "GIN"])
def test_autocast_multiplies_in_the_faster_dtype(monkeypatch, fused_always, narrow, kind):
    layer, seen = LAYERS[kind](), []
    lin = {"max": "lin_r", "projected": "lin", "GIN": "nn"}[kind]
    getattr(layer, lin).register_forward_hook(lambda *given: seen.append(given[2].dtype))
    monkeypatch.setattr(fused, "find_obstacle", lambda _: None)  # the hook
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(50, 12), torch.randint(50, (2, 400)))
    assert seen == [torch.bfloat16 if narrow else torch.float32]
    assert out.dtype == (torch.bfloat16 if narrow else torch.float32)


@pytest.mark.parametrize("layer", LAYERS)
def test_models_of_bfloat16_are_fused_too(always, layer):
    torch.manual_seed(0)
    edge_index = torch.randint(50, (2, 400))
    x, model = torch.randn(50, 12).bfloat16(), LAYERS[layer]().bfloat16()
    got = differentiate(model, x, edge_index, False)
    want = differentiate(copy.deepcopy(model).float(), x.float(), edge_index, False)
    assert all(part.dtype == torch.bfloat16 for part in got)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b).norm() <= TOLERANCE * b.norm()


@pytest.mark.parametrize("kind", ["SAGE", "GAT", "GATv2"])
def test_hooks_of_the_layers_of_a_trimmed_model_run(fused_always, kind):
    model, seen = MODELS[kind](), []
    model.convs[0].register_forward_hook(lambda *given: seen.append(given[2].shape))
    sources = torch.cat([torch.randint(10, (30,)), torch.randint(50, (30,))])
    edge_index = torch.stack([sources, torch.cat([torch.arange(30) % 5, 5 + torch.arange(30) % 5])])
    model(torch.randn(50, 12), edge_index, num_sampled_nodes_per_hop=[5, 5, 40], num_sampled_edges_per_hop=[30, 30])
    assert seen == [(10, 16)]
