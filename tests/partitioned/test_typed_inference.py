"""Exact outputs of a graph with types in parts: those of one machine, whoever has which nodes."""

import tempfile

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE, to_hetero

from lightning_gnn import FullInference, PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.nn import (
    HGT,
    RGAT,
    RGCN,
    HeteroGraphSAGE,
    LinkPredictor,
    NodeClassifier,
    TypeEmbeddings,
)
from lightning_gnn.partitioned.folder import write_partition
from tests.full_graph.launch import run
from tests.partitioned.test_training import trainer_of

WIDTHS = {"user": 3, "item": 4, "tag": 3, "shop": 2}
RATES, RATED, FOLLOWS, MARKS, SELLS = TYPES = [
    ("user", "rates", "item"),
    ("item", "rev_rates", "user"),
    ("user", "follows", "user"),
    ("tag", "marks", "item"),  # no edges lead to tags
    ("shop", "sells", "item"),  # of which there are none
]
MODELS = {
    "sage": lambda data, widths: HeteroGraphSAGE(data.metadata(), widths, 8, 3, 5),
    "sage max": lambda data, widths: HeteroGraphSAGE(data.metadata(), widths, 8, 2, 5, aggr="max"),
    "rgcn": lambda data, widths: RGCN(data.metadata(), widths, 8, 3, 5),
    "rgcn without roots": lambda data, widths: RGCN(data.metadata(), widths, 8, 2, 5, root_weight=False),
    "rgat": lambda data, widths: RGAT(data.metadata(), widths, 8, 2, 5, heads=2),
    "rgat concatenated": lambda data, widths: RGAT(data.metadata(), widths, 8, 2, 5, heads=2, concat=True),
    "hgt": lambda data, widths: HGT(data.metadata(), widths, 8, 2, 5, heads=2),
}
OPTIONS = {"num_neighbors": [2, 2], "batch_size": 4, "seed": 1, "inference": "full"}


def graph(seed=0, users=17, items=9, tags=4, num_edges=40):
    """Double precision, duplicate edges, self-loops, isolated nodes, a type without nodes and one without in-edges."""
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
    """Cut it; no user is in part 1, and all tags are in part 0."""
    generator = torch.Generator().manual_seed(seed)
    owner = {name: torch.randint(parts, (data[name].num_nodes,), generator=generator) for name in data.node_types}
    owner["user"][owner["user"] == 1] = 0
    owner["tag"][:] = 0
    write_partition(data, folder, owner, parts)
    return folder


def model_of(name, data, widths=WIDTHS):
    pl.seed_everything(3, verbose=False)
    return MODELS[name](data, widths).double().eval()


def one_machine(model, data):
    with torch.no_grad():
        return model(data.x_dict, data.edge_index_dict)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def labelled(data):
    """Pairs of users and items, some twice, with labels."""
    users, items = data["user"].num_nodes, data["item"].num_nodes
    number = torch.arange(12)
    return torch.stack([number * 5 % users, number * 3 % items]), (number % 3 == 0).float()


def check_nodes(module, datamodule, data, trainer, ranks=1, rank=0):
    (scores,) = trainer.validate(module, datamodule=datamodule, verbose=False)
    (rows,) = trainer.predict(module, datamodule=datamodule)
    expected = one_machine(module.model, data)["user"]
    close(rows, expected[rank::ranks])
    chosen, labels = expected[data["user"].val_mask], data["user"].y[data["user"].val_mask]
    assert scores["val_loss"] == pytest.approx(float(nn.functional.cross_entropy(chosen, labels)), rel=1e-6)
    assert scores["val_acc"] == pytest.approx(float((chosen.argmax(1) == labels).double().mean()), rel=1e-6)
    return scores


def check_links(module, folder, data, trainer, ranks=1, rank=0):
    edges, labels = labelled(data)
    datamodule = PartitionedLinkDataModule(
        folder, (RATES, data[RATES].edge_index), input_val_edges=(RATES, edges), input_val_labels=labels,
        input_pred_edges=(RATES, edges), **OPTIONS,
    )  # fmt: skip
    (scores,) = trainer.validate(module, datamodule=datamodule, verbose=False)
    (found,) = trainer.predict(module, datamodule=datamodule)
    rows = one_machine(module.model, data)
    expected = (rows["user"][edges[0]] * rows["item"][edges[1]]).sum(1)
    close(found, expected[rank::ranks])
    loss = nn.functional.binary_cross_entropy_with_logits(expected, labels.double())
    assert scores["val_loss"] == pytest.approx(float(loss), rel=1e-6)
    above = expected[labels == 1][:, None] - expected[labels == 0]
    area = ((above > 0) + 0.5 * (above == 0)).double().mean()
    assert scores["val_auc"] == pytest.approx(float(area), rel=1e-6)
    return scores


@settings(max_examples=20)
@given(
    st.sampled_from(sorted(MODELS)), st.integers(0, 2**20), st.integers(1, 20), st.integers(1, 12), st.integers(0, 5),
    st.integers(0, 60), st.integers(1, 4), st.sampled_from([1, 7, 1 << 24]),
)  # fmt: skip
def test_all_parts_on_one_rank(name, seed, users, items, tags, num_edges, parts, most):
    data = graph(seed, users, items, tags, num_edges)
    expected = one_machine(model_of(name, data), data)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_gnn.partitioned.inference._MOST_EDGES", most)
        partition(data, f"{folder}/parts", parts, seed)
        for target in ("user", "item"):
            nodes = torch.arange(data[target].num_nodes).flip(0)
            datamodule = PartitionedDataModule(f"{folder}/parts", input_pred_nodes=(target, nodes), **OPTIONS)
            datamodule.setup("predict")
            (batch,) = datamodule.predict_dataloader()
            module = NodeClassifier(model_of(name, data), num_classes=5, target=target).eval()
            close(module.predict_step(batch, 0), expected[target].flip(0))
            datamodule.teardown("predict")


def test_types_that_nothing_reaches(tmp_path):
    # R-GCN computes them too.
    data = graph()
    partition(data, tmp_path / "parts", 3)
    for name in ("rgcn", "rgcn without roots"):
        model = model_of(name, data)
        datamodule = PartitionedDataModule(tmp_path / "parts", input_pred_nodes="tag", **OPTIONS)
        datamodule.setup("predict")
        (batch,) = datamodule.predict_dataloader()
        found = NodeClassifier(model, num_classes=5, target="tag").eval().predict_step(batch, 0)
        close(found, one_machine(model, data)["tag"])
        datamodule.teardown("predict")


@pytest.mark.parametrize("name", MODELS)
def test_metrics_and_links_are_those_of_one_machine(tmp_path, name):
    data = graph()
    folder = partition(data, tmp_path / "parts", 3)
    datamodule = PartitionedDataModule(folder, **OPTIONS)
    node = NodeClassifier(model_of(name, data), num_classes=10 if "concat" in name else 5, target="user")
    check_nodes(node, datamodule, data, trainer_of(1, "auto", inference_mode=True))
    link = LinkPredictor(model_of(name, data), target=RATES)
    check_links(link, folder, data, trainer_of(1, "auto", inference_mode=True))


def test_links_within_a_type(tmp_path):
    data = graph()
    datamodule = PartitionedLinkDataModule(
        partition(data, tmp_path / "parts", 3), (FOLLOWS, data[FOLLOWS].edge_index),
        input_pred_edges=(FOLLOWS, data[FOLLOWS].edge_index[:, :9]), **OPTIONS,
    )  # fmt: skip
    module = LinkPredictor(model_of("sage", data), target=FOLLOWS)
    (found,) = trainer_of(1, "auto").predict(module, datamodule=datamodule)
    source, target = one_machine(module.model, data)["user"][data[FOLLOWS].edge_index[:, :9]]
    close(found, (source * target).sum(1))


def test_embeddings_in_place_of_features(tmp_path):
    data = graph()
    for name in ("item", "shop"):
        data[name].num_nodes = data[name].num_nodes
        del data[name].x
    folder = partition(data, tmp_path / "parts", 3)
    embeddings = TypeEmbeddings({"item": 9}, 6).double()
    kinds = [kind for kind in TYPES if "shop" not in kind]
    pl.seed_everything(3, verbose=False)
    model = HeteroGraphSAGE((["user", "item", "tag"], kinds), WIDTHS | {"item": 6}, 8, 2, 5).double().eval()
    module = NodeClassifier(model, num_classes=5, target="user", embeddings=embeddings)
    (rows,) = trainer_of(1, "auto").predict(module, datamodule=PartitionedDataModule(folder, **OPTIONS))
    with torch.no_grad():
        x_dict = {"user": data["user"].x, "item": embeddings.tables["item"].weight, "tag": data["tag"].x}
        close(rows, model(x_dict, data.edge_index_dict)["user"])


def _several(rank, ranks, folder):
    torch.set_num_threads(1)
    data, found = graph(), []
    for name in ("sage", "rgcn", "rgat", "hgt"):
        trainer = trainer_of(ranks, "ddp", inference_mode=True)
        module = NodeClassifier(model_of(name, data), num_classes=5, target="user")
        topology = "whole" if name == "sage" else "parts"
        datamodule = PartitionedDataModule(folder, topology=topology, **OPTIONS)
        found.append(check_nodes(module, datamodule, data, trainer, ranks, rank))
    link = LinkPredictor(model_of("hgt", data), target=RATES)
    found.append(check_links(link, folder, data, trainer_of(ranks, "ddp", inference_mode=True), ranks, rank))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.campaign(parts=3)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_several_ranks(tmp_path, ranks):
    # With three parts, one of two ranks has two, and of four ranks two have the same.
    folder = partition(graph(), tmp_path / "parts", 3)
    results = run(_several, ranks, ranks, folder, nodes=ranks)
    assert all(result == results[0] for result in results)


def test_what_cannot_work_is_refused_before_training(tmp_path):
    data = graph()
    folder = partition(data, tmp_path / "parts", 2)

    def fit(model, embeddings=None):
        module = NodeClassifier(model, num_classes=5, target="user", embeddings=embeddings)
        trainer = trainer_of(1, "auto", num_sanity_val_steps=0)
        try:
            trainer.fit(module, datamodule=PartitionedDataModule(folder, **OPTIONS))
        finally:
            assert trainer.global_step == 0

    with pytest.raises(ValueError, match=r"goes layer by layer, which GraphModule does not: use HeteroGraphSAGE, RGCN"):
        fit(to_hetero(GraphSAGE((-1, -1), 8, 2, 5), (["user", "item"], [RATES, RATED])))

    class Own(HeteroGraphSAGE):
        def forward(self, x_dict, edge_index_dict):
            return super().forward(x_dict, edge_index_dict)

    with pytest.raises(ValueError, match="which Own does not"):
        fit(Own(data.metadata(), WIDTHS, 8, 2, 5))
    with pytest.raises(ValueError, match=r"no edges of \('item', 'near', 'shop'\), which the model reads"):
        fit(HGT((data.node_types, [*TYPES, ("item", "near", "shop")]), WIDTHS, 8, 2, 5))
    with pytest.raises(ValueError, match="nodes of 'tag' have features x and embeddings; leave one of them out"):
        fit(model_of("sage", data), TypeEmbeddings({"tag": 4}, 3))
    del data["tag"].x
    data["tag"].num_nodes = 4
    folder = partition(data, tmp_path / "without", 2)
    with pytest.raises(ValueError, match="there are 4 nodes of 'tag', but embeddings of 5"):
        fit(model_of("sage", data), TypeEmbeddings({"tag": 5}, 3))
    with pytest.raises(ValueError, match="nodes of 'tag' have no features x: give some, or embeddings"):
        fit(model_of("sage", data))
    with pytest.raises(ValueError, match=r"FullInference\(folder='layers'\) does not go with a partitioned graph"):
        PartitionedDataModule(folder, **OPTIONS | {"inference": FullInference("layers")})
