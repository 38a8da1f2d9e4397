"""Exact inference: the outputs of the whole-graph forward, for any memory budget."""

import warnings

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.nn import models as pyg

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn import GAT, GCN, FullInference, GraphSAGE, infer, inference
from lightning_gnn.nn.inference import layers_of
from lightning_gnn.ops.aggregate import source_order
from tests.strategies import edge_indices

NODES = 60
GENERATOR = torch.Generator().manual_seed(0)
EDGES = torch.cat(
    [
        torch.randint(15, (2, 200), generator=GENERATOR),
        torch.randint(50, (2, 200), generator=GENERATOR),
        torch.tensor([[3, 3, 5], [3, 3, 5]]),
    ],
    dim=1,
)
X = torch.randn(NODES, 8, dtype=torch.double, generator=GENERATOR)
WEIGHT = torch.rand(EDGES.size(1), dtype=torch.double, generator=GENERATOR)
GRAPH = CompressedGraph.from_edge_index(EDGES, NODES)

MODELS = [
    (GCN, {}),
    (GCN, {"norm": "batch", "act_first": True, "jk": "last"}),
    (GCN, {"normalize": False}),
    (GCN, {"add_self_loops": False, "improved": True}),
    (GraphSAGE, {"norm": "layer", "norm_kwargs": {"mode": "node"}}),
    (GraphSAGE, {"aggr": "max", "normalize": True}),
    (GraphSAGE, {"aggr": "sum", "normalize": True, "root_weight": False}),
    (GraphSAGE, {"project": True}),
    (GAT, {"heads": 3, "act": "elu", "output_heads": 2}),
    (GAT, {"heads": 2, "residual": True, "norm": "batch"}),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(inference, "MIN_BLOCK_VERTICES", 8)  # several blocks even for a small graph
        patch.setattr(source_order, "_CHUNK_BYTES", 600)  # several chunks of sources
        yield


def make_trained(cls, **kwargs):
    """Return a model with nontrivial normalization statistics."""
    torch.manual_seed(0)
    model = cls(8, 12, 3, 5, dropout=0.5, **kwargs).double()
    model(X, EDGES)
    return model.eval()


@pytest.mark.campaign
@pytest.mark.parametrize("limit", ["auto", 3000, 0])
@pytest.mark.parametrize(("cls", "kwargs"), MODELS)
def test_equals_the_forward_of_the_whole_graph(tmp_path, cls, kwargs, limit):
    model = make_trained(cls, **kwargs)
    extra = {"edge_weight": WEIGHT} if cls is GCN else {}
    options = FullInference(folder=tmp_path, memory_limit=limit, progress=False)
    out = infer(model, X, GRAPH, settings=options, **extra)
    torch.testing.assert_close(out, model(X, EDGES, **extra), rtol=1e-10, atol=1e-10)
    assert not out.requires_grad
    assert any(tmp_path.iterdir()) == (limit != "auto")


@settings(max_examples=30)
@given(drawn=edge_indices(), which=st.integers(0, len(MODELS) - 1))
def test_on_any_graph(drawn, which):
    num_nodes, edges = drawn
    cls, kwargs = MODELS[which]
    model = make_trained(cls, **kwargs)
    graph = CompressedGraph.from_edge_index(edges, num_nodes)
    x = torch.randn(num_nodes, 8, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    out = infer(model, x, graph, settings=FullInference(memory_limit=0, progress=False))
    torch.testing.assert_close(out, model(x, edges), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("limit", ["auto", 0])
def test_features_in_half_of_the_bytes_are_widened_where_they_are_read(monkeypatch, limit):
    model, x = make_trained(GCN).float(), X.half()
    widened, settings = [], FullInference(memory_limit=limit, progress=False)
    monkeypatch.setattr(inference, "widen_features", lambda x, model: widened.append(x) or x.float())
    torch.testing.assert_close(infer(model, x, GRAPH, settings=settings), model(x.float(), EDGES))
    assert bool(widened) == (limit == "auto")


@settings(max_examples=30)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12), parts=st.integers(1, 5), data=st.data())
def test_threads_share_no_target(counts, parts, data):
    targets = np.repeat(np.arange(len(counts)), counts)
    begin = data.draw(st.integers(0, targets.size))
    cuts = source_order._cut_between_targets(targets, begin, targets.size, parts)
    assert len(cuts) == parts + 1
    assert [cuts[0], cuts[-1]] == [begin, targets.size]
    assert cuts == sorted(cuts)
    assert all(targets[cut - 1] != targets[cut] for cut in cuts if begin < cut < targets.size)


def relu(module, args, *output):
    """Change the inputs of a layer, as a hook before it, or its outputs, as one after it."""
    if output:
        return output[0].relu()
    first = tuple(each.relu() for each in args[0]) if isinstance(args[0], tuple) else args[0].relu()
    return first, *args[1:]


CHANGES = {
    "a layer in place of lin": lambda conv: setattr(conv, "lin", nn.Sequential(conv.lin, nn.ReLU())),
    "lin with a bias": lambda conv: setattr(conv.lin, "bias", nn.Parameter(torch.arange(12.0).double())),
    "a hook after lin": lambda conv: conv.lin.register_forward_hook(relu),
    "a hook before the layer": lambda conv: conv.register_forward_pre_hook(relu),
}


@pytest.mark.parametrize("limit", [0, 3000])
@pytest.mark.parametrize(
    ("cls", "change"), [*((GCN, each) for each in CHANGES), (GraphSAGE, "a hook before the layer")]
)
def test_layers_that_users_changed(cls, change, limit):
    model = make_trained(cls)
    for conv in model.convs[:-1]:
        CHANGES[change](conv)
    out = infer(model, X, GRAPH, settings=FullInference(memory_limit=limit, progress=False))
    torch.testing.assert_close(out, model(X, EDGES), rtol=1e-10, atol=1e-10)


class Interrupted(Exception):
    pass


def interrupt(model, layer, calls):
    """Make a layer raise at its call number ``calls``."""
    seen = []

    def hook(module, args, output):
        seen.append(module)
        if len(seen) > calls:
            raise Interrupted

    return model.convs[layer].register_forward_hook(hook)


@pytest.mark.medium
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("given", [True, False])
def test_an_interrupted_run_leaves_no_outputs_and_starts_again(tmp_path, monkeypatch, given, layer):
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "layers" if given else None
    model, options = make_trained(GraphSAGE), FullInference(folder=folder, memory_limit=0, progress=False)
    handle = interrupt(model, layer, 3)
    with pytest.raises(Interrupted):
        infer(model, X, GRAPH, settings=options)
    handle.remove()
    assert not list(tmp_path.rglob("layer_*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = infer(model, X, GRAPH, settings=options)
    torch.testing.assert_close(out, model(X, EDGES), rtol=1e-10, atol=1e-10)


def test_what_a_killed_run_has_left_is_not_used(tmp_path):
    for layer in range(3):
        np.save(tmp_path / f"layer_{layer}.npy", np.full((NODES, 12), np.nan))
    model = make_trained(GraphSAGE)
    out = infer(model, X, GRAPH, settings=FullInference(folder=tmp_path, memory_limit=0, progress=False))
    torch.testing.assert_close(out, model(X, EDGES), rtol=1e-10, atol=1e-10)


def test_the_result_is_memory_mapped_and_only_it_is_kept(tmp_path):
    model = make_trained(GraphSAGE)
    out = infer(model, X, GRAPH, settings=FullInference(folder=tmp_path, memory_limit=0, progress=False))
    (path,) = tmp_path.glob("*.npy")
    assert np.array_equal(np.load(path), out.numpy())
    out.zero_()  # copy on write
    assert np.abs(np.load(path)).sum() > 0


def test_bfloat16_goes_through_files_of_float32(tmp_path):
    model = make_trained(GraphSAGE).bfloat16()
    x = X.bfloat16()
    out = infer(model, x, GRAPH, settings=FullInference(folder=tmp_path, memory_limit=0, progress=False))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, model(x, GRAPH).float(), rtol=5e-2, atol=5e-2)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = GraphSAGE(8, 12, 2, 5).double()

    def forward(self, x, edge_index):
        return self.layer(x, edge_index).tanh()


class Tensorial(nn.Module):
    def forward(self, x, edge_index):
        return x.new_zeros(x.shape).index_add(0, edge_index[1], x[edge_index[0]])


class Scaled(GraphSAGE):
    def forward(self, x, edge_index):
        return 2 * super().forward(x, edge_index)


@pytest.mark.parametrize(
    "model",
    [Own(), Tensorial(), Scaled(8, 12, 2, 5), pyg.GIN(8, 12, 2, 5), pyg.GCN(8, 12, 2, 5), GAT(8, 12, 2, 5, v2=True)],
    ids=lambda model: type(model).__name__,
)
def test_other_models_run_on_the_whole_graph_at_once(model):
    model = model.double().eval()
    assert layers_of(model) is None
    out = infer(model, X, GRAPH, settings=FullInference(memory_limit=0))
    torch.testing.assert_close(out, model(X, EDGES), rtol=1e-10, atol=1e-10)


def test_features_of_edges_reach_a_model_that_takes_them():
    model = GAT(8, 12, 2, 5, edge_dim=3).double().eval()
    features = torch.rand(EDGES.size(1), 3, dtype=torch.double)
    out = infer(model, X, GRAPH, edge_attr=features)
    torch.testing.assert_close(out, model(X, EDGES, edge_attr=features), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", ["layer", "graph_norm", "instance"])
def test_a_norm_over_all_nodes_needs_memory(norm):
    model = make_trained(GraphSAGE, norm=norm)
    torch.testing.assert_close(infer(model, X, GRAPH), model(X, EDGES), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"averages over all nodes.*raise memory_limit"):
        infer(model, X, GRAPH, settings=FullInference(memory_limit=0))


def test_wrong_use_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        infer(GCN(8, 12, 2, 5).double(), X, GRAPH)
    for limit in ("much", -1):
        with pytest.raises(ValueError, match="memory_limit must be a number of bytes, or 'auto'"):
            FullInference(memory_limit=limit)
    options = FullInference(folder=tmp_path, memory_limit=0, progress=False)
    with FileLock(tmp_path / "lock"), pytest.raises(RuntimeError, match="in use by another process"):
        infer(make_trained(GCN), X, GRAPH, settings=options)


def test_progress_is_logged_up_to_the_last_node(caplog):
    with caplog.at_level("INFO"):
        infer(make_trained(GraphSAGE), X, GRAPH, settings=FullInference(memory_limit=0))
    said = [record.message for record in caplog.records if "of the nodes are done" in record.message]
    assert [message for message in said if "100 %" in message] == [
        f"layer {layer} of 3: 100 % of the nodes are done" for layer in (1, 2, 3)
    ]
    assert len(said) > 3
