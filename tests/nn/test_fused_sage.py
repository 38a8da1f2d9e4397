import pytest
import torch
from torch_geometric.nn import conv as pyg

from lightning_gnn.nn import SAGEConv
from lightning_gnn.nn.conv import sage
from lightning_gnn.ops.aggregate_update.definition import aggregate_update
from tests.ops.test_aggregate_update import differentiate, hub_batch, normal


@pytest.fixture
def calls(monkeypatch, fused_always):
    seen = []

    def counted(*arguments, **options):
        seen.append(arguments)
        return aggregate_update(*arguments, **options)

    monkeypatch.setattr(sage, "aggregate_update", counted)
    return seen


def make_layers(size=(6, 4), **options):
    ours, theirs = SAGEConv(*size, **options).double(), pyg.SAGEConv(*size, **options).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def compare(ours, theirs, x, target, edges, inputs):
    """Compare two layers; x and target are tensors, or functions that return them."""
    results = []
    for layer in (ours, theirs):
        source = x() if callable(x) else x
        out = layer((source, target(source) if callable(target) else target), edges)
        results.append([out, *differentiate(out, [*inputs, *layer.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_targets_that_are_not_the_first_sources_keep_their_own_gradient(calls):
    (num_sources, num_targets), edges = hub_batch()
    x, other = normal(num_sources, 6).requires_grad_(), normal(num_targets, 6, seed=1).requires_grad_()
    compare(*make_layers(), x, other, edges, [x, other])
    compare(*make_layers(), x, x[:num_targets].detach(), edges, [x])  # the same memory, but no gradient
    compare(*make_layers(), x.detach(), x[:num_targets], edges, [x])
    compare(*make_layers(), x, x[1 : num_targets + 1], edges, [x])
    assert [call[3] for call in calls] == [None] * 4
    ours, theirs = make_layers()
    whole = edges.clone()
    torch.testing.assert_close(ours(x, whole), theirs(x, whole), rtol=1e-12, atol=1e-12)
    assert calls[-1][3] is ours.lin_r.weight
