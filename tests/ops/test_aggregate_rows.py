"""Aggregation over a mini-batch's edges: PyG's results and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.utils import scatter

from lightning_gnn.ops.aggregate_update import rows
from lightning_gnn.ops.aggregate_update.rows import aggregate_rows
from tests.ops.test_aggregate_update import batches, execution, executions, hub_batch, normal


def sort_by_target(edge_index, num_sources, num_targets):
    return torch.ops.lightning_gnn.edges_by_target(edge_index, num_sources, num_targets, None)


@settings(max_examples=60)
@given(batches(), st.sampled_from([1, 3, 16, 70]), st.sampled_from(["sum", "mean", "max"]), st.booleans(), executions)
def test_results_and_gradients_are_those_of_pygs_scatter(batch, width, reduce, ties, chosen):
    num_sources, num_targets, edge_index = batch
    x = normal(num_sources, width)
    x = (x.round() + 0.5 if ties else x).requires_grad_()  # torch's initial 0 takes a share of ties at 0
    grad = normal(num_targets, width, seed=2)
    wanted = scatter(x[edge_index[0]], edge_index[1], 0, num_targets, reduce)
    with execution(**chosen):
        out = aggregate_rows(x, sort_by_target(edge_index, num_sources, num_targets), reduce)
        (ours,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    (theirs,) = torch.autograd.grad(wanted, x, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_derivatives(reduce):
    (num_sources, num_targets), edges = hub_batch(12, 5, 30)
    x = normal(num_sources, 3).requires_grad_()
    sorted_edges = sort_by_target(edges, num_sources, num_targets)
    assert torch.autograd.gradcheck(lambda x: aggregate_rows(x, sorted_edges, reduce), x)
    if reduce != "max":
        assert torch.autograd.gradgradcheck(lambda x: aggregate_rows(x.sin(), sorted_edges, reduce), x)


def test_it_runs_compiled_code(monkeypatch):
    (num_sources, num_targets), edges = hub_batch()
    monkeypatch.setattr(rows, "_aggregate_torch", lambda *arguments: pytest.fail("torch's operators ran"))
    x = normal(num_sources, 5, dtype=torch.float32).requires_grad_()
    for reduce in ("sum", "mean", "max"):
        aggregate_rows(x, sort_by_target(edges, num_sources, num_targets), reduce).sum().backward()


def test_a_maximum_of_zeros_is_shared_by_the_edges_that_attain_it_alone():
    """torch's own scatter_reduce counts its initial zeros, even with include_self=False."""
    edges = [torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 2], dtype=torch.int32)]
    x = torch.tensor([[0.0, 1], [0, 2], [0, -3]], requires_grad=True)
    shares = torch.tensor([[0.5, 0], [0.5, 1], [1, 1]])
    assert torch.equal(torch.autograd.grad(aggregate_rows(x, edges, "max").sum(), x)[0], shares)
    (grad,) = torch.autograd.grad(aggregate_rows(x, edges, "max").sum(), x, create_graph=True)
    assert torch.equal(grad, shares)
