"""``torch.compile`` calls the fused operators without a graph break, and gives eager results."""

import shutil
from contextlib import suppress

import pytest
import pytorch_lightning as pl
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.compilers import nop

from lightning_gnn import NeighborDataModule
from lightning_gnn.nn import (
    GAT,
    GCN,
    GIN,
    HGT,
    RGAT,
    RGCN,
    GraphSAGE,
    GraphTransformer,
    HeteroGraphSAGE,
    NodeClassifier,
    SAGEConv,
    export_program,
)
from lightning_gnn.ops.aggregate_update import edge_order, gcn_edges
from lightning_gnn.ops.attention import definition as attention
from lightning_gnn.ops.attention.reference import Attend, Layout
from tests.batching_data import small_data
from tests.nn.fusing import fuse_from

# Inductor imports it, and it replaces distutils, which fails after some tests of other files.
with suppress(ImportError):
    import setuptools  # noqa: F401

TYPES = (["a", "b"], [("a", "r", "b"), ("b", "s", "a"), ("a", "t", "a")])
MODELS = {
    "sage": (lambda **options: GraphSAGE(6, 8, 2, 3, **options), "aggregate_update"),
    "max": (lambda **options: GraphSAGE(6, 8, 2, 3, aggr="max", **options), "aggregate_rows"),
    "gcn": (lambda **options: GCN(6, 8, 2, 3, **options), "aggregate_update"),
    "gin": (lambda **options: GIN(6, 8, 2, 3, **options), "aggregate_rows"),
    "gat": (lambda **options: GAT(6, 8, 2, 3, heads=2, **options), "attend"),
    "gatv2": (lambda **options: GAT(6, 8, 2, 3, heads=2, v2=True, **options), "attend"),
    "transformer": (lambda **options: GraphTransformer(6, 8, 2, 3, heads=2, **options), "attend"),
}
TYPED = {
    "typed sage": (lambda: HeteroGraphSAGE(TYPES, 6, 8, 2, 3), "aggregate_update", 2),
    "rgcn": (lambda: RGCN(TYPES, 6, 8, 2, 3), "aggregate_update", 2),
    "rgat": (lambda: RGAT(TYPES, 6, 8, 2, 3), "attend", 4),  # the wide layer has one per relation
    "hgt": (lambda: HGT(TYPES, 6, 8, 2, 3), "attend", 2),
}


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    fuse_from(0, monkeypatch)
    torch._dynamo.reset()
    counters.clear()


def draw(seed):
    """Return a mini-batch of two hops with self-loops and repeated edges, of a size that depends on the seed."""
    some = torch.Generator().manual_seed(seed)
    nodes, edges = [5 + seed, 7 + 2 * seed, 9 + seed], [30 + 3 * seed, 40 + seed]
    targets = torch.randint(nodes[0], (edges[0],), generator=some), torch.randint(nodes[1], (edges[1],), generator=some)
    target = torch.cat([targets[0].sort().values, targets[1].sort().values + nodes[0]])
    source = torch.cat([torch.randint(sum(nodes[: hop + 2]), (edges[hop],), generator=some) for hop in range(2)])
    x = torch.randn(sum(nodes), 6, generator=some, dtype=torch.float64)
    return x, torch.stack([source, target]), nodes, edges


def draw_types(seed):
    some = torch.Generator().manual_seed(seed)
    size = {"a": 10 + seed, "b": 12 + 2 * seed}
    x = {name: torch.randn(count, 6, generator=some, dtype=torch.float64) for name, count in size.items()}
    count = 40 + 3 * seed
    return x, {
        kind: torch.stack([torch.randint(size[end], (count,), generator=some) for end in (kind[0], kind[2])])
        for kind in TYPES[1]
    }


class KeepLosses(pl.Callback):
    """Keeps the loss of each step."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())


class Recorder:
    """A backend of AOTAutograd that counts our operators in forward and backward graphs."""

    def __init__(self):
        self.names, self.backend = [], aot_autograd(fw_compiler=self.record, bw_compiler=self.record)

    def record(self, graph, inputs):
        targets = [node.target for part in graph.modules() if hasattr(part, "graph") for node in part.graph.nodes]
        self.names += [target._opname for target in targets if getattr(target, "namespace", "") == "lightning_gnn"]
        return nop(graph, inputs)


def compare(model, compiled, *inputs, **options):
    """Assert that outputs and gradients, also of the features, are equal."""
    found = []
    for call in (compiled, model):
        torch.manual_seed(1)
        out = call(*inputs)
        out = torch.cat([rows.flatten() for rows in out.values()]) if isinstance(out, dict) else out
        leaves = [value for value in (inputs[0], *model.parameters()) if torch.is_tensor(value) and value.requires_grad]
        found.append([out, *torch.autograd.grad(out.pow(2).sum(), leaves, allow_unused=True)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **options)


@pytest.mark.slow
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_one_graph_of_our_operators_for_all_sizes(name, trimmed):
    build, operator = MODELS[name]
    model, recorder = build().double(), Recorder()
    compiled = torch.compile(model, backend=recorder.backend, fullgraph=True)
    for seed in range(4):
        x, edge_index, *counts = draw(seed)
        compare(model, compiled, x.requires_grad_(), edge_index, None, None, None, None, *(counts if trimmed else ()))
    # The second size compiles the graph for all others.
    assert counters["stats"]["unique_graphs"] == 2
    assert recorder.names.count(operator) == recorder.names.count(f"{operator}_backward") == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPED)
def test_a_typed_model_is_one_graph_of_our_operators_for_all_sizes(name):
    build, operator, calls = TYPED[name]
    model, recorder = build().double(), Recorder()
    compiled = torch.compile(model, backend=recorder.backend, fullgraph=True)
    for seed in range(4):
        compare(model, compiled, *draw_types(seed))
    assert counters["stats"]["unique_graphs"] == 2
    assert recorder.names.count(operator) == recorder.names.count(f"{operator}_backward") == 2 * calls


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_under_autocast_in_evaluation_and_without_gradients(name):
    model = MODELS[name][0]()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, edge_index, *counts = draw(0)
    inputs = x.float(), edge_index, None, None, None, None, *counts
    with torch.autocast("cpu", torch.bfloat16):
        compare(model, compiled, *inputs)
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(compiled(*inputs), model(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_a_trainer_takes_a_compiled_model(name):
    """With ``dynamic=True``, a graph serves all sizes with the same order of products: two each in both modes."""
    data, losses = small_data(), []
    data.x, data.y, data.edge_attr = data.x[:, :6], data.y % 3, None
    for compiles in (False, True):
        pl.seed_everything(0, verbose=False)
        model = MODELS[name][0]()
        model = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True) if compiles else model
        datamodule = NeighborDataModule(data, num_neighbors=[4, 3], batch_size=60)
        kept = KeepLosses()
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        pl.Trainer(max_epochs=1, callbacks=[kept], accelerator="cpu", **options).fit(
            NodeClassifier(model, 3), datamodule
        )
        losses.append(kept.values)
    assert len(losses[0]) > 2
    torch.testing.assert_close(*map(torch.tensor, losses))
    assert 2 <= counters["stats"]["unique_graphs"] <= 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ by g++, which is not installed")
@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_inductors_code_calls_our_operators(name):
    """Inductor asserts that sizes and strides are those of the operators' fakes."""
    model = MODELS[name][0]()
    compiled = torch.compile(model, fullgraph=True)
    x, edge_index, *counts = draw(0)
    compare(model, compiled, x.float(), edge_index, None, None, None, None, *counts, atol=1e-4, rtol=1e-4)


@pytest.mark.medium
def test_dropout_is_torchs_own(monkeypatch):
    model, recorder = MODELS["sage"][0](dropout=0.5, input_dropout=0.3).double(), Recorder()
    compiled = torch.compile(model, backend=recorder.backend, fullgraph=True)
    x, edge_index, *counts = draw(0)
    monkeypatch.setattr("lightning_gnn.ops.dropout.draws_by_key", lambda x: False)
    monkeypatch.setattr("lightning_gnn.nn.conv.fused.draws_by_key", lambda x: False)
    compare(model, compiled, x.requires_grad_(), edge_index, None, None, None, None, *counts)
    assert recorder.names.count("aggregate_update") == 2
    first, second = (compiled(x, edge_index, None, None, None, None, *counts) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.medium
@pytest.mark.parametrize("nodes", [[5, 7, 9], [4, 8, 9]])
def test_wrong_counts_per_hop_are_named(nodes):
    model = MODELS["gcn"][0]().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, edge_index, _, edges = draw(0)
    inputs = x, edge_index, None, None, None, None, nodes, edges
    if nodes[0] == 5:
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
        return
    with pytest.raises(RuntimeError, match="num_sampled_edges_per_hop do not fit the edges"):
        compiled(*inputs)


@pytest.fixture
def device_order():
    """Let the CPU sort edges as a device does."""
    library = torch.library.Library("lightning_gnn", "IMPL")
    for function in (edge_order.edges_by_target, gcn_edges.gcn_edges):
        library.impl(function.__name__, function, "CPU")
    yield
    library._destroy()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize(("name", "sorts"), [("sage", 2), ("gat", 2), ("gcn", 1)])
def test_edges_that_are_known_to_be_sorted_are_not_sorted(name, sorts, monkeypatch, record_calls, device_order):
    model, recorder = MODELS[name][0]().double(), Recorder()
    compiled = torch.compile(model, backend=recorder.backend, fullgraph=True)
    x, edge_index, *counts = draw(0)
    monkeypatch.setattr(edge_order, "mark_sorted", lambda edges: edge_order._sorted.update({edges: edges._version}))
    compiled(x, edge_index, None, None, None, None, *counts)
    assert recorder.names.count("first_edges") == sorts - 1  # the outer layer reads all edges
    checks, other = record_calls(edge_order, "_check"), edge_index.clone()
    edge_order.mark_sorted(edge_index)
    found = compiled(x, edge_index, None, None, None, None, *counts)
    assert not checks
    assert torch.equal(found, compiled(x, other, None, None, None, None, *counts))
    assert len(checks) == sorts


@pytest.mark.slow
def test_a_layer_with_hooks_or_targets_of_its_own():
    layer = SAGEConv(6, 4).double()
    x, edge_index, nodes, _ = draw(0)
    edge_index = edge_index[:, :30]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for targets in (x[: nodes[0]], x[1 : nodes[0] + 1].clone()):
        torch.testing.assert_close(compiled((x, targets), edge_index), layer((x, targets), edge_index))
    layer.register_forward_hook(lambda layer, inputs, out: out + 1)
    model = MODELS["sage"][0]().double()
    model.convs[0].register_forward_hook(lambda layer, inputs, out: out + 1)
    inputs = draw(1)
    wanted = model(*inputs[:2], None, None, None, None, *inputs[2:])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs[:2], None, None, None, None, *inputs[2:]), wanted)


@pytest.mark.slow
def test_programs_run_without_our_operators():
    for node in export_program(NodeClassifier(MODELS["sage"][0](), 3), 6).graph.nodes:
        assert getattr(node.target, "namespace", "aten") == "aten", node.target


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_operators_are_what_torch_expects_of_one(dtype, first):
    x, edge_index, *_ = draw(0)
    x, operators, checked = x.to(dtype), torch.ops.lightning_gnn, {"test_utils": ("test_schema", "test_faketensor")}
    edges = operators.edges_by_target(edge_index, 21, 21, None)
    weight, own, bias = torch.randn(1, 4, 6, dtype=dtype), torch.randn(1, 4, 6, dtype=dtype), x[:1, :4].clone()
    call = edges, x, weight, own, bias, [21], [1], [0], True, first, 0.5, 3
    out, aggregated = operators.aggregate_update(*call, first)
    kept = aggregated if first else None
    torch.library.opcheck(operators.aggregate_update, (*call, first), **checked)
    torch.library.opcheck(operators.aggregate_update_backward, (*call, out, kept, out, [True] * 4), **checked)
    for reduce in ("mean", "max") if dtype != torch.bfloat16 else ("mean",):
        best, ties = operators.aggregate_rows(edges, x, reduce)
        rest = (best, ties) if reduce == "max" else (None, None)
        torch.library.opcheck(operators.aggregate_rows, (edges, x, reduce), **checked)
        torch.library.opcheck(operators.aggregate_rows_backward, (edges, best, x, *rest, reduce), **checked)
    torch.library.opcheck(operators.first_edges, (edge_index, 30, 4), **checked)
    for given in ((edge_index, 21, 21, x[:, 0].repeat(4)[:70]), (edge_index, 21, 21, None)):
        torch.library.opcheck(operators.edges_by_target, given, **checked)
    for loops in (True, False):
        torch.library.opcheck(operators.gcn_edges, (edge_index, 21, 21, None, 1.0, loops, torch.float32), **checked)


@pytest.mark.medium
@pytest.mark.parametrize("form", ["values", "weight", "dynamic", "keys", "relations"])
def test_attention_is_what_torch_expects_of_one(form):
    x, edge_index, *_ = draw(0)
    edges, heads = torch.ops.lightning_gnn.edges_by_target(edge_index, 21, 21, None), 2
    side, shift, layout = torch.randn(1, heads, 3).double(), torch.randn(21, heads).double(), Layout([21], [1], False)
    call = Attend(edges, x, side, shift, None, torch.rand(70, heads).double(), layout, 0.2)
    if form == "weight":
        call = call._replace(side=torch.randn(1, heads, 6).double(), weight=torch.randn(1, heads, 4, 6).double())
    elif form == "dynamic":
        call = call._replace(shift=torch.randn(21, heads * 3).double(), dynamic=True)
    elif form == "keys":
        layout = Layout([21], [1], True)
        call = call._replace(side=torch.randn(21, heads, 3).double(), layout=layout, keys=x.cos(), slope=1.0)
    elif form == "relations":
        indptr = torch.cat([edges[0][:1].expand(21), edges[0]])
        layout, side = Layout([21], [2], False), torch.randn(2, heads, 6).double()
        call = call._replace(
            edges=[indptr, edges[1]], layout=layout, side=side, shift=torch.randn(42, heads).double(),
            weight=torch.randn(2, heads, 4, 6).double(),
        )  # fmt: skip
    given, checked = attention._to_arguments(call), {"test_utils": ("test_schema", "test_faketensor")}
    keep, mass = call.weight is not None, form == "relations"
    out, total, *saved = torch.ops.lightning_gnn.attend(*given, keep, mass)
    torch.library.opcheck(torch.ops.lightning_gnn.attend, (*given, keep, mass), **checked)
    saved[0] = out if call.weight is None else saved[0]
    wanted = [True, True, True, call.weight is not None, call.keys is not None]
    torch.library.opcheck(torch.ops.lightning_gnn.attend_backward, (*given, out, total, saved, wanted), **checked)
