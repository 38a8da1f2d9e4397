"""Layers on mini-batches with the Ascend C kernels on the twin, against float64; which unit runs each part."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_gnn.nn.conv import GCNConv, SAGEConv
from lightning_gnn.nn.conv.fused import can_fuse
from lightning_gnn.ops import aggregate_update, default_backend
from lightning_gnn.ops.aggregate.ascend_twin import record_launches
from lightning_gnn.ops.aggregate_update.reference import ReluDropout
from tests.ascend_ops import run_kernels as run

HALF = 2.0**-11

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the twin needs g++"),
    pytest.mark.filterwarnings("ignore:the Ascend C kernels compute in float16"),
]


def draw_batch(seed, num_sources, num_targets, num_edges):
    """Draw edges: some targets have many, some none, and some edges are parallel."""
    draw = np.random.default_rng(seed)
    target = np.sort((num_targets * draw.random(num_edges) ** 2).astype(np.int64))
    target = target[target % 5 != 3]
    return np.searchsorted(target, np.arange(num_targets + 1)), draw.integers(0, num_sources, target.size), target


@pytest.mark.medium
@pytest.mark.parametrize(
    ("sizes", "own_rows", "weighted", "mean", "transpose_b", "blocks"),
    [
        ((50, 1, 4, 24, 10), 1, False, True, True, 1),
        ((700, 300, 2000, 41, 130), 300, True, True, False, 3),
        ((400, 260, 900, 300, 16), 0, True, False, True, 5),
        ((140, 260, 500, 16, 300), 140, False, False, False, 2),
        ((90, 200, 2000, 2100, 20), 70, False, True, True, 2),
        ((90, 1300, 900, 30, 20), 70, False, True, True, 1),
    ],
)
@pytest.mark.parametrize("seed", [0, 3])
def test_the_kernel_equals_the_reference(sizes, own_rows, weighted, mean, transpose_b, blocks, seed):
    num_sources, num_targets, num_edges, k, n = sizes
    indptr, indices, target = draw_batch(k, num_sources, num_targets, num_edges)
    draw = np.random.default_rng(k)
    x = draw.standard_normal((num_sources, k)).astype(np.float16)
    b, own = (draw.standard_normal((k, n)).astype(np.float16) for _ in range(2))
    weights = draw.standard_normal(indices.size).astype(np.float32) if weighted else None
    sums, size = np.zeros((2, num_targets, k))
    messages = x[indices].astype(float) * (1 if weights is None else weights[:, None])
    np.add.at(sums, target, messages)
    np.add.at(size, target, abs(messages))
    if mean:
        sums, size = (part / np.maximum(np.diff(indptr), 1)[:, None] for part in (sums, size))
    options = {"own_rows": own_rows, "weights": weights, "mean": mean, "transpose_b": transpose_b}
    found, y = run.aggregate_update(
        x, indptr, indices, b, own if own_rows else None, **options, blocks=blocks, seed=seed
    )
    assert (abs(found - sums) <= 1.01 * HALF * size + 1e-6).all()
    expected, bound = sums @ b.astype(float), HALF * (size @ abs(b.astype(float)))
    bound += 1e-6 * (size @ abs(b.astype(float)))  # the float32 error of the products
    if own_rows:
        bound[:own_rows] += 1e-6 * (abs(x[:own_rows].astype(float)) @ abs(own.astype(float)))
        expected[:own_rows] += x[:own_rows].astype(float) @ own.astype(float)
    assert (abs(y - expected) <= 1.5 * bound + 1e-4).all()
    alone, _ = run.aggregate_update(x, indptr, indices, None, **{**options, "own_rows": 0}, blocks=2, seed=seed)
    assert np.array_equal(alone, found)  # without a product, and with other blocks


def test_not_a_number_stays_in_the_rows_that_read_it():
    indptr, indices, _ = draw_batch(0, 60, 150, 300)
    x = np.ones((60, 20), np.float16)
    x[7, 3] = np.nan
    reads = np.array([7 in indices[indptr[row] : indptr[row + 1]] for row in range(150)])
    _, y = run.aggregate_update(x, indptr, indices, np.ones((20, 30), np.float16), transpose_b=True, blocks=2)
    assert reads.any()
    assert np.array_equal(np.isnan(y).any(1), reads)


def compute_both(call, tensors):
    """Return a call's result and gradients on the twin and in float64."""
    found = []
    for backend, prepare in (("ascend_twin", lambda x: x), (None, torch.Tensor.double)):
        inputs = [None if x is None else prepare(x).requires_grad_() for x in tensors]
        with default_backend(backend):
            out = call(*inputs)
            grad = prepare(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype) / 100)
            some = [x for x in inputs if x is not None]
            found.append([out.detach(), *torch.autograd.grad(out, some, grad)])
    return zip(*found, strict=True)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 200), st.integers(1, 900)),
    columns=st.tuples(st.sampled_from([1, 16, 41, 150]), st.sampled_from([1, 7, 32, 140])),
    reduce=st.sampled_from(["sum", "mean"]),
    own=st.booleans(),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    magnitude=st.sampled_from([1e-12, 1.0, 1e9]),
)
@example(0, (1, 1, 1), (1, 1), "mean", True, True, torch.float32, 1.0)
@example(0, (200, 150, 900), (150, 7), "sum", True, False, torch.float32, 1e-12)  # multiplies first
@example(0, (200, 150, 900), (150, 7), "mean", False, True, torch.float32, 1e9)
def test_layers_equal_float64(seed, sizes, columns, reduce, own, weighted, dtype, magnitude):
    (num_nodes, num_targets, num_edges), (k, n) = sizes, columns
    num_targets = min(num_targets, num_nodes)
    draw = torch.Generator().manual_seed(seed)
    magnitude = 1.0 if dtype == torch.float16 else magnitude
    x = (torch.randn(num_nodes, k, generator=draw) * magnitude).to(dtype)
    weight, own_weight = ((torch.randn(n, k, generator=draw) / k**0.5).to(dtype) for _ in range(2))
    bias = (torch.randn(n, generator=draw) * magnitude).to(dtype)
    edge_index = torch.stack([torch.randint(num_nodes, (num_edges,), generator=draw),
                              torch.randint(num_targets, (num_edges,), generator=draw)])  # fmt: skip
    edge_weight = torch.rand(num_edges, generator=draw) * 1e-3 if weighted else None

    def call(x, weight, own_weight, bias):
        given = None if edge_weight is None else edge_weight.to(x.dtype)
        return aggregate_update(x, edge_index, weight, own_weight, bias, num_targets, reduce, given)

    tensors = [x, weight, own_weight if own else None, bias]
    for got, expected in compute_both(call, tensors):
        assert got.dtype == dtype
        error = (got.double() - expected).abs().max().item()
        # all in float16, including the sums; bfloat16 has three bits fewer
        bound = (40 if dtype == torch.bfloat16 else 6) * HALF * expected.abs().max().item()
        assert error <= bound + (2.0**-24 if dtype == torch.float16 else 0)


def test_relu_and_dropout_are_those_of_the_cpu():
    torch.manual_seed(0)
    x, weight = torch.randn(80, 30), torch.randn(20, 30) / 5
    edge_index = torch.randint(80, (2, 400))
    then = ReluDropout(0.4, 5)
    found = [
        [out, *torch.autograd.grad(out.sum(), inputs)]
        for backend in ("ascend_twin", None)
        for inputs in [(x.clone().requires_grad_(), weight.clone().requires_grad_())]
        for out in [_run_on_backend(backend, lambda a, b: aggregate_update(a, edge_index, b, then=then), *inputs)]
    ]
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.02, atol=2e-3 * expected.abs().max().item())
    assert ((found[0][0] == 0) == (found[1][0] == 0)).float().mean() > 0.99


def _run_on_backend(backend, call, *arguments):
    with default_backend(backend):
        return call(*arguments)


@pytest.mark.parametrize("layer", [GCNConv, SAGEConv])
def test_layers_run_as_one_kernel(layer):
    torch.manual_seed(0)
    conv, x, edge_index = layer(40, 20), torch.randn(150, 40), torch.randint(150, (2, 1000))
    expected = conv(x, edge_index)  # PyG's operators
    assert not can_fuse(conv, x, x, edge_index)
    with default_backend("ascend_twin"), record_launches() as launches:
        found = conv(x, edge_index)
        (again,) = torch.autograd.grad(found.sum(), conv.bias if layer is GCNConv else conv.lin_l.bias)
    assert [launch.kernel for launch in launches][:1] == ["aggregate_update"]
    torch.testing.assert_close(found, expected, rtol=0.01, atol=2e-3)
    torch.testing.assert_close(again, torch.full_like(again, 150.0))


@pytest.mark.medium
def test_a_compiler_goes_on_around_it():
    torch.manual_seed(0)
    x, weight = torch.randn(60, 24, requires_grad=True), torch.randn(10, 24)
    edge_index = torch.randint(60, (2, 400))
    compiled = torch.compile(lambda x: aggregate_update(x * 2, edge_index, weight).relu(), backend="aot_eager")
    with default_backend("ascend_twin"), record_launches() as launches:
        expected = aggregate_update(x * 2, edge_index, weight).relu()
        found = compiled(x)
        assert torch.equal(compiled(x), found)
        found.sum().backward()
    torch.testing.assert_close(found, expected)
    assert [launch.kernel for launch in launches] == ["aggregate_update"] * 4
    assert x.grad.abs().sum() > 0


def test_second_derivatives_are_torchs():
    x = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    edge_index, weight = torch.randint(30, (2, 90)), torch.randn(4, 8, dtype=torch.float64)
    found = []
    for backend in ("ascend_twin", None):
        with default_backend(backend):
            out = aggregate_update(x, edge_index, weight, then=ReluDropout())
            (grad,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
            found.append(torch.autograd.grad((grad**2).sum(), x)[0])
    torch.testing.assert_close(*found, rtol=0.05, atol=0.01 * found[1].abs().max().item())
