"""Layers on mini-batches under autocast and in bfloat16: the fused operators, near what float32 gives."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import conv as pyg

from lightning_gnn.nn import GCN, GCNConv, GINConv, GraphSAGE, SAGEConv
from lightning_gnn.nn.conv import fused

LAYERS = {
    "mean": lambda: SAGEConv(12, 10),
    "sum, no root": lambda: SAGEConv(12, 10, aggr="sum", root_weight=False),
    "wide": lambda: SAGEConv(12, 40),
    "max": lambda: SAGEConv(12, 10, aggr="max"),
    "GCN": lambda: GCNConv(12, 10),
    "GIN": lambda: GINConv(nn.Linear(12, 10)),
    "GraphSAGE": lambda: GraphSAGE(12, 16, num_layers=2, out_channels=10),
    "GCN, model": lambda: GCN(12, 16, num_layers=2, out_channels=10),
}


TOLERANCE = 0.06
"""Of a matrix's norm: products and sums are rounded to 8 bits, and ReLU is decided anew where it is near zero."""


@pytest.fixture
def always(monkeypatch):
    """Fuse batches of any size, and refuse PyG's path."""
    monkeypatch.setattr(fused, "UNFUSED_UP_TO", 0)

    def refuse(*_, **__):
        raise AssertionError("PyG's path was taken")

    for kind in (pyg.SAGEConv, pyg.GCNConv, pyg.GINConv):
        monkeypatch.setattr(kind, "propagate", refuse)


def gradients(model, x, edge_index, low):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        out = model(x, edge_index)
    grads = torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])
    return [out, *grads]


@pytest.mark.parametrize("features", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_autocast_gives_what_float32_gives_but_for_rounding(always, layer, features):
    torch.manual_seed(0)
    edge_index = torch.randint(50, (2, 400))
    x, model = torch.randn(50, 12).to(features), LAYERS[layer]()
    got, want = gradients(model, x, edge_index, True), gradients(model, x.float(), edge_index, False)
    assert got[0].dtype == torch.bfloat16
    assert got[1].dtype == features
    for a, b in zip(got, want, strict=True):
        # As a whole: where a sum ends near zero, the rounding of its parts is all there is.
        assert (a.float() - b).norm() <= TOLERANCE * b.norm()


@pytest.mark.parametrize("layer", LAYERS)
def test_models_of_bfloat16_are_fused_too(always, layer):
    torch.manual_seed(0)
    edge_index = torch.randint(50, (2, 400))
    x, model = torch.randn(50, 12).bfloat16(), LAYERS[layer]().bfloat16()
    got = gradients(model, x, edge_index, False)
    want = gradients(copy.deepcopy(model).float(), x.float(), edge_index, False)
    assert all(part.dtype == torch.bfloat16 for part in got)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b).norm() <= TOLERANCE * b.norm()


def test_another_autocast_is_left_to_pyg(monkeypatch):
    monkeypatch.setattr(fused, "UNFUSED_UP_TO", 0)
    x, edge_index = torch.randn(9, 12), torch.randint(9, (2, 20))
    with torch.autocast("cpu", torch.float16):
        assert not fused.fuses(SAGEConv(12, 4), x, x, edge_index)


def test_dropout_under_autocast_is_that_of_its_key(always):
    torch.manual_seed(0)
    edge_index, x = torch.randint(50, (2, 400)), torch.randn(50, 12)
    model, results = GraphSAGE(12, 64, num_layers=2, out_channels=10, dropout=0.5), []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(gradients(model, x, edge_index, True))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.manual_seed(1)
    for a, b in zip(results[0], gradients(model, x, edge_index, False), strict=True):
        assert (a.float() - b).norm() <= TOLERANCE * b.norm()
