"""The mean of the ranks' gradients, for any subset of parameters used by a rank."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_gnn.distributed.gradient_reducer import GradientReducer
from tests.full_graph import launch
from tests.hyscale.ranks import joined

SHAPES = [(), (1,), (3,), (2, 3), (0, 4), (2, 1, 5)]
DTYPES = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64, torch.float32]
USES = [lambda index, rank: True, lambda index, rank: (index + rank) % 3 == 0, lambda index, rank: False]
"""Whether a rank has a gradient for a parameter."""


def make_gradient(index, rank):
    """Return whole numbers, whose means over 2 ranks are exact in any dtype."""
    return torch.full(SHAPES[index], 4.0 * rank + index, dtype=DTYPES[index])


def reduce_dense(rank):
    """Average gradients of all ranks, some ranks and no rank; with a factor; with a frozen parameter."""
    found = []
    with joined():
        mean = GradientReducer(dist.get_world_size())
        for is_used in USES:
            for factor in (1.0, 0.5):
                parameters = [
                    nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in zip(SHAPES, DTYPES, strict=True)
                ]
                parameters[1].requires_grad_(False)
                for index, parameter in enumerate(parameters):
                    if is_used(index, rank) and parameter.requires_grad:
                        parameter.grad = make_gradient(index, rank)
                held = [parameter.grad for parameter in parameters]
                mean.reduce(parameters, factor)
                # Gradients are updated in place: optimizers that flatten them retain views.
                after = [parameter.grad for parameter in parameters]
                assert all(old is None or old is new for old, new in zip(held, after, strict=True))
                found.append(after)
    return found


@pytest.mark.medium
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dense_gradients_of_all_or_some_ranks(num_ranks):
    results = launch.run(reduce_dense, num_ranks)
    first, *others = map(flatten, results)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
    cases = itertools.product(USES, (1.0, 0.5))
    for (is_used, factor), found in zip(cases, results[0], strict=True):
        for index, value in enumerate(found):
            held = [make_gradient(index, rank) for rank in range(num_ranks) if is_used(index, rank)]
            if not held or index == 1:
                assert value is None
                continue
            assert (value.dtype, value.shape) == (DTYPES[index], torch.Size(SHAPES[index]))
            expected = sum(held).double() * factor / num_ranks
            assert torch.allclose(
                value.double(), expected, rtol=8e-3 if value.dtype == torch.bfloat16 else 1e-6, atol=0
            )


def flatten(found):
    return [value for case in found for value in case if value is not None]


def reduce_sparse(rank):
    """Average an embedding's sparse gradients from all ranks, some, none, or without rows; and a dense gradient."""
    found = []
    with joined():
        mean = GradientReducer(dist.get_world_size())
        torch.manual_seed(0)
        table, weight = nn.Embedding(6, 2, sparse=True).double(), nn.Parameter(torch.ones(2, dtype=torch.float64))
        for rows in ([[0, 1], [1, 5], [2, 2]], [[], [3], None], [None, None, None], [[], [], []], [[4, 4], None, [0]]):
            table.weight.grad = weight.grad = None
            if rows[rank] is not None:
                scale = float(rank + 1)
                (table(torch.tensor(rows[rank], dtype=torch.int64)) * weight).sum().mul(scale).backward()
            mean.reduce([table.weight, weight])
            grad = table.weight.grad
            found.append((None if grad is None else (grad.is_sparse, grad.to_dense()), weight.grad))
    return found


@pytest.mark.medium
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sparse_gradients_of_all_or_some_ranks(num_ranks):
    results = launch.run(reduce_sparse, num_ranks)
    torch.manual_seed(0)
    table = nn.Embedding(6, 2, sparse=True).double().weight.detach()
    cases = ([[0, 1], [1, 5], [2, 2]], [[], [3], None], [None, None, None], [[], [], []], [[4, 4], None, [0]])
    for number, rows in enumerate(cases):
        rows = rows[:num_ranks]
        for found in results:
            of_table, of_weight = found[number]
            if all(row is None for row in rows):
                assert of_table is None
                assert of_weight is None
                continue
            expected, weight_mean = torch.zeros(6, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
            for rank, row in enumerate(rows):
                for index in row or ():
                    expected[index] += (rank + 1) / num_ranks
                    weight_mean += table[index] * (rank + 1) / num_ranks
            assert of_table[0]
            assert torch.allclose(of_table[1], expected, rtol=1e-15)
            assert torch.allclose(of_weight, weight_mean, rtol=1e-14)


def reduce_mixed(rank):
    """Average a gradient that is dense on rank 0 and sparse (first rows) on the others; then one with a graph."""
    with joined():
        mean = GradientReducer(dist.get_world_size())
        weight = nn.Parameter(torch.ones(4, 2))
        for _ in range(2):  # only from the second step on, the gradient is known to be sparse
            if rank == 0:
                weight.grad = torch.full((4, 2), 6.0)
            else:
                weight.grad = torch.sparse_coo_tensor([[0, 0]], torch.ones(2, 2), (4, 2), check_invariants=True)
            mean.reduce([weight])
        sparse = weight.grad.to_dense()
        x = nn.Parameter(torch.tensor([1.0, 2.0]))
        (x**3).sum().mul(rank + 1).backward(create_graph=True)
        mean.reduce([x])
        return sparse, x.grad.detach()


@pytest.mark.medium
def test_gradients_that_are_sparse_on_some_ranks_only_or_have_a_graph():
    for sparse, with_graph in launch.run(reduce_mixed, 2):
        expected = torch.full((4, 2), 3.0)
        expected[0] += 1.0
        assert torch.equal(sparse, expected)
        assert torch.equal(with_graph, torch.tensor([4.5, 18.0]))
