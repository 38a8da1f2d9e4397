"""GAT and GATv2 layers on a mini-batch's edge_index equal PyG's, and use PyG's path where they would not."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.nn import conv as pyg
from torch_geometric.nn import models as pyg_models

from lightning_gnn.nn import GAT, GATConv, GATv2Conv
from lightning_gnn.nn.conv import attention
from lightning_gnn.ops.attention.definition import attend
from tests.nn.fusing import fuse_from
from tests.ops.test_aggregate_update import batches, differentiate, hub_batch, normal

PAIRS = [(GATConv, pyg.GATConv), (GATv2Conv, pyg.GATv2Conv)]
OURS = [GATConv, GATv2Conv]


@pytest.fixture
def calls(monkeypatch, fused_always):
    seen = []

    def counted(*arguments, **options):
        seen.append(arguments)
        return attend(*arguments, **options)

    monkeypatch.setattr(attention, "attend", counted)
    return seen


def make_layers(pair, *sizes, **options):
    ours, theirs = (layer(*sizes, **options).double() for layer in pair)
    ours.load_state_dict(theirs.state_dict())
    for one in (ours, theirs):
        if one.bias is not None:
            torch.nn.init.constant_(one.bias, 0.3)
    return ours, theirs


def compare(ours, theirs, make, edges, leaves):
    """Compare results, and the gradients of leaves and parameters; ``make`` returns the features."""
    results = []
    for layer in (ours, theirs):
        out = layer(make(), edges)
        results.append([out, *differentiate(out, [*leaves, *layer.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


OPTIONS = [
    {},
    {"heads": 3, "negative_slope": 0.1},
    {"heads": 4, "concat": False, "residual": True},
    {"heads": 2, "add_self_loops": False, "bias": False},
    {"heads": 5, "residual": True},
]


@pytest.mark.slow
@settings(max_examples=60)
@given(batches(), st.sampled_from(PAIRS), st.sampled_from(OPTIONS), st.booleans(), st.sampled_from([True, False, None]))
def test_results_and_gradients_are_pygs(batch, pair, options, needs_x, first):
    num_sources, num_targets, edges = batch
    leaf = normal(num_sources, 6).requires_grad_(needs_x)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        fuse_from(1, patch)
        patch.setattr(attention, "attend", lambda *args, **kw: seen.append(1) or attend(*args, **kw))
        if first is not None:
            patch.setattr(attention, "aggregates_first", lambda *sizes: first)

        def make():
            x = leaf.tanh()
            return x, x[:num_targets]

        compare(*make_layers(pair, 6, 4, **options), make, edges, [leaf])
    assert len(seen) == (edges.size(1) > 0)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("first", [True, False])
def test_sources_and_targets_of_their_own(calls, monkeypatch, pair, first):
    monkeypatch.setattr(attention, "aggregates_first", lambda *sizes: first)
    (num_sources, num_targets), edges = hub_batch()
    source, target = normal(num_sources, 6).requires_grad_(), normal(num_targets, 5, seed=1).requires_grad_()
    ours, theirs = make_layers(pair, (6, 5), 7, heads=2)
    compare(ours, theirs, lambda: (source, target), edges, [source, target])
    # More targets than sources: the last ones get no self-loop.
    few = edges.clone()
    few[0] %= 50
    compare(ours, theirs, lambda: (source[:50], target), few, [source, target])
    ours, theirs = make_layers(pair, 6, 7, heads=2)
    compare(ours, theirs, lambda: source, edges, [source])
    if pair[0] is GATv2Conv:
        ours, theirs = make_layers(pair, 6, 7, heads=2, share_weights=True)
        compare(ours, theirs, lambda: source, edges, [source])
        compare(ours, theirs, lambda: (source, source[:num_targets]), edges, [source])
    assert len(calls) == (5 if pair[0] is GATv2Conv else 3)


@pytest.mark.slow
@pytest.mark.parametrize("layer", OURS)
def test_small_batches_take_pygs_path(calls, monkeypatch, layer):
    edges, x = torch.zeros(2, 10, dtype=torch.int64), torch.ones(3, 5)
    fuse_from(61, monkeypatch)
    layer(5, 3, heads=2)(x, edges)
    assert not calls
    fuse_from(60, monkeypatch)
    layer(5, 3, heads=2)(x, edges)
    assert len(calls) == 1


class DoubledGAT(GATConv):
    def message(self, x_j, alpha):
        return 2 * super().message(x_j, alpha)


class DoubledGATv2(GATv2Conv):
    def message(self, x_j, alpha):
        return 2 * super().message(x_j, alpha)


class Cast(torch.nn.Linear):
    pass


@pytest.mark.parametrize("pair", PAIRS)
def test_whatever_is_out_of_the_ordinary_takes_pygs_path(calls, pair):
    conv, base = pair
    (num_sources, num_targets), edges = hub_batch()
    x = normal(num_sources, 6)
    both = (x, x[:num_targets])
    first, seen = "lin" if conv is GATConv else "lin_l", []
    odd = {
        "max": conv(6, 4, aggr="max"),
        "mean": conv(6, 4, aggr="mean"),
        "module": conv(6, 4, aggr=base(1, 1, aggr="sum").aggr_module),
        "edge features": conv(6, 4, edge_dim=3),
        "message": (DoubledGAT if conv is GATConv else DoubledGATv2)(6, 4),
        "hook": conv(6, 4),
        "edge hook": conv(6, 4),
        "message hook": conv(6, 4),
        "own product": conv(6, 4),
        "lazy": conv((-1, -1), 4),
    }
    getattr(odd["hook"], first).register_forward_hook(lambda *_: seen.append("hook"))
    odd["edge hook"].register_edge_update_forward_hook(lambda *_: seen.append("edge hook"))
    odd["message hook"].register_message_forward_hook(lambda *_: seen.append("message hook"))
    setattr(odd["own product"], first, Cast(6, 4))
    for name, layer in odd.items():
        out = layer.double()(both, edges)
        assert out.shape == (num_targets, 4), name
        assert not calls, name
    # PyG's GATConv also applies its linear layer to the targets.
    assert list(dict.fromkeys(seen)) == ["hook", "edge hook", "message hook"]
    plain = conv(6, 4).double()
    out, (looped, weights) = plain(both, edges, return_attention_weights=True)
    assert looped.size(1) == weights.size(0)
    plain(x, EdgeIndex(edges, sparse_size=(num_sources, num_sources)))
    plain(x, torch.sparse_coo_tensor(edges, torch.ones(edges.size(1)).double(), (num_sources, num_sources)).t())
    torch.func.grad(lambda features: plain((features, features[:num_targets]), edges).sum())(x)
    with torch.autocast("cpu", torch.bfloat16):
        plain(both, edges)
    with pytest.raises(RuntimeError, match=r"dtype|Double"):
        plain((x.float(), both[1].float()), edges)
    assert not calls
    torch.testing.assert_close(plain(both, edges), out, rtol=1e-12, atol=1e-12)
    assert len(calls) == 1


@pytest.mark.parametrize("layer", OURS)
def test_a_node_that_is_not_there_is_named(calls, layer):
    x = normal(4, 6)
    with pytest.raises(IndexError, match=r"edge_index\[0\] holds node 7"):
        layer(6, 4).double()(x, torch.tensor([[0, 7], [1, 2]]))


@pytest.mark.parametrize("layer", OURS)
def test_dropout_of_attention(calls, layer):
    (num_sources, num_targets), edges = hub_batch()
    x = normal(num_sources, 6).requires_grad_()
    conv = layer(6, 4, heads=3, dropout=0.4, add_self_loops=False).double()
    conv((x, x[:num_targets]), edges)
    factor = calls[-1][5]
    assert factor.shape == (edges.size(1), 3)
    assert set(factor.flatten().tolist()) == {0.0, 1 / 0.6}
    assert abs(factor.mean() - 1) < 0.05
    conv((x, x[:num_targets]), edges)
    assert not torch.equal(calls[-1][5], factor)

    def run(function):
        torch.manual_seed(3)
        out = function((x, x[:num_targets]))
        return [out, *differentiate(out, [x, *conv.parameters()])]

    plain = run(lambda pair: conv(pair, edges))
    again = run(lambda pair: checkpoint(lambda *both: conv(both, edges), *pair, use_reentrant=False))
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    # The same weights are dropped in PyG's layer.
    theirs = (pyg.GATConv if layer is GATConv else pyg.GATv2Conv)(6, 4, heads=3, dropout=0.4, add_self_loops=False)
    theirs = theirs.double()
    theirs.load_state_dict(conv.state_dict())
    order = torch.argsort(edges[1], stable=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", lambda alpha, p, training: alpha * calls[-1][5])
        out = theirs((x, x[:num_targets]), edges[:, order])
    grads = differentiate(out, [x, *theirs.parameters()])
    for one, other in zip(again, [out, *grads], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    conv.eval()
    conv((x, x[:num_targets]), edges)
    assert calls[-1][5] is None


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("output_heads", [None, 1])
def test_a_trimmed_model_fuses_every_layer(calls, v2, output_heads):
    nodes, num_edges = [4, 8, 20], [10, 40]
    generator = torch.Generator().manual_seed(0)
    source = torch.cat([torch.randint(12, (10,), generator=generator), torch.randint(32, (40,), generator=generator)])
    target = torch.cat([torch.arange(10) % 4, 4 + torch.arange(40) % 8])
    edges, x = torch.stack([source, target]), normal(32, 6)
    model = GAT(6, 16, 2, 3, heads=4, output_heads=output_heads, v2=v2).double()
    trimmed = model(x, edges, num_sampled_nodes_per_hop=nodes, num_sampled_edges_per_hop=num_edges)
    assert [call[0][0].numel() - 1 for call in calls] == [12, 4]
    whole = model(x, edges)
    torch.testing.assert_close(trimmed, whole[:4], rtol=1e-12, atol=1e-12)
    if output_heads is None:
        theirs = pyg_models.GAT(6, 16, 2, 3, heads=4, v2=v2).double()
        theirs.load_state_dict(model.state_dict())
        torch.testing.assert_close(whole, theirs(x, edges), rtol=1e-12, atol=1e-12)
    F.cross_entropy(trimmed, torch.tensor([0, 1, 2, 0])).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
