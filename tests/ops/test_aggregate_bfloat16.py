import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn import aggregate
from lightning_gnn.ops.intrinsics import round_span
from tests.ops.test_aggregate import REDUCES, hub_graph, problems, storage, use  # noqa: F401  storage is a fixture

BF16 = torch.bfloat16


def assert_same(got, want):
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)


def widen(tensors):
    return [tensor.float().requires_grad_() for tensor in tensors]


@given(problems())
@settings(max_examples=150, deadline=None)
def test_rows_are_widened_added_up_in_float32_and_rounded_once(problem):
    graph, _, x, weight, reduce, packed = problem
    inputs = [tensor.detach().to(BF16) for tensor in ([x] if weight is None else [x, graph.edge_order(weight)])]
    exact = widen(inputs)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    with pytest.MonkeyPatch.context() as patch:
        use(patch, packed)
        out = aggregate(graph, *inputs, reduce=reduce)
        expected = aggregate(graph, *exact, reduce=reduce)
        assert_same(out, expected.to(BF16))
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(BF16)
        grads = torch.autograd.grad(out, inputs, grad)
        if reduce == "mean":
            # The gradient is divided, and rounded, before it is passed back along the edges.
            degrees = graph.in_degrees.clamp(min=1).view(-1, *[1] * (grad.dim() - 1))
            expected, grad = aggregate(graph, *exact), (grad.float() / degrees).to(BF16)
        wanted = torch.autograd.grad(expected, exact, grad.float())
    for got, want in zip(grads, wanted, strict=True):
        assert_same(got, want.to(BF16))


@pytest.mark.medium
@given(problems())
@settings(max_examples=100, deadline=None)
def test_weights_of_float32_make_float32_of_rows_that_are_read_as_they_are(problem):
    graph, edge_index, x, weight, reduce, packed = problem
    weight = torch.rand(edge_index.size(1)) if weight is None else weight.float()
    x = x.to(BF16)
    inputs = [x.clone().requires_grad_(), graph.edge_order(weight).requires_grad_()]
    exact = [*widen([x]), inputs[1].detach().clone().requires_grad_()]
    with pytest.MonkeyPatch.context() as patch:
        use(patch, packed)
        out, expected = (aggregate(graph, *given, reduce=reduce) for given in (inputs, exact))
        assert_same(out, expected)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        grads, wanted = (torch.autograd.grad(o, g, grad) for o, g in ((out, inputs), (expected, exact)))
    assert_same(grads[0], wanted[0].to(BF16))
    assert_same(grads[1], wanted[1])


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.usefixtures("storage")
def test_the_reference_agrees(backend, reduce, heads):
    _, graph = hub_graph()
    x, weight = torch.randn(30, heads, 20).to(BF16).requires_grad_(), torch.rand(400, heads).requires_grad_()
    for inputs in ([x], [x, weight], [x, weight.to(BF16)]):
        got = aggregate(graph, *inputs, reduce=reduce, backend=backend)
        want = aggregate(graph, *(tensor.double() for tensor in inputs), reduce=reduce, backend="reference")
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), want, atol=1000 * torch.finfo(torch.float32).eps, rtol=eps)


@numba.njit
def _round(x, begin, out, at, count):
    round_span(x, begin, out, at, count)


@given(st.lists(st.floats(width=32), max_size=40), st.integers(0, 3), st.integers(0, 3))
def test_numbers_are_rounded_as_torch_rounds_them(numbers, begin, at):
    special = [0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, 1e-40, torch.inf, -torch.inf, torch.nan]
    numbers = torch.tensor([*numbers, *special])
    x, out = torch.cat([torch.zeros(begin), numbers]), np.full(at + numbers.numel() + 1, 7, np.uint16)
    _round(x.numpy(), begin, out, at, numbers.numel())
    assert_same(torch.from_numpy(out[at:-1].view(np.int16)).view(BF16), numbers.to(BF16))
    assert (out[:at] == 7).all()
    assert out[-1] == 7
