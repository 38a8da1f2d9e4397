import importlib
import threading
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.nn import conv as pyg

from lightning_gnn.ops.aggregate_update import numba as aggregate_update_numba
from lightning_gnn.ops.aggregate_update import reference as aggregate_update_reference
from lightning_gnn.ops.aggregate_update.definition import aggregate_update
from lightning_gnn.ops.aggregate_update.reference import Update
from tests.patience import PATIENCE
from tests.strategies import edge_indices

# The package may export a function with the name of the module.
module = importlib.import_module("lightning_gnn.ops.aggregate_update.definition")


@contextmanager
def execution(threads=1, first=None, tile=3):
    """Use this many workers, tiles of few rows for graphs of any size, and this order of the product."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregate_update_numba, "MAX_SERIAL_WORK", 0)
        patch.setattr(aggregate_update_numba, "_tile_rows", lambda x: tile)
        if first is not None:
            patch.setattr(module, "aggregates_first", lambda *sizes: first)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@st.composite
def batches(draw):
    """Draw num_sources, num_targets and edges, sorted by target or not."""
    num_sources, edge_index = draw(edge_indices())
    num_targets = draw(st.integers(1, num_sources))
    edge_index = torch.stack([edge_index[0], edge_index[1] % num_targets])
    if draw(st.booleans()):
        edge_index = edge_index[:, torch.argsort(edge_index[1], stable=True)]
    return num_sources, num_targets, edge_index


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def differentiate(out, inputs):
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    return torch.autograd.grad(out, wanted, normal(*out.shape, seed=9, dtype=out.dtype)) if wanted else ()


executions = st.builds(
    dict, threads=st.integers(1, 3), first=st.sampled_from([None, True, False]), tile=st.sampled_from([1, 3, 64])
)
sizes = st.sampled_from([(5, 3), (3, 7), (64, 1), (1, 70), (40, 40)])


@settings(max_examples=80)
@given(batches(), sizes, st.sampled_from(["sum", "mean"]), st.booleans(), st.booleans(), st.booleans(), executions)
def test_output_and_all_gradients_are_those_of_pygs_layer(batch, size, reduce, root, bias, needs_x, chosen):
    num_sources, num_targets, edge_index = batch
    layer = pyg.SAGEConv(size[0], size[1], aggr=reduce, root_weight=root, bias=bias).double()
    x = normal(num_sources, size[0]).requires_grad_(needs_x)
    inputs = [x, layer.lin_l.weight, layer.lin_r.weight if root else None, layer.lin_l.bias]
    wanted = layer((x, x[:num_targets]), edge_index, (num_sources, num_targets))
    with execution(**chosen):
        out = aggregate_update(x, edge_index, *inputs[1:], num_targets, reduce)
        grads = differentiate(out, inputs)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(grads, differentiate(wanted, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@settings(max_examples=60)
@given(
    batches(),
    sizes,
    st.sampled_from(["sum", "mean"]),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.lists(st.booleans(), min_size=4, max_size=4),
    executions,
)
def test_weighted_edges_in_any_precision(batch, size, reduce, dtype, wanted, chosen):
    num_sources, num_targets, edge_index = batch
    edge_weight = normal(edge_index.size(1), seed=1, dtype=dtype)
    shapes = [(num_sources, size[0]), (size[1], size[0]), (size[1], size[0]), (size[1],)]
    given_inputs = [
        (normal(*shape, seed=seed, dtype=dtype) * size[0] ** -0.5).requires_grad_(want)
        for seed, (shape, want) in enumerate(zip(shapes, wanted, strict=True))
    ]
    exact_inputs = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in given_inputs]
    x, weight, self_weight, bias = exact_inputs
    messages = x[edge_index[0]] * edge_weight.double()[:, None]
    aggregated = torch.zeros(num_targets, size[0], dtype=torch.float64).index_add(0, edge_index[1], messages)
    if reduce == "mean":
        aggregated = aggregated / torch.bincount(edge_index[1], minlength=num_targets).clamp(min=1)[:, None]
    exact = aggregated @ weight.T + x[:num_targets] @ self_weight.T + bias
    with execution(**chosen):
        x, weight, self_weight, bias = given_inputs
        out = aggregate_update(x, edge_index, weight, self_weight, bias, num_targets, reduce, edge_weight)
        grads = differentiate(out, given_inputs)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 0.3}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(grads, differentiate(exact, exact_inputs), strict=True):
        # float16's gradients of hubs are sums of a hundred rounded numbers.
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("first", [True, False])
def test_targets_need_no_rows_without_their_own_term(first):
    edge_index = torch.tensor([[0, 2, 2, 1], [5, 0, 5, 5]])
    x, weight = normal(3, 4).requires_grad_(), normal(2, 4, seed=1).requires_grad_()
    with execution(first=first):
        out = aggregate_update(x, edge_index, weight, num_targets=6)
        grads = differentiate(out, [x, weight])
    wanted = torch.zeros(6, 4, dtype=torch.float64).index_add(0, edge_index[1], x[edge_index[0]]) @ weight.T
    torch.testing.assert_close(out, wanted)
    for ours, theirs in zip(grads, differentiate(wanted, [x, weight]), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(0, 0, 4, 3), (5, 0, 4, 3), (5, 2, 0, 3), (5, 2, 4, 0), (5, 2, 4, 3)])
def test_what_is_empty(shape):
    num_sources, num_targets, wide, narrow = shape
    inputs = [torch.ones(size, requires_grad=True) for size in ((num_sources, wide), (narrow, wide), (narrow,))]
    x, weight, bias = inputs
    out = aggregate_update(x, torch.empty(2, 0, dtype=torch.int64), weight, None, bias, num_targets, "mean")
    assert torch.equal(out, torch.ones(num_targets, narrow))
    out.sum().backward()
    assert torch.equal(bias.grad, torch.full((narrow,), float(num_targets)))
    assert not x.grad.any()
    assert not weight.grad.any()


@pytest.mark.medium
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_second_derivatives(first, reduce):
    _, edges = hub_batch()
    inputs = [
        normal(12, 3).requires_grad_(),
        normal(2, 3, seed=1).requires_grad_(),
        normal(2, 3, seed=2).requires_grad_(),
        normal(2, seed=3).requires_grad_(),
    ]

    def function(x, weight, self_weight, bias):
        return aggregate_update(x, edges[:, :30] % 5, weight, self_weight, bias, 5, reduce).tanh()

    with execution(first=first):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)
        # A tensor used twice has one gradient, the sum of both.
        x, weight = inputs[:2]
        one, two = (
            torch.autograd.grad(function(x, w, v, None).sum(), (weight,), create_graph=double)[0]
            for w, v, double in ((weight, weight, False), (weight, weight, True))
        )
        torch.testing.assert_close(one, two)


def hub_batch(num_sources=300, num_targets=120, num_edges=2000):
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.stack(
        [
            torch.randint(num_sources, (num_edges,), generator=generator),
            torch.randint(num_targets, (num_edges,), generator=generator),
        ]
    )
    edge_index[1, : num_edges // 3] = 3
    edge_index[0, num_edges // 4 : num_edges // 2] = 5
    return (num_sources, num_targets), edge_index


def test_an_order_of_edges_changes_nothing_but_rounding():
    (num_sources, num_targets), edges = hub_batch()
    x, weight, edge_weight = normal(num_sources, 16), normal(8, 16, seed=1), normal(edges.size(1), seed=2)
    order = torch.argsort(edges[1], stable=True)
    wanted = aggregate_update(x, edges, weight, None, None, num_targets, "sum", edge_weight)
    # Sorting is stable, so sums have the same order.
    out = aggregate_update(x, edges[:, order], weight, None, None, num_targets, "sum", edge_weight[order])
    assert torch.equal(out, wanted)
    strided = torch.stack([edges[0], edges[1]], dim=1).T
    assert torch.equal(aggregate_update(x, strided, weight, None, None, num_targets, "sum", edge_weight), wanted)


@pytest.mark.parametrize("first", [True, False])
def test_the_same_from_several_threads_and_in_any_mode(first):
    (num_sources, num_targets), edges = hub_batch()
    inputs = [normal(num_sources, 24), normal(10, 24, seed=1), normal(10, 24, seed=2)]

    def run(mode):
        x, weight, self_weight = (tensor.clone().requires_grad_() for tensor in inputs)
        with mode():
            out = aggregate_update(x, edges, weight, self_weight, None, num_targets, "mean")
        return out.detach(), *(differentiate(out, [x, weight, self_weight]) if out.requires_grad else ())

    wanted = run(torch.enable_grad)
    with execution(threads=2, first=first):
        results: dict = {}
        threads = [
            threading.Thread(target=lambda mode=mode: results.update({mode: run(mode)}))
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        results["here"] = run(torch.inference_mode)
    assert len(results) == 4
    for result in results.values():
        for ours, theirs in zip(result, wanted, strict=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_workers_products_take_one_thread_and_nobody_elses_number_changes():
    seen = []
    with execution(threads=5):  # more workers than other tests leave running

        def share(first, last):
            seen.append((threading.current_thread(), torch.get_num_threads()))

        aggregate_update_numba._run_ranges(share, torch.arange(101).numpy(), torch.ones(100, 1))
        assert len(seen) == 5
        assert {count for _, count in seen} == {1}
        assert threading.current_thread() not in {thread for thread, _ in seen}
        assert torch.get_num_threads() == 5
        later: list = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [5]


@given(batches(), st.booleans())
@settings(max_examples=25)
def test_edges_sorted_on_the_cpu_are_those_sorted_by_torch(batch, weighted):
    num_sources, num_targets, edge_index = batch
    order = importlib.import_module("lightning_gnn.ops.aggregate_update.edge_order")
    weight = normal(edge_index.size(1), dtype=torch.float16) if weighted else None
    arguments = (edge_index, num_sources, num_targets, weight)
    by_target = torch.ops.lightning_gnn.edges_by_target(*arguments)
    by_source = torch.ops.lightning_gnn.edges_by_source(by_target, num_sources)
    expected = order.edges_by_target(*arguments), order.edges_by_source(by_target, num_sources)
    for ours, theirs in zip([*by_target, *by_source], [*expected[0], *expected[1]], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@settings(max_examples=30)
@given(batches(), sizes, st.booleans(), st.booleans(), st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_operators_of_other_devices(batch, size, mean, first, wanted):
    """The implementation with torch's own operators, which no public call uses on this device."""
    num_sources, num_targets, edge_index = batch
    edges = torch.ops.lightning_gnn.edges_by_target(edge_index, num_sources, num_targets, None)
    x, weight, self_weight = (
        normal(num_sources, size[0]),
        normal(1, *size[::-1], seed=1),
        normal(1, *size[::-1], seed=2),
    )
    bias, grad = normal(1, size[1], seed=3), normal(num_targets, size[1], seed=4)
    call = Update(edges, x, weight, self_weight, bias, [num_targets], [1], [0], mean, first)
    results = []
    for backend in (aggregate_update_reference, aggregate_update_numba):
        out, saved = backend.aggregate_update(call, first)
        results.append([out, *backend.aggregate_update_backward(call, grad, saved if first else None, None, wanted)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


X, EDGES, WEIGHT = torch.ones(4, 3), torch.tensor([[0, 3], [1, 0]]), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ValueError, "reduce='max' is unknown", {"reduce": "max"}),
        (TypeError, "x must be a floating tensor, but is torch.int64", {"x": X.long()}),
        (TypeError, "weight must be a floating tensor, but is list", {"weight": [1]}),
        (TypeError, "weight is torch.float64, but x is torch.float32", {"weight": WEIGHT.double()}),
        (TypeError, "edge_index must be an int64 tensor, but is torch.int32", {"edge_index": EDGES.int()}),
        (ValueError, r"they are \[4, 3\] and \[2, 4\]", {"weight": torch.ones(2, 4)}),
        (ValueError, r"edge_index must be \[2, E\], but is \[2\]", {"edge_index": EDGES[0]}),
        (ValueError, r"self_weight must be \[2, 3\]", {"self_weight": torch.ones(3, 2)}),
        (ValueError, r"bias must be \[2\], but is \[3\]", {"bias": torch.ones(3)}),
        (ValueError, "4 rows for 5 targets", {"self_weight": WEIGHT, "num_targets": 5}),
        (ValueError, "num_targets=-1", {"num_targets": -1}),
        (ValueError, "is on meta, but x is on cpu", {"bias": torch.ones(2, device="meta")}),
        (ValueError, r"edge_weight must be \[2\], but is \[3\]", {"edge_weight": torch.ones(3)}),
        (ValueError, r"detach\(\) it", {"edge_weight": torch.ones(2, requires_grad=True)}),
        (IndexError, r"edge_index\[0\] holds node 3 \(edge 1\), but there are 3 sources", {"x": X[:3]}),
        (IndexError, r"edge_index\[1\] holds node 1 \(edge 0\), but there are 1 targets", {"num_targets": 1}),
        (IndexError, r"edge_index\[0\] holds node -1", {"edge_index": EDGES - torch.tensor([[1], [0]])}),
    ],
)
def test_bad_input_is_named(error, message, changed):
    with pytest.raises(error, match=message):
        aggregate_update(**({"x": X, "edge_index": EDGES, "weight": WEIGHT} | changed))
