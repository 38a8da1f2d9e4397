"""``TransformerConv`` and ``GraphTransformer`` equal PyG's layers on mini-batches and on graphs."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.nn import conv as pyg

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn import GraphTransformer, TransformerConv, infer, unfused_layers
from lightning_gnn.nn.conv import transformer
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.ops.attention.definition import attend_keys
from tests.nn.fusing import fuse_from
from tests.ops.test_aggregate_update import batches, differentiate, hub_batch, normal

OPTIONS = [
    {},
    {"heads": 3, "beta": True},
    {"heads": 4, "concat": False},
    {"heads": 2, "concat": False, "beta": True},
    {"heads": 2, "root_weight": False, "bias": False},
]


@pytest.fixture
def calls(monkeypatch):
    seen = []
    monkeypatch.setattr(transformer, "attend_keys", lambda *given: seen.append(given) or attend_keys(*given))
    fuse_from(1, monkeypatch)
    return seen


def make_layers(*sizes, **options):
    ours, theirs = (layer(*sizes, **options).double() for layer in (TransformerConv, pyg.TransformerConv))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def compare(results):
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@settings(max_examples=60)
@given(batches(), st.sampled_from(OPTIONS), st.booleans())
def test_results_and_gradients_are_pygs(batch, options, needs_x):
    num_sources, num_targets, edges = batch
    leaf = normal(num_sources, 6).requires_grad_(needs_x)
    seen, results = [], []
    with pytest.MonkeyPatch.context() as patch:
        fuse_from(1, patch)
        patch.setattr(transformer, "attend_keys", lambda *given: seen.append(1) or attend_keys(*given))
        for layer in make_layers(6, 4, **options):
            x = leaf.tanh()
            out = layer((x, x[:num_targets]), edges)
            used = [p for name, p in layer.named_parameters() if options.get("root_weight", True) or "skip" not in name]
            results.append([out, *differentiate(out, [leaf, *used])])
    compare(results)
    assert len(seen) == (edges.size(1) > 0)


def test_sources_and_targets_of_their_own(calls):
    (num_sources, num_targets), edges = hub_batch()
    source, target = normal(num_sources, 6).requires_grad_(), normal(num_targets, 5, seed=1).requires_grad_()
    results = []
    for layer in make_layers((6, 5), 7, heads=2):
        out = layer((source, target), edges)
        results.append([out, *differentiate(out, [source, target, *layer.parameters()])])
    compare(results)
    assert len(calls) == 1


def test_dropout_of_attention(calls):
    (num_sources, num_targets), edges = hub_batch()
    x = normal(num_sources, 6).requires_grad_()
    edges = edges[:, torch.argsort(edges[1], stable=True)]
    results = []
    for layer in make_layers(6, 4, heads=3, dropout=0.4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "dropout", lambda alpha, p, training: alpha * calls[-1][4])  # for PyG's layer
            out = layer((x, x[:num_targets]), edges)
        results.append([out, *differentiate(out, [x, *layer.parameters()])])
    compare(results)
    assert set(calls[-1][4].flatten().tolist()) == {0.0, 1 / 0.6}


def test_whatever_is_out_of_the_ordinary_takes_pygs_path(calls):
    (num_sources, num_targets), edges = hub_batch()
    x = normal(num_sources, 6)
    layer = TransformerConv(6, 4, edge_dim=3).double()
    assert layer((x, x[:num_targets]), edges, normal(edges.size(1), 3)).shape == (num_targets, 4)
    plain = TransformerConv(6, 4).double()
    out, (_, weights) = plain((x, x[:num_targets]), edges, return_attention_weights=True)
    assert weights.shape == (edges.size(1), 1)
    assert not calls
    torch.testing.assert_close(plain((x, x[:num_targets]), edges), out, rtol=1e-12, atol=1e-12)
    assert unfused_layers(torch.nn.ModuleList([layer, plain])) == {"0": "it reads edge features"}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_graph_gives_what_its_edges_give(options):
    edges, x = torch.randint(30, (2, 200), generator=torch.Generator().manual_seed(0)), normal(30, 6).requires_grad_()
    graph, results = CompressedGraph.from_edge_index(edges, 30), []
    for layer, either in zip(make_layers(6, 4, **options), (graph, edges), strict=True):
        out = layer(x, either)
        results.append([out, *differentiate(out, [x])])
    compare(results)


def test_what_a_graph_does_not_support_is_named():
    graph, x = CompressedGraph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2), torch.ones(2, 6)
    for layer, options in ((TransformerConv(6, 4, edge_dim=2), {}), (TransformerConv(6, 4), {"edge_attr": None})):
        with pytest.raises(ValueError, match="neither edge features, nor return_attention_weights"):
            layer(x, graph, return_attention_weights=True, **options)
    with pytest.raises(ValueError, match="aggr='mean'"):
        TransformerConv(6, 4, aggr="mean")(x, graph)


@pytest.mark.parametrize("output_heads", [None, 1])
def test_a_trimmed_model_fuses_every_layer_and_full_inference_is_exact(calls, output_heads):
    nodes, num_edges = [4, 8, 20], [10, 40]
    generator = torch.Generator().manual_seed(0)
    source = torch.cat([torch.randint(12, (10,), generator=generator), torch.randint(32, (40,), generator=generator)])
    target = torch.cat([torch.arange(10) % 4, 4 + torch.arange(40) % 8])
    edges, x = torch.stack([source, target]), normal(32, 6)
    model = GraphTransformer(6, 16, 2, 3, heads=4, output_heads=output_heads, beta=True).double().eval()
    trimmed = model(x, edges, num_sampled_nodes_per_hop=nodes, num_sampled_edges_per_hop=num_edges)
    assert [call[0][0].numel() - 1 for call in calls] == [12, 4]
    whole = model(x, edges)
    torch.testing.assert_close(trimmed, whole[:4], rtol=1e-12, atol=1e-12)
    F.cross_entropy(trimmed, torch.tensor([0, 1, 2, 0])).backward()
    assert all(parameter.grad.abs().sum() > 0 for name, parameter in model.named_parameters() if "key.bias" not in name)
    graph = CompressedGraph.from_edge_index(edges, 32)
    for limit in ("auto", 0):
        found = infer(model, x, graph, settings=FullInference(memory_limit=limit, progress=False))
        torch.testing.assert_close(found, whole.detach(), rtol=1e-12, atol=1e-12)
