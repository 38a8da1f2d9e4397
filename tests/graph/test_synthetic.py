"""Tests of the synthetic graphs: structure, determinism, argument errors and the promised accuracies."""

import itertools
import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from lightning_gnn.graph.synthetic import planted_power_law, power_law_graph

planted_small = partial(planted_power_law, 4_000, 60_000, 8, 16)


@pytest.fixture(scope="module")
def small() -> Data:
    return planted_small()


@pytest.fixture(scope="module")
def default() -> Data:
    return planted_power_law()


def top_share(degree: Tensor, fraction: float = 0.01) -> float:
    top = degree.sort(descending=True).values[: int(len(degree) * fraction)]
    return float(top.sum() / degree.sum())


def test_planted_sizes_and_dtypes(small: Data) -> None:
    assert small.num_nodes == 4_000
    assert small.x.shape == (4_000, 16)
    assert small.x.dtype == torch.float32
    assert small.edge_index.shape == (2, 60_000)
    assert small.edge_index.dtype == torch.int64
    assert small.y.shape == (4_000,)
    assert small.y.dtype == torch.int64
    assert small.validate()


def test_planted_default_sizes(default: Data) -> None:
    assert default.x.shape == (100_000, 64)
    assert default.edge_index.shape == (2, 2_000_000)
    assert default.y.unique().tolist() == list(range(16))
    assert [int(default[f"{name}_mask"].sum()) for name in ("train", "val", "test")] == [10_000, 5_000, 25_000]


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_planted_labels_change_nothing_else(small: Data, noise: float) -> None:
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
    with pytest.raises(ValueError, match="labels='some' is unknown; use classes, several or numbers"):
        planted_small(labels="some")


def test_planted_odd_edge_count_rounds_down() -> None:
    assert planted_power_law(100, 301, 4, 2).num_edges == 300


@pytest.mark.parametrize("num_edges", [0, 1])
def test_planted_without_edges(num_edges: int) -> None:
    assert planted_power_law(10, num_edges, 2, 2).edge_index.shape == (2, 0)


def test_planted_is_deterministic(small: Data) -> None:
    again, other = planted_small(), planted_small(seed=1)
    for key in ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(small[key], again[key]), key
        assert not torch.equal(small[key], other[key]), key


def test_planted_edges_are_simple_and_symmetric(small: Data) -> None:
    source, target = small.edge_index
    forward, backward = source * 4_000 + target, target * 4_000 + source
    assert not (source == target).any()
    assert (forward.diff() > 0).all()  # sorted without duplicates
    assert torch.equal(forward, backward.sort().values)


def test_planted_degrees_are_power_law(default: Data) -> None:
    degree = default.edge_index[1].bincount(minlength=100_000)
    assert top_share(degree) > 0.1
    assert degree.max() > 30 * 20
    # P(degree >= d) ~ d ** (1 - exponent), below the cap of the hubs.
    tail = [float((degree >= d).sum()) for d in (40, 320)]
    assert math.log(tail[0] / tail[1]) / math.log(8) == pytest.approx(1.5, abs=0.2)
    # Hubs are not clustered in the id range.
    hubs = degree.argsort(descending=True)[:1_000].double()
    assert abs(hubs.mean() - 50_000) < 5_000


def test_planted_labels_are_balanced_and_homophilous(small: Data) -> None:
    count = small.y.bincount(minlength=8)
    assert count.min() > 0.9 * 500
    assert count.max() < 1.1 * 500
    source, target = small.edge_index
    assert (small.y[source] == small.y[target]).float().mean() > 0.4


def test_planted_knobs_at_their_ends() -> None:
    pure = planted_small(homophily=1.0, label_noise=0.0, feature_noise=0.0)
    source, target = pure.edge_index
    assert torch.equal(pure.y[source], pure.y[target])
    assert len(pure.x.unique(dim=0)) == 8
    mixed = planted_small(homophily=0.0)
    source, target = mixed.edge_index
    assert (mixed.y[source] == mixed.y[target]).float().mean() < 0.2


@pytest.mark.parametrize("split", [(0.1, 0.05, 0.25), (0.7, 0.2, 0.1), (1.0, 0.0, 0.0)])
def test_planted_masks_are_disjoint(split: tuple[float, float, float]) -> None:
    data = planted_small(split=split)
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.dtype == torch.bool
    assert masks.sum(0).max() == 1
    assert masks.sum(1).tolist() == [round(4_000 * part) for part in split]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_nodes", 1),
        ("num_edges", -2),
        ("num_edges", 100 * 99 // 2 + 1),
        ("num_classes", 0),
        ("num_classes", 101),
        ("num_features", 0),
        ("seed", -1),
        ("homophily", 1.1),
        ("homophily", math.nan),
        ("label_noise", -0.1),
        ("feature_noise", -1.0),
        ("feature_noise", math.inf),
        ("exponent", 2.0),
        ("exponent", math.nan),
        ("split", (0.5, 0.5, 0.5)),
        ("split", (0.5, -0.1, 0.5)),
        ("split", (0.5, 0.5)),
    ],
)
def test_planted_rejects_bad_arguments(name: str, value: object) -> None:
    arguments: dict[str, object] = {"num_nodes": 100, "num_edges": 400, "num_classes": 4, "num_features": 2}
    with pytest.raises(ValueError, match=f"^{name}="):
        planted_power_law(**{**arguments, name: value})  # type: ignore[arg-type]


def test_planted_rejects_edges_that_do_not_fit_the_communities() -> None:
    with pytest.raises(ValueError, match="num_edges=2000 does not fit"):
        planted_power_law(100, 2_000, 16, 2, homophily=1.0)


def test_power_law_graph_structure() -> None:
    indptr, indices = power_law_graph(20_000, 400_000)
    assert indptr.shape == (20_001,)
    assert indptr.dtype == torch.int64
    assert indices.shape == (400_000,)
    assert indices.dtype == torch.int64
    assert indptr[0] == 0
    assert indptr[-1] == 400_000
    assert (indptr.diff() >= 0).all()
    assert indices.min() >= 0
    assert indices.max() < 20_000


def test_power_law_graph_is_skewed_both_ways() -> None:
    indptr, indices = power_law_graph(20_000, 400_000)
    for degree in (indptr.diff(), indices.bincount(minlength=20_000)):
        assert top_share(degree) > 0.15
        assert degree.max() > 15 * 20
        hubs = degree.argsort(descending=True)[:200].double()
        assert abs(hubs.mean() - 10_000) < 2_000


def test_power_law_graph_is_deterministic() -> None:
    first, again, other = (power_law_graph(1_000, 20_000, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_power_law_graph_without_edges() -> None:
    indptr, indices = power_law_graph(5, 0)
    assert indptr.tolist() == [0] * 6
    assert indices.shape == (0,)


@pytest.mark.parametrize(("name", "value"), [("num_nodes", 1), ("num_edges", -1), ("exponent", 2.0), ("seed", -1)])
def test_power_law_graph_rejects_bad_arguments(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        power_law_graph(**{"num_nodes": 10, "num_edges": 20, name: value})  # type: ignore[arg-type]


class Sage(nn.Module):
    def __init__(self, features: int, classes: int, hidden: int = 128, dropout: float = 0.0) -> None:
        super().__init__()
        widths = [features, hidden, hidden, classes]
        self.layers = nn.ModuleList(SAGEConv(i, o) for i, o in itertools.pairwise(widths))
        self.dropout = dropout

    def forward(self, x: Tensor, blocks: list[tuple[Tensor, int]]) -> Tensor:
        for depth, (layer, (edges, size)) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer((x, x[:size]), edges)
            if depth + 1 < len(self.layers):
                x = F.dropout(x.relu(), self.dropout, self.training)
        return x


class Sampler:
    """Uniform neighbour sampling, with replacement where a node has more neighbours than the fanout."""

    def __init__(self, data: Data, fanouts: tuple[int, ...] = (10, 10, 5)) -> None:
        self.fanouts = fanouts
        self.neighbours = data.edge_index[1]  # sorted by source, and the graph is symmetric
        self.degree = data.edge_index[0].bincount(minlength=data.num_nodes)
        self.start = self.degree.cumsum(0) - self.degree

    def __call__(self, seeds: Tensor) -> tuple[Tensor, list[tuple[Tensor, int]]]:
        nodes, blocks = seeds, []
        for fanout in self.fanouts:
            degree, slot = self.degree[nodes, None], torch.arange(fanout).expand(len(nodes), -1)
            offset = torch.where(degree <= fanout, slot, (torch.rand(len(nodes), fanout) * degree).long())
            row, column = (slot < degree).nonzero(as_tuple=True)
            sources = self.neighbours[self.start[nodes[row]] + offset[row, column]]
            local = torch.full((len(self.degree),), -1)
            local[nodes] = torch.arange(len(nodes))
            new = sources[local[sources] < 0].unique()
            local[new] = torch.arange(len(nodes), len(nodes) + len(new))
            blocks.append((torch.stack([local[sources], row]), len(nodes)))
            nodes = torch.cat([nodes, new])
        return nodes, blocks[::-1]


def mlp_accuracy(data: Data, epochs: int = 15) -> float:
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


def sage_accuracy(data: Data, epochs: int = 3, lr: float = 0.01, dropout: float = 0.0, num_test: int = 4_096) -> float:
    sampler, sage = Sampler(data), Sage(data.num_features, 16, dropout=dropout)
    optimizer = torch.optim.Adam(sage.parameters(), lr=lr)
    train, test = data.train_mask.nonzero().flatten(), data.test_mask.nonzero().flatten()[:num_test]
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(1024):
            nodes, blocks = sampler(batch)
            optimizer.zero_grad()
            F.cross_entropy(sage(data.x[nodes], blocks), data.y[batch]).backward()
            optimizer.step()
    sage.eval()
    correct = 0
    with torch.no_grad():
        for batch in test.split(1024):
            nodes, blocks = sampler(batch)
            correct += int((sage(data.x[nodes], blocks).argmax(1) == data.y[batch]).sum())
    return correct / len(test)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Fix the seed, and use one thread: on a busy machine, waiting for a second one costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_features_alone_are_not_enough(default: Data) -> None:
    assert 0.56 <= mlp_accuracy(default) <= 0.64


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_sampled_graphsage_learns_the_communities(default: Data) -> None:
    assert 0.85 < sage_accuracy(default) < 0.95
