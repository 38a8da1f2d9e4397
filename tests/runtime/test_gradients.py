"""The mean of the ranks' gradients, whichever parameters a rank has used."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_gnn.distributed.gradient_reducer import GradientReducer
from tests.full_graph import launch
from tests.hyscale.ranks import joined

SHAPES = [(), (1,), (3,), (2, 3), (0, 4), (2, 1, 5)]
DTYPES = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64, torch.float32]


def parameters():
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]


def gradient(place, rank):
    """Whole numbers, whose means over 2 ranks are exact in any dtype."""
    return torch.full(SHAPES[place], 4.0 * rank + place, dtype=DTYPES[place])


def take_dense(rank):
    """Each of these on all ranks: gradients of all, of some ranks, of none; a factor; a frozen parameter."""
    found = []
    with joined():
        mean = GradientReducer(dist.get_world_size())
        for who in (lambda place, rank: True, lambda place, rank: (place + rank) % 3 == 0, lambda place, rank: False):
            for factor in (1.0, 0.5):
                here = parameters()
                here[1].requires_grad_(False)
                for place, parameter in enumerate(here):
                    if who(place, rank) and parameter.requires_grad:
                        parameter.grad = gradient(place, rank)
                held = [parameter.grad for parameter in here]
                mean.reduce(here, factor)
                # What was there stays where it was: optimizers that flatten gradients keep views of them.
                assert all(old is None or old is parameter.grad for old, parameter in zip(held, here, strict=True))
                found.append([parameter.grad for parameter in here])
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dense_gradients_of_all_or_some_ranks(num_ranks):
    results = launch.run(take_dense, num_ranks)
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(flat(results[0]), flat(other), strict=True))
    users = [lambda place, rank: True, lambda place, rank: (place + rank) % 3 == 0, lambda place, rank: False]
    cases = [(who, factor) for who in users for factor in (1.0, 0.5)]
    for (who, factor), found in zip(cases, results[0], strict=True):
        for place, value in enumerate(found):
            held = [gradient(place, rank) for rank in range(num_ranks) if who(place, rank)]
            if not held or place == 1:
                assert value is None
                continue
            assert (value.dtype, value.shape) == (DTYPES[place], torch.Size(SHAPES[place]))
            expected = sum(held).double() * factor / num_ranks
            assert torch.allclose(
                value.double(), expected, rtol=8e-3 if value.dtype == torch.bfloat16 else 1e-6, atol=0
            )


def flat(found):
    return [value for case in found for value in case if value is not None]


def take_sparse(rank):
    """Rows of an embedding in turn: by all ranks, by one, by none, none of them, one twice; a dense one beside it."""
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


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sparse_gradients_of_all_or_some_ranks(num_ranks):
    results = launch.run(take_sparse, num_ranks)
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
            expected, beside = torch.zeros(6, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
            for rank, row in enumerate(rows):
                for place in row or ():
                    expected[place] += (rank + 1) / num_ranks
                    beside += table[place] * (rank + 1) / num_ranks
            assert of_table[0]
            assert torch.allclose(of_table[1], expected, rtol=1e-15)
            assert torch.allclose(of_weight, beside, rtol=1e-14)


def take_unlike(rank):
    """A gradient that is dense on rank 0, and of the first rows, sparse, on the others; then one with a graph."""
    with joined():
        mean = GradientReducer(dist.get_world_size())
        weight = nn.Parameter(torch.ones(4, 2))
        for _ in range(2):  # the first time nobody knows that it may be sparse
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


def test_gradients_that_are_sparse_on_some_ranks_only_or_have_a_graph():
    for sparse, with_graph in launch.run(take_unlike, 2):
        expected = torch.full((4, 2), 3.0)
        expected[0] += 1.0
        assert torch.equal(sparse, expected)
        assert torch.equal(with_graph, torch.tensor([4.5, 18.0]))
