"""Sharded aggregation equals the global one for all numbers of ranks and groups; exchanges are adjoint."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.full_graph.plan import shard_rows
from lightning_gnn.full_graph.shard import RowShard
from lightning_gnn.nn import GCNConv
from lightning_gnn.ops.aggregate import definition
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.aggregate.edge_softmax import edge_softmax
from tests.campaigns import campaign
from tests.full_graph.launch import run


def make_skewed_graph(num_nodes, num_edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(num_nodes, (num_edges,), generator=generator)
    col = (torch.rand(num_edges, generator=generator) ** 3 * (num_nodes - 2)).long()
    return CompressedGraph.from_edge_index(torch.stack([row, col]), num_nodes)


GRAPHS = {
    "skewed": lambda: make_skewed_graph(60, 400),
    "hubs": lambda: make_skewed_graph(40, 300, seed=1),
    "few edges": lambda: make_skewed_graph(30, 3, seed=2),
    "no edge": lambda: make_skewed_graph(40, 0),
}

CASES = [
    ((6,), None),
    ((7,), "edges"),
    ((3, 5), "edges"),
    ((3, 5), "heads"),
    ((1, 8), "heads"),
    ((5, 2), "heads"),
    ((2,), "edges"),
    ((1,), None),
]


def list_divisors(number):
    return [m for m in range(1, number + 1) if number % m == 0]


def compute_reference(graph, x, weight, reduce, grad):
    x = x.clone().requires_grad_()
    weight = None if weight is None else weight.clone().requires_grad_()
    out = aggregate(graph, x, weight, reduce)
    out.backward(grad)
    return out.detach(), x.grad, None if weight is None else weight.grad


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def compare_with_global(rank, num_ranks, numbers):
    """Compare everything that a shard computes with the whole graph, for these numbers of groups."""
    dist.init_process_group("gloo")
    for name, make in GRAPHS.items():
        if num_ranks > 3 and name not in ("hubs", "few edges"):
            continue  # many processes on few cores take long
        graph = make()
        num_nodes = graph.num_targets
        generator = torch.Generator().manual_seed(5)
        split = torch.rand(num_nodes, generator=generator) < 0.5
        owners = shard_rows(num_nodes, num_ranks, {"train": split})
        rows = owners.rows(rank)
        for groups in numbers:
            shard = RowShard(graph, owners, rank, 6, groups)
            assert torch.equal(shard.in_degrees, graph.in_degrees[rows])
            assert torch.equal(shard.out_degrees, graph.out_degrees[rows])
            m = shard.plan.num_groups
            place = shard.edge_places
            for shape, weighted in CASES:
                x = torch.randn(num_nodes, *shape, dtype=torch.float64, generator=generator)
                grad = torch.randn(x.shape, dtype=torch.float64, generator=generator)
                weight = None
                if weighted:
                    edge_shape = (graph.num_edges, *shape[: weighted == "heads"])
                    weight = torch.randn(edge_shape, dtype=torch.float64, generator=generator)
                if x[0].numel() < m and groups != "auto":
                    with pytest.raises(ValueError, match="features narrower than the groups"):
                        shard.aggregate(x[rows])
                    continue
                for reduce in ("sum", "mean", "max") if x.numel() == 15 * num_nodes or not weighted else ("sum",):
                    out, grad_x, grad_weight = compute_reference(graph, x, weight, reduce, grad)
                    mine = x[rows].clone().requires_grad_()
                    weights = None if weight is None else weight[place].clone().requires_grad_()
                    got = aggregate(shard, mine, weights, reduce)
                    assert_close(got.detach(), out[rows])
                    got.backward(grad[rows])
                    assert_close(mine.grad, grad_x[rows])
                    if weight is not None:
                        total = torch.zeros_like(weight)
                        total[place] = weights.grad
                        dist.all_reduce(total)
                        assert_close(total, grad_weight)
            for heads in (1, 4):
                source, target = torch.randn(2, num_nodes, heads, dtype=torch.float64, generator=generator)
                grad = torch.randn(graph.num_edges, heads, dtype=torch.float64, generator=generator)
                ends = [source.clone().requires_grad_(), target.clone().requires_grad_()]
                out = edge_softmax(graph, *ends)
                out.backward(grad)
                mine = [source[rows].clone().requires_grad_(), target[rows].clone().requires_grad_()]
                got = edge_softmax(shard, *mine)
                assert_close(got.detach(), out.detach()[place])
                # Each of the M ranks of a range holds a partial gradient.
                got.backward(grad[place] / m)
                assert_close(mine[0].grad, ends[0].grad[rows])
                assert_close(mine[1].grad, ends[1].grad[rows])
            assert_close(
                shard.gcn_weight(dtype=torch.float64),
                graph.gcn_weight(dtype=torch.float64)[shard.with_self_loops().edge_places],
            )
            values = torch.rand(graph.num_edges, dtype=torch.float64, generator=generator)
            assert_close(shard.edge_order(values), graph.edge_order(values)[place])
            for improved, loops in ((False, True), (True, True), (False, False)):
                given, ours = values.clone().requires_grad_(), values.clone().requires_grad_()
                expected = graph.gcn_weight(given, improved, loops)
                looped = shard.with_self_loops() if loops else shard
                assert_close(shard.gcn_weight(values, improved, loops), expected.detach()[looped.edge_places])
                grad = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
                expected.backward(grad)
                got = shard.gcn_weight(ours, improved, loops)
                got.backward(grad[looped.edge_places] / m)
                dist.all_reduce(ours.grad)
                assert_close(ours.grad, given.grad)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_number_of_groups_aggregates_like_one_process(num_ranks):
    run(compare_with_global, num_ranks, num_ranks, [*list_divisors(num_ranks), "auto"])


@campaign
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [4, 6])
def test_many_ranks_aggregate_like_one_process(num_ranks, number):
    numbers = [*list_divisors(num_ranks), "auto"]
    run(compare_with_global, num_ranks, num_ranks, [numbers[number % len(numbers)]])


def compute_penalized_loss(shard, x, weight, scores, reduce):
    """Return a loss that contains the gradient of another loss, through sums and, non-linearly, x itself."""
    out = aggregate(shard, x, weight, reduce) + aggregate(shard, x * scores)
    (inner,) = torch.autograd.grad(out.pow(2).sum() + x.pow(3).sum(), x, create_graph=True)
    return inner.pow(2).sum()


def compare_penalties(rank, num_ranks):
    dist.init_process_group("gloo")
    for name in ("skewed", "few edges", "no edge"):
        graph = GRAPHS[name]()
        owners = shard_rows(graph.num_targets, num_ranks, {})
        rows = owners.rows(rank)
        for groups, reduce in zip(list_divisors(num_ranks), ("sum", "mean"), strict=False):
            shard = RowShard(graph, owners, rank, 6, groups)
            generator = torch.Generator().manual_seed(3)
            given = [
                torch.randn(size, dtype=torch.float64, generator=generator)
                for size in ((graph.num_targets, 2, 3), (graph.num_edges, 2), (2, 3))
            ]
            x, weight, scores = (value.clone().requires_grad_() for value in given)
            wanted = torch.autograd.grad(compute_penalized_loss(graph, x, weight, scores, reduce), (x, weight, scores))
            place = shard.edge_places
            mine = [given[0][rows], given[1][place], given[2]]
            mine = [value.clone().requires_grad_() for value in mine]
            got = torch.autograd.grad(compute_penalized_loss(shard, *mine, reduce), mine)
            assert_close(got[0], wanted[0][rows])
            # Each rank has partial gradients of weights and parameters.
            total = torch.zeros_like(given[1])
            total[place] = got[1]
            for part, want in ((total, wanted[1]), (got[2].clone(), wanted[2])):
                dist.all_reduce(part)
                assert_close(part, want)
        inner = torch.autograd.grad(aggregate(shard, mine[0], reduce="max").sum(), mine[0], create_graph=True)[0]
        with pytest.raises(NotImplementedError, match="first derivative only"):
            torch.autograd.grad(inner.sum(), mine[0])
    return True


@pytest.mark.slow
def test_a_gradient_penalty_is_that_of_one_process():
    assert all(run(compare_penalties, 4, 4))


def count_permutations(rank, num_ranks):
    """Count how often weights are normalized and permuted for the transpose in each of three steps."""
    dist.init_process_group("gloo")
    counts = Counter()
    permute, normalize = definition.permute_rows, CompressedGraph.gcn_weight
    definition.permute_rows = lambda *given: counts.update(["permuted"]) or permute(*given)
    CompressedGraph.gcn_weight = lambda *given: counts.update(["normalized"]) or normalize(*given)
    graph = GRAPHS["skewed"]()
    owners = shard_rows(graph.num_targets, num_ranks, {})
    found = []
    for edge_weight in (None, torch.rand(graph.num_edges) + 0.5):
        model = [GCNConv(6, 5), GCNConv(5, 4)]
        for groups in list_divisors(num_ranks):
            shard = RowShard(graph, owners, rank, 6, groups)
            x = torch.rand(shard.num_sources, 6, requires_grad=True)
            for _ in range(3):
                counts.clear()
                out = model[1](model[0](x, shard, edge_weight), shard, edge_weight)
                out.sum().backward()
                found.append(dict(counts))
    return found


@pytest.mark.slow
def test_constant_weights_are_normalized_and_permuted_once():
    for found in run(count_permutations, 4, 4):
        for first in range(0, len(found), 3):
            assert found[first]
            assert found[first + 1 : first + 3] == [{}, {}]
