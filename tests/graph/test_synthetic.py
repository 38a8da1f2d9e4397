"""Tests of the synthetic graphs: structure, determinism, argument errors and the promised accuracies."""

import math
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gnn import NeighborDataModule
from lightning_gnn.graph.synthetic import planted_power_law, power_law_graph
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from tests.refusals import refuses

planted_small = partial(planted_power_law, 4_000, 60_000, 8, 16)


@pytest.fixture(scope="module")
def small():
    return planted_small()


@pytest.fixture(scope="module")
def default():
    return planted_power_law()


def top_share(degree, fraction=0.01):
    top = degree.sort(descending=True).values[: int(len(degree) * fraction)]
    return float(top.sum() / degree.sum())


def test_planted_sizes_and_dtypes(small, default):
    for key, shape, dtype in (
        ("x", (4_000, 16), torch.float32),
        ("edge_index", (2, 60_000), torch.int64),
        ("y", (4_000,), torch.int64),
    ):
        assert (small[key].shape, small[key].dtype) == (shape, dtype)
    assert small.validate()
    assert planted_power_law(100, 301, 4, 2).num_edges == 300  # rounded down
    for num_edges in (0, 1):
        assert planted_power_law(10, num_edges, 2, 2).edge_index.shape == (2, 0)
    assert default.x.shape == (100_000, 64)
    assert default.edge_index.shape == (2, 2_000_000)
    assert default.y.unique().tolist() == list(range(16))
    assert [int(default[f"{name}_mask"].sum()) for name in ("train", "val", "test")] == [10_000, 5_000, 25_000]


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_planted_labels_change_nothing_else(small, noise):
    classes, several, numbers = (
        planted_small(label_noise=noise, labels=labels) for labels in ("classes", "several", "numbers")
    )
    for data in (several, numbers):
        assert torch.equal(data.x, small.x)
        assert torch.equal(data.edge_index, small.edge_index)
    assert several.y.shape == (4_000, 8)
    assert set(several.y.flatten().tolist()) == {0, 1}
    assert numbers.y.shape == (4_000,)
    assert numbers.y.dtype == torch.float32
    if noise == 0:
        # All of a community have the same.
        for y in (several.y, numbers.y.unsqueeze(1)):
            assert len(torch.cat([classes.y.unsqueeze(1), y], 1).unique(dim=0)) == 8
        assert bool(several.y[torch.arange(4_000), classes.y].all())
    else:
        assert len(torch.cat([classes.y.unsqueeze(1), several.y], 1).unique(dim=0)) > 100
    refuses(ValueError, "labels='some' is unknown; use classes, several or numbers", planted_small, labels="some")


def test_planted_is_deterministic(small):
    again, other = planted_small(), planted_small(seed=1)
    for key in ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(small[key], again[key]), key
        assert not torch.equal(small[key], other[key]), key


def test_planted_edges_are_simple_and_symmetric(small):
    source, target = small.edge_index
    forward, backward = source * 4_000 + target, target * 4_000 + source
    assert not (source == target).any()
    assert (forward.diff() > 0).all()  # sorted without duplicates
    assert torch.equal(forward, backward.sort().values)


def test_planted_degrees_are_power_law(default):
    degree = default.edge_index[1].bincount(minlength=100_000)
    assert top_share(degree) > 0.1
    assert degree.max() > 30 * 20
    # P(degree >= d) ~ d ** (1 - exponent), below the cap of the hubs.
    tail = [float((degree >= d).sum()) for d in (40, 320)]
    assert math.log(tail[0] / tail[1]) / math.log(8) == pytest.approx(1.5, abs=0.2)
    # Hubs are not clustered in the id range.
    hubs = degree.argsort(descending=True)[:1_000].double()
    assert abs(hubs.mean() - 50_000) < 5_000


def test_planted_labels_are_balanced_and_homophilous(small):
    count = small.y.bincount(minlength=8)
    assert count.min() > 0.9 * 500
    assert count.max() < 1.1 * 500
    source, target = small.edge_index
    assert (small.y[source] == small.y[target]).float().mean() > 0.4


def test_planted_knobs_at_their_ends():
    pure = planted_small(homophily=1.0, label_noise=0.0, feature_noise=0.0)
    source, target = pure.edge_index
    assert torch.equal(pure.y[source], pure.y[target])
    assert len(pure.x.unique(dim=0)) == 8
    mixed = planted_small(homophily=0.0)
    source, target = mixed.edge_index
    assert (mixed.y[source] == mixed.y[target]).float().mean() < 0.2


@pytest.mark.parametrize("split", [(0.1, 0.05, 0.25), (0.7, 0.2, 0.1), (1.0, 0.0, 0.0)])
def test_planted_masks_are_disjoint(split):
    data = planted_small(split=split)
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.dtype == torch.bool
    assert masks.sum(0).max() == 1
    assert masks.sum(1).tolist() == [round(4_000 * part) for part in split]


FITS = {"num_nodes": 100, "num_edges": 400, "num_classes": 4, "num_features": 2}
WRONG = {
    "num_nodes": [1], "num_edges": [-2, 100 * 99 // 2 + 1], "num_classes": [0, 101], "num_features": [0], "seed": [-1],
    "homophily": [1.1, math.nan], "label_noise": [-0.1], "feature_noise": [-1.0, math.inf], "exponent": [2.0, math.nan],
    "split": [(0.5, 0.5, 0.5), (0.5, -0.1, 0.5), (0.5, 0.5)],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_planted_rejects_bad_arguments(name, value):
    refuses(ValueError, f"^{name}=", planted_power_law, **{**FITS, name: value})


def test_planted_rejects_edges_that_do_not_fit_the_communities():
    refuses(ValueError, "num_edges=2000 does not fit", planted_power_law, 100, 2_000, 16, 2, homophily=1.0)


def test_power_law_graph_structure():
    indptr, indices = power_law_graph(20_000, 400_000)
    assert (indptr.shape, indptr.dtype) == ((20_001,), torch.int64)
    assert (indices.shape, indices.dtype) == ((400_000,), torch.int64)
    assert (indptr[0], indptr[-1]) == (0, 400_000)
    assert (indptr.diff() >= 0).all()
    assert indices.min() >= 0
    assert indices.max() < 20_000
    for degree in (indptr.diff(), indices.bincount(minlength=20_000)):  # skewed both ways
        assert top_share(degree) > 0.15
        assert degree.max() > 15 * 20
        hubs = degree.argsort(descending=True)[:200].double()
        assert abs(hubs.mean() - 10_000) < 2_000
    indptr, indices = power_law_graph(5, 0)
    assert indptr.tolist() == [0] * 6
    assert indices.shape == (0,)


def test_power_law_graph_is_deterministic():
    first, again, other = (power_law_graph(1_000, 20_000, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("name", "value"), [("num_nodes", 1), ("num_edges", -1), ("exponent", 2.0), ("seed", -1)])
def test_power_law_graph_rejects_bad_arguments(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        power_law_graph(**{"num_nodes": 10, "num_edges": 20, name: value})


def mlp_accuracy(data, epochs=15):
    mlp = nn.Sequential(nn.Linear(data.num_features, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 16))
    optimizer = torch.optim.Adam(mlp.parameters(), lr=5e-3)
    train, test = data.train_mask.nonzero().flatten(), data.test_mask
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(1024):
            optimizer.zero_grad()
            F.cross_entropy(mlp(data.x[batch]), data.y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return float((mlp.eval()(data.x[test]).argmax(1) == data.y[test]).float().mean())


def sage_accuracy(data):
    module = NodeClassifier(GraphSAGE(data.num_features, 128, 3, 16, dropout=0.0), 16, lr=0.01)
    batches = NeighborDataModule(data, num_neighbors=[10, 10, 5], batch_size=1024)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=3, limit_val_batches=0, limit_test_batches=4, **quiet)
    trainer.fit(module, batches)
    return trainer.test(module, batches, verbose=False)[0]["test_acc"]


@pytest.mark.slow
def test_features_alone_are_not_enough_and_graphsage_learns_the_communities(default):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert 0.56 <= mlp_accuracy(default) <= 0.64
        assert 0.85 < sage_accuracy(default) < 0.95
