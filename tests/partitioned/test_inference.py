"""Exact inference on homogeneous and heterogeneous partitioned graphs equals inference on one machine."""

import os
import tempfile
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE as PyGGraphSAGE
from torch_geometric.nn import to_hetero

from lightning_gnn import FullInference, NeighborDataModule, PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.nn import (
    GAT,
    GCN,
    HGT,
    RGAT,
    RGCN,
    GraphSAGE,
    HeteroGraphSAGE,
    LinkPredictor,
    NodeClassifier,
    TypeEmbeddings,
)
from lightning_gnn.partitioned import partition_graph
from lightning_gnn.partitioned.folder import write_partition
from tests.full_graph.launch import observe, run
from tests.partitioned.test_training import make_trainer
from tests.sampling.cases import make_plain_graph

SIZES = {"in_channels": 3, "hidden_channels": 8, "num_layers": 3, "out_channels": 3}
WIDTHS = {"user": 3, "item": 4, "tag": 3, "shop": 2}
RATES, RATED, FOLLOWS, MARKS, SELLS = TYPES = [
    ("user", "rates", "item"),
    ("item", "rev_rates", "user"),
    ("user", "follows", "user"),
    ("tag", "marks", "item"),  # tags have no in-edges
    ("shop", "sells", "item"),  # there are no shops
]
PLAIN = {
    "gcn": lambda: GCN(**SIZES),
    "gcn improved": lambda: GCN(**SIZES, improved=True, norm="batch", jk="last"),
    "gcn without loops": lambda: GCN(**SIZES, add_self_loops=False),
    "gcn without norm": lambda: GCN(**SIZES, normalize=False),
    "sage": lambda: GraphSAGE(**SIZES, norm="layer", norm_kwargs={"mode": "node"}),
    "sage max": lambda: GraphSAGE(**SIZES, aggr="max"),
    "gat": lambda: GAT(**SIZES, heads=2),
}
TYPED = {
    "sage": lambda data: HeteroGraphSAGE(data.metadata(), WIDTHS, 8, 3, 5),
    "sage max": lambda data: HeteroGraphSAGE(data.metadata(), WIDTHS, 8, 2, 5, aggr="max"),
    "rgcn": lambda data: RGCN(data.metadata(), WIDTHS, 8, 3, 5),
    "rgcn without roots": lambda data: RGCN(data.metadata(), WIDTHS, 8, 2, 5, root_weight=False),
    "rgat": lambda data: RGAT(data.metadata(), WIDTHS, 8, 2, 5, heads=2),
    "rgat concatenated": lambda data: RGAT(data.metadata(), WIDTHS, 8, 2, 5, heads=2, concat=True),
    "hgt": lambda data: HGT(data.metadata(), WIDTHS, 8, 2, 5, heads=2),
}
OPTIONS = {"num_neighbors": [2, 2], "batch_size": 4, "seed": 1, "inference": "full"}


def make_plain(weighted):
    """Return a float64 graph with several self-loops of a node, which all weigh what the last one does."""
    data = make_plain_graph()
    data.edge_index[:, 7:50:6] = data.edge_index[:1, 7:50:6]
    data.edge_index[:, 20:23] = 3
    data.x = data.x.double()
    data.edge_weight = data.edge_weight.double() + 0.1
    if not weighted:
        del data.edge_weight
    return data


def make_typed(seed=0, users=17, items=9, tags=4, num_edges=40):
    """Float64, duplicate edges, self-loops, isolated nodes, a type without nodes and one without in-edges."""
    generator = torch.Generator().manual_seed(seed)
    data = HeteroData()
    for name, size in {"user": users, "item": items, "tag": tags, "shop": 0}.items():
        data[name].x = torch.randn(size, WIDTHS[name], generator=generator).double()
    for source, name, target in TYPES:
        sizes = [data[end].num_nodes for end in (source, target)]
        count = num_edges if min(sizes) else 0
        reached = [max(size // 2, 1) for size in sizes]  # the others are isolated
        ends = [torch.randint(size, (count,), generator=generator) for size in reached]
        data[source, name, target].edge_index = torch.stack(ends)
    data["user"].y = torch.arange(users) % 5
    data["user"].train_mask = torch.ones(users, dtype=torch.bool)
    data["user"].val_mask = torch.arange(users) % 2 == 0
    return data


def partition(data, folder, parts, seed=0):
    """Partition a graph so that part 1 has no users and part 0 has all tags."""
    generator = torch.Generator().manual_seed(seed)
    owner = {name: torch.randint(parts, (data[name].num_nodes,), generator=generator) for name in data.node_types}
    owner["user"][owner["user"] == 1] = 0
    owner["tag"][:] = 0
    write_partition(data, folder, owner, parts)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inference")
    for weighted in (False, True):
        partition_graph(make_plain(weighted), folder / str(weighted), 3, "ldg")
    return folder


def make_model(name, data=None):
    pl.seed_everything(3, verbose=False)
    return (PLAIN[name]() if data is None else TYPED[name](data)).double().eval()


def make_classifier(name, data=None):
    if data is None:
        return NodeClassifier(make_model(name), num_classes=3).eval()
    return NodeClassifier(make_model(name, data), num_classes=10 if "concat" in name else 5, target="user")


def infer_on_one_machine(module, data):
    """Return the outputs for the whole graph, by type if heterogeneous, without a Trainer."""
    with torch.no_grad():
        if isinstance(data, HeteroData):
            return module.model(data.x_dict, data.edge_index_dict)
        (batch,) = NeighborDataModule(data, **OPTIONS).val_dataloader()
        return NodeClassifier(module.model, num_classes=3).eval()(batch)


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def collect_outputs(module, datamodule, ranks, strategy):
    trainer = make_trainer(ranks, strategy, inference_mode=True)
    (scores,) = trainer.validate(module, datamodule=datamodule, verbose=False)
    (rows,) = trainer.predict(module, datamodule=datamodule)
    return scores, rows


def check_nodes(name, data, folder, ranks=1, rank=0, strategy="auto", **options):
    """Compare outputs and scores with those of one machine; return the scores."""
    several = isinstance(data, HeteroData)
    module, nodes = make_classifier(name, data if several else None), data["user"] if several else data
    scores, rows = collect_outputs(module, PartitionedDataModule(folder, **OPTIONS | options), ranks, strategy)
    expected = infer_on_one_machine(module, data)
    expected = expected["user"] if several else expected
    assert_close(rows, expected[rank::ranks])
    chosen, labels = expected[nodes.val_mask], nodes.y[nodes.val_mask]
    assert scores["val_loss"] == pytest.approx(float(nn.functional.cross_entropy(chosen, labels)), rel=1e-6)
    assert scores["val_acc"] == pytest.approx(float((chosen.argmax(1) == labels).double().mean()), rel=1e-6)
    return scores


def check_links(name, data, folder, ranks=1, rank=0, strategy="auto"):
    """Compare links: validate on labeled edges of the graph and others, score more of them, some twice."""
    several, number = isinstance(data, HeteroData), torch.arange(12)
    if several:
        edges = torch.stack([number * 5 % data["user"].num_nodes, number * 3 % data["item"].num_nodes])
        labels, train = (number % 3 == 0).float(), (RATES, data[RATES].edge_index)
        module = LinkPredictor(make_model(name, data), target=RATES)
    else:
        edges = torch.cat([data.edge_index[:, 10:17], torch.stack([torch.arange(8), torch.arange(8).flip(0)])], dim=1)
        labels, train = torch.tensor([1.0] * 7 + [0.0] * 8), data.edge_index
        module = LinkPredictor(make_model(name)).eval()
    scored = torch.cat([edges, edges[:, :4]], dim=1)
    val, predicted = ((RATES, edges), (RATES, scored)) if several else (edges, scored)
    datamodule = PartitionedLinkDataModule(
        folder, train, input_val_edges=val, input_val_labels=labels, input_pred_edges=predicted, **OPTIONS
    )  # fmt: skip
    scores, rows = collect_outputs(module, datamodule, ranks, strategy)
    nodes = infer_on_one_machine(module, data)
    sources, targets = (nodes["user"], nodes["item"]) if several else (nodes, nodes)
    assert_close(rows, (sources[scored[0]] * targets[scored[1]]).sum(1)[rank::ranks])
    expected = (sources[edges[0]] * targets[edges[1]]).sum(1)
    loss = nn.functional.binary_cross_entropy_with_logits(expected, labels.double())
    assert scores["val_loss"] == pytest.approx(float(loss), rel=1e-6)
    above = expected[labels == 1][:, None] - expected[labels == 0]
    area = ((above > 0) + 0.5 * (above == 0)).double().mean()
    assert scores["val_auc"] == pytest.approx(float(area), rel=1e-6)
    return scores


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_all_parts_on_one_rank(folder, name, weighted):
    # A limit of zero makes blocks as small as possible.
    check_nodes(name, make_plain(weighted), folder / str(weighted), inference=FullInference(memory_limit=0))


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPED)
def test_types_and_their_links_on_one_rank(tmp_path, name):
    data = make_typed()
    folder = partition(data, tmp_path / "parts", 3)
    check_nodes(name, data, folder)
    check_links(name, data, folder)


@pytest.mark.medium
@settings(max_examples=20)
@given(
    st.sampled_from(sorted(TYPED)), st.integers(0, 2**20), st.integers(1, 20), st.integers(1, 12), st.integers(0, 5),
    st.integers(0, 60), st.integers(1, 4), st.sampled_from([1, 7, 1 << 24]),
)  # fmt: skip
def test_any_types_in_any_parts(name, seed, users, items, tags, num_edges, parts, most):
    data = make_typed(seed, users, items, tags, num_edges)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_gnn.partitioned.inference._MAX_BLOCK_EDGES", most)
        partition(data, f"{folder}/parts", parts, seed)
        for target in ("user", "item"):
            nodes = torch.arange(data[target].num_nodes).flip(0)
            assert_close(*predict_type(name, data, f"{folder}/parts", (target, nodes), target, nodes))


def predict_type(name, data, folder, nodes, target, order):
    """Return the predictions of a DataModule for a type, and those of one machine."""
    datamodule = PartitionedDataModule(folder, input_pred_nodes=nodes, **OPTIONS)
    datamodule.setup("predict")
    (batch,) = datamodule.predict_dataloader()
    module = NodeClassifier(make_model(name, data), num_classes=5, target=target).eval()
    found = module.predict_step(batch, 0)
    datamodule.teardown("predict")
    return found, infer_on_one_machine(module, data)[target][order]


@pytest.mark.medium
def test_embeddings_in_place_of_features(tmp_path):
    data = make_typed()
    for name in ("item", "shop"):
        data[name].num_nodes = data[name].num_nodes
        del data[name].x
    folder = partition(data, tmp_path / "parts", 3)
    embeddings = TypeEmbeddings({"item": 9}, 6).double()
    kinds = [kind for kind in TYPES if "shop" not in kind]
    pl.seed_everything(3, verbose=False)
    model = HeteroGraphSAGE((["user", "item", "tag"], kinds), WIDTHS | {"item": 6}, 8, 2, 5).double().eval()
    module = NodeClassifier(model, num_classes=5, target="user", embeddings=embeddings)
    (rows,) = make_trainer(1, "auto").predict(module, datamodule=PartitionedDataModule(folder, **OPTIONS))
    with torch.no_grad():
        x_dict = {"user": data["user"].x, "item": embeddings.tables["item"].weight, "tag": data["tag"].x}
        assert_close(rows, model(x_dict, data.edge_index_dict)["user"])


def _infer_on_rank(rank, ranks, folder, types):
    torch.set_num_threads(1)
    place, found = (ranks, rank, "ddp"), []
    if types:
        for name in ("sage", "rgcn", "rgat", "hgt"):
            topology = "whole" if name == "sage" else "parts"
            found.append(check_nodes(name, make_typed(), folder, *place, topology=topology))
        found.append(check_links("hgt", make_typed(), folder, *place))
    else:
        for name, weighted in (("gcn improved", True), ("sage", False), ("gat", True)):
            topology = "whole" if name == "sage" else "parts"
            found.append(check_nodes(name, make_plain(weighted), folder / str(weighted), *place, topology=topology))
        found.append(check_links("gcn improved", make_plain(True), folder / "True", *place))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.campaign(parts=4)
@pytest.mark.parametrize(("ranks", "types"), [(2, False), (3, False), (5, False), (2, True), (3, True), (4, True)])
def test_several_ranks(folder, tmp_path, ranks, types):
    # With three parts, one of two ranks loads two; of four or five ranks, several load the same part.
    source = partition(make_typed(), tmp_path / "parts", 3) if types else folder
    results = run(_infer_on_rank, ranks, ranks, source, types, nodes=ranks)
    assert all(result == results[0] for result in results)


def _train_hybrid(rank, folder):
    datamodule = PartitionedDataModule(folder / "False", **OPTIONS)
    trainer = make_trainer(2, "hyscale", num_sanity_val_steps=0)
    try:
        trainer.fit(make_classifier("sage"), datamodule=datamodule)
    finally:
        assert trainer.global_step == 0


@pytest.mark.slow
def test_hybrid_training_is_refused_before_it_begins(folder):
    for error in observe(_train_hybrid, 2, folder, nodes=2).errors:
        assert "inference='full' on a partitioned graph needs all ranks, but hyscale" in error


@pytest.fixture
def one_rank():
    """Close the process group and restore the environment, which Lightning leaves changed after an exception."""
    with patch.dict(os.environ):
        yield
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: GCN(**SIZES, jk="cat"), r"runs layer by layer, which GCN does not support: use GCN, .* or 'last'"),
        (lambda: GCN(**SIZES, norm="GraphNorm"), "GraphNorm averages over all nodes, but no rank has all outputs"),
    ],
    ids=["jk", "norm"],
)
def test_models_that_cannot_work_are_refused(folder, one_rank, model, message):
    module = NodeClassifier(model().double(), num_classes=3)
    with pytest.raises(ValueError, match=message):
        make_trainer(1).validate(module, datamodule=PartitionedDataModule(folder / "False", **OPTIONS), verbose=False)


def test_an_empty_split_is_refused(folder, one_rank):
    few = PartitionedDataModule(folder / "False", input_val_nodes=torch.arange(0), **OPTIONS)
    with pytest.raises(ValueError, match="the val split is empty"):
        make_trainer(1).validate(make_classifier("gcn"), datamodule=few, verbose=False)


class Own(HeteroGraphSAGE):
    def forward(self, x_dict, edge_index_dict):
        return super().forward(x_dict, edge_index_dict)


REFUSED = [
    (lambda data: (to_hetero(PyGGraphSAGE((-1, -1), 8, 2, 5), (["user", "item"], [RATES, RATED])), None),
     r"runs layer by layer, which GraphModule does not support: use HeteroGraphSAGE, RGCN"),
    (lambda data: (Own(data.metadata(), WIDTHS, 8, 2, 5), None), "which Own does not"),
    (lambda data: (HGT((data.node_types, [*TYPES, ("item", "near", "shop")]), WIDTHS, 8, 2, 5), None),
     r"no edges of \('item', 'near', 'shop'\), which the model reads"),
    (lambda data: (make_model("sage", data), TypeEmbeddings({"tag": 4}, 3)),
     "nodes of 'tag' have features x and embeddings; leave one of them out"),
    (lambda data: (make_model("sage", without_features(data)), TypeEmbeddings({"tag": 5}, 3)),
     "the graph has 4 nodes of 'tag', but embeddings of 5"),
    (lambda data: (make_model("sage", without_features(data)), None),
     "nodes of 'tag' have no features x: give some, or embeddings"),
]  # fmt: skip


def without_features(data):
    del data["tag"].x
    data["tag"].num_nodes = 4
    return data


@pytest.mark.medium
@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_work_with_types_is_refused_before_training(tmp_path, make, message):
    data = make_typed()
    model, embeddings = make(data)
    module = NodeClassifier(model, num_classes=5, target="user", embeddings=embeddings)
    trainer = make_trainer(1, "auto", num_sanity_val_steps=0)
    datamodule = PartitionedDataModule(partition(data, tmp_path / "parts", 2), **OPTIONS)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, datamodule=datamodule)
    assert trainer.global_step == 0
