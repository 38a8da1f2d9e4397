import pytest
import torch
import torch.nn.functional as F
from torch_geometric import EdgeIndex
from torch_geometric.nn import conv as pyg

from lightning_gnn.nn import GraphSAGE, SAGEConv
from lightning_gnn.nn.conv import fused, sage
from lightning_gnn.ops.aggregate_update.definition import aggregate_update
from tests.ops.test_aggregate_update import gradients, hub_batch, normal


@pytest.fixture
def calls(monkeypatch):
    """What the layers hand to the fused operator."""
    seen = []

    def counted(*arguments, **options):
        seen.append(arguments)
        return aggregate_update(*arguments, **options)

    monkeypatch.setattr(sage, "aggregate_update", counted)
    monkeypatch.setattr(fused, "UNFUSED_UP_TO", 0)
    return seen


def test_small_batches_take_pygs_path(calls, monkeypatch):
    edges = torch.zeros(2, 10, dtype=torch.int64)
    x = torch.ones(3, 5)
    monkeypatch.setattr(fused, "UNFUSED_UP_TO", 50)
    SAGEConv(5, 2)(x, edges)
    assert not calls
    monkeypatch.setattr(fused, "UNFUSED_UP_TO", 49)
    SAGEConv(5, 2)(x, edges)
    assert len(calls) == 1


def layers(size=(6, 4), **options):
    ours, theirs = SAGEConv(*size, **options).double(), pyg.SAGEConv(*size, **options).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def compare(ours, theirs, x, target, edges, inputs):
    """Compare two layers; x and target are tensors, or functions that make them."""
    results = []
    for layer in (ours, theirs):
        source = x() if callable(x) else x
        out = layer((source, target(source) if callable(target) else target), edges)
        results.append([out, *gradients(out, [*inputs, *layer.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"aggr": "sum"}, {"aggr": "add", "bias": False}, {"root_weight": False}])
@pytest.mark.parametrize("size", [(6, 4), (6, 30)])
def test_the_layer_fuses_a_mini_batch(calls, options, size):
    (num_sources, num_targets), edges = hub_batch()
    leaf = normal(num_sources, 6).requires_grad_()
    compare(*layers(size, **options), leaf.detach(), leaf.detach()[:num_targets], edges, [])
    edges = edges[:, edges[0] < num_sources - 20]
    for made in (lambda: leaf, lambda: leaf.relu(), lambda: leaf.relu()[:-10].relu()[:-5]):
        compare(*layers(size, **options), made, lambda x: x[:num_targets], edges, [leaf])
    assert len(calls) == 4
    assert all((call[3] is not None) == options.get("root_weight", True) for call in calls)


def test_targets_that_are_not_the_first_sources_keep_their_own_gradient(calls):
    (num_sources, num_targets), edges = hub_batch()
    x, other = normal(num_sources, 6).requires_grad_(), normal(num_targets, 6, seed=1).requires_grad_()
    compare(*layers(), x, other, edges, [x, other])
    compare(*layers(), x, x[:num_targets].detach(), edges, [x])  # the same memory, but no gradient
    compare(*layers(), x.detach(), x[:num_targets], edges, [x])
    compare(*layers(), x, x[1 : num_targets + 1], edges, [x])
    assert [call[3] for call in calls] == [None] * 4
    ours, theirs = layers()
    whole = edges.clone()
    torch.testing.assert_close(ours(x, whole), theirs(x, whole), rtol=1e-12, atol=1e-12)
    assert calls[-1][3] is ours.lin_r.weight


class Doubled(SAGEConv):
    def message(self, x_j):
        return 2 * x_j


class Cast(torch.nn.Linear):
    pass


def test_whatever_is_out_of_the_ordinary_takes_pygs_path(calls):
    (num_sources, num_targets), edges = hub_batch()
    x = normal(num_sources, 6)
    pair = (x, x[:num_targets])
    seen: list = []
    odd = {
        "lstm": SAGEConv(6, 4, aggr="lstm"),
        "several": SAGEConv(6, 4, aggr=["mean", "max"]),
        "module": SAGEConv(6, 4, aggr=pyg.SAGEConv(1, 1, aggr="mean").aggr_module),
        "message": Doubled(6, 4),
        "hook": SAGEConv(6, 4),
        "message hook": SAGEConv(6, 4),
        "own product": SAGEConv(6, 4),
        "lazy": SAGEConv((-1, -1), 4),
    }
    odd["hook"].lin_l.register_forward_hook(lambda *_: seen.append("hook"))
    odd["message hook"].register_message_forward_hook(lambda *_: seen.append("message hook"))
    odd["own product"].lin_l = Cast(6, 4)
    edges = edges[:, torch.argsort(edges[1], stable=True)]  # as lstm wants it
    for name, layer in odd.items():
        out = layer.double()(pair, edges)
        assert out.shape == (num_targets, 4), name
        assert not calls, name
    assert seen == ["hook", "message hook"]
    plain = SAGEConv(6, 4).double()
    plain(pair, edges, (num_sources, num_targets))
    plain((x, None), edges, (num_sources, num_targets))
    plain(x, EdgeIndex(edges, sparse_size=(num_sources, num_sources)))
    plain(x, torch.sparse_coo_tensor(edges, torch.ones(edges.size(1)).double(), (num_sources, num_sources)).t())
    torch.func.grad(lambda features: plain((features, features[:num_targets]), edges).sum())(x)
    with torch.autocast("cpu", torch.bfloat16):
        plain(pair, edges)
    with pytest.raises(RuntimeError, match=r"dtype|Double"):
        plain((x.float(), pair[1].float()), edges)
    assert not calls
    plain(pair, edges)
    assert len(calls) == 1


def test_a_trimmed_model_fuses_every_layer(calls):
    nodes, num_edges = [4, 8, 20], [10, 40]
    generator = torch.Generator().manual_seed(0)
    source = torch.cat([torch.randint(12, (10,), generator=generator), torch.randint(32, (40,), generator=generator)])
    target = torch.cat([torch.arange(10) % 4, 4 + torch.arange(40) % 8])
    edges, x = torch.stack([source, target]), normal(32, 6)
    model = GraphSAGE(6, 16, 2, 3).double()
    trimmed = model(x, edges, num_sampled_nodes_per_hop=nodes, num_sampled_edges_per_hop=num_edges)
    assert [call[5] for call in calls] == [12, 4]
    assert all(call[3] is not None for call in calls)
    whole = model(x, edges)
    torch.testing.assert_close(trimmed, whole[:4], rtol=1e-12, atol=1e-12)
    F.cross_entropy(trimmed, torch.tensor([0, 1, 2, 0])).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
