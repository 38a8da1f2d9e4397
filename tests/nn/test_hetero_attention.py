"""RGAT and HGT in one operator against PyG's layers, and when they use PyG's path."""

import pytest
import torch
from torch_geometric.nn import GATConv, HGTConv

from lightning_gnn.nn import HGT, RGAT, HeteroGraphSAGE
from lightning_gnn.nn.hetero import attention, layers
from lightning_gnn.ops.attention.definition import attend_relations
from tests.nn.test_hetero import TYPES, Plain, assert_same, list_widths, make_graph

WIDTHS = [(5, 5, 5), (5, 3, 5), (2, 3, 4)]


@pytest.fixture
def calls(monkeypatch):
    return watch(monkeypatch)


def watch(patch):
    seen = []

    def counted(*arguments, **options):
        seen.append(arguments)
        return attend_relations(*arguments, **options)

    patch.setattr(attention, "attend_relations", counted)
    patch.setattr(layers, "aggregates_first", lambda *given: True)
    return seen


def make_plain_gat(widths, heads, **options):
    def make(layer):
        width = list_widths(layer, widths)
        out = {"out_channels": 3, "concat": False} if layer == 1 else {"out_channels": 8 // heads}
        more = {"heads": heads, "add_self_loops": False, "residual": True} | options
        return {k: GATConv((width[k[0]], width[k[2]]), **more, **out) for k in TYPES}

    return Plain(make, 2).double()


class PlainHGT(torch.nn.Module):
    """PyG's layers, composed as in its example."""

    def __init__(self, ours, data):
        super().__init__()
        self.lin, self.lin_out = ours.lin, ours.lin_out
        self.convs = torch.nn.ModuleList(HGTConv(8, 8, data.metadata(), heads=conv.heads) for conv in ours.convs)

    def forward(self, x_dict, edge_index_dict):
        x = {name: rows.relu() for name, rows in self.lin(x_dict).items()}
        for conv in self.convs:
            x = conv(x, edge_index_dict)
        return {name: self.lin_out(rows) for name, rows in x.items()}


def make_pair(kind, data, widths, heads, **options):
    """Return our model and PyG's with the same random parameters, and nonzero biases."""
    in_channels = dict(zip("abc", widths, strict=True))
    torch.manual_seed(3)
    ours = kind(data.metadata(), in_channels, 8, 2, 3, heads=heads, **options).double()
    theirs = make_plain_gat(widths, heads, **options) if kind is RGAT else PlainHGT(ours, data).double()
    for parameter in ours.parameters():
        torch.nn.init.uniform_(parameter, -0.7, 0.7)
    if kind is HGT:
        theirs.convs.load_state_dict(ours.convs.state_dict())
    else:
        theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def compare(ours, theirs, data):
    results, names = [], [name for name, _ in ours.named_parameters()]
    for model in (ours, theirs):
        x = {name: rows.clone().requires_grad_() for name, rows in data.x_dict.items()}
        out = model(x, data.edge_index_dict)
        loss = sum(rows.tanh().square().sum() for rows in out.values())
        by_name = dict(model.named_parameters())
        leaves = [*x.values(), *(by_name[name] for name in names)]
        found = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
        found = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
        results.append((out, dict(zip([*x, *names], found, strict=True))))
    for one, other in zip(*results, strict=True):
        assert_same(one, other)


@pytest.mark.medium
@pytest.mark.parametrize("kind", [RGAT, HGT])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_results_and_gradients_are_pygs(calls, kind, widths, heads):
    data = make_graph(widths=widths)
    compare(*make_pair(kind, data, widths, heads), data)
    # One call per table of features of one width.
    assert len(calls) == (1 + len(set(widths)) if kind is RGAT else 2)


@pytest.mark.parametrize("options", [{"residual": False}, {"bias": False}, {"negative_slope": 0.5}])
def test_options_of_the_layer(calls, options):
    data = make_graph()
    compare(*make_pair(RGAT, data, (5, 5, 5), 2, **options), data)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", [HeteroGraphSAGE, RGAT, HGT])
@pytest.mark.parametrize("fused", [True, False])
def test_a_type_that_nothing_reaches_may_come_first(monkeypatch, kind, fused):
    types = [("a", "x", "b"), ("b", "x", "b"), ("b", "x", "c")]
    data = make_graph(sizes=(9, 6, 4), types=types)
    model = kind((["a", "b", "c"], types), 5, 8, 2, 3).double()
    monkeypatch.setattr(layers, "aggregates_first", lambda *given: True)
    want = model(data.x_dict, data.edge_index_dict)
    # The same graph, but edges lead to its first type.
    other = kind((["c", "b", "a"], types), 5, 8, 2, 3).double()
    other.load_state_dict(model.state_dict())
    if not fused:
        monkeypatch.setattr(layers.TypedConv, "_can_fuse", lambda *given: False)
        monkeypatch.setattr(attention.TransformerConv, "_can_fuse", lambda *given: False)
    assert_same(other(data.x_dict, data.edge_index_dict), want)


@pytest.mark.medium
def test_dropped_attention_is_seeded_and_keeps_the_mean(calls):
    data = make_graph(num_edges=400)
    model = RGAT(data.metadata(), 5, 8, 1, 3, dropout=0.0).double()
    for conv in model.convs[0].convs.values():
        conv.dropout = 0.5
    torch.manual_seed(1)
    one = model(data.x_dict, data.edge_index_dict)["a"]
    torch.manual_seed(1)
    assert torch.equal(model(data.x_dict, data.edge_index_dict)["a"], one)
    assert calls[0][6].unique().tolist() == [0.0, 2.0]
    with torch.no_grad():
        drawn = torch.stack([model(data.x_dict, data.edge_index_dict)["a"] for _ in range(400)])
    model.eval()
    want = model(data.x_dict, data.edge_index_dict)["a"].detach()
    assert calls[-1][6] is None
    error = (drawn.mean(0) - want).abs() / (drawn.std(0) / 20)
    assert float(error.max()) < 6


@pytest.mark.parametrize("kind", [RGAT, HGT])
def test_what_is_out_of_the_ordinary_takes_pygs_path(calls, kind):
    data = make_graph()
    ours, theirs = make_pair(kind, data, (5, 5, 5), 2)
    first = ours.convs[0]
    module = first.convs["b", "x", "a"].lin_src if kind is RGAT else first.k_rel
    seen = []
    hook = module.register_forward_hook(lambda *given: seen.append(1))
    compare(ours, theirs, data)
    assert seen
    assert len(calls) == 1
    hook.remove()
    first.double().half()
    calls.clear()
    with pytest.raises(RuntimeError, match=r"dtype"):
        ours(data.x_dict, data.edge_index_dict)
    assert not calls


@pytest.mark.parametrize("kind", [RGAT, HGT])
def test_bfloat16_is_summed_in_float32(calls, kind):
    data = make_graph(dtype=torch.float32)
    ours, theirs = (model.float() for model in make_pair(kind, data, (5, 5, 5), 2))
    exact = theirs(data.x_dict, data.edge_index_dict)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(data.x_dict, data.edge_index_dict)
    assert len(calls) == 2
    assert all(arguments[1].dtype == torch.float32 for arguments in calls)
    for name, rows in exact.items():
        torch.testing.assert_close(out[name].float(), rows, rtol=0.1, atol=0.1)
