"""Link prediction on a full graph: several ranks train, evaluate and predict like one process."""

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn import FullGraphDataModule
from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy
from lightning_gnn.nn import LinkPredictor, NodeClassifier
from tests.cli.command import TINY, assert_two_devices_as_one
from tests.full_graph.launch import run
from tests.full_graph.training import model_of, small_data, trainer_of
from tests.patience import NEVER

STAGES = {"train": 41, "val": 17, "test": 23, "pred": 9}


def draw_edges(kind="pairs"):
    """Return the keywords of a DataModule: with labeled edges by stage, or with triplets in the only batch."""
    draw, data = torch.Generator().manual_seed(2), small_data()
    del data.train_mask, data.val_mask, data.test_mask
    if kind == "triplets":
        for key, shape in {"src_index": (11,), "dst_pos_index": (11,), "dst_neg_index": (11, 3)}.items():
            data[key] = torch.randint(90, shape, generator=draw)
        return {"data": data}
    edges = {f"input_{stage}_edges": torch.randint(90, (2, count), generator=draw) for stage, count in STAGES.items()}
    labels = {f"input_{stage}_labels": torch.arange(count) % 2 for stage, count in STAGES.items() if stage != "pred"}
    return {"data": data, **edges, **labels}


def train_all(rank, num_ranks):
    """Return weights, logs and scores of several models."""
    results = []
    for kind, groups, name in (("pairs", 1, "gcn"), ("pairs", num_ranks, "gat"), ("triplets", "auto", "sage")):
        pl.seed_everything(5, verbose=False)
        module = LinkPredictor(model_of(name, 0.5).double(), lr=0.02, metrics=["auc", *["mrr"] * (kind != "pairs")])
        strategy = AscendHybridParallelStrategy(1 if num_ranks == 1 else groups, timeout=NEVER)
        trainer = trainer_of(strategy, num_ranks, max_epochs=4, check_val_every_n_epoch=2)
        datamodule = FullGraphDataModule(**draw_edges(kind))
        trainer.fit(module, datamodule)
        logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
        logged |= trainer.test(module, datamodule, verbose=False)[0]
        weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        results.append((weights, logged, trainer.predict(module, datamodule)[0]))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_train_like_one_process(num_ranks):
    alone = train_all(0, 1)
    for results in run(train_all, num_ranks, num_ranks):
        for (weights, logged, scores), (expected, values, rows) in zip(results, alone, strict=True):
            torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(scores, rows, rtol=1e-9, atol=1e-10)
            assert logged == pytest.approx(values, rel=1e-6)
            assert {"train_loss_epoch", "val_auc", "test_auc"} <= set(logged)


class OwnLinks(LinkPredictor):
    gathers_endpoints = False


def try_others(rank):
    """Return the messages of what cannot train on two ranks."""
    data, found = draw_edges(), []
    one = {**data, "input_train_edges": data["input_train_edges"][:, :1], "input_train_labels": torch.ones(1)}
    for make, keywords in ((OwnLinks, data), (lambda model: NodeClassifier(model, 7), data), (LinkPredictor, one)):
        try:
            trainer = trainer_of(AscendHybridParallelStrategy(timeout=NEVER), 2, max_epochs=1)
            trainer.fit(make(model_of("gcn").double()), FullGraphDataModule(**keywords))
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_modules_that_would_read_other_rows_are_refused():
    for own, node, few in run(try_others, 2):
        assert "sharded across 2 ranks, but OwnLinks does not gather the embeddings of other ranks" in own
        assert "but NodeClassifier does not gather" in node
        assert "1 labeled edges, but there are 2 ranks" in few


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_train_edges": None}, "input_train_labels are given without input_train_edges"),
        ({"input_val_labels": None}, "input_val_labels is missing"),
        ({"input_test_edges": torch.full((2, 23), 90)}, "input_test_edges"),
        ({"input_train_edges": None, "input_train_labels": None}, "no train_mask"),
    ],
)
def test_wrong_edges_are_named(changes, message):
    with pytest.raises((ValueError, IndexError), match=message):
        FullGraphDataModule(**draw_edges() | changes)


@pytest.mark.slow
def test_the_command_trains_on_two_devices_as_on_one(tmp_path):
    overrides = [item for item in TINY if not item.startswith(("datamodule.", "trainer.enable_progress_bar"))]
    overrides += ["task=link", "model.num_layers=2", "datamodule=full", "strategy=ascend_hybrid"]
    overrides += ["trainer.max_epochs=3"]
    assert_two_devices_as_one(tmp_path, overrides, ("test_auc", "test_loss", "val_auc"))
