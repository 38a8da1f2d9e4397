"""Dropout by counter: the same on every backend and for every partition of the rows, with the right rate."""

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.ops.dropout import add_relu_drop, drop_by_row, dropout, edge_dropout, row_dropout, row_dropout_torch
from lightning_gnn.ops.hashing import GOLDEN, NODE_STEP, mix
from tests.patience import PATIENCE

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
keys = st.integers(-(2**63), 2**63 - 1)


def to_signed(value):
    return value - (1 << 64) if value >> 63 else value


def drop_by_definition(x, p, key, rows):
    """Draw number by number with Python integers."""
    out = torch.zeros_like(x).reshape(x.size(0), -1)
    for i, row in enumerate(rows):
        stream = mix(mix(key) ^ (row * NODE_STEP))
        for c, value in enumerate(x.reshape(x.size(0), -1)[i]):
            word = mix(stream + (c // 2 + 1) * GOLDEN)
            if (word >> 32 if c % 2 else word & 0xFFFFFFFF) >= min(round(p * 2**32), 2**32 - 1):
                out[i, c] = value * (1 / (1 - p))
    return out.view(x.shape)


@given(
    key=keys,
    p=st.sampled_from([0.0, 1e-12, 0.1, 0.5, 0.9, 1 - 2**-40]),
    shape=st.sampled_from([(4,), (5, 3), (3, 2, 4), (0, 3), (3, 0), (1, 1)]),
    dtype=st.sampled_from(DTYPES),
    first=st.integers(0, 2**40),
)
def test_every_backend_draws_the_same_mask(key, p, shape, dtype, first):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    rows = first + torch.arange(shape[0]).flip(0) * 3
    dropped = row_dropout(x, p, key, rows)
    assert dropped.dtype == dtype
    assert torch.equal(dropped, row_dropout_torch(x, p, to_signed(mix(key)), rows))
    if dtype == torch.float64 and x.numel():
        assert torch.equal(dropped, drop_by_definition(x, p, key, rows.tolist()))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_and_the_mean_are_right_in_rows_and_columns(p):
    x = torch.ones(2000, 200, dtype=torch.float64)
    ones = row_dropout(x, p, 11) * (1 - p)
    assert ((ones == 0) | ((ones - 1).abs() < 1e-12)).all()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(ones.mean() - (1 - p)) < 5 * deviation / x.numel() ** 0.5
    for dim in (0, 1):
        z = (ones.mean(dim) - (1 - p)) / deviation * x.size(dim) ** 0.5
        assert z.abs().max() < 6
        assert 0.8 < z.std() < 1.2  # rows are independent, and so are columns
    other = row_dropout(x, p, 12) != 0
    both = (other & (ones != 0)).double().mean()
    assert abs(both - (1 - p) ** 2) < 0.005


@pytest.mark.medium
def test_gradients_pass_through_the_same_mask_any_number_of_times():
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([9, 4, 7, 100, 0, 1])

    def function(x):
        return row_dropout(x.pow(3), 0.4, 5, rows)

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (got,), (want,) = (torch.autograd.grad(call(x).sum(), x) for call in (compiled, function))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("x", "p", "rows", "error", "message"),
    [
        (torch.ones(3, 2), 1.5, None, ValueError, "p must be a probability"),
        (torch.ones(3, 2), float("nan"), None, ValueError, "p must be a probability"),
        (torch.ones(3, 2).long(), 0.5, None, TypeError, "x must be floating .* they are torch.int64"),
        (torch.ones(3, 2), 0.5, torch.arange(2), ValueError, r"rows must be \[3\]"),
        (torch.ones(3, 2), 0.5, torch.ones(3), TypeError, "rows int64 or int32"),
    ],
)
def test_wrong_arguments_are_explained(x, p, rows, error, message):
    with pytest.raises(error, match=message):
        row_dropout(x, p, 0, rows)


def drop_repeatedly(x):
    """Call dropout in every way that layers use it."""
    layer = torch.nn.Dropout(0.5)
    given = x.clone()
    return [
        layer(x),
        F.dropout(x, 0.3),
        torch.dropout(x, 0.3, True),
        F.dropout(input=x, p=0.3, training=True),
        F.dropout(given, 0.4, inplace=True),
        given,
        torch.dropout_(x.clone(), 0.2, train=True),
        torch.nn.Dropout(0.5).eval()(x),
        F.dropout(x, 0.3, False),
    ]


def test_a_context_draws_every_call_by_row():
    x = torch.randn(30, 5)
    with drop_by_row(4):
        whole = drop_repeatedly(x)
    with drop_by_row(5):
        other = drop_repeatedly(x)
    assert torch.equal(whole[4], whole[5])
    assert torch.equal(whole[7], x)
    assert torch.equal(whole[8], x)
    assert not any(torch.equal(a, b) for a, b in zip(whole[:7], other[:7], strict=True))
    assert not torch.equal(whole[1], whole[2])  # each call has its own key
    for rows in (torch.arange(0, 30, 2), torch.tensor([3, 29, 5])):
        with drop_by_row(4, rows):
            part = drop_repeatedly(x[rows])
        for a, b in zip(part, whole, strict=True):
            assert torch.equal(a, b[rows])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_call_draws_the_same_mask_again(reentrant):
    drawn = []

    def layer(x):
        x = F.dropout(F.dropout(x, 0.3) + torch.rand(()), 0.5)
        drawn.append(x.detach() == 0)
        return x * x

    x = torch.rand(30, 5, requires_grad=True)
    with drop_by_row(4, torch.arange(30)):
        first = checkpoint(layer, x, use_reentrant=reentrant)
        out = checkpoint(layer, F.dropout(first, 0.1) + 1, use_reentrant=reentrant)
        out.sum().backward()
    one, two, two_again, one_again = drawn
    assert torch.equal(one, one_again)
    assert torch.equal(two, two_again)
    assert not torch.equal(one, two)


def test_a_tensor_of_other_rows_gets_the_same_mask_on_all_ranks():
    x = torch.randn(7, 5)
    drawn = []
    for rows in (torch.arange(3), torch.arange(3, 10, 2)):
        with drop_by_row(4, rows):
            drawn.append(F.dropout(x, 0.5))
    assert torch.equal(*drawn)


def test_outside_of_a_context_and_in_other_threads_torch_draws():
    x = torch.ones(20, 20)
    drawn = []
    with drop_by_row(4):
        thread = threading.Thread(target=lambda: drawn.append(torch.manual_seed(1) and F.dropout(x, 0.5)))
        thread.start()
        thread.join(PATIENCE)
    torch.manual_seed(1)
    assert torch.equal(drawn[0], F.dropout(x, 0.5))


def test_weights_of_edges_are_dropped_by_their_place():
    edge_index = torch.randint(12, (2, 50), generator=torch.Generator().manual_seed(0))
    graph = CompressedGraph.from_edge_index(edge_index, 12)
    weight = torch.rand(50, 4) + 1

    class Part:
        edge_places = torch.arange(20, 45)

    with drop_by_row(8, torch.arange(25)):  # as many rows as edges, but edges do not count as rows
        whole = edge_dropout(graph, weight, 0.5, True)
    with drop_by_row(8, torch.arange(3)):
        part = edge_dropout(Part(), weight[20:45], 0.5, True)
        assert edge_dropout(graph, weight, 0.5, False) is weight
    assert torch.equal(part, whole[20:45])
    torch.manual_seed(2)
    outside = edge_dropout(graph, weight, 0.5, True)
    torch.manual_seed(2)
    assert torch.equal(outside, dropout(weight, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_bias_relu_and_dropout_in_one_pass(monkeypatch, dtype, has_bias, p):
    monkeypatch.setattr("lightning_gnn.ops.dropout._TILE_ROWS", 8)
    monkeypatch.setattr("lightning_gnn.ops.dropout._ELEMENTS_PER_THREAD", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = torch.randn(50, 7).to(dtype).requires_grad_()
    bias = torch.randn(7).to(dtype).requires_grad_() if has_bias else None
    inputs = [x, bias] if has_bias else [x]
    fused = add_relu_drop(x, bias, p, 5)
    # bfloat16 is rounded once.
    wide = torch.promote_types(dtype, torch.float32)
    plain = row_dropout((x.to(wide) + bias.to(wide) if has_bias else x.to(wide)).relu(), p, 5).to(dtype)
    assert torch.equal(fused, plain)
    first = [torch.autograd.grad(out.square().sum(), inputs, create_graph=True) for out in (fused, plain)]
    direct = torch.autograd.grad(add_relu_drop(x, bias, p, 5).square().sum(), inputs)
    second = [torch.autograd.grad(sum(one.square().sum() for one in grads), inputs) for grads in first]
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    for got, want in zip([*first[0], *second[0], *direct], [*first[1], *second[1], *first[1]], strict=True):
        torch.testing.assert_close(got, want, **tolerance)
