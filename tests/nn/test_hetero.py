import itertools

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import HeteroConv, RGCNConv, SAGEConv
from torch_geometric.transforms import AddSelfLoops, RemoveDuplicatedEdges, ToUndirected

from lightning_gnn import NeighborDataModule
from lightning_gnn.nn import HGT, RGAT, RGCN, GraphSAGE, HeteroGraphSAGE, NodeClassifier
from tests.nn.quiet import trainer

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
MODELS = [HeteroGraphSAGE, RGCN, RGAT, HGT]
TYPES = [("a", "x", "a"), ("b", "x", "a"), ("b", "y", "a"), ("a", "x", "b"), ("c", "x", "b"), ("a", "z", "c")]


def make_graph(sizes=(9, 6, 4), widths=(5, 5, 5), types=TYPES, num_edges=25, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    data = HeteroData()
    for name, size, width in zip("abc", sizes, widths, strict=True):
        data[name].x = torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)
    for source, name, target in types:
        sizes_of = [max(data[end].num_nodes, 1) for end in (source, target)]
        ends = [torch.randint(size, (num_edges,), generator=generator) for size in sizes_of]
        data[source, name, target].edge_index = torch.stack(ends)
    return data


def assert_same(ours, theirs):
    assert set(ours) == set(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **CLOSE)


class Plain(torch.nn.Module):
    """PyG's layers, composed as in its examples."""

    def __init__(self, make, num_layers):
        super().__init__()
        self.convs = torch.nn.ModuleList(HeteroConv(make(layer)) for layer in range(num_layers))

    def forward(self, x_dict, edge_index_dict):
        for i, conv in enumerate(self.convs):
            x_dict = conv(x_dict, edge_index_dict)
            if i < len(self.convs) - 1:
                x_dict = {name: x.relu() for name, x in x_dict.items()}
        return x_dict


def list_widths(layer, widths):
    return {"a": widths[0], "b": widths[1], "c": widths[2]} if layer == 0 else dict.fromkeys("abc", 8)


def make_plain_sage(widths, aggr="mean", root=True):
    def make(layer):
        width, out = list_widths(layer, widths), 3 if layer == 1 else 8
        return {k: SAGEConv((width[k[0]], width[k[2]]), out, aggr=aggr, root_weight=root) for k in TYPES}

    return Plain(make, 2).double()


@pytest.mark.parametrize("widths", [(5, 5, 5), (5, 3, 5), (2, 3, 4)])
@pytest.mark.parametrize(("aggr", "root"), [("mean", True), ("sum", True), ("mean", False), ("max", True)])
def test_graphsage_is_that_of_pyg(widths, aggr, root):
    data, theirs = make_graph(widths=widths), make_plain_sage(widths, aggr, root)
    in_channels = dict(zip("abc", widths, strict=True))
    ours = HeteroGraphSAGE(data.metadata(), in_channels, 8, 2, 3, aggr=aggr, root_weight=root).double()
    ours.load_state_dict(theirs.state_dict())
    given = [{name: x.clone().requires_grad_() for name, x in data.x_dict.items()} for _ in range(2)]
    outs = [model(x, data.edge_index_dict) for model, x in zip((ours, theirs), given, strict=True)]
    assert_same(*outs)
    grads = [
        torch.autograd.grad(sum(rows.square().sum() for rows in out.values()), [*x.values(), *model.parameters()])
        for out, x, model in zip(outs, given, (ours, theirs), strict=True)
    ]
    names = [
        [*x, *(name for name, _ in model.named_parameters())] for x, model in zip(given, (ours, theirs), strict=True)
    ]
    assert_same(*(dict(zip(n, g, strict=True)) for n, g in zip(names, grads, strict=True)))


@pytest.mark.parametrize("options", [{}, {"aggr": "sum"}, {"num_bases": 3}, {"num_blocks": 1}, {"root_weight": False}])
def test_rgcn_is_that_of_pyg_on_the_graph_without_types(options, monkeypatch):
    monkeypatch.setattr("torch_geometric.backend.use_segment_matmul", False)  # which uses one mean for all relations
    data = make_graph()
    ours = RGCN(data.metadata(), 5, 8, 2, 3, **options).double()
    whole = data.to_homogeneous()
    assert [name for name, _ in ours.convs[0].named_parameters()] == [
        name for name, _ in RGCNConv(5, 8, len(TYPES), **options).named_parameters()
    ]
    theirs = [RGCNConv(*size, len(TYPES), **options).double() for size in ((5, 8), (8, 3))]
    for one, other in zip(ours.convs, theirs, strict=True):
        other.load_state_dict(one.state_dict())
    order = [data.edge_types.index(kind) for kind in data.edge_types]
    assert order == sorted(order)
    x = theirs[0](whole.x, whole.edge_index, whole.edge_type).relu()
    want = theirs[1](x, whole.edge_index, whole.edge_type)
    out = ours(data.x_dict, data.edge_index_dict)
    torch.testing.assert_close(torch.cat(list(out.values())), want, **CLOSE)


def test_rgcn_maps_features_of_several_widths():
    data = make_graph(widths=(2, 3, 4))
    model = RGCN(data.metadata(), {"a": 2, "b": 3, "c": 4}, 8, 2, 3).double()
    mapped = {name: model.lin.lins[name](x) for name, x in data.x_dict.items()}
    narrow = RGCN(data.metadata(), 8, 8, 2, 3).double()
    narrow.convs.load_state_dict(model.convs.state_dict())
    assert_same(model(data.x_dict, data.edge_index_dict), narrow(mapped, data.edge_index_dict))


@pytest.mark.medium
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("hops", [1, 2, 3])
def test_trimming_leaves_the_seeds_as_they_are(kind, hops):
    data = make_graph(sizes=(60, 40, 20), num_edges=150)
    model = kind(data.metadata(), 5, 8, 2, 3).double()
    loader = NeighborDataModule(
        data, num_neighbors=[3] * hops, batch_size=5, input_train_nodes=("a", torch.arange(20))
    ).train_dataloader()
    for batch in loader:
        whole = model(batch.x_dict, batch.edge_index_dict)["a"][:5]
        numbers = batch.collect("num_sampled_nodes"), batch.collect("num_sampled_edges")
        trimmed = model(batch.x_dict, batch.edge_index_dict, *numbers)["a"]
        assert trimmed.size(0) == 5 or hops < 2
        torch.testing.assert_close(trimmed[:5], whole, **CLOSE)


@given(st.lists(st.integers(0, 12), min_size=3, max_size=3), st.integers(0, 40), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_types_may_lack_nodes_and_edges(sizes, num_edges, seed):
    if 0 in sizes:
        num_edges = 0
    data = make_graph(sizes=sizes, num_edges=num_edges, seed=seed)
    theirs = make_plain_sage((5, 5, 5))
    ours = HeteroGraphSAGE(data.metadata(), 5, 8, 2, 3).double()
    ours.load_state_dict(theirs.state_dict())
    assert_same(ours(data.x_dict, data.edge_index_dict), theirs(data.x_dict, data.edge_index_dict))


def test_what_no_relation_reaches_is_read_once():
    types = [("b", "x", "a"), ("a", "x", "a")]
    data = make_graph(types=types)
    ours = HeteroGraphSAGE((["a", "b"], types), 5, 8, 2, 3).double()
    assert [list(conv.convs.keys()) for conv in ours.convs] == [types, types[1:]]
    del data["c"]
    with pytest.warns(UserWarning, match="representations do not get updated"):
        theirs = Plain(
            lambda layer: {k: SAGEConv((8 if layer else 5,) * 2, 3 if layer else 8) for k in types[layer:]}, 2
        ).double()
    theirs.load_state_dict(ours.state_dict())
    out = ours(data.x_dict, data.edge_index_dict)
    assert list(out) == ["a"]
    assert_same(out, theirs(data.x_dict, data.edge_index_dict))


@pytest.mark.parametrize("where", ["layer", "relation", "product"])
def test_hooks_see_what_they_would_in_pyg(where):
    data, seen = make_graph(), []
    model = HeteroGraphSAGE(data.metadata(), 5, 8, 2, 3).double()
    want = model(data.x_dict, data.edge_index_dict)
    conv = model.convs[0].convs["b", "x", "a"]
    module = {"layer": model.convs[0], "relation": conv, "product": conv.lin_l}[where]
    module.register_forward_hook(lambda *given: seen.append(given[2]))
    assert_same(model(data.x_dict, data.edge_index_dict), want)
    assert len(seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), zip(MODELS, itertools.cycle(["32-true", "bf16-mixed"]), strict=False))
def test_it_trains_with_one_line(kind, precision, tmp_path):
    data = make_graph(sizes=(200, 80, 30), num_edges=600, dtype=torch.float32)
    data["a"].y = (data["a"].x[:, 0] > 0).long()
    data["a"].train_mask = data["a"].val_mask = torch.ones(200, dtype=torch.bool)
    pl.seed_everything(0, verbose=False)
    module = NodeClassifier(kind(data.metadata(), 5, 16, 2, 2, dropout=0.1), 2, lr=0.02, target="a")
    run = trainer(tmp_path, max_epochs=8, precision=precision)
    run.fit(module, datamodule=NeighborDataModule(data, num_neighbors=[5, 5], batch_size=50))
    assert run.callback_metrics["val_acc"] > 0.85


@pytest.mark.parametrize("transform", [AddSelfLoops(), ToUndirected(merge=False), RemoveDuplicatedEdges()])
@pytest.mark.parametrize("typed", [True, False])
def test_edges_that_a_transform_changes_are_all_read(typed, transform):
    data = make_graph(sizes=(60, 40, 20), num_edges=150, dtype=torch.float32)
    data["a"].y = torch.zeros(60, dtype=torch.long)
    seeds = ("a", torch.arange(20))
    if typed:
        model, target = RGCN(data.metadata(), 5, 8, 2, 2), "a"
    else:
        edges = data["a", "x", "a"].edge_index
        data, seeds = Data(x=data["a"].x, y=data["a"].y, edge_index=edges), seeds[1]
        model, target = GraphSAGE(5, 8, 2, 2), None
    options = {"num_neighbors": [3, 3], "batch_size": 5, "transform": transform, "replace": True}
    for batch in NeighborDataModule(data, seeds, **options).train_dataloader():
        logits = NodeClassifier(model, 2, target=target).predict_step(batch, 0)
        whole = model(batch.x_dict, batch.edge_index_dict)["a"] if typed else model(batch.x, batch.edge_index)
        torch.testing.assert_close(logits, whole[:5])


def test_too_few_hops_are_told():
    data = make_graph(sizes=(60, 40, 20), num_edges=150, dtype=torch.float32)
    data["a"].y = torch.zeros(60, dtype=torch.long)
    module = NodeClassifier(RGCN(data.metadata(), 5, 8, 2, 2), 2, target="a")
    loader = NeighborDataModule(data, ("a", torch.arange(20)), num_neighbors=[3], batch_size=5).train_dataloader()
    with pytest.warns(
        UserWarning, match="the model has 2 layers, but its mini-batches have 1 hop: nodes of the last hop"
    ):
        module(next(iter(loader)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_channels": 0}, "hidden_channels must be at least 1, got 0"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout is a probability in \[0, 1\), got 1.0"),
        ({"metadata": (["a"], [])}, r"metadata has no edge types; use data.metadata\(\)"),
        ({"metadata": (["a"], [("a", "x", "b")])}, r"\('a', 'x', 'b'\) has the type 'b', which is not among \['a'\]"),
        ({"in_channels": {"a": 5, "b": 5}}, "in_channels must be at least 1 for 'c', got None"),
        ({"metadata": (["a", "b", "c"], [("a", "x", "b")])}, "no edge type is left for layer 2"),
    ],
)
def test_mistakes_are_named(change, message):
    arguments = {
        "metadata": make_graph().metadata(), "in_channels": 5, "hidden_channels": 8, "num_layers": 2, "out_channels": 3
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        HeteroGraphSAGE(**arguments)


def test_missing_features_and_edges_are_named():
    data = make_graph()
    model = HeteroGraphSAGE(data.metadata(), 5, 8, 2, 3).double()
    edges = dict(data.edge_index_dict)
    del edges["c", "x", "b"]
    with pytest.raises(ValueError, match=r"the batch has no edges of \('c', 'x', 'b'\), which the model reads"):
        model(data.x_dict, edges)
    with pytest.raises(ValueError, match="the batch has no features of 'c', which the model reads"):
        model({name: data[name].x for name in "ab"}, data.edge_index_dict)
    with pytest.raises(ValueError, match="aggr='max' is unknown; use mean or sum"):
        RGCN(data.metadata(), 5, 8, 2, 3, aggr="max")
    with pytest.raises(ValueError, match="hidden_channels=8 counts all heads and must be a multiple of heads=3"):
        RGAT(data.metadata(), 5, 8, 2, 3, heads=3)
