"""Exact outputs of a graph in parts: those of one machine, whoever has which nodes."""

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_gnn import (
    FullInference,
    LinkDataModule,
    NeighborDataModule,
    PartitionedDataModule,
    PartitionedLinkDataModule,
)
from lightning_gnn.nn import GAT, GCN, GraphSAGE, LinkPredictor, NodeClassifier
from lightning_gnn.partitioned import partition_graph
from tests.full_graph.launch import observe, run
from tests.partitioned.graphs import plain_graph
from tests.partitioned.test_training import trainer_of

SIZES = {"in_channels": 3, "hidden_channels": 8, "num_layers": 3, "out_channels": 3}
MODELS = {
    "gcn": lambda: GCN(**SIZES),
    "gcn improved": lambda: GCN(**SIZES, improved=True, norm="batch", jk="last"),
    "gcn without loops": lambda: GCN(**SIZES, add_self_loops=False),
    "gcn without norm": lambda: GCN(**SIZES, normalize=False),
    "sage": lambda: GraphSAGE(**SIZES, norm="layer", norm_kwargs={"mode": "node"}),
    "sage max": lambda: GraphSAGE(**SIZES, aggr="max"),
    "gat": lambda: GAT(**SIZES, heads=2),
}
OPTIONS = {"num_neighbors": [2, 2, 2], "batch_size": 8, "seed": 1}


def graph(weighted):
    """A graph of double precision, with several self-loops of a node, which weigh what the last one does."""
    data = plain_graph()
    data.edge_index[:, 7:50:6] = data.edge_index[:1, 7:50:6]
    data.edge_index[:, 20:23] = 3
    data.x = data.x.double()
    data.edge_weight = data.edge_weight.double() + 0.1
    if not weighted:
        del data.edge_weight
    return data


def module_of(name):
    pl.seed_everything(3, verbose=False)
    return NodeClassifier(MODELS[name]().double(), num_classes=3).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inference")
    for weighted in (False, True):
        partition_graph(graph(weighted), folder / str(weighted), 3, "ldg", batches=0)
    return folder


def _outputs(module, datamodule, ranks, strategy="auto"):
    trainer = trainer_of(ranks, strategy, inference_mode=True)
    (scores,) = trainer.validate(module, datamodule=datamodule, verbose=False)
    (rows,) = trainer.predict(module, datamodule=datamodule)
    return scores, rows


def _same(found, expected, ranks=1, rank=0):
    (scores, rows), (true_scores, true_rows) = found, expected
    torch.testing.assert_close(rows, true_rows[rank::ranks], rtol=1e-12, atol=1e-12)
    assert scores.keys() == true_scores.keys() > set()
    for name, value in scores.items():
        assert value == pytest.approx(true_scores[name], rel=1e-6), name


def _expected(name, weighted):
    return _outputs(module_of(name), NeighborDataModule(graph(weighted), **OPTIONS, inference="full"), 1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_all_parts_on_one_rank(folder, name, weighted):
    # A limit of nothing: blocks of as few nodes as may be.
    datamodule = PartitionedDataModule(folder / str(weighted), **OPTIONS, inference=FullInference(memory_limit=0))
    _same(_outputs(module_of(name), datamodule, 1), _expected(name, weighted))


def test_blocks_of_few_nodes(folder, monkeypatch):
    monkeypatch.setattr("lightning_gnn.partitioned.inference._MOST_EDGES", 30)  # fewer than a hub has
    datamodule = PartitionedDataModule(folder / "True", **OPTIONS, inference="full")
    _same(_outputs(module_of("gcn improved"), datamodule, 1), _expected("gcn improved", True))


def _several(rank, ranks, folder):
    torch.set_num_threads(1)
    found = []
    for name, weighted in (("gcn improved", True), ("sage", False), ("gat", True)):
        datamodule = PartitionedDataModule(
            folder / str(weighted), **OPTIONS, inference="full", topology="whole" if name == "sage" else "parts"
        )
        found.append(_outputs(module_of(name), datamodule, ranks, "ddp"))
        expected = _expected_alone(name, weighted)
        _same(found[-1], expected, ranks, rank)
    torch.distributed.destroy_process_group()
    return [scores for scores, _ in found]


def _expected_alone(name, weighted):
    """Outputs of the whole graph, made without a Trainer beside the ranks that are joined."""
    module, data = module_of(name), NeighborDataModule(graph(weighted), **OPTIONS, inference="full")
    (batch,) = data.val_dataloader()
    with torch.no_grad():
        rows = module(batch)
    nodes = batch.val_mask
    accuracy = (rows[nodes].argmax(1) == batch.y[nodes]).double().mean()
    loss = nn.functional.cross_entropy(rows[nodes], batch.y[nodes])
    return {"val_acc": float(accuracy), "val_loss": float(loss)}, rows


@pytest.mark.slow
@pytest.mark.campaign(parts=4)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_several_ranks(folder, ranks):
    # With three parts, one of two ranks has two, and of five ranks several have the same.
    results = run(_several, ranks, ranks, folder, nodes=ranks)
    assert all(result == results[0] for result in results)


def link_options(data):
    """Edges of the graph and others, with labels, to validate; more of them, some twice, to score."""
    edges = torch.cat([data.edge_index[:, 10:17], torch.stack([torch.arange(8), torch.arange(8).flip(0)])], dim=1)
    labels = torch.tensor([1.0] * 7 + [0.0] * 8)
    scored = torch.cat([edges.flip(0), edges[:, :4]], dim=1)
    given = {"input_val_edges": edges, "input_val_labels": labels, "input_pred_edges": scored}
    return data.edge_index, {**OPTIONS, **given, "inference": "full"}


def predictor_of(name):
    pl.seed_everything(3, verbose=False)
    return LinkPredictor(MODELS[name]().double()).eval()


def _same_links(name, weighted, folder, ranks, rank, strategy="auto"):
    train, options = link_options(graph(weighted))
    datamodule = PartitionedLinkDataModule(folder / str(weighted), train, **options)
    scores, rows = _outputs(predictor_of(name), datamodule, ranks, strategy)
    module, whole = predictor_of(name), LinkDataModule(graph(weighted), train, **options)
    with torch.no_grad():
        (batch,) = whole.predict_dataloader()
        true_rows = module.predict_step(batch, 0)
        (batch,) = whole.val_dataloader()
        true_scores = module.predict_step(batch, 0)
    torch.testing.assert_close(rows, true_rows[rank::ranks], rtol=1e-12, atol=1e-12)
    loss = nn.functional.binary_cross_entropy_with_logits(true_scores, batch.edge_label.double())
    assert scores["val_loss"] == pytest.approx(float(loss), rel=1e-6)
    places = true_scores.argsort().argsort().double()[batch.edge_label == 1]  # area under the curve, by ranks
    area = (places.sum() - 7 * 6 / 2) / (7 * 8)
    assert scores["val_auc"] == pytest.approx(float(area), rel=1e-6)
    return scores


@pytest.mark.parametrize(("name", "weighted"), [("gcn improved", True), ("sage", False), ("gat", False)])
def test_links_of_all_parts_on_one_rank(folder, name, weighted):
    _same_links(name, weighted, folder, 1, 0)


def _links(rank, ranks, folder):
    torch.set_num_threads(1)
    scores = _same_links("gcn improved", True, folder, ranks, rank, "ddp")
    torch.distributed.destroy_process_group()
    return scores


@pytest.mark.slow
@pytest.mark.campaign(parts=4)
@pytest.mark.parametrize("ranks", [2, 3])
def test_links_of_several_ranks(folder, ranks):
    results = run(_links, ranks, ranks, folder, nodes=ranks)
    assert all(result == results[0] for result in results)


def _hybrid(rank, folder):
    datamodule = PartitionedDataModule(folder / "False", **OPTIONS, inference="full")
    trainer = trainer_of(2, "hyscale", num_sanity_val_steps=0)
    try:
        trainer.fit(module_of("sage"), datamodule=datamodule)
    finally:
        assert trainer.global_step == 0


@pytest.mark.slow
def test_hybrid_training_is_refused_before_it_begins(folder):
    outcome = observe(_hybrid, 2, folder, nodes=2)
    for error in outcome.errors:
        assert "inference='full' on a partitioned graph needs all ranks, and hyscale" in error


@pytest.fixture
def one_rank():
    """Close the process group that Lightning leaves after an exception."""
    yield
    torch.distributed.destroy_process_group()


def test_what_cannot_work_is_refused(folder, one_rank):
    def inferring(model, **options):
        datamodule = PartitionedDataModule(folder / "False", **OPTIONS, inference="full", **options)
        trainer_of(1).validate(NodeClassifier(model.double(), num_classes=3), datamodule=datamodule, verbose=False)

    with pytest.raises(ValueError, match=r"goes layer by layer, which GCN does not: use GCN, .* jk=None or 'last'"):
        inferring(GCN(**SIZES, jk="cat"))
    with pytest.raises(ValueError, match="GraphNorm averages over all nodes, of which no rank has the outputs"):
        inferring(GCN(**SIZES, norm="GraphNorm"))
    with pytest.raises(ValueError, match=r"FullInference\(folder='layers'\) does not go with a partitioned graph"):
        PartitionedDataModule(folder / "False", **OPTIONS, inference=FullInference("layers"))
    few = PartitionedDataModule(folder / "False", input_val_nodes=torch.arange(0), **OPTIONS, inference="full")
    with pytest.raises(ValueError, match="the val split is empty"):
        trainer_of(1).validate(module_of("gcn"), datamodule=few, verbose=False)
