"""Negatives of evaluation with ``filter_negatives``: none is an edge, and the others are those of PyG."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling, NeighborSampler
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import to_undirected

from lightning_gnn import (
    CollectiveLinkDataModule,
    LinkDataModule,
    PartitionedLinkDataModule,
    PersistentLinkDataModule,
)
from lightning_gnn.partitioned import partition_graph

RATES = ("user", "rates", "item")


def draw_links(draw, square):
    """Return a matrix of links ``[users, items]`` in which each user has a non-link, and random numbers."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    users = draw(st.integers(2, 7))
    items = users if square else draw(st.integers(2, 7))
    links = torch.rand(users, items, generator=random) < draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    links[0, 0] = True
    links[torch.arange(users), torch.randint(1, items, (users,), generator=random)] = False
    return links, random


@st.composite
def datamodules(draw):
    """Draw a factory of a LinkDataModule whose last stages have negatives, the links, and their type."""
    typed, times = draw(st.booleans()), draw(st.sampled_from(["", "edges", "nodes"]))
    links, random = draw_links(draw, square=not typed)
    edges = links.nonzero().t()
    edges = edges[:, torch.randperm(edges.size(1), generator=random)]
    count = int(torch.randint(1, edges.size(1) + 1, (), generator=random))
    message = edges[:, count:]  # the graph lacks the labeled edges
    sizes = dict(zip(("user", "item"), links.shape, strict=True))
    if typed:
        data = HeteroData({name: {"x": torch.randn(size, 2, generator=random)} for name, size in sizes.items()})
        data[RATES].edge_index = message
        stores = {"edges": [(data[RATES], message.size(1))], "nodes": [(data[name], sizes[name]) for name in sizes]}
    else:
        data = Data(x=torch.randn(sizes["user"], 2, generator=random), edge_index=message)
        stores = {"edges": [(data, message.size(1))], "nodes": [(data, sizes["user"])]}
    options = {"num_neighbors": [2], "batch_size": draw(st.integers(1, 4)), "seed": draw(st.integers(0, 99))}
    for store, size in stores.get(times, []):
        store.when = torch.randint(5, (size,), generator=random)
        store.when[: size and 1] = 0
    # Each stage has some of the labeled edges, also as a stage without negatives.
    parts = torch.tensor_split(edges[:, :count], 3, dim=1)
    stages = ["train", "val", "test"]
    for stage, part in zip(stages, parts, strict=True):
        part = edges[:, :1] if not part.size(1) else part
        options[f"input_{stage}_edges"] = (RATES, part) if typed else part
        if times:
            # Later than all nodes, so that the nodes' times leave each user a non-link.
            options[f"input_{stage}_time"] = torch.randint(5, 9, (part.size(1),), generator=random)
    if times:
        options["time_attr"] = "when"
    mode = draw(st.sampled_from(["binary", "triplet"]))
    weights = {}
    if draw(st.booleans()):
        weights = {f"{end}_weight": torch.rand(size, generator=random) + 0.1 for end, size in
                   (("src", links.size(0)), ("dst", links.size(1)))}  # fmt: skip
    options["neg_sampling"] = NegativeSampling(mode, draw(st.sampled_from([1, 3])), **weights)
    options["disjoint"] = draw(st.booleans())
    return lambda **more: LinkDataModule(data, **options, **more), links, typed


def pairs_of(batch, typed):
    """Return the positive and the negative pairs of a mini-batch, ``[2, n]`` in nodes of the graph."""
    edges, source, target = (batch[RATES], batch["user"], batch["item"]) if typed else (batch, batch, batch)
    if "edge_label_index" in edges:
        pairs = torch.stack([source.n_id[edges.edge_label_index[0]], target.n_id[edges.edge_label_index[1]]])
        return pairs[:, edges.edge_label == 1], pairs[:, edges.edge_label == 0]
    sources, negatives = source.n_id[source.src_index], target.dst_neg_index.view(source.src_index.numel(), -1)
    positive = torch.stack([sources, target.n_id[target.dst_pos_index]])
    repeated = sources.repeat_interleave(negatives.size(1))
    return positive, torch.stack([repeated, target.n_id[negatives.flatten()]])


@pytest.mark.medium
@given(datamodules())
def test_no_negative_of_evaluation_is_an_edge(drawn):
    make, links, typed = drawn
    plain, filtered, again = make(), make(filter_negatives=True), make(filter_negatives=True, num_workers=2)
    for stage in ("val", "test"):
        loaders = [getattr(module, f"{stage}_dataloader")() for module in (plain, filtered, again)]
        for before, after, repeated in zip(*loaders, strict=True):
            (positive, old), (same, new) = pairs_of(before, typed), pairs_of(after, typed)
            assert torch.equal(positive, same)
            assert links[positive[0], positive[1]].all()
            assert not links[new[0], new[1]].any()
            # Pairs that are no edges are those of PyG.
            kept = ~links[old[0], old[1]]
            assert torch.equal(old[:, kept], new[:, kept])
            assert all(torch.equal(a, b) for a, b in zip(pairs_of(repeated, typed), (same, new), strict=True))
    for before, after in zip(plain.train_dataloader(), filtered.train_dataloader(), strict=True):
        for old, new in zip(pairs_of(before, typed), pairs_of(after, typed), strict=True):
            assert torch.equal(old, new)


@pytest.mark.parametrize("make", [LinkDataModule, PersistentLinkDataModule, CollectiveLinkDataModule])
def test_other_datamodules_filter_too(make):
    data = complete_but([(0, 1), (2, 3)])
    options = {"input_val_edges": data.edge_index[:, :9], "num_neighbors": [2], "neg_sampling": "binary"}
    (batch,) = make(data, batch_size=9, seed=0, filter_negatives=True, **options).val_dataloader()
    _, negative = pairs_of(batch, typed=False)
    assert set(map(tuple, negative.t().tolist())) <= {(0, 1), (2, 3)}


def complete_but(missing, size=6):
    links = torch.ones(size, size, dtype=torch.bool)
    links[tuple(torch.tensor(missing).t())] = False
    return Data(x=torch.eye(size), edge_index=links.nonzero().t())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_non_edges_are_drawn_by_their_weights(mode, weighted):
    """In a graph with few non-edges, which are found by listing them, each has its share."""
    missing = [(0, 1), (0, 2), (0, 5), (3, 2), (4, 4)]
    data = complete_but(missing)
    weight = torch.arange(1.0, 7.0) if weighted else torch.ones(6)
    sampling = NegativeSampling(mode, 2000, *([weight, weight] if weighted else []))
    positive = torch.tensor([[0, 3], [0, 1]])
    datamodule = LinkDataModule(
        data, input_val_edges=positive, num_neighbors=[1], seed=0, batch_size=2, neg_sampling=sampling,
        filter_negatives=True,
    )  # fmt: skip
    (batch,) = datamodule.val_dataloader()
    _, negative = pairs_of(batch, typed=False)
    found = torch.zeros(6, 6).index_put_(tuple(negative), torch.tensor(1.0), accumulate=True)
    expected = torch.zeros(6, 6)
    expected[tuple(torch.tensor(missing).t())] = 1.0
    expected *= weight
    if mode == "binary":
        expected *= weight.unsqueeze(1)
        expected *= negative.size(1) / expected.sum()
    else:
        expected[[1, 2, 4, 5]] = 0.0
        expected[[0, 3]] *= 2000 / expected[[0, 3]].sum(1, keepdim=True)
    assert (found > 0).equal(expected > 0)
    assert float((found - expected).abs().max()) < 150  # more than 4 standard deviations


@pytest.mark.parametrize(
    ("mode", "missing", "message"),
    [
        ("triplet", [(3, 4)], "node 0 has no non-edges: it is linked to all 6 nodes"),
        ("binary", [], "the graph has no non-edges: all 6 x 6 pairs of nodes are edges"),
    ],
)
def test_a_graph_without_non_edges_is_refused(mode, missing, message):
    data = complete_but(missing) if missing else Data(x=torch.eye(6), edge_index=torch.ones(6, 6).nonzero().t())
    datamodule = LinkDataModule(
        data, input_val_edges=data.edge_index[:, :3], num_neighbors=[1], neg_sampling=mode, filter_negatives=True
    )
    with pytest.raises(ValueError, match=message):
        next(iter(datamodule.val_dataloader()))


def test_weights_and_times_leave_no_non_edge():
    data = complete_but([(0, 4), (0, 5)])
    data.when = torch.tensor([0, 0, 0, 0, 0, 9])
    weight = torch.tensor([1.0, 1, 1, 1, 0, 1])
    options = {
        "input_val_edges": torch.tensor([[0], [1]]), "num_neighbors": [1], "filter_negatives": True, "seed": 0,
        "time_attr": "when", "input_train_time": torch.full((34,), 9),
    }  # fmt: skip
    for time, sampling, found in ((5, NegativeSampling("triplet", 20), 4), (9, None, 5)):
        sampling = sampling or NegativeSampling("triplet", 20, dst_weight=weight)
        module = LinkDataModule(data, neg_sampling=sampling, input_val_time=torch.tensor([time]), **options)
        _, negative = pairs_of(next(iter(module.val_dataloader())), typed=False)
        assert negative[1].unique().tolist() == [found]
    sampling = NegativeSampling("triplet", 20, dst_weight=weight)
    module = LinkDataModule(data, neg_sampling=sampling, input_val_time=torch.tensor([5]), **options)
    with pytest.raises(ValueError, match="node 0 has no non-edges"):
        next(iter(module.val_dataloader()))


@pytest.mark.parametrize("undirected", [False, True])
def test_a_labeled_edge_of_an_undirected_graph_counts_in_both_directions(undirected):
    torch.manual_seed(0)
    data = Data(x=torch.eye(8), edge_index=to_undirected(torch.randint(8, (2, 24))))
    train, val, _ = RandomLinkSplit(0.3, 0.1, is_undirected=True, add_negative_train_samples=False)(data)
    labeled = val.edge_label_index[:, val.edge_label == 1]
    message = train.edge_index
    if not undirected:
        message = message[:, message[0] < message[1]]
    graph = Data(x=data.x, edge_index=message)
    module = LinkDataModule(
        graph, input_train_edges=message, input_val_edges=labeled, num_neighbors=[1], seed=0, batch_size=50,
        neg_sampling=NegativeSampling("binary", 100), filter_negatives=True,
    )  # fmt: skip
    _, negative = pairs_of(next(iter(module.val_dataloader())), typed=False)
    drawn, reverse = set(map(tuple, negative.t().tolist())), set(map(tuple, labeled.flip(0).t().tolist()))
    assert not drawn & set(map(tuple, labeled.t().tolist()))
    assert bool(drawn & reverse) is not undirected


def test_edges_labeled_0_are_non_edges_and_edges_to_predict_are_unknown():
    data = complete_but([(0, 1), (0, 2), (0, 3)])
    module = LinkDataModule(
        data, torch.tensor([[0, 0], [1, 2]]), torch.tensor([1, 0]), input_val_edges=torch.tensor([[0], [0]]),
        input_pred_edges=torch.tensor([[0], [3]]), num_neighbors=[1], seed=0, neg_sampling=None,
        eval_loader_kwargs={"neg_sampling": NegativeSampling("triplet", 50)}, filter_negatives=True,
    )  # fmt: skip
    _, negative = pairs_of(next(iter(module.val_dataloader())), typed=False)
    assert negative[1].unique().tolist() == [2, 3]


def test_without_effect_it_is_refused(tmp_path):
    data = complete_but([(0, 1)])
    edges = {"input_val_edges": data.edge_index[:, :3]}
    sampling = {"neg_sampling": "binary"}
    options = {"num_neighbors": [1], "filter_negatives": True}
    for given_options, message in (
        (edges, "has no effect: neg_sampling is missing"),
        (sampling, "has no effect: there are no validation or test edges"),
        (edges | sampling | {"input_val_labels": torch.ones(3)}, "has no effect: the evaluation edges have labels"),
        (edges | sampling | {"link_sampler": NeighborSampler(data, [1])}, "link_sampler is NeighborSampler"),
        (edges | sampling | {"filter_negatives": "yes"}, "filter_negatives must be True or False"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            LinkDataModule(data, **options | given_options)
    partition_graph(data, tmp_path, parts=1, method="ldg")
    with pytest.raises(ValueError, match="needs all edges on each rank; set topology='whole'"):
        PartitionedLinkDataModule(tmp_path, data.edge_index, **edges, **sampling, **options)


def test_a_partitioned_graph_has_the_negatives_of_one_machine(tmp_path):
    torch.manual_seed(0)
    data = Data(x=torch.eye(9), edge_index=torch.randint(9, (2, 60)))
    partition_graph(data, tmp_path, parts=2, method="ldg")
    options = {
        "input_val_edges": data.edge_index[:, :9], "num_neighbors": [2], "seed": 0, "batch_size": 4,
        "neg_sampling": NegativeSampling("triplet", 5), "filter_negatives": True,
    }  # fmt: skip
    alone = LinkDataModule(data, data.edge_index, **options)
    parts = PartitionedLinkDataModule(tmp_path, data.edge_index, topology="whole", **options)
    parts.setup("validate")
    for one, other in zip(alone.val_dataloader(), parts.val_dataloader(), strict=True):
        assert torch.equal(pairs_of(one, False)[1], pairs_of(other, False)[1])
    parts.teardown("validate")


def test_a_labeled_edge_between_two_types_counts_in_one_direction():
    """Even if there are as many sources as targets, and all others are linked in both directions."""
    data = HeteroData({name: {"x": torch.eye(3)} for name in ("user", "item")})
    data[RATES].edge_index = torch.tensor([[0, 0, 2, 1, 2], [0, 2, 0, 2, 1]])
    module = LinkDataModule(
        data, (RATES, data[RATES].edge_index), input_val_edges=(RATES, torch.tensor([[0], [1]])), num_neighbors=[1],
        neg_sampling=NegativeSampling("binary", 50), seed=0, filter_negatives=True,
    )  # fmt: skip
    _, negative = pairs_of(next(iter(module.val_dataloader())), typed=True)
    assert set(map(tuple, negative.t().tolist())) == {(1, 0), (1, 1), (2, 2)}
