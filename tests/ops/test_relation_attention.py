"""Attention over the edges of all relations equals a plain loop over edges, in values and in all derivatives."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_gnn.ops.aggregate_update.definition import sort_relations
from lightning_gnn.ops.attention import reference
from lightning_gnn.ops.attention.definition import attend_relations
from lightning_gnn.ops.attention.reference import Attend, Layout
from tests.ops.test_attention import execution
from tests.ops.test_relation_update import RELATIONS, SOURCES, TARGETS, Relation, batches, normal


def draw_inputs(batch, across, heads, channels, dtype=torch.float64, wanted=(True,) * 4, dropped=False):
    """Draw sorted edges, their layout, and the operator's other arguments."""
    sources, targets, relations = batch
    edges, reached = sort_relations(sources, targets, relations)
    layout = Layout(list(targets), reached, across)
    shapes = [
        (sum(sources), channels),
        (layout.num_rows if across else len(relations), heads, channels),
        (layout.num_rows, heads),
        (len(relations), heads, 3, channels),
    ]
    given = [
        (normal(*shape, seed=seed) / channels**0.25).to(dtype).requires_grad_(want)
        for seed, (shape, want) in enumerate(zip(shapes, wanted, strict=True))
    ]
    factor = 2 * torch.randint(2, (edges[1].numel(), heads), generator=torch.Generator().manual_seed(7)).to(dtype)
    return edges, layout, given, factor if dropped else None


def attend_plainly(batch, layout, values, side, shift, weight, slope):
    """Process the edges one by one, in their original order."""
    sources, targets, relations = batch
    first, row, parts, masses = [sum(sources[:kind]) for kind in range(len(sources))], 0, [], []
    for kind, count in enumerate(targets):
        own = [r for r, relation in enumerate(relations) if relation.target == kind]
        for t in range(count):
            lists = []
            for j, r in enumerate(own):
                source, target = relations[r].edge_index
                read = values[first[relations[r].source] + source[target == t]]
                by = side[row + j] if layout.across else side[r]
                lists.append((F.leaky_relu(read @ by.t() + shift[row + j], slope), read))
            if layout.across and own:
                attention = torch.cat([score for score, _ in lists]).softmax(0).split([len(s) for s, _ in lists])
            else:
                attention = [score.softmax(0) for score, _ in lists]
            out = values.new_zeros(weight.size(1), weight.size(2))
            for r, share, (_, read) in zip(own, attention, lists, strict=True):
                out = out + torch.einsum("eh,ec,hoc->ho", share, read, weight[r])
                masses.append(share.sum(0))
            parts.append(out.flatten())
            row += len(own)
    none = values.new_zeros(0, weight.size(1))
    wide = values.new_zeros(0, weight.size(1) * weight.size(2))
    return torch.stack(parts) if parts else wide, torch.stack(masses) if masses else none


def compute_gradients(outs, inputs):
    """Return the gradients of a weighted sum of all numbers."""
    loss = sum((out * normal(*out.shape, seed=20 + i).to(out.dtype)).sum() for i, out in enumerate(outs))
    found = torch.autograd.grad(loss, [t for t in inputs if t.requires_grad], allow_unused=True)
    wanted = [t for t in inputs if t.requires_grad]
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


@settings(max_examples=100, deadline=None)
@given(
    batches(), st.booleans(), st.sampled_from([1, 2, 3, 4, 5, 7]), st.sampled_from([1, 3, 8, 20, 65]),
    st.sampled_from([0.2, 1.0]), st.tuples(*[st.booleans()] * 4), st.integers(1, 3),
)  # fmt: skip
def test_result_and_gradients_are_those_of_a_plain_loop(batch, across, heads, channels, slope, wanted, threads):
    edges, layout, given, _ = draw_inputs(batch, across, heads, channels, wanted=wanted)
    expected = attend_plainly(batch, layout, *given, slope)
    with execution(threads):
        outs = attend_relations(edges, given[0], *given[1:], layout, None, slope)
        grads = compute_gradients(outs, given) if any(out.requires_grad for out in outs) else []
    for ours, theirs in zip(outs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    if not any(out.requires_grad for out in expected):
        assert not any(bool(found.any()) for found in grads)
        return
    for ours, theirs in zip(grads, compute_gradients(expected, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(batches(), st.booleans(), st.sampled_from([torch.float64, torch.float32]), st.integers(1, 3))
@example(([1, 0, 0], [0, 1, 1], [Relation(0, 2, torch.tensor([[0], [0]]))]), True, torch.float64, 1)
def test_dropped_attention_is_that_of_the_reference(batch, across, dtype, threads):
    edges, layout, given, factor = draw_inputs(batch, across, 3, 20, dtype, dropped=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    expected = reference.attend(Attend(edges, *exact, factor.double(), layout, 0.2))
    with execution(threads):
        outs = attend_relations(edges, *given, layout, factor, 0.2)
        grads = compute_gradients(outs, given)
    close = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    for ours, theirs in zip((*outs, *grads), (*expected, *compute_gradients(expected, exact)), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, **close)


@pytest.mark.slow
@pytest.mark.parametrize("across", [True, False])
def test_first_and_second_derivatives(across):
    edges, layout, given, factor = draw_inputs((SOURCES, TARGETS, RELATIONS), across, 2, 3, dropped=True)

    def function(*inputs):
        out, mass = attend_relations(edges, *inputs, layout, factor, 0.2)
        return out.tanh(), mass.tanh()

    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


def test_a_nan_stays_in_its_softmax():
    edges, layout, given, _ = draw_inputs((SOURCES, TARGETS, RELATIONS), True, 2, 3, wanted=(False,) * 4)
    given[0][1] = torch.nan
    out, _ = attend_relations(edges, *given, layout)
    expected, _ = reference.attend(Attend(edges, *given, None, layout, 1.0))
    assert out.isnan().any()
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_mistakes_are_named():
    edges, layout, given, _ = draw_inputs((SOURCES, TARGETS, RELATIONS), True, 2, 3)
    values, side, shift, weight = given
    with pytest.raises(ValueError, match=r"side must be \[8, 2, 3\], but is \[7, 2, 3\]"):
        attend_relations(edges, values, side[:7], shift, weight, layout)
    with pytest.raises(ValueError, match=r"side must be \[sides, heads, channels\]"):
        attend_relations(edges, values, side[0], shift, weight, layout)
