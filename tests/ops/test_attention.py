"""Attention over a mini-batch's edges equals its plain reference, in values and in all derivatives."""

import importlib
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.utils import softmax

from lightning_gnn.ops.attention import numba as attention_numba
from lightning_gnn.ops.attention import reference
from lightning_gnn.ops.attention.definition import attend, attend_keys, with_self_loops
from lightning_gnn.ops.attention.reference import Attend, Layout
from tests.ops.test_aggregate_update import batches, differentiate, hub_batch, normal

module = importlib.import_module("lightning_gnn.ops.attention.definition")


@contextmanager
def execution(threads=1, tile=3):
    """Use this many workers, and tiles of few rows for graphs of any size."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_numba, "SECTION_WORK", 1)
        patch.setattr(attention_numba, "_tile_rows", lambda size: tile)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def sort_edges(edge_index, num_sources, num_targets):
    return torch.ops.lightning_gnn.edges_by_target(edge_index, num_sources, num_targets, None)


KINDS = ["multiplied before", "multiplied after", "dynamic"]


def draw_inputs(kind, num_sources, edges, heads, channels, dtype=torch.float64, wanted=(True,) * 4, dropped=True):
    """Draw the arguments of ``attend`` other than edges."""
    num_targets, num_edges = edges[0].numel() - 1, edges[1].numel()
    after, dynamic = kind == "multiplied after", kind == "dynamic"
    shapes = [
        (num_sources, channels if after else heads * channels),
        (heads, channels),
        (num_targets, heads * channels if dynamic else heads),
        (heads * 3, channels) if after else None,
    ]
    tensors = [
        None if shape is None else (normal(*shape, seed=seed) / shape[-1] ** 0.25).to(dtype).requires_grad_(want)
        for seed, (shape, want) in enumerate(zip(shapes, wanted, strict=True))
    ]
    factor = 2 * torch.randint(2, (num_edges, heads), generator=torch.Generator().manual_seed(7)).to(dtype)
    return [*tensors, factor if dropped else None]


def attend_by_reference(edges, inputs, dynamic):
    """Compute the expected result with torch's operators; the weight is split equally among the heads."""
    values, side, target, weight, factor = inputs
    weight = None if weight is None else weight.view(1, side.size(0), -1, side.size(1))
    layout = Layout([edges[0].numel() - 1], [1], False)
    return reference.attend(Attend(edges, values, side[None], target, weight, factor, layout, 0.2, dynamic))[0]


executions = st.builds(dict, threads=st.integers(1, 3), tile=st.sampled_from([1, 3, 64]))
sizes = st.tuples(st.sampled_from([1, 2, 3, 4, 5, 7]), st.sampled_from([1, 3, 8, 16, 20, 65]))


@settings(max_examples=150)
@given(
    batches(),
    st.sampled_from(KINDS),
    sizes,
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.booleans(),
    st.booleans(),
    executions,
)
def test_result_and_gradients_are_those_of_the_reference(batch, kind, size, wanted, dropped, loops, chosen):
    num_sources, num_targets, edge_index = batch
    edges = sort_edges(edge_index, num_sources, num_targets)
    if loops:
        edges = with_self_loops(edges, num_sources)
    inputs = draw_inputs(kind, num_sources, edges, *size, wanted=wanted, dropped=dropped)
    dynamic = kind == "dynamic"
    expected = attend_by_reference(edges, inputs, dynamic)
    with execution(**chosen):
        out = attend(edges, *inputs, 0.2, dynamic)
        grads = differentiate(out, inputs[:4]) if out.requires_grad else ()
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    assert out.requires_grad == expected.requires_grad
    if out.requires_grad:
        for ours, theirs in zip(grads, differentiate(expected, inputs[:4]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@settings(max_examples=100)
@given(batches(), st.sampled_from(KINDS), sizes, st.booleans(), executions)
def test_values_of_bfloat16_are_those_of_float64_but_for_rounding(batch, kind, size, dropped, chosen):
    num_sources, num_targets, edge_index = batch
    edges, dynamic = sort_edges(edge_index, num_sources, num_targets), kind == "dynamic"
    *tensors, factor = draw_inputs(kind, num_sources, edges, *size, dropped=dropped)
    # All are exact in bfloat16, so that only results are rounded; parameters stay float32.
    exact = [None if one is None else one.detach().bfloat16().double().requires_grad_() for one in tensors]
    narrow = [None if one is None else one.detach().float().requires_grad_() for one in exact]
    narrow[0] = exact[0].detach().bfloat16().requires_grad_()
    with execution(**chosen):
        out = attend(edges, *narrow, None if factor is None else factor.float(), 0.2, dynamic)
        seed = normal(*out.shape, seed=9).bfloat16()
        got = [out, *torch.autograd.grad(out, [one for one in narrow if one is not None], seed)]
    expected = attend_by_reference(edges, [*exact, factor], dynamic)
    want = [expected, *torch.autograd.grad(expected, [one for one in exact if one is not None], seed.double())]
    assert [one.dtype for one in got[:3]] == [torch.bfloat16, torch.bfloat16, torch.float32]
    scale = max(float(one.norm()) for one in want)  # gradients of scores cancel, down to 0
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm() + 0.01 * scale


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_bfloat16_do_not_depend_on_the_number_of_threads(kind):
    edges = sort_edges(torch.randint(700, (2, 9000), generator=torch.Generator().manual_seed(0)), 700, 700)
    *inputs, factor = draw_inputs(kind, 700, edges, 4, 20, dtype=torch.float32)
    inputs[0] = inputs[0].detach().bfloat16().requires_grad_()
    given, found = [one for one in inputs if one is not None], []
    for threads in (1, 3):
        with execution(threads, tile=64):
            out = attend(edges, *inputs, factor, 0.2, kind == "dynamic")
            found.append([out, *torch.autograd.grad(out.float().square().sum(), given)])
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_bfloat16_that_are_not_finite_reach_all_that_read_them(kind):
    edges = sort_edges(torch.randint(50, (2, 200), generator=torch.Generator().manual_seed(0)), 50, 50)
    *inputs, factor = draw_inputs(kind, 50, edges, 3, 5, dtype=torch.float32, wanted=(False,) * 4)
    inputs[0][5], inputs[0][6] = torch.nan, torch.inf
    out = attend(edges, inputs[0].bfloat16(), *inputs[1:], factor, 0.2, kind == "dynamic")
    exact = attend(edges, *inputs, factor, 0.2, kind == "dynamic")
    assert bool(out.isnan().any())
    assert torch.equal(out.isnan(), exact.isnan())


def draw_keys(num_sources, edges, heads, channels, wanted=(True,) * 3, dropped=True, dtype=torch.float64):
    """Draw queries, keys and values, and the factors of dropout."""
    num_targets, width = edges[0].numel() - 1, heads * channels
    shapes = (num_targets, heads, channels), (num_sources, width), (num_sources, width)
    inputs = [
        (normal(*shape, seed=seed) / channels**0.25).to(dtype).requires_grad_(want)
        for seed, (shape, want) in enumerate(zip(shapes, wanted, strict=True))
    ]
    factor = 2 * torch.randint(2, (edges[1].numel(), heads), generator=torch.Generator().manual_seed(7)).to(dtype)
    return [*inputs, factor if dropped else None]


def attend_keys_plainly(edges, query, keys, values, factor):
    """Compute the expected result of ``attend_keys`` with torch's and PyG's operators."""
    rows = torch.repeat_interleave(edges[0].diff())
    keys, values = (part.view(part.size(0), *query.shape[1:])[edges[1]] for part in (keys, values))
    attention = softmax((query[rows] * keys).sum(2), rows, num_nodes=query.size(0))
    attention = attention if factor is None else attention * factor
    return torch.zeros_like(query).index_add(0, rows, attention.unsqueeze(2) * values).flatten(1)


@settings(max_examples=80)
@given(batches(), sizes, st.lists(st.booleans(), min_size=3, max_size=3), st.booleans(), executions)
def test_keys_of_their_own(batch, size, wanted, dropped, chosen):
    num_sources, num_targets, edge_index = batch
    edges = sort_edges(edge_index, num_sources, num_targets)
    inputs = draw_keys(num_sources, edges, *size, wanted, dropped)
    expected = attend_keys_plainly(edges, *inputs)
    with execution(**chosen):
        out = attend_keys(edges, *inputs)
        assert out.requires_grad == expected.requires_grad
        grads = differentiate(out, inputs[:3]) if out.requires_grad else ()
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(grads, differentiate(expected, inputs[:3]) if grads else (), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.medium
def test_second_derivatives_with_keys():
    edges = sort_edges(hub_batch()[1][:, :24] % 4, 9, 4)
    *inputs, factor = draw_keys(9, edges, 2, 3)
    with execution():
        assert torch.autograd.gradcheck(lambda *given: attend_keys(edges, *given, factor), inputs)
        assert torch.autograd.gradgradcheck(lambda *given: attend_keys(edges, *given, factor).tanh(), inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(4, 100), (8, 8), (1, 64), (4, 64), (3, 17)])
def test_single_precision(kind, size):
    (num_sources, num_targets), edge_index = hub_batch()
    edges = sort_edges(edge_index, num_sources, num_targets)
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = draw_inputs(kind, num_sources, edges, *size, dtype=dtype)
        out = attend(edges, *inputs, 0.2, kind == "dynamic")
        results.append([out, *differentiate(out, inputs[:4])])
        assert {tensor.dtype for tensor in results[-1]} == {dtype}
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4 * float(double.detach().abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_the_same_bits(kind):
    (num_sources, num_targets), edge_index = hub_batch(3000, 1200, 20_000)
    edges = sort_edges(edge_index, num_sources, num_targets)
    results = []
    for threads in (1, 2, 5):
        inputs = draw_inputs(kind, num_sources, edges, 3, 20, dtype=torch.float32)
        with execution(threads, tile=50):
            out = attend(edges, *inputs, 0.2, kind == "dynamic")
            results.append([out, *differentiate(out, inputs[:4])])
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind):
    _, edge_index = hub_batch()
    edges = with_self_loops(sort_edges(edge_index[:, :24] % 4, 9, 4), 9)
    *inputs, factor = draw_inputs(kind, 9, edges, 2, 3)
    inputs = [tensor for tensor in inputs if tensor is not None]

    def function(values, side, target, weight=None):
        return attend(edges, values, side, target, weight, factor, 0.2, kind == "dynamic").tanh()

    with execution():
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [(0, 0, 0), (3, 0, 0), (3, 2, 0), (0, 3, 0), (3, 3, 4)])
def test_what_is_empty(kind, count):
    num_sources, num_targets, num_edges = count
    edges = sort_edges(torch.zeros(2, num_edges, dtype=torch.int64), num_sources, num_targets)
    inputs = draw_inputs(kind, num_sources, edges, 2, 5)
    out = attend(edges, *inputs, 0.2, kind == "dynamic")
    assert out.shape == (num_targets, 6 if kind == "multiplied after" else 10)
    assert not out[1:].any()
    grads = differentiate(out, inputs[:4])
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert num_edges or not any(grad.any() for grad in grads)


def test_scores_of_any_size_do_not_overflow_and_what_is_no_number_stays():
    edges = sort_edges(torch.tensor([[0, 1, 2, 2], [0, 0, 0, 1]]), 3, 2)
    values, side, target = torch.tensor([[1e4], [-1e4], [1e4]]), torch.ones(1, 1), torch.zeros(2, 1)
    out = attend(edges, values, side, target)
    assert out.tolist() == [[1e4], [1e4]]
    values[0] = torch.nan
    out = attend(edges, values, side, target)
    assert out[0].isnan()
    assert out[1] == 1e4


def test_what_does_not_fit_is_named():
    edges = sort_edges(torch.tensor([[0, 1], [0, 0]]), 2, 1)
    values, side, target = torch.ones(2, 6), torch.ones(2, 3), torch.ones(1, 2)
    attend(edges, values, side, target)
    with pytest.raises(ValueError, match=r"values must be \[2, 6\], but is \[2, 5\]"):
        attend(edges, torch.ones(2, 5), side, target)
    with pytest.raises(ValueError, match=r"shift must be \[1, 6\]"):
        attend(edges, values, side, target, dynamic=True)
    with pytest.raises(ValueError, match=r"factor must be \[2, 2\]"):
        attend(edges, values, side, target, factor=torch.ones(3, 2))
    with pytest.raises(ValueError, match="weight must be None"):
        attend(edges, torch.ones(2, 3), side, torch.ones(1, 6), torch.ones(2, 3), dynamic=True)
    with pytest.raises(ValueError, match="3 rows, which is not a multiple of 2 heads"):
        attend(edges, torch.ones(2, 3), side, target, torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"side must be \[sides, heads, channels\]"):
        attend(edges, values, torch.ones(6), target)
    with pytest.raises(TypeError, match=r"side is torch.float64, but values is torch.float32"):
        attend(edges, values, side.double(), target)
    with pytest.raises(TypeError, match="float32 or float64"):
        attend(edges, values.half(), side.half(), target.half())
