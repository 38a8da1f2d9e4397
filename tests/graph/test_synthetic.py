"""Synthetic graphs: structure, determinism, argument errors and the promised accuracies."""

import math
from functools import partial

import pytest
import torch

from lightning_gnn.datasets.synthetic import planted_power_law, power_law_graph
from tests.refusals import refuses

planted_small = partial(planted_power_law, 4_000, 60_000, 8, 16)


@pytest.fixture(scope="module")
def small():
    return planted_small()


@pytest.fixture(scope="module")
def default():
    return planted_power_law()


@pytest.mark.medium
def test_planted_sizes_and_dtypes(small, default):
    for key, shape, dtype in (
        ("x", (4_000, 16), torch.float32),
        ("edge_index", (2, 60_000), torch.int64),
        ("y", (4_000,), torch.int64),
    ):
        assert (small[key].shape, small[key].dtype) == (shape, dtype)
    assert small.validate()
    assert planted_power_law(100, 301, 4, 2).num_edges == 300  # rounded down
    for num_nodes, num_edges in ((2_000, 40_000), (30, 216), (16, 60)):
        assert planted_power_law(num_nodes).num_edges == num_edges  # follows num_nodes
    for num_edges in (0, 1):
        assert planted_power_law(10, num_edges, 2, 2).edge_index.shape == (2, 0)
    assert default.x.shape == (100_000, 64)
    assert default.edge_index.shape == (2, 2_000_000)
    assert default.y.unique().tolist() == list(range(16))
    assert [int(default[f"{name}_mask"].sum()) for name in ("train", "val", "test")] == [10_000, 5_000, 25_000]


def test_planted_is_deterministic(small):
    again, other = planted_small(), planted_small(seed=1)
    for key in ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(small[key], again[key]), key
        assert not torch.equal(small[key], other[key]), key


def test_planted_labels_are_balanced_and_homophilous(small):
    count = small.y.bincount(minlength=8)
    assert count.min() > 0.9 * 500
    assert count.max() < 1.1 * 500
    source, target = small.edge_index
    assert (small.y[source] == small.y[target]).float().mean() > 0.4


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
    for degree in (indptr.diff(), indices.bincount(minlength=20_000)):  # both distributions are skewed
        top = degree.sort(descending=True).values[: int(len(degree) * 0.01)]
        assert top.sum() / degree.sum() > 0.15
        assert degree.max() > 15 * 20
        hubs = degree.argsort(descending=True)[:200].double()
        assert abs(hubs.mean() - 10_000) < 2_000
    indptr, indices = power_law_graph(5, 0)
    assert indptr.tolist() == [0] * 6
    assert indices.shape == (0,)
