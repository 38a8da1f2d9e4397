"""On a CPU that multiplies faster in bfloat16, layers compute in it, and every sum is one of float32."""

from functools import partial

import pytest
import torch
from torch_geometric.nn import GCNConv, SAGEConv

from lightning_gnn.nn import conv
from lightning_gnn.ops import dropout
from lightning_gnn.ops.aggregate_update import definition
from lightning_gnn.ops.aggregate_update import numba as loops
from lightning_gnn.ops.aggregate_update.definition import Relation, relation_update
from lightning_gnn.ops.aggregate_update.reference import ReluDropout
from tests.nn.fusing import fuse_from
from tests.ops.test_aggregate_update import execution

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(definition, "multiplies_bfloat16", lambda: True)


def differentiate(layer, x, edge_index, low):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", BF16, enabled=low):
        out = layer(x, edge_index)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(BF16).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], seed)]


@pytest.mark.parametrize("columns", [24, 6])  # the sums come first, or the products
@pytest.mark.parametrize(
    ("own", "peer"),
    [
        (conv.SAGEConv, SAGEConv),
        (partial(conv.SAGEConv, aggr="sum", root_weight=False), partial(SAGEConv, aggr="sum", root_weight=False)),
        (conv.GCNConv, GCNConv),
    ],
)  # fmt: skip
def test_the_distance_from_float32_is_that_of_torchs_autocast(monkeypatch, own, peer, columns):
    torch.manual_seed(0)
    fuse_from(1, monkeypatch)
    edge_index, x = torch.randint(300, (2, 3000)), torch.randn(300, columns)
    layer, theirs = own(columns, 12), peer(columns, 12).double()
    theirs.load_state_dict(layer.state_dict())
    exact = differentiate(theirs, x.double(), edge_index, False)
    peers, ours = (differentiate(module, x, edge_index, True) for module in (theirs.float(), layer))
    assert ours[0].dtype == BF16
    for got, other, want in zip(ours, peers, exact, strict=True):
        assert (got - want).norm() <= 3 * (other - want).norm() + 1e-3 * want.norm()


def make_update(num_types=2, nodes=700):
    """Return a heterogeneous layer as a function of its floating inputs, and these."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    sizes, targets = [nodes] * num_types, [nodes - 50] * num_types
    relations = [
        Relation(source, target, torch.randint(nodes - 50, (2, 2000), generator=generator))
        for target in range(num_types)
        for source in range(num_types)
    ]
    inputs = draw(sum(sizes), 20), draw(len(relations), 16, 20), draw(num_types, 16, 20), draw(num_types, 16)

    def update(x, weight, self_weight, bias):
        return relation_update(x, sizes, targets, relations, weight, self_weight, bias, True, ReluDropout(0.4, 5))

    return update, [one.to(BF16) for one in inputs]


@pytest.mark.parametrize("num_types", [1, 2])
def test_gradients_do_not_depend_on_the_number_of_threads(monkeypatch, num_types):
    monkeypatch.setattr(loops, "_BLOCK_ROWS", 128)
    update, inputs = make_update(num_types)
    found = []
    for number in (1, 3):
        with execution(number, tile=64):
            given = [one.clone().requires_grad_() for one in inputs]
            out = update(*given)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), given)])
    *exact, _ = zip(*found, strict=True)  # the bias's gradient is a sum of rows, in the order of the threads
    assert all(torch.equal(one, three) for one, three in exact)


@pytest.mark.parametrize("num_types", [1, 2])
def test_first_and_second_derivatives_are_those_of_float32_but_for_rounding(num_types):
    update, inputs = make_update(num_types)

    def derive(given):
        given = [one.clone().requires_grad_() for one in given]
        out = update(*given)
        first = torch.autograd.grad(out.float().square().mean(), given, create_graph=True)
        second = torch.autograd.grad(sum(one.float().square().sum() for one in first), given)
        return [out, *first, *second]

    for got, want in zip(derive(inputs), derive([one.float() for one in inputs]), strict=True):
        assert got.dtype == BF16
        assert (got - want).norm() <= 0.03 * want.norm()


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5])
def test_relu_and_dropout_of_every_bfloat16(p):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16).view(256, 256)
    key = dropout.mixed_key(7)
    out, exact = bits.clone(), bits.float()
    dropout.relu_drop_rows(3, out, p, key)
    dropout.relu_drop_rows(3, exact, p, key)
    torch.testing.assert_close(out, exact.to(BF16), atol=0, rtol=0, equal_nan=True)
    # The gradient passes where the result is positive or NaN.
    grad, before, total = torch.randn(256, 256).to(BF16), torch.empty_like(bits), torch.zeros(256)
    dropout.relu_drop_backward(grad, bits, p, before, total)
    wanted = torch.where(bits <= 0, 0.0, grad.float() * torch.tensor(1.0 / (1.0 - p)))
    assert torch.equal(before, wanted.to(BF16))
    torch.testing.assert_close(total, wanted.sum(0), rtol=1e-5, atol=1e-4)


def test_nan_and_infinity_reach_all_that_read_them():
    update, (x, *parameters) = make_update(1)
    x[5], x[6] = torch.nan, torch.inf
    out, exact = update(x, *parameters), update(x.float(), *(one.float() for one in parameters))
    assert bool(out.isnan().any())
    assert torch.equal(out.isnan(), exact.isnan())
