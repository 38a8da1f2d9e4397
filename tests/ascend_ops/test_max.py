"""Maxima and their gradient with the Ascend C kernels on the twin: bit-identical to torch's for any order of cores."""

import shutil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch_geometric.nn import conv as pyg

from lightning_gnn.compressed import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.nn import conv
from lightning_gnn.ops import aggregate, default_backend
from lightning_gnn.ops.aggregate import chip_max
from lightning_gnn.ops.aggregate.ascend_twin import record_launches
from lightning_gnn.ops.aggregate_update.rows import aggregate_rows
from tests.ascend_ops import run_kernels as run

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the twin needs g++"),
    pytest.mark.filterwarnings("ignore:the Ascend C kernels compute in float16"),
]
STRANGE = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])


def draw_integers(draw, *shape):
    """Draw numbers with many ties."""
    return torch.randint(-3, 4, shape, generator=draw).float()


def draw_case(seed, nodes, edges, heads, columns, weighted, strange, workers=4, groups="auto"):
    """Draw a graph with a hub, isolated vertices and parallel edges; features and weights with ties."""
    draw = torch.Generator().manual_seed(seed)
    edge_index = (nodes * torch.rand(2, edges, generator=draw) ** 2).long()
    edge_index[1, : edges // 4] = nodes // 2
    plan = PlanSettings(num_workers=workers, num_groups=groups)
    graph = CompressedGraph.from_edge_index(edge_index, nodes, settings=plan)
    x = draw_integers(draw, nodes, heads, columns)
    weight = draw_integers(draw, edges, heads) if weighted else None
    if strange:
        x.view(-1)[torch.randint(x.numel(), (9,), generator=draw)] = STRANGE[torch.arange(9) % 4]
        x[-1], x[0] = -torch.inf, torch.nan
        if weight is not None:
            weight[:4, 0] = STRANGE[:4][: len(weight)]
    return graph, x, weight


def compute_gradients(call, x, weight):
    """Return result and gradients."""
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weight) if tensor is not None]
    out = call(inputs[0], inputs[1] if weight is not None else None)
    grad = torch.arange(out.numel(), dtype=out.dtype).view(out.shape) % 5 - 2
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.medium
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    nodes=st.integers(1, 120),
    edges=st.integers(0, 900),
    heads=st.integers(1, 3),
    columns=st.sampled_from([1, 7, 16, 64, 100]),
    workers=st.sampled_from([(1, 1), (2, 2), (6, 3), (32, 1), (8, "auto")]),
    weighted=st.booleans(),
    strange=st.booleans(),
)
@example(seed=0, nodes=1, edges=0, heads=1, columns=16, workers=(2, 1), weighted=True, strange=True)
@example(seed=0, nodes=1, edges=1, heads=1, columns=1, workers=(2, 1), weighted=False, strange=False)
@example(seed=1, nodes=90, edges=800, heads=1, columns=602, workers=(8, 4), weighted=False, strange=True)
@example(seed=1, nodes=40, edges=500, heads=2, columns=530, workers=(2, 1), weighted=True, strange=True)
def test_a_maximum_is_torchs_to_the_bit(seed, nodes, edges, heads, columns, workers, weighted, strange):
    count, groups = workers
    groups = groups if groups == "auto" or groups <= heads * columns else 1
    graph, x, weight = draw_case(seed, nodes, edges, heads, columns, weighted, strange, count, groups)
    with record_launches() as launches:
        twin, torchs = (
            compute_gradients(lambda x, weight: aggregate(graph, x, weight, "max", backend), x, weight)  # noqa: B023
            for backend in ("ascend_twin", "reference")
        )
    assert [launch.kernel for launch in launches] == (["aggregate_max", "aggregate_max_backward"] if edges else [])
    torch.testing.assert_close(twin[0], torchs[0], rtol=0, atol=0, equal_nan=True)
    for got, expected in zip(twin[1:], torchs[1:], strict=True):
        # gradients contain thirds, and sums have another order
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def compare_maxima(seeds=(0, 3), weighted=(False, True)):
    """Compare results and gradients with torch's, for ordered and unordered cores, with and without NaN."""
    for with_weights in weighted:
        for strange, seed in zip((False, True, True), (*seeds, 5), strict=False):
            graph, x, weight = draw_case(seed, 110, 900, 2, 70, with_weights, strange, 3, 1)

            def launch(kernel, blocks, inputs, outputs, tiling, seed=seed):
                run.launch_tensors(kernel, blocks, inputs, outputs, tiling, seed=seed)

            sides = [
                chip_max.entries_of_edges([side.indptr, side.indices], 2) for side in (graph.forward, graph.backward)
            ]
            best, ties = chip_max.maxima(launch, sides[0], x, weight)
            expected = compute_reference(graph, x, weight)
            assert torch.equal(best.nan_to_num(99), expected[0].nan_to_num(99)), "maxima"
            assert torch.equal(ties, expected[1]), "ties"
            shares = torch.arange(best.numel()).view(best.shape).float() % 7 - 3
            back = None if weight is None else weight[graph.backward.edge_ids.long()]
            grad = chip_max.maxima_backward(launch, sides[1], shares, best, x, back)
            wanted = torch.zeros_like(x)
            source, target = get_ends(graph)
            message = x[source] * (1 if weight is None else weight.unsqueeze(2))
            hit = (message == best[target]) | (message.isnan() & best[target].isnan())
            factor = 1 if weight is None else weight.unsqueeze(2)
            wanted.index_add_(0, source, (shares[target] * factor).masked_fill(~hit, 0))
            assert torch.equal(grad.nan_to_num(99), wanted.nan_to_num(99)), "gradient"


def get_ends(graph):
    """Return source and target of each edge in the forward order."""
    return graph.forward.indices.long(), graph.forward.entry_rows().long()


def compute_reference(graph, x, weight):
    source, target = get_ends(graph)
    message = x[source] * (1 if weight is None else weight.unsqueeze(2))
    best = torch.full((graph.num_targets, *x.shape[1:]), -torch.inf)
    best.scatter_reduce_(0, target.view(-1, 1, 1).expand_as(message), message, "amax")
    hit = (message == best[target]) | (message.isnan() & best[target].isnan())
    ties = torch.zeros_like(best).index_add_(0, target, hit.float())
    best[torch.bincount(target, minlength=len(best)) == 0] = 0
    return best, ties


def test_cores_may_run_in_any_order():
    compare_maxima()


def draw_mini_batch(seed, sources=70, targets=50, edges=400):
    """Draw unsorted edges with isolated targets and parallel edges."""
    draw = torch.Generator().manual_seed(seed)
    source = torch.randint(sources, (edges,), generator=draw)
    target = (targets * torch.rand(edges, generator=draw) ** 2).long()
    return torch.stack([source, target[torch.randperm(edges, generator=draw)]])


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(1, 500)),
    columns=st.sampled_from([1, 16, 41, 130]),
    reduce=st.sampled_from(["max", "sum", "mean"]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    strange=st.booleans(),
)
@example(0, (1, 1, 1), 1, "max", torch.float32, True)
@example(0, (5, 90, 3), 16, "max", torch.float32, False)  # most targets have no edge
def test_rows_of_a_mini_batch_are_reduced_as_on_the_cpu(seed, sizes, columns, reduce, dtype, strange):
    num_sources, num_targets, _ = sizes
    edge_index = draw_mini_batch(seed, *sizes)
    x = draw_integers(torch.Generator().manual_seed(seed), num_sources, columns).to(dtype)
    if strange and reduce == "max":
        x.view(-1)[torch.randint(x.numel(), (5,))] = STRANGE[:1].to(dtype)
        x[-1] = -torch.inf
    edges = torch.ops.lightning_gnn.edges_by_target(edge_index, num_sources, num_targets, None)
    results = []
    for backend in ("ascend_twin", None):
        with default_backend(backend):
            results.append(compute_gradients(lambda x, _: aggregate_rows(x, edges, reduce), x, None))
    for got, expected in zip(*results, strict=True):
        assert got.dtype == dtype
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-3 if dtype == torch.float16 or reduce != "max" else 1e-5
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * 10, equal_nan=True)


@pytest.mark.parametrize("aggr", ["max", "sum", "mean"])
@pytest.mark.parametrize("layer", ["sage", "gin"])
def test_layers_on_mini_batches_equal_pygs_operators(layer, aggr):
    torch.manual_seed(0)
    edge_index, x = draw_mini_batch(0), torch.randn(70, 24)
    ours, theirs = (
        (kinds.SAGEConv if layer == "sage" else kinds.GINConv)(
            *((24, 12) if layer == "sage" else (torch.nn.Linear(24, 12), 0.0, True)), aggr=aggr
        )
        for kinds in (conv, pyg)
    )
    theirs.load_state_dict(ours.state_dict())
    expected = compute_gradients(lambda x, _: theirs((x, x[:50]), edge_index), x, None)
    with default_backend("ascend_twin"), record_launches() as launches:
        got = compute_gradients(lambda x, _: ours((x, x[:50]), edge_index), x, None)
    kernels = ["aggregate_max", "aggregate_max_backward"] if aggr == "max" else ["aggregate_update"] * 2
    assert [launch.kernel for launch in launches][: len(kernels)] == kernels
    tolerance = 1e-4 if aggr == "max" else 0.02
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
