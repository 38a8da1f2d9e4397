"""Dropout with one key from torch's generator: torch's behavior, independent of threads and on recomputation."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_gnn.nn import GAT, GCN, GIN, Dropout, GraphSAGE
from lightning_gnn.ops.dropout import drop_by_row

X = torch.rand(3000, 200, generator=torch.Generator().manual_seed(0)) + 1


def draw(layer, x, seed=3):
    torch.manual_seed(seed)
    return layer(x)


def test_a_seed_gives_a_mask_and_calls_give_others():
    layer = Dropout(0.4)
    one = draw(layer, X)
    assert torch.equal(draw(layer, X), one)
    assert not torch.equal(layer(X), one)
    assert not torch.equal(draw(layer, X, seed=4), one)
    torch.testing.assert_close(one[one != 0], X[one != 0] / 0.6)
    assert abs((one == 0).float().mean() - 0.4) < 0.005


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_draws_its_mask_again(reentrant):
    layer, seen = Dropout(0.5), []

    def run(x):
        x = layer(layer(x) * 2)
        seen.append(x.detach())
        return x.square()

    leaf = X[:50].clone().requires_grad_()
    checkpoint(run, leaf, use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)
    assert torch.equal(leaf.grad != 0, seen[0] != 0)


def test_where_dropout_is_drawn_by_row_it_is_as_torchs():
    rows, layers = torch.tensor([3, 29, 5]), (Dropout(0.5), nn.Dropout(0.5))
    results = []
    for layer in layers:
        with drop_by_row(4, rows):
            results.append((layer(X[rows]), layer(X[rows])))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.medium
def test_gradients_pass_where_numbers_do():
    torch.manual_seed(0)
    leaf = X[:20, :7].double().requires_grad_()
    key_state = torch.get_rng_state()

    def run(x):
        torch.set_rng_state(key_state)
        return Dropout(0.3)(x)

    assert torch.autograd.gradcheck(run, leaf)
    assert torch.autograd.gradgradcheck(run, leaf)


def test_torch_draws_where_torch_has_its_own_ways():
    small = X[:6, :5]
    inplace = small.clone()
    assert draw(Dropout(0.5, inplace=True), inplace) is inplace
    assert torch.equal(inplace, draw(nn.Dropout(0.5), small))
    for x in (torch.tensor(2.0), nn.Parameter(small).as_subclass(Marked)):
        assert torch.equal(draw(Dropout(0.5), x), draw(nn.Dropout(0.5), x))
    assert Dropout(0.5)(torch.ones(3, 2, device="meta")).shape == (3, 2)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(Dropout(0.5))(small)
    assert torch.vmap(Dropout(0.5), randomness="different")(small).shape == small.shape
    traced = torch.jit.trace(Dropout(0.5), small, check_trace=False)
    assert not torch.equal(traced(small), traced(small))  # the trace does not contain the key


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("model", [GCN, GraphSAGE, GIN, GAT])
def test_models_drop_by_it(model):
    built = model(4, 8, 2, 3, dropout=0.5, input_dropout=0.25)
    assert type(built.dropout) is type(built.input_dropout) is Dropout
    assert (built.dropout.p, built.input_dropout.p) == (0.5, 0.25)
