"""Derivatives of every order: correct, or rejected."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from lightning_gnn import CompressedGraph, aggregate
from lightning_gnn.ops import edge_softmax, gather_rows
from lightning_gnn.ops.aggregate import numba_rows
from lightning_gnn.ops.aggregate.derivatives import Graph
from lightning_gnn.ops.aggregate_update.definition import aggregate_update
from lightning_gnn.ops.dropout import row_dropout
from tests.strategies import edge_indices

LINEAR = ("sum", "mean")
CPU = (None, "reference")
EDGES = torch.randint(7, (2, 20), generator=torch.Generator().manual_seed(0))


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_small(seed=0, num_nodes=7, num_edges=20):
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(seed))
    return edge_index, CompressedGraph.from_edge_index(edge_index, num_nodes)


def aggregate_densely(edge_index, x, weight=None, reduce="sum"):
    """Aggregate with torch's own operators; features are [N, D] or [N, H, C]."""
    messages = x[edge_index[0]]
    if weight is not None:
        messages = messages * weight.reshape(*weight.shape, *[1] * (messages.dim() - weight.dim()))
    if reduce == "max":
        index = edge_index[1].view(-1, *[1] * (x.dim() - 1)).expand_as(messages)
        return torch.zeros_like(x).scatter_reduce(0, index, messages, "amax", include_self=False)
    out = torch.zeros_like(x).index_add(0, edge_index[1], messages)
    degrees = torch.bincount(edge_index[1], minlength=x.size(0)).clamp(min=1)
    return out / degrees.view(-1, *[1] * (x.dim() - 1)) if reduce == "mean" else out


@st.composite
def problems(draw):
    num_nodes, edge_index = draw(edge_indices(max_nodes=6, max_edges=10))
    heads = draw(st.sampled_from([None, 1, 2]))
    shape = (num_nodes, 2) if heads is None else (num_nodes, heads, 2)
    weighted = draw(st.booleans())
    seed = draw(st.integers(0, 2**31))
    weight = randn(edge_index.size(1), *(() if heads is None else (heads,)), seed=seed) if weighted else None
    graph = CompressedGraph.from_edge_index(edge_index, num_nodes)
    return graph, randn(*shape, seed=seed + 1), weight


@given(problems(), st.sampled_from(LINEAR), st.sampled_from(CPU))
@settings(max_examples=15, deadline=None)
def test_second_derivatives_are_those_of_differences(problem, reduce, backend):
    graph, x, weight = problem
    inputs = [tensor.requires_grad_() for tensor in (x, weight) if tensor is not None]

    def function(x, weight=None):
        return aggregate(graph, x, weight, reduce, backend) * x.sum()  # uses x twice

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_second_derivative_of_a_maximum_is_refused(weighted):
    _, graph = make_small()
    x = randn(7, 3).requires_grad_()
    weight = randn(20, seed=1).requires_grad_() if weighted else None
    # Without a gradient for the first gradient's own input, the second derivative was once lost silently.
    loss = aggregate(graph, x, weight, "max").sum() + x.pow(3).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"first derivative only.*use reduce='sum' or 'mean'"):
        torch.autograd.grad(grad.pow(2).sum(), x)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        grad.pow(2).sum().backward()


def test_a_second_derivative_of_attention_is_refused():
    _, graph = make_small()
    source, target = randn(7, 2).requires_grad_(), randn(7, 2, seed=1).requires_grad_()
    loss = edge_softmax(graph, source, target).pow(2).sum() + source.pow(3).sum()
    (grad,) = torch.autograd.grad(loss, source, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"edge_softmax has a first derivative only.*PyG's own"):
        torch.autograd.grad(grad.pow(2).sum(), source)


@pytest.mark.medium
@pytest.mark.parametrize(
    "function",
    [
        aggregate,
        lambda graph, x: aggregate(graph, x, reduce="max"),
        lambda graph, x: edge_softmax(graph, x, x),
        lambda _, x: row_dropout(x, 0.5, 1),
        lambda _, x: aggregate_update(x, EDGES, x[:2]),
    ],
)
def test_tangents_and_transforms_are_refused_not_dropped(function):
    _, graph = make_small()
    x = randn(7, 3)
    with forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError), match=r"forward mode AD|jvp"):
        function(graph, forward_ad.make_dual(x, x))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: function(graph, x).sum())(x)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.vmap(lambda x: function(graph, x))(randn(4, 7, 3))


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [*LINEAR, "max"])
def test_a_compiled_function_is_one_graph(reduce):
    _, graph = make_small()
    _, other = make_small(seed=5, num_edges=30)

    def function(graph, x, weight):
        return aggregate(graph, x.relu() + 0.1, weight, reduce).sin()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for which in (graph, other, graph):
        inputs = randn(7, 2, 3).requires_grad_(), randn(which.num_edges, 2, seed=1).requires_grad_()
        got, want = compiled(which, *inputs), function(which, *inputs)
        torch.testing.assert_close(got, want)
        for pair in zip(*(torch.autograd.grad(out.pow(2).sum(), inputs) for out in (got, want)), strict=True):
            torch.testing.assert_close(*pair)


@pytest.mark.slow
def test_a_compiled_layer_derives_the_graph_once(record_calls):
    from lightning_gnn.nn import GATConv, GCNConv, SAGEConv

    derived = record_calls(numba_rows, "_derive")
    _, graph = make_small()
    for layer in (GCNConv(4, 3), SAGEConv(4, 3), SAGEConv(4, 3, aggr="max"), GATConv(4, 3, heads=2)):
        layer.double()
        graph.with_self_loops()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch._dynamo.reset()
        for _ in range(3):
            x = randn(7, 4).requires_grad_()
            got, want = compiled(x, graph), layer(x, graph)
            torch.testing.assert_close(got, want)
            grads = (torch.autograd.grad(out.pow(2).sum(), [x, *layer.parameters()]) for out in (got, want))
            for pair in zip(*grads, strict=True):
                torch.testing.assert_close(*pair)
    assert 0 < len(derived) <= 4  # two graphs, two directions


def test_operators_are_what_torch_expects_of_one():
    _, graph = make_small()
    arguments, operators = Graph.of(graph, None), torch.ops.lightning_gnn
    x, weight, scores = randn(7, 2, 3), randn(20, 2, seed=1), (randn(7, 2), randn(7, 2, seed=2), 0.2)
    best, ties = operators.graph_max(x, weight, *arguments)
    for name, *inputs in (
        ("graph_sum", x, weight, None, True, False),
        ("graph_products", x, x),
        ("graph_max", x, weight),
        ("graph_max_backward", best / ties.clamp(min=1), best, x, weight, True, True),
        ("graph_softmax", *scores),
        ("graph_softmax_backward", *scores, operators.graph_softmax(*scores, *arguments), weight),
    ):
        checked = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(operators, name), (*inputs, *arguments), test_utils=checked)


@pytest.mark.parametrize("reduce", [*LINEAR, "max"])
def test_a_graph_made_in_inference_mode_serves_training(reduce):
    with torch.inference_mode():
        edge_index, graph = make_small()
    x, weight = randn(7, 2, 3).requires_grad_(), randn(20, 2, seed=1).requires_grad_()
    want = aggregate_densely(edge_index.clone(), x, weight, reduce)
    got = aggregate(graph, x, graph.edge_order(weight), reduce)
    for pair in zip(*(torch.autograd.grad(out.sum(), (x, weight)) for out in (got, want)), strict=True):
        torch.testing.assert_close(*pair)
    edge_softmax(graph, x[:, :, 0], x[:, :, 1]).pow(2).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "ascend_twin"])
def test_a_gradient_penalty_on_other_backends(backend):
    edge_index, graph = make_small()
    results = []
    for ours in (True, False):
        x, weight = randn(7, 3).float().requires_grad_(), randn(20, seed=1).float().requires_grad_()
        out = (
            aggregate(graph, x, graph.edge_order(weight), "mean", backend)
            if ours
            else aggregate_densely(edge_index, x, weight, "mean")
        )
        (grad,) = torch.autograd.grad(out.pow(2).sum() + x.pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.pow(2).sum(), (x, weight)))
    tolerance = 1e-4 if backend == "triton" else 2e-2
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() <= tolerance * want.abs().max()


def test_a_gather_does_not_lose_a_gradient():
    table, index = randn(5, 3).requires_grad_(), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"requires a gradient, which would be lost; take table\[index\]"):
        gather_rows(table, index)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="which would be lost"):
        pool.submit(gather_rows, table, index).result()  # worker threads use another code path
    with torch.no_grad():
        assert torch.equal(gather_rows(table, index), table[1:3])


@pytest.mark.medium
def test_aggregate_and_update_has_all_derivatives():
    edge_index = make_small()[0]
    inputs = randn(7, 3), randn(2, 3, seed=1), randn(2, 3, seed=2)

    def function(x, weight, self_weight):
        return aggregate_update(x, edge_index, weight, self_weight, reduce="mean") * x.sum()

    leaves = [tensor.requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)
    want = torch.autograd.grad(function(*leaves).pow(2).sum(), leaves)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves).pow(2).sum(), leaves), want)
