"""Layers and models that run as few operators: PyG's results and gradients, and log messages about exceptions."""

import logging

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import conv as pyg

from lightning_gnn.nn import GCN, GIN, Dropout, GCNConv, GINConv, GraphSAGE, SAGEConv, unfused_layers
from lightning_gnn.nn.conv import fused, gcn, gin, sage
from lightning_gnn.ops.aggregate_update.definition import aggregate_update
from lightning_gnn.ops.aggregate_update.reference import ReluDropout
from lightning_gnn.ops.dropout import row_dropout
from tests.nn.fusing import fuse_from
from tests.nn.quiet import trainer
from tests.nn.test_trimming import list_hop_sizes, sample
from tests.ops.test_aggregate_update import batches, differentiate, execution, executions, hub_batch, normal
from tests.strategies import edge_indices


@pytest.fixture
def calls(monkeypatch, fused_always):
    """Fuse wherever possible, and record the calls."""
    seen: list = []

    def counting(name, function):
        return lambda *arguments, **options: seen.append(name) or function(*arguments, **options)

    for module, name in ((sage, "aggregate_update"), (sage, "aggregate_rows"), (gin, "aggregate_rows")):
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    monkeypatch.setattr(gcn, "update_by_edges", counting("update_by_edges", gcn.update_by_edges))
    return seen


def make_mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def assert_same(ours, theirs, run, inputs=(), tolerance=1e-10):
    theirs.load_state_dict(ours.state_dict())
    results = []
    for layer in (ours, theirs):
        out = run(layer)
        results.append([out, *differentiate(out, [*inputs, *layer.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


GCN_OPTIONS = [
    {}, {"improved": True}, {"add_self_loops": False}, {"normalize": False}, {"bias": False}
]  # fmt: skip


@pytest.mark.medium
@settings(max_examples=40)
@given(edge_indices(), st.sampled_from(GCN_OPTIONS), st.booleans(), executions)
def test_gcn_is_pygs(graph, options, weighted, chosen):
    num_nodes, edge_index = graph
    x = normal(num_nodes, 6).requires_grad_()
    weight = normal(edge_index.size(1), seed=4).abs() if weighted else None
    ours, theirs = GCNConv(6, 4, **options).double(), pyg.GCNConv(6, 4, **options).double()
    with pytest.MonkeyPatch.context() as patch, execution(**chosen):
        fuse_from(1, patch)
        assert_same(ours, theirs, lambda layer: layer(x, edge_index, weight), [x])


SAGE_OPTIONS = [
    {},
    {"aggr": "sum"},
    {"aggr": "add", "bias": False},
    {"root_weight": False},
    {"aggr": "max"},
    {"aggr": "max", "root_weight": False},
    {"project": True},
    {"normalize": True},
    {"project": True, "normalize": True, "aggr": "max"},
    {"aggr": "sum", "bias": False, "root_weight": False},
]


@settings(max_examples=40)
@given(batches(), st.sampled_from(SAGE_OPTIONS), executions)
def test_sage_is_pygs(batch, options, chosen):
    num_sources, num_targets, edge_index = batch
    x = normal(num_sources, 6).requires_grad_()
    ours, theirs = SAGEConv(6, 4, **options).double(), pyg.SAGEConv(6, 4, **options).double()
    with pytest.MonkeyPatch.context() as patch, execution(**chosen):
        fuse_from(1, patch)
        assert_same(ours, theirs, lambda layer: layer((x, x[:num_targets]), edge_index), [x])


@settings(max_examples=40)
@given(batches(), st.sampled_from([{}, {"eps": 0.3}, {"train_eps": True, "eps": 0.1}, {"aggr": "max"}]), executions)
def test_gin_is_pygs(batch, options, chosen):
    num_sources, num_targets, edge_index = batch
    x = normal(num_sources, 6).requires_grad_()
    ours, theirs = GINConv(make_mlp(), **options).double(), pyg.GINConv(make_mlp(), **options).double()
    with pytest.MonkeyPatch.context() as patch, execution(**chosen):
        fuse_from(1, patch)
        assert_same(ours, theirs, lambda layer: layer((x, x[:num_targets]), edge_index), [x])


def test_each_of_them_is_fused(calls):
    (num_sources, num_targets), edges = hub_batch()
    x = normal(num_sources, 6)
    pair = (x, x[:num_targets])
    for layer in [
        *(SAGEConv(6, 4, **options) for options in SAGE_OPTIONS),
        GINConv(make_mlp()),
        GINConv(make_mlp(), train_eps=True),
    ]:
        before = len(calls)
        layer.double()(pair, edges)
        assert len(calls) == before + 1, layer
    for options in GCN_OPTIONS:
        layer, before = GCNConv(6, 4, **options).double(), len(calls)
        layer(x, edges)
        layer(x, edges, normal(edges.size(1)))
        assert len(calls) == before + 2, options
    calls.clear()
    weight = normal(edges.size(1)).abs().requires_grad_()
    assert_same(GCNConv(6, 4).double(), pyg.GCNConv(6, 4).double(), lambda layer: layer(x, edges, weight), [weight])
    GCNConv(6, 4).double()(x, edges, normal(edges.size(1), dtype=torch.float32))
    GCNConv(6, 4, aggr="mean").double()(x, edges)
    assert not calls


# ReLU and dropout in the operator.


@settings(max_examples=60)
@given(
    batches(),
    st.sampled_from([(5, 3), (3, 7), (64, 1)]),
    st.sampled_from(["sum", "mean"]),
    st.sampled_from([0.0, 0.3, 1 - 1e-12]),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    executions,
)
def test_what_comes_then_is_what_would_come_after(batch, size, reduce, p, key, dtype, chosen):
    num_sources, num_targets, edge_index = batch
    shapes = [(num_sources, size[0]), (size[1], size[0]), (size[1], size[0]), (size[1],)]
    x, weight, self_weight, bias = (
        normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)
    )
    inputs = [x, weight, self_weight, bias]
    arguments = (x, edge_index, weight, self_weight, bias, num_targets, reduce)
    with execution(**chosen):
        after = row_dropout(aggregate_update(*arguments).relu(), p, key)
        then = aggregate_update(*arguments, then=ReluDropout(p, key))
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
        assert torch.equal(then == 0, after == 0)
        torch.testing.assert_close(then, after, rtol=tolerance, atol=tolerance)
        if p > 0.9:
            return  # numbers grow by a factor of 1e12
        for ours, theirs in zip(differentiate(then, inputs), differentiate(after, inputs), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.medium
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_derivatives_of_what_comes_then(first, p):
    _, edges = hub_batch()
    shapes = [(12, 3), (2, 3), (2, 3), (2,)]
    inputs = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]

    def function(x, weight, self_weight, bias):
        then = ReluDropout(p, 77)
        return aggregate_update(x, edges[:, :30] % 5, weight, self_weight, bias, 5, "mean", then=then).tanh()

    with execution(first=first):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_nan_passes_as_through_torch():
    x, edges = torch.tensor([[float("nan")], [1.0]]).double().requires_grad_(), torch.tensor([[0, 1], [0, 1]])
    weight = torch.ones(1, 1).double()
    for p in (0.0, 0.5):
        key = next(key for key in range(99) if row_dropout(torch.ones(2, 1), p, key).all())
        after = row_dropout(aggregate_update(x, edges, weight).relu(), p, key)
        then = aggregate_update(x, edges, weight, then=ReluDropout(p, key))
        torch.testing.assert_close(then, after, equal_nan=True)
        grads = [torch.autograd.grad(out.sum(), x)[0] for out in (then, after)]
        torch.testing.assert_close(*grads, equal_nan=True)


@pytest.fixture
def graph():
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(60, (2, 300), generator=generator)
    edge_index = torch.cat([edge_index, torch.arange(0, 60, 2).expand(2, -1)], dim=1)  # self-loops
    return edge_index, torch.randn(60, 8, generator=generator, dtype=torch.double)


MODELS = [
    (GCN, {}),
    (GCN, {"improved": True, "act_first": True}),
    (GCN, {"normalize": False}),
    (GCN, {"add_self_loops": False, "bias": False}),
    (GCN, {"jk": "last"}),
    (GCN, {"norm": "batch"}),
    (GraphSAGE, {}),
    (GraphSAGE, {"aggr": "max", "jk": "last"}),
    (GraphSAGE, {"normalize": True, "act": "elu"}),
    (GraphSAGE, {"project": True, "act": None}),
    (GIN, {"train_eps": True}),
]


@pytest.mark.parametrize("fanouts", [[3, 2, 2], [-1, -1, -1], [2, 2, 2, 2]], ids=str)
@pytest.mark.parametrize(("cls", "options"), MODELS)
def test_a_fused_model_is_the_same_with_the_same_dropout(cls, options, fanouts, graph, monkeypatch):
    batch = sample([4, 0, 17, 33], fanouts, *graph)
    model = cls(8, 12, 3, 5, dropout=0.5, input_dropout=0.2, **options).double()
    weight = normal(batch.num_edges).abs() if cls is GCN else None
    results = []
    for limit, trims in ((1 << 40, True), (0, True), (0, False)):
        fuse_from(limit, monkeypatch)
        model.train(trims)
        for _ in range(2):  # the second call draws other masks
            torch.manual_seed(0)
            out = model(batch.x, batch.edge_index, weight, **(list_hop_sizes(batch) if trims else {}))[:4]
        results.append([out, *differentiate(out, model.parameters())])
        if limit == 0 and trims:
            model.eval()
            results.append([model(batch.x, batch.edge_index, weight, **list_hop_sizes(batch))[:4]])
    for one, other in ((0, 1), (2, 3)):
        for ours, theirs in zip(results[one], results[other], strict=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_only_what_is_plain_goes_into_the_operator(graph, calls, monkeypatch):
    batch = sample([4, 0, 17, 33], [3, 2], *graph)
    seen: list = []

    def run(change=lambda model: None, **options):
        model = GraphSAGE(8, 12, 2, 5, dropout=0.5, **options).double()
        change(model)
        seen.clear()
        model(batch.x, batch.edge_index, **list_hop_sizes(batch))
        return [then for then in seen if then is not None]

    def spied(*arguments, then=None, **options):
        seen.append(then)
        return aggregate_update(*arguments, then=then, **options)

    monkeypatch.setattr(sage, "aggregate_update", spied)
    assert [then.p for then in run()] == [0.5]
    assert [then.p for then in run(lambda model: model.eval())] == [0.0]
    hooks: list = []

    def hooked(name):
        return lambda model: model.get_submodule(name).register_forward_hook(lambda *_: hooks.append(name))

    for name in ("convs.0", "act", "dropout", "norms.0"):
        assert not run(hooked(name)), name
    assert hooks == ["convs.0", "act", "dropout", "norms.0"]
    assert not run(norm="batch")
    assert not run(act="elu")
    assert not run(lambda model: setattr(model, "dropout", nn.Dropout(0.5)))
    assert not run(lambda model: setattr(model.dropout, "p", 1.0))
    assert not run(lambda model: setattr(model.dropout, "inplace", True))

    class Own(SAGEConv):
        def forward(self, x, edge_index, size=None):
            hooks.append("own")
            return super().forward(x, edge_index, size)

    assert not run(lambda model: model.convs.__setitem__(0, Own(8, 12).double()))
    assert hooks[-1] == "own"


def test_a_gcn_batch_whose_edges_come_in_no_order_is_normalised_alike(graph, calls):
    batch = sample([4, 0, 17, 33], [3, 2], *graph)
    model = GCN(8, 12, 2, 5).double()
    wanted = model(batch.x, batch.edge_index, **list_hop_sizes(batch))
    first = batch.num_sampled_edges[0]
    order = torch.cat([torch.randperm(first), first + torch.randperm(batch.num_edges - first)])
    out = model(batch.x, batch.edge_index[:, order], **list_hop_sizes(batch))
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    assert calls == ["update_by_edges"] * 4


# Log messages.


class Doubled(SAGEConv):
    def message(self, x_j):
        return 2 * x_j


def test_reasons_are_given():
    hooked = GCNConv(4, 4)
    hooked.lin.register_forward_hook(lambda *_: None)
    replaced = SAGEConv(4, 4)
    replaced.lin_l = nn.Linear(4, 4)
    layers = {
        "fine": SAGEConv(4, 4),
        "max": SAGEConv(4, 4, aggr="max"),
        "isomorphism": GINConv(nn.Linear(4, 4)),
        "pygs": pyg.GCNConv(4, 4),
        "other": pyg.ChebConv(4, 4, 2),
        "lstm": SAGEConv(4, 4, aggr="lstm"),
        "several": SAGEConv(4, 4, aggr=["mean", "max"]),
        "message": Doubled(4, 4),
        "hooked": hooked,
        "replaced": replaced,
        "backwards": GINConv(nn.Linear(4, 4), flow="target_to_source"),
    }
    reasons = unfused_layers(nn.ModuleDict(layers))
    assert list(reasons) == list(layers)[3:]
    for name, words in {
        "pygs": "lightning_gnn.nn.GCNConv takes the same",
        "other": "no fused operator for ChebConv",
        "lstm": "'lstm'",
        "several": "aggr=",
        "message": "message()",
        "hooked": "lin",
        "replaced": "lin_l is a torch.nn.modules.linear.Linear",
        "backwards": "flow",
    }.items():
        assert words in reasons[name], reasons[name]


def test_what_has_a_reason_does_not_fuse(calls):
    (num_sources, _), edges = hub_batch()
    x = normal(num_sources, 4)
    for layer in (
        Doubled(4, 4),
        SAGEConv(4, 4, aggr=["mean", "max"]),
        GINConv(nn.Linear(4, 4), flow="target_to_source"),
    ):
        layer.double()((x, x), edges)
    assert not calls


def test_dropout_is_ours_in_training_only():
    assert fused.fold_dropout(nn.Identity(), nn.Identity(), nn.ReLU(), Dropout(0.5).eval(), normal(2)) == ReluDropout()
    assert fused.fold_dropout(nn.Identity(), nn.Identity(), F.relu, Dropout(0.5), normal(2)) is None


def test_a_run_says_what_is_not_fused(caplog, tmp_path):
    from lightning_gnn import NeighborDataModule
    from lightning_gnn.nn import NodeClassifier

    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(40, 4, generator=generator),
        y=torch.randint(3, (40,), generator=generator),
        edge_index=torch.randint(40, (2, 160), generator=generator),
    )
    for model, said in ((GraphSAGE(4, 8, 2, 3), False), (GraphSAGE(4, 8, 2, 3, aggr="lstm"), True)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            trainer(max_epochs=2).fit(
                NodeClassifier(model, num_classes=3),
                NeighborDataModule(data, torch.arange(20), num_neighbors=[2, 2], batch_size=8),
            )
        found = [record.message for record in caplog.records if "several PyG operators" in record.message]
        assert len(found) == said
        assert not said or "convs.0: aggr='lstm'" in found[0]
