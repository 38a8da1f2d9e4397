"""Aggregation by relation and products against dense matrices, with gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.ops.aggregate_update import numba as aggregate_update_numba
from lightning_gnn.ops.aggregate_update import triton as aggregate_update_triton
from lightning_gnn.ops.aggregate_update.definition import Relation, relation_update
from lightning_gnn.ops.aggregate_update.reference import ReluDropout, Update
from lightning_gnn.ops.dropout import row_dropout
from lightning_gnn.ops.library import triton_obstacle
from tests.ops.test_aggregate_update import execution, normal


@st.composite
def batches(draw):
    """Draw sources and targets of up to four types, and up to six relations; any of them may be empty."""
    sources = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    # A type without source rows may still have targets.
    targets = [draw(st.integers(0, count or 3)) for count in sources]
    relations = []
    for _ in range(draw(st.integers(0, 6))):
        source, target = draw(st.integers(0, len(sources) - 1)), draw(st.integers(0, len(sources) - 1))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        count = draw(st.integers(0, 40)) if sources[source] and targets[target] else 0
        ends = [
            torch.randint(max(size, 1), (count,), generator=generator) for size in (sources[source], targets[target])
        ]
        edges = torch.stack(ends)
        if draw(st.booleans()):
            edges = edges[:, torch.argsort(edges[1], stable=True)]
        relations.append(Relation(source, target, edges))
    return sources, targets, sorted(relations, key=lambda relation: relation.target)


def update_densely(x, sources, targets, relations, weight, self_weight, bias, mean):
    """Compute the same with a dense matrix per relation, type by type."""
    tables, parts = torch.split(x, sources), []
    for kind, count in enumerate(targets):
        out = x.new_zeros(count, weight.size(1))
        for relation, w in zip(relations, weight, strict=True):
            if relation.target != kind:
                continue
            source, target = relation.edge_index
            matrix = x.new_zeros(count, sources[relation.source])
            matrix.index_put_((target, source), x.new_ones(source.numel()), accumulate=True)
            if mean:
                matrix = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
            out = out + matrix @ tables[relation.source] @ w.t()
        if self_weight is not None and sources[kind]:
            out = out + tables[kind][:count] @ self_weight[kind].t()
        parts.append(out if bias is None else out + bias[kind])
    return torch.cat(parts)


def draw_inputs(sources, relations, shape, dtype, has_self, has_bias, grad):
    wide, narrow = shape
    given = [normal(sum(sources), wide, dtype=dtype), normal(len(relations), narrow, wide, seed=1, dtype=dtype)]
    given.append(normal(len(sources), narrow, wide, seed=2, dtype=dtype) if has_self else None)
    given.append(normal(len(sources), narrow, seed=3, dtype=dtype) if has_bias else None)
    return [t if t is None else t.requires_grad_(wants) for t, wants in zip(given, grad, strict=True)]


@given(
    batches(), st.sampled_from([(5, 3), (3, 7), (64, 1), (33, 40)]), st.sampled_from([torch.float64, torch.float32]),
    st.booleans(), st.booleans(), st.booleans(), st.tuples(*[st.booleans()] * 4),
    st.sampled_from([None, ReluDropout(), ReluDropout(0.4, 77)]), st.integers(1, 3), st.sampled_from([1, 3, 64]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_result_and_gradients_are_those_of_dense_matrices(
    batch, shape, dtype, mean, has_self, has_bias, grad, then, threads, tile
):
    sources, targets, relations = batch
    given = draw_inputs(sources, relations, shape, dtype, has_self, has_bias, grad)
    exact = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in given]
    x, *weights = exact
    expected = update_densely(x, sources, targets, relations, *weights, mean)
    if then is not None:
        expected = row_dropout(expected.relu(), then.p, then.key)
    with execution(threads, tile=tile):
        x, *weights = given
        out = relation_update(x, sources, targets, relations, *weights, mean, then)
        wanted = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
        outward = normal(*out.shape, seed=9, dtype=dtype)
        grads = torch.autograd.grad(out, wanted, outward, allow_unused=True) if out.requires_grad else ()
    assert out.dtype == dtype
    tolerance = 1e-11 if dtype == torch.float64 else 2e-4
    if then is not None and dtype == torch.float32:
        return  # a number may round to the other side of ReLU's zero
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    if not sum(targets) or not out.requires_grad:
        return
    if not expected.requires_grad:
        assert not any(found is not None and found.any() for found in grads)
        return
    wanted = [tensor for tensor in exact if tensor is not None and tensor.requires_grad]
    for got, want in zip(
        grads, torch.autograd.grad(expected, wanted, outward.double(), allow_unused=True), strict=True
    ):
        none = torch.zeros(())
        got, want = (none if t is None else t.double() for t in (got, want))
        torch.testing.assert_close(*torch.broadcast_tensors(got, want.to(got.dtype)), rtol=tolerance, atol=tolerance)


SOURCES, TARGETS = [6, 4, 3], [3, 2, 0]
RELATIONS = [
    Relation(0, 0, torch.tensor([[5, 5, 1, 0], [2, 0, 0, 2]])),
    Relation(1, 0, torch.tensor([[3, 0], [1, 1]])),
    Relation(2, 1, torch.tensor([[2, 1, 0, 0], [0, 1, 1, 0]])),
]


@pytest.mark.slow
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("then", [None, ReluDropout(0.3, 5)])
def test_first_and_second_derivatives(mean, then):
    given = draw_inputs(SOURCES, RELATIONS, (3, 2), torch.float64, True, True, [True] * 4)

    def function(x, *weights):
        return relation_update(x, SOURCES, TARGETS, RELATIONS, *weights, mean, then).tanh()

    with execution(2):
        assert torch.autograd.gradcheck(function, given)
        assert torch.autograd.gradgradcheck(function, given)


def test_under_autocast_it_is_of_that_dtype():
    given = draw_inputs(SOURCES, RELATIONS, (3, 2), torch.float32, True, True, [True] * 4)
    x, *weights = given
    with torch.autocast("cpu", torch.bfloat16):
        out = relation_update(x, SOURCES, TARGETS, RELATIONS, *weights)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.float(), relation_update(x, SOURCES, TARGETS, RELATIONS, *weights), rtol=0.1, atol=0.1
    )
    out.float().sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in given)


@pytest.mark.medium
@pytest.mark.skipif(triton_obstacle() is not None, reason="Triton is not installed")
@pytest.mark.parametrize("mean", [True, False])
def test_the_kernel_of_a_gpu_gives_the_same(mean, monkeypatch):
    """On the CPU in Triton's interpreter, on a GPU natively."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for backend in (aggregate_update_numba, aggregate_update_triton):
        place = "cpu" if backend is aggregate_update_numba else device
        given = [t.to(place) for t in draw_inputs(SOURCES, RELATIONS, (16, 8), torch.float32, True, True, [False] * 4)]
        edges = torch.ops.lightning_gnn.relation_edges(
            [relation.edge_index.to(place) for relation in RELATIONS], [6, 4, 3], [3, 3, 2], [0, 6, 10], [0, 1, 6],
            [2, 2, 1], 8,
        )  # fmt: skip
        call = Update(edges, *given, TARGETS, [2, 1, 0], [0, 6, 10], mean, True)
        out, saved = backend.aggregate_update(call, True)
        grads = backend.aggregate_update_backward(call, torch.ones_like(out), saved, None, [True] * 4)
        results.append([tensor.cpu() for tensor in (out, saved, *grads)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(12, 3)}, ValueError, r"x must be \[13, 3\], but is \[12, 3\]"),
        ({"weight": torch.ones(2, 2, 3)}, ValueError, r"weight must be \[3, 2, 3\], but is \[2, 2, 3\]"),
        ({"self_weight": torch.ones(2, 2, 3)}, ValueError, r"self_weight must be \[3, 2, 3\], but is \[2, 2, 3\]"),
        ({"bias": torch.ones(2)}, ValueError, r"bias must be \[3, 2\], but is \[2\]"),
        ({"relations": RELATIONS[::-1]}, ValueError, "relations must be sorted by the type of their targets"),
        ({"num_targets": [7, 2, 0]}, ValueError, "self_weight reads the rows of 7 targets, but x has only 6"),
        (
            {"relations": [Relation(0, 0, torch.tensor([[6], [0]])), *RELATIONS[1:]]},
            IndexError,
            r"edge_index\[0\] holds node 6 \(edge 0\), but there are 6 sources",
        ),
        (
            {"relations": [*RELATIONS[:2], Relation(2, 1, torch.tensor([[0], [-1]]))]},
            IndexError,
            r"edge_index\[1\] holds node -1 \(edge 0\), but there are 2 targets",
        ),
    ],
)
def test_mistakes_are_named(change, error, message):
    arguments = {
        "x": torch.ones(13, 3), "num_sources": SOURCES, "num_targets": TARGETS, "relations": RELATIONS,
        "weight": torch.ones(3, 2, 3), "self_weight": torch.ones(3, 2, 3), "bias": torch.ones(3, 2),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        relation_update(**(arguments | change))
