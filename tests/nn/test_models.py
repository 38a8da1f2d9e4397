from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch_geometric.nn import models as pyg

from lightning_gnn.nn import GAT, GCN, GraphSAGE

X = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
EDGES = torch.randint(30, (2, 120), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("ours", "theirs", "kwargs"),
    [
        (GCN, pyg.GCN, {}),
        (GCN, pyg.GCN, {"improved": True, "norm": "layer", "act_first": True}),
        (GCN, pyg.GCN, {"jk": "cat"}),
        (GraphSAGE, pyg.GraphSAGE, {"norm": "batch"}),
        (GAT, pyg.GAT, {"heads": 4, "act": "elu"}),
        (GAT, pyg.GAT, {"heads": 2, "v2": True}),
    ],
)
def test_state_dict_moves_both_ways(ours: type, theirs: type, kwargs: dict) -> None:
    a = ours(8, 12, 3, 5, dropout=0.5, input_dropout=0.5, **kwargs).eval()
    b = theirs(8, 12, 3, 5, dropout=0.5, **kwargs).eval()
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(X, EDGES), b(X, EDGES))
    c = theirs(8, 12, 3, 5, dropout=0.5, **kwargs).eval()
    assert not torch.equal(a(X, EDGES), c(X, EDGES))
    a.load_state_dict(c.state_dict())
    assert torch.equal(a(X, EDGES), c(X, EDGES))


def test_input_dropout_only_while_training() -> None:
    model = GraphSAGE(8, 12, 2, 5, input_dropout=0.5)
    assert not torch.equal(model(X, EDGES), model(X, EDGES))
    model.eval()
    assert torch.equal(model(X, EDGES), model(X, EDGES))


def test_gat_of_the_paper() -> None:
    model = GAT(1433, 64, 2, 7, dropout=0.6, input_dropout=0.6, act="elu", heads=8, output_heads=1)
    first, last = model.convs
    assert (first.heads, first.out_channels, first.concat, first.dropout) == (8, 8, True, 0.6)
    assert (last.heads, last.out_channels, last.concat, last.dropout) == (1, 7, False, 0.6)
    # Per layer: weights, two attention vectors and a bias.
    assert sum(p.numel() for p in model.parameters()) == (1433 * 64 + 3 * 64) + (64 * 7 + 3 * 7)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GCN(8, 16, 2, 5, input_dropout=1.0), r"input_dropout is a probability in \[0, 1\), got 1.0"),
        (lambda: GCN(8, 16, 2, 5, dropout=-0.1), "dropout is a probability"),
        (lambda: GraphSAGE(8, 0, 2, 5), "hidden_channels must be at least 1, got 0"),
        (lambda: GraphSAGE(8, 16, 0, 5), "num_layers must be at least 1, got 0"),
        (lambda: GCN(0, 16, 2, 5), "in_channels must be at least 1"),
        (lambda: GCN(8, 16, 2, 0), "out_channels must be at least 1, got 0"),
        (lambda: GAT(8, 10, 2, 5, heads=4), "hidden_channels=10 counts all heads together"),
        (lambda: GAT(8, 16, 2, 5, heads=0), "heads must be at least 1, got 0"),
        (lambda: GAT(8, 16, 2, heads=4, output_heads=1), "output_heads=1 needs out_channels"),
    ],
)
def test_bad_arguments(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_bad_inputs() -> None:
    with pytest.raises(ValueError, match="x has 8 features per node, but the model was built for 9"):
        GCN(9, 16, 2, 5)(X, EDGES)
    lists = {"num_sampled_nodes_per_hop": [10, 10, 10], "num_sampled_edges_per_hop": [60, 60]}
    with pytest.raises(ValueError, match="cached=True"):
        GCN(8, 16, 2, 5, cached=True)(X, EDGES, **lists)
