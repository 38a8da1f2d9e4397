import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.utils import softmax

from lightning_gnn import CompressedGraph, edge_softmax
from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.ops.aggregate import numba_rows
from tests.ops.test_aggregate import hub_graph, use
from tests.strategies import edge_indices


def softmax_by_pyg(edge_index, source, target, slope=0.2):
    scores = torch.nn.functional.leaky_relu(source[edge_index[0]] + target[edge_index[1]], slope)
    return softmax(scores, edge_index[1], num_nodes=target.size(0))


@given(
    edge_indices(),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.sampled_from([None, "reference"]),
)
@settings(max_examples=100, deadline=None)
def test_weights_and_gradients_are_pygs(graph, heads, workers, dtype, packed, backend):
    num_nodes, edge_index = graph
    compressed = CompressedGraph.from_edge_index(edge_index, num_nodes, settings=PlanSettings(num_workers=workers))
    scores = [torch.randn(num_nodes, heads).to(dtype).requires_grad_() for _ in range(2)]
    exact = [tensor.detach().double().requires_grad_() for tensor in scores]
    expected = softmax_by_pyg(edge_index, *exact)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, packed)
        out = edge_softmax(compressed, *scores, backend=backend)
        grad = torch.randn(expected.shape, dtype=torch.float64)
        grads = torch.autograd.grad(out, scores, compressed.edge_order(grad).to(dtype))
    assert out.dtype == dtype
    tolerance = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(out.double(), compressed.edge_order(expected), **tolerance)
    for got, want in zip(grads, torch.autograd.grad(expected, exact, grad), strict=True):
        torch.testing.assert_close(got.double(), want, **tolerance)


def test_the_same_bits_for_any_number_of_workers(monkeypatch):
    monkeypatch.setattr(numba_rows, "MAX_SERIAL_WORK", 0)
    _, graph = hub_graph(num_nodes=200, num_edges=3000)
    scores = [torch.randn(200, 3, requires_grad=True) for _ in range(2)]
    results = []
    for workers in (1, 2, 3, 7):
        out = edge_softmax(graph.replace_settings(PlanSettings(num_workers=workers)), *scores)
        results.append([out, *torch.autograd.grad(out.square().sum(), scores)])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_is_exact_over_its_whole_range(dtype):
    """One target with maximum score 0: the weights are exp of the scores, divided by their sum."""
    scores = torch.cat([-torch.logspace(-8, 2.2, 5000, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    count = scores.numel()
    graph = CompressedGraph.from_edge_index(torch.stack([torch.arange(count), torch.zeros(count).long()]), count)
    source = scores.to(dtype).view(-1, 1)
    out = edge_softmax(graph, source, torch.zeros_like(source), negative_slope=1.0)
    order = graph.edge_order(torch.arange(count))
    powers = torch.empty_like(out).index_copy_(0, order, out / out[order == count - 1])
    exact = source.double().exp()
    normal = source > -70
    torch.testing.assert_close(powers[normal].double(), exact[normal], atol=0, rtol=3 * torch.finfo(dtype).eps)
    assert (powers[~normal].double() <= exact[~normal] * 1.001 + 1e-38).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_extreme_scores_do_what_they_do_in_pyg(value, backend):
    edge_index, graph = hub_graph()
    source, target = torch.randn(30, 2), torch.randn(30, 2)
    source[5] = value
    target[4] = value
    out = edge_softmax(graph, source, target, backend=backend)
    torch.testing.assert_close(out, graph.edge_order(softmax_by_pyg(edge_index, source, target)), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    _, graph = hub_graph()
    scores = [torch.randn(30, 2).to(dtype) for _ in range(2)]
    out = edge_softmax(graph, *scores)
    assert torch.equal(out, edge_softmax(graph, *(tensor.float() for tensor in scores)).to(dtype))


def test_no_edges():
    graph = CompressedGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 3)
    scores = [torch.randn(3, 2, requires_grad=True) for _ in range(2)]
    out = edge_softmax(graph, *scores)
    assert out.shape == (0, 2)
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), scores))


@pytest.mark.parametrize(
    ("error", "message", "source", "target"),
    [
        (ValueError, "source_scores must be \\[30, 2\\], but is \\[29, 2\\]", torch.randn(29, 2), torch.randn(30, 2)),
        (ValueError, "target_scores must be \\[30, 2\\]", torch.randn(30, 2), torch.randn(31, 2)),
        (ValueError, "source_scores must be", torch.randn(30), torch.randn(30, 2)),
        (ValueError, "target_scores must be", torch.randn(30, 3), torch.randn(30, 2)),
        (ValueError, "on meta, but the graph is on cpu", torch.randn(30, 2, device="meta"), torch.randn(30, 2)),
        (TypeError, "must be a floating tensor, but is torch.int64", torch.ones(30, 2).long(), torch.randn(30, 2)),
        (TypeError, "have the same dtype", torch.randn(30, 2).double(), torch.randn(30, 2)),
    ],
)
def test_errors_say_what_is_wrong(error, message, source, target):
    with pytest.raises(error, match=message):
        edge_softmax(hub_graph()[1], source, target)
