"""``backend="ascend_twin"``: aggregation, attention, layers and training with the Ascend C kernels on the CPU twin."""

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_gnn.compressed import CompressedGraph
from lightning_gnn.compressed import builder as build
from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.nn import GAT
from lightning_gnn.nn.conv import GATConv, GCNConv, SAGEConv
from lightning_gnn.ops import aggregate, default_backend, edge_softmax
from lightning_gnn.ops.aggregate import ascend_twin as aggregate_ascend_twin
from lightning_gnn.ops.aggregate import chip_plan
from lightning_gnn.ops.aggregate.ascend_twin import record_launches

HALF = 2.0**-11  # relative error of rounding to float16

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the twin needs g++"),
    pytest.mark.filterwarnings("ignore:the Ascend C kernels compute in float16"),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Split hubs across chunks and cluster vertices that share neighbors, as in a large graph."""
    monkeypatch.setattr(build, "MAX_VERTICES", 32)


def draw_graph(seed, nodes, edges, num_workers=4, num_groups="auto"):
    """Draw a graph with a hub that is split across chunks, isolated vertices, parallel edges and self-loops."""
    draw = torch.Generator().manual_seed(seed)
    edge_index = (nodes * torch.rand(2, edges, generator=draw) ** 2).long()
    edge_index[1, : edges // 4] = nodes // 2
    plan = PlanSettings(num_workers=num_workers, num_groups=num_groups)
    return CompressedGraph.from_edge_index(edge_index, nodes, settings=plan)


def run(graph, tensors, call, grad_scale=1.0):
    """Return result and gradients on the twin, in float64, and in float64 with magnitudes, which bound the errors."""
    found = []
    for backend, prepare in (
        ("ascend_twin", lambda x: x),
        ("reference", torch.Tensor.double),
        ("reference", lambda x: x.double().abs()),
    ):
        inputs = [prepare(tensor.detach()).requires_grad_() for tensor in tensors]
        out = call(backend, *inputs)
        grad = prepare(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(tensors[0]) * grad_scale)
        found.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    return found


def assert_close(results, factor=4):
    # Features, weights and results are each rounded to float16 once; sums are float32.
    for place, (got, expected, size) in enumerate(zip(*results, strict=True)):
        assert got.shape == expected.shape
        error = (got.double() - expected).abs()
        # Relative to the terms of a sum; near float16's smallest numbers, relative to the whole tensor.
        bound = factor * HALF * size + 2.0**-20 * size.max().item() if size.numel() else size
        assert (error <= bound).all(), (
            f"result {place}: {error.max():.3g}, worst {(error / bound).max():.3g} of the bound"
        )


@pytest.mark.medium
@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    nodes=st.integers(1, 120),
    edges=st.integers(0, 900),
    heads=st.integers(1, 3),
    columns=st.sampled_from([1, 7, 16, 41, 100]),
    workers=st.sampled_from([(1, 1), (2, 2), (6, 3), (32, 1), (8, "auto")]),
    reduce=st.sampled_from(["sum", "mean"]),
    weighted=st.booleans(),
)
@example(seed=0, nodes=1, edges=0, heads=1, columns=16, workers=(2, 1), reduce="sum", weighted=True)
@example(seed=0, nodes=90, edges=800, heads=1, columns=602, workers=(8, 4), reduce="sum", weighted=True)
def test_aggregate_equals_float64(seed, nodes, edges, heads, columns, workers, reduce, weighted):
    count, groups = workers
    groups = groups if groups == "auto" or groups <= heads * columns else 1
    graph = draw_graph(seed, nodes, edges, count, groups)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, heads, columns, generator=draw)
    weight = [torch.randn(edges, heads, generator=draw)] if weighted else []

    def call(backend, x, *weight):
        return aggregate(graph, x, *(weight or [None]), reduce=reduce, backend=backend)

    assert_close(run(graph, [x, *weight], call))


@settings(max_examples=8)
@given(
    seed=st.integers(0, 1000),
    nodes=st.integers(1, 90),
    edges=st.integers(0, 700),
    heads=st.sampled_from([1, 3, 8, 70]),
    workers=st.sampled_from([1, 3, 32]),
)
def test_edge_softmax_equals_float64(seed, nodes, edges, heads, workers):
    graph = draw_graph(seed, nodes, edges, workers)
    draw = torch.Generator().manual_seed(seed)
    scores = [torch.randn(nodes, heads, generator=draw) * 3 for _ in range(2)]
    results = run(graph, scores, lambda backend, *ends: edge_softmax(graph, *ends, backend=backend))
    for got, expected in zip(*results[:2], strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)  # float32 throughout, no float16


@pytest.mark.parametrize(("magnitude", "grad"), [(1e-12, 1e-12), (1e12, 1e-9), (1e-9, 1e12)])
def test_numbers_beyond_float16_keep_their_precision(magnitude, grad):
    graph = draw_graph(3, 80, 700)
    x = torch.randn(80, 1, 24, generator=torch.Generator().manual_seed(0)) * magnitude
    weight = torch.rand(700, 1, generator=torch.Generator().manual_seed(1)) * 1e6
    results = run(graph, [x, weight], lambda backend, *args: aggregate(graph, *args, backend=backend), grad)
    assert all(results[1][0].abs().amax() > 0 for _ in range(3))
    assert_close(results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    graph = draw_graph(4, 60, 500)
    x = torch.randn(60, 1, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.rand(500, 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = run(graph, [x, weight], lambda backend, *args: aggregate(graph, *args, reduce="mean", backend=backend))
    assert all(result.dtype == dtype for result in results[0])
    assert_close(results, factor=40 if dtype == torch.bfloat16 else 4)  # bfloat16 itself has three bits fewer


def test_nan_and_infinity_reach_the_rows_that_read_them_and_no_others():
    graph = draw_graph(5, 60, 500)
    x = torch.randn(60, 40, generator=torch.Generator().manual_seed(0))
    x[7, 3], x[9, 30], x[11, 5] = torch.nan, torch.inf, -torch.inf
    got = aggregate(graph, x, backend="ascend_twin")
    expected = aggregate(graph, x.double(), backend="reference")
    assert expected.isnan().any()
    assert expected.isinf().any()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isposinf(), expected.isposinf())
    finite = expected.isfinite()
    torch.testing.assert_close(got[finite].double(), expected[finite], rtol=0, atol=HALF * 200)


def test_heads_without_weights_are_refused_where_they_would_be_read():
    graph = draw_graph(6, 40, 200, 2)
    chunks = graph.chunked().chunks
    cut = [0, 32], [0, chunks.num_chunks]
    with pytest.raises(ValueError, match=r"weights \[E, 2\] for x \[40, 2, 16\], .* x\.reshape\(40, 1, 32\)"):
        aggregate_ascend_twin.aggregate_chunks(chunks.tensors(), 40, torch.ones(40, 2, 16), None, "sum", *cut)


def test_conversion_is_said_once():
    aggregate_ascend_twin.warn_converted.cache_clear()
    graph = draw_graph(8, 20, 60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        aggregate(graph, torch.ones(20, 4, dtype=torch.float16), backend="ascend_twin")
        assert not caught
        aggregate(graph, torch.ones(20, 4), backend="ascend_twin")
        aggregate(graph, torch.ones(20, 4), backend="ascend_twin")
    assert [str(item.message) for item in caught] == [
        "the Ascend C kernels compute in float16 with float32 sums; torch.float32 is scaled by a power of two per "
        "tensor and converted"
    ]


@pytest.mark.parametrize("kernel", ["cube", "vector"])
@pytest.mark.parametrize(("seed", "heads", "columns", "groups"), [(0, 1, 41, 1), (1, 3, 16, 3), (2, 1, 300, "auto")])
def test_each_kernel_equals_float64_on_the_plans_own_chunks(monkeypatch, kernel, seed, heads, columns, groups):
    plan = chip_plan.plan_chip
    monkeypatch.setattr(chip_plan, "plan_chip", lambda *args, **how: plan(*args, **how | {"kernels": (kernel,)}))
    monkeypatch.setattr(chip_plan, "HEIGHT", {"cube": 48, "vector": 8})
    graph = draw_graph(seed, 120, 900, 3, groups)
    draw = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(120, heads, columns, generator=draw), torch.randn(900, heads, generator=draw)
    for reduce in ("sum", "mean"):
        with record_launches() as launches:
            assert_close(run(graph, [x, weight], lambda backend, *args: aggregate(graph, *args, reduce, backend)))  # noqa: B023
        assert f"aggregate_{kernel}" in {launch.kernel for launch in launches}
        assert {launch.kernel for launch in launches} <= {f"aggregate_{kernel}", "combine_parts", "edge_products"}
        plain = aggregate(graph, x, None, reduce, "ascend_twin")
        exact = aggregate(graph, x.double(), None, reduce, "reference")
        torch.testing.assert_close(plain.double(), exact, rtol=0.01, atol=0.02)


def test_default_backend_is_for_those_who_name_none():
    graph = draw_graph(10, 40, 300)
    x = torch.randn(40, 16, requires_grad=True)
    with record_launches() as launches:
        with default_backend("ascend_twin"):
            y = aggregate(graph, x)
            forward = len(launches)
            aggregate(graph, x, backend="numba")
            with default_backend(None):
                aggregate(graph, x)
            assert len(launches) == forward > 0
        aggregate(graph, x)
        assert len(launches) == forward
        y.sum().backward()
        assert len(launches) > forward  # the gradient runs on the same backend as the aggregation
    with (
        pytest.raises(ValueError, match=r"backend='cube' is unknown; use one of numba, .*ascend_twin"),
        default_backend("cube"),
    ):
        pass


@pytest.mark.parametrize("layer", ["gcn", "sage", "gat"])
def test_layers_end_to_end(layer):
    torch.manual_seed(0)
    graph = draw_graph(11, 150, 1000)
    make = {
        "gcn": lambda: GCNConv(40, 20),
        "sage": lambda: SAGEConv(40, 20),
        "gat": lambda: GATConv(40, 10, heads=3, concat=True),
    }[layer]
    ours = make()
    exact = make().double()
    exact.load_state_dict(ours.state_dict())
    x = torch.randn(150, 40)
    left, right = x.clone().requires_grad_(), x.double().requires_grad_()
    with record_launches() as launches, default_backend("ascend_twin"):
        y = ours(left, graph)
    with default_backend("reference"):
        expected = exact(right, graph)
    assert launches
    grad = torch.randn(y.shape) / len(y)
    y.backward(grad)
    expected.backward(grad.double())
    pairs = [(y, expected), (left.grad, right.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(ours.parameters(), exact.parameters(), strict=True)]
    for got, wanted in pairs:
        torch.testing.assert_close(got.double(), wanted, rtol=0.01, atol=2e-3 * wanted.abs().max().item())


@pytest.mark.medium
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_a_compiler_looks_through_it(reduce):
    graph = draw_graph(12, 60, 400)
    x, weight = torch.randn(60, 24, requires_grad=True), torch.rand(400)
    compiled = torch.compile(lambda x: aggregate(graph, x, weight, reduce).relu(), backend="aot_eager", fullgraph=True)
    with default_backend("ascend_twin"), record_launches() as launches:
        expected = aggregate(graph, x, weight, reduce).relu()
        found = compiled(x)
        forward = len(launches)
        found.sum().backward()
    assert len(launches) > forward >= 2
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("layer", "options"), [(GCNConv, {}), (SAGEConv, {}), (SAGEConv, {"aggr": "max"}), (GATConv, {})]
)
def test_layers_under_autocast(layer, options, dtype):
    torch.manual_seed(0)
    conv, x, edge_index = layer(24, 16, **options), torch.randn(90, 24), torch.randint(90, (2, 600))
    graph = CompressedGraph.from_edge_index(edge_index, 90, settings=PlanSettings(num_workers=4))
    expected = conv(x, edge_index)
    for edges in [graph] if layer is not SAGEConv else [graph, edge_index]:
        with record_launches() as launches, default_backend("ascend_twin"), torch.autocast("cpu", dtype):
            found = conv(x, edges)
        assert launches
        assert layer is not SAGEConv or found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def draw_communities(nodes=240, classes=3):
    """Draw a stand-in for a citation graph: vertices mostly cite their own class, and features correlate with it."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(nodes) % classes
    source, target = torch.randint(0, nodes, (2, 14 * nodes), generator=draw)
    selected = (y[source] == y[target]) | (torch.rand(source.numel(), generator=draw) < 0.1)
    edge_index = torch.stack([source[selected], target[selected]])
    x = F.one_hot(y, classes).float() @ torch.randn(classes, 24, generator=draw) + 2 * torch.randn(
        nodes, 24, generator=draw
    )
    return x, torch.cat([edge_index, edge_index.flip(0)], 1), y, torch.arange(nodes) < 60, torch.arange(nodes) >= 60


def train(make, x, graph, y, seen, unseen, backend, epochs, lr):
    torch.manual_seed(0)
    with default_backend(backend):
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=5e-4)
        losses = []
        for _ in range(epochs):
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, graph)[seen], y[seen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            right = model(x, graph)[unseen].argmax(1) == y[unseen]
    return right.float().mean().item(), losses


@pytest.mark.medium
def test_gat_trains_as_on_the_cpu():
    x, edge_index, *rest = draw_communities()
    graph = CompressedGraph.from_edge_index(edge_index, len(x), settings=PlanSettings(num_workers=4))

    def make():
        return GAT(24, hidden_channels=16, num_layers=2, out_channels=3, heads=2, output_heads=1, dropout=0.3)

    twin, twin_losses = train(make, x, graph, *rest, "ascend_twin", 25, 0.02)
    cpu, cpu_losses = train(make, x, graph, *rest, None, 25, 0.02)
    assert min(twin, cpu) > 0.85
    assert abs(twin - cpu) <= 0.03
    assert twin_losses == pytest.approx(cpu_losses, rel=0.05)


@pytest.mark.slow
def test_trainer_on_a_simulated_npu_with_the_twin_behind_it():
    """``Trainer(accelerator="npu", strategy="ascend_hybrid")``: complete except for the chip."""
    command = [sys.executable, "-m", "tests.ascend_ops.on_simulated_npu", "ascend_hybrid"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
def test_sampled_batches_train_on_a_simulated_npu_with_the_twin_behind_it():
    """``Trainer(accelerator="npu")`` with ``NeighborDataModule``: the losses of the CPU, in float32 and float16."""
    command = [sys.executable, "-m", "tests.ascend_ops.on_simulated_npu", "neighbors"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
