import multiprocessing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn import CompressedGraph, aggregate, edge_softmax
from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.ops import hybrid_plan, intrinsics
from lightning_gnn.ops.aggregate import numba_kernels, numba_rows
from lightning_gnn.ops.aggregate.derivatives import permute_rows
from tests.patience import PATIENCE
from tests.strategies import edge_indices

REDUCES = ("sum", "mean", "max")


@pytest.fixture(params=["as they are", "packed"])
def storage(request, monkeypatch):
    """Use threads, with and without packed slices, for graphs of any size."""
    use(monkeypatch, request.param == "packed")


def use(monkeypatch, packed):
    monkeypatch.setattr(numba_rows, "MAX_SERIAL_WORK", 0)
    monkeypatch.setattr(numba_rows, "PACK_FROM", 0 if packed else 2**40)
    monkeypatch.setattr(numba_rows, "PACK_DEGREE", 0)


def compute(edge_index, num_nodes, x, weight, reduce):
    """Aggregate target by target; torch's autograd computes the gradients."""
    shape = x.shape
    if weight is not None:
        x = x.view(shape[0], weight.size(1) if weight.dim() == 2 else 1, -1)
        weight = weight.view(weight.size(0), x.size(1), 1)
    messages = x[edge_index[0]] if weight is None else x[edge_index[0]] * weight
    out = []
    for node in range(num_nodes):
        own = messages[edge_index[1] == node]
        if own.size(0) == 0:
            out.append(own.new_zeros(own.shape[1:]))
        elif reduce == "max":
            out.append(own.amax(0))
        else:
            out.append(own.sum(0) if reduce == "sum" else own.mean(0))
    return torch.stack(out).view(num_nodes, *shape[1:])


def hub_graph(num_nodes=30, num_edges=400, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    edge_index[1, : num_edges // 3] = 3
    edge_index[0, num_edges // 4 : num_edges // 2] = 5
    edge_index[edge_index == 7] = 8  # an isolated vertex
    return edge_index, CompressedGraph.from_edge_index(edge_index, num_nodes, **options)


@st.composite
def problems(draw):
    num_nodes, edge_index = draw(edge_indices())
    workers = draw(st.integers(1, 6))
    shape = draw(st.sampled_from([(6,), (7,), (41,), (70,), (3, 2), (3, 5), (2, 8), (3, 8), (5, 16), (2, 40)]))
    graph = CompressedGraph.from_edge_index(edge_index, num_nodes, settings=PlanSettings(num_workers=workers))
    weighted = draw(st.sampled_from(["no", "edge", "head"] if len(shape) == 2 else ["no", "edge"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(num_nodes, *shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        x = x.round()  # ties
    count = {"no": None, "edge": (edge_index.size(1),), "head": (edge_index.size(1), shape[0])}[weighted]
    weight = None if count is None else torch.randn(count, generator=generator, dtype=torch.float64)
    return graph, edge_index, x, weight, draw(st.sampled_from(REDUCES)), draw(st.booleans())


@given(problems(), st.sampled_from([torch.float64, torch.float32]), st.sampled_from([None, "reference"]))
@settings(max_examples=150, deadline=None)
def test_result_and_gradients_are_those_of_a_dense_float64_aggregation(problem, dtype, backend):
    graph, edge_index, x, weight, reduce, packed = problem
    # Rounded first, so that both get the same numbers, and the same ties.
    given_x = x.to(dtype)
    inputs = [given_x.clone().requires_grad_()]
    exact = [given_x.double().requires_grad_()]
    if weight is not None:
        rounded = weight.to(dtype) if reduce != "max" else weight.round().to(dtype)
        inputs.append(rounded.clone().requires_grad_())
        exact.append(rounded.double().requires_grad_())
    expected = compute(edge_index, graph.num_targets, exact[0], exact[1] if weight is not None else None, reduce)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, packed)
        ordered = None if weight is None else graph.edge_order(inputs[1])
        out = aggregate(graph, inputs[0], ordered, reduce, backend=backend)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        grads = torch.autograd.grad(out, inputs, grad)
    assert out.dtype == dtype
    tolerance = {"atol": 1e-11, "rtol": 1e-11} if dtype == torch.float64 else {"atol": 2e-4, "rtol": 2e-4}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    if edge_index.numel():
        for got, want in zip(grads, torch.autograd.grad(expected, exact, grad.double()), strict=True):
            torch.testing.assert_close(got.double(), want, **tolerance)
    else:
        assert not any(got.any() for got in grads)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_number_of_columns(storage, dtype):
    edge_index, graph = hub_graph(settings=PlanSettings(num_workers=4))
    weight = torch.randn(graph.num_edges, dtype=dtype)
    for num_columns in [*range(1, 36), 47, 63, 64, 65, 100, 127, 130, 256]:
        x = torch.randn(graph.num_sources, num_columns, dtype=dtype)
        for reduce in REDUCES:
            for weights in (None, weight):
                expected = compute(edge_index, 30, x.double(), None if weights is None else weights.double(), reduce)
                out = aggregate(graph, x, None if weights is None else graph.edge_order(weights), reduce)
                torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12])
def test_any_shape_of_heads(storage, heads):
    _, graph = hub_graph(settings=PlanSettings(num_workers=2))
    for channels in (1, 3, 4, 7, 8, 16, 32, 33, 64, 72):
        inputs = [torch.randn(30, heads, channels, requires_grad=True), torch.randn(400, heads, requires_grad=True)]
        got, want = (aggregate(graph, *inputs, backend=backend) for backend in (None, "reference"))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)  # float32 sums in two orders
        grad = torch.randn_like(got)
        for a, b in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", REDUCES)
def test_the_same_bits_for_any_number_of_workers(storage, reduce, dtype):
    _, graph = hub_graph(num_nodes=200, num_edges=3000)
    inputs = [torch.randn(200, 49).to(dtype).requires_grad_(), torch.randn(3000).to(dtype).requires_grad_()]
    results = []
    for workers in (1, 2, 3, 4, 6, 300):
        out = aggregate(graph.replace_settings(PlanSettings(num_workers=workers)), *inputs, reduce)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce", REDUCES)
def test_half_precision_is_rounded_once(storage, dtype, reduce):
    _, graph = hub_graph()
    x, weight = torch.randn(30, 20).to(dtype).requires_grad_(), torch.rand(400).to(dtype).requires_grad_()
    out = aggregate(graph, x, weight, reduce)
    wide = [tensor.detach().float().requires_grad_() for tensor in (x, weight)]
    expected = aggregate(graph, *wide, reduce)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), atol=0, rtol=torch.finfo(dtype).eps)
    grad = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, (x, weight), grad), torch.autograd.grad(expected, wide, grad.float()), strict=True
    ):
        # The gradient of a mean is rounded once more, by the division.
        torch.testing.assert_close(
            got, want.to(dtype), atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_nan_and_infinity_come_out(storage, reduce, backend):
    edge_index, graph = hub_graph()
    x = torch.randn(30, 18, dtype=torch.float64)
    x[5, 3] = torch.nan
    x[6, 4] = torch.inf
    x[:, 5] = -torch.inf
    expected = compute(edge_index, 30, x, None, reduce)
    assert expected.isnan().any()
    assert expected.isinf().any()
    torch.testing.assert_close(aggregate(graph, x, None, reduce, backend), expected, equal_nan=True)
    narrow = x.bfloat16()
    out, wide = (aggregate(graph, given, None, reduce, backend) for given in (narrow, narrow.float()))
    torch.testing.assert_close(out, wide.bfloat16(), atol=0, rtol=0, equal_nan=True)


def test_a_gradient_is_shared_by_the_edges_that_attain_the_maximum():
    edge_index = torch.tensor([[0, 1, 2, 2], [3, 3, 3, 3]])
    graph = CompressedGraph.from_edge_index(edge_index, 4)
    x = torch.tensor([[1.0], [4.0], [4.0], [0.0]], requires_grad=True)
    aggregate(graph, x, reduce="max")[3].sum().backward()
    assert x.grad.flatten().tolist() == pytest.approx([0, 1 / 3, 2 / 3, 0])


def test_nothing_to_compute():
    graph = CompressedGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 4)
    x = torch.randn(4, 3, requires_grad=True)
    for reduce in REDUCES:
        out = aggregate(graph, x, torch.empty(0), reduce)
        assert torch.equal(out, torch.zeros(4, 3))
        assert not torch.autograd.grad(out.sum(), x)[0].any()
    narrow = torch.randn(4, 0, requires_grad=True)
    out = aggregate(graph, narrow)
    assert out.shape == (4, 0)
    out.sum().backward()


def test_constant_weights_are_permuted_once_and_never_confused():
    _, graph = hub_graph()
    x = torch.randn(30, 4, requires_grad=True)

    def gradient(weight):
        return torch.autograd.grad(aggregate(graph, x, weight).sum(), x)[0]

    def expected(weight):
        return torch.autograd.grad(aggregate(graph, x, weight, backend="reference").sum(), x)[0]

    def remembered():
        return graph.cache["backward_weight"][2]

    weight = torch.rand(400)
    gradient(weight)
    first = remembered()
    gradient(weight)
    assert remembered() is first
    weight.mul_(2)
    torch.testing.assert_close(gradient(weight), expected(weight))
    assert remembered() is not first
    both = torch.rand(800)
    for view in (both[:400], both[400:], both[::2]):  # one storage, three contents
        torch.testing.assert_close(gradient(view), expected(view.clone()))
    for _ in range(20):  # new tensors at old addresses
        fresh = torch.rand(400)
        copy = fresh.clone()
        torch.testing.assert_close(gradient(fresh), expected(copy))
        del fresh
    known = remembered()
    gradient(torch.rand(400, requires_grad=True))
    assert remembered() is known


def test_forward_in_inference_mode_leaves_training_possible():
    _, graph = hub_graph()
    weight, x = torch.rand(400), torch.randn(30, 4, requires_grad=True)
    with torch.inference_mode():
        for reduce in REDUCES:
            aggregate(graph, x, weight, reduce)
    for reduce in REDUCES:
        aggregate(graph, x, weight, reduce).sum().backward()


def _compare_in_child(graph, x, expected, connection):
    torch.set_num_threads(1)
    connection.send(torch.equal(aggregate(graph, x), expected))


def test_a_forked_process_may_call(storage):
    _, graph = hub_graph(settings=PlanSettings(num_workers=2))
    x = torch.randn(30, 8)
    expected = aggregate(graph, x)  # starts threads, which a child process does not inherit
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    child = context.Process(target=_compare_in_child, args=(graph, x, expected, sender), daemon=True)
    child.start()
    assert receiver.poll(PATIENCE), "the child hangs"
    assert receiver.recv()
    child.join(PATIENCE)


def test_a_workers_error_is_the_callers():
    from lightning_gnn.ops.worker_threads import run_all

    def fail():
        raise ArithmeticError("share 1")

    for shares in ([fail, int, int], [int, int, fail]):
        with pytest.raises(ArithmeticError, match="share 1"):
            run_all(shares)
    done = []
    run_all([lambda i=i: done.append(i) for i in range(9)])
    assert sorted(done) == list(range(9))


@given(st.integers(1, 200), st.integers(0, 9), st.booleans(), st.sampled_from([0, 5]))
def test_columns_are_cut_into_blocks_that_have_a_loop(channels, heads, overlap, packed_rows):
    num_columns = channels * max(heads, 1)
    for widths, kinds in ((intrinsics.WIDTHS, intrinsics.SUMS), (intrinsics.MAX_WIDTHS, intrinsics.MAXIMA)):
        table, count = numba_kernels.blocks_of(num_columns, channels, heads, widths, overlap, packed_rows)
        written, covered = 0, set()
        for column, width, base, stride, head, shared, _ in table.tolist():
            assert (width, shared) in kinds
            assert shared == 0 or (width, shared) in intrinsics.PRODUCTS
            assert column + width <= num_columns
            # Each weight of a block is repeated for the columns of its head.
            each = width // max(shared, 1)
            assert heads <= 1 or all((column + i) // channels == head + i // each for i in range(width))
            assert (base, stride) == ((written, width) if packed_rows else (column, num_columns))
            written += width * packed_rows
            covered |= set(range(column, column + width))
        assert count == written
        assert covered == set(range(num_columns))


def test_a_plan_is_that_of_an_npu():
    _, graph = hub_graph()
    with pytest.raises(ValueError, match=r"aggregations on cpu do not use a hybrid plan.*ascend_twin"):
        hybrid_plan(graph, 50)


def test_a_sharded_graph_aggregates_itself():
    class Part:
        def aggregate(self, x, weight, reduce):
            return x, weight, reduce

        def edge_softmax(self, source_scores, target_scores, negative_slope):
            return negative_slope

    x = torch.randn(2, 2)
    assert edge_softmax(Part(), x, x, 0.1) == 0.1
    assert aggregate(Part(), x, None, "max") == (x, None, "max")
    with pytest.raises(ValueError, match="cannot be chosen for a Part"):
        aggregate(Part(), x, backend="numba")


X, WEIGHT = torch.randn(30, 4), torch.rand(400)


@pytest.mark.parametrize(
    ("error", "message", "given", "options"),
    [
        (ValueError, "one row per source, 30, but has 29", [X[:29]], {}),
        (ValueError, r"one row per edge, 400, but is \[399\]", [X, WEIGHT[:399]], {}),
        (ValueError, "x must be", [X[:, 0]], {}),
        (ValueError, r"x must be \[num_sources, 2, C\]", [X, torch.rand(400, 2)], {}),
        (ValueError, "x must be", [torch.randn(30, 3, 4), torch.rand(400, 2)], {}),
        (ValueError, "reduce='min' is unknown; use one of sum", [X], {"reduce": "min"}),
        (ValueError, "backend='mkl' is unknown", [X], {"backend": "mkl"}),
        (ValueError, "x is on meta, but the graph is on cpu", [X.to("meta")], {}),
        (TypeError, "x must be a floating tensor, but is torch.int64", [X.long()], {}),
        (TypeError, "weight must be a floating tensor", [X, WEIGHT.int()], {}),
        (TypeError, "x must be a floating tensor, but is list", [[1.0]], {}),
    ],
)
def test_errors_say_what_is_wrong(error, message, given, options):
    with pytest.raises(error, match=message):
        aggregate(hub_graph()[1], *given, **options)
    with pytest.raises(TypeError, match="graph must be"):
        aggregate(torch.zeros(2, 3), X)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
def test_weights_of_any_number_of_heads_are_permuted(dtype, heads):
    values = torch.randn(40, heads).to(dtype)
    order = torch.randint(37, (50,), dtype=torch.int32)
    for weight in (
        values,
        values[3:],
        values.t().contiguous().t(),
        values.flatten()[1 : 1 + 37 * heads].view(37, heads),
    ):
        assert torch.equal(permute_rows(weight, order), weight[order.long()])
    assert permute_rows(values[:0], order[:0]).shape == (0, heads)
