"""One option selects the task: classes, multiple labels, regression, links and their ranks."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling

from lightning_gnn import LinkDataModule, NeighborDataModule
from lightning_gnn.nn import GraphSAGE, LinkPredictor, NodeClassifier, NodeRegressor
from tests.batching_data import small_data
from tests.nn.quiet import trainer
from tests.nn.test_typed_classifier import make_featured_data
from tests.sampling.test_typed import WRITES


def make_labeled_graph(kind):
    """Return a graph whose labels are determined by its features."""
    data = small_data()
    x = data.x = torch.randn(data.num_nodes, 6, generator=torch.Generator().manual_seed(0))
    data.y = {"multilabel": (x[:, :3] > 0).long(), "regression": x[:, :2] * 2 - 1, "one": x[:, 0]}[kind]
    for split in ("train", "val", "test"):
        data[f"{split}_mask"] = torch.ones(data.num_nodes, dtype=torch.bool)
    return data


@pytest.mark.medium
@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["multilabel", "regression"])
@pytest.mark.parametrize("full", [False, True])
def test_labels_and_numbers_are_learned(kind, full, tmp_path):
    pl.seed_everything(0, verbose=False)
    data = make_labeled_graph(kind)
    model = GraphSAGE(6, 32, 2, data.y.size(1))
    module = NodeClassifier(model, 3, kind="multilabel") if kind == "multilabel" else NodeRegressor(model)
    if full:
        batches = torch.utils.data.DataLoader([data], collate_fn=lambda parts: parts[0])
        run = trainer(tmp_path, max_epochs=60)
        run.fit(module, batches, batches)
    else:
        run = trainer(tmp_path, max_epochs=12)
        run.fit(module, datamodule=NeighborDataModule(data, num_neighbors=[5, 5], batch_size=32))
    found = run.callback_metrics
    if kind == "multilabel":
        assert found["val_f1"] > 0.85
    else:
        assert found["val_mae"] < 0.6


def test_losses_and_metrics_are_those_by_hand():
    data = make_labeled_graph("multilabel")
    batch = next(iter(NeighborDataModule(data, num_neighbors=[3], batch_size=20).train_dataloader()))
    module = NodeClassifier(GraphSAGE(6, 8, 1, 3), 3, kind="multilabel")
    loss, y = module.training_step(batch, 0), batch.y[:20]
    rows = module(batch)[:20].detach()
    torch.testing.assert_close(loss["loss"], F.binary_cross_entropy_with_logits(rows, y.float()))
    right = ((rows > 0) & (y == 1)).sum()
    torch.testing.assert_close(module.train_f1.compute(), 2 * right / ((rows > 0).sum() + y.sum()))

    batch.y = make_labeled_graph("regression").y[batch.n_id]
    module = NodeRegressor(GraphSAGE(6, 8, 1, 2))
    loss, rows = module.training_step(batch, 0), module(batch)[:20].detach()
    torch.testing.assert_close(loss["loss"], F.mse_loss(rows, batch.y[:20]))
    torch.testing.assert_close(module.train_mae.compute(), (rows - batch.y[:20]).abs().mean())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, [0.5, 2.0]])
def test_class_weights_and_smoothing_are_those_of_torch(weights, smoothing, tmp_path):
    data = make_labeled_graph("one")
    data.y = (data.y > 0.5).long()
    model = GraphSAGE(6, 8, 1, 2)
    module = NodeClassifier(model, 2, class_weights=weights, label_smoothing=smoothing)
    datamodule = NeighborDataModule(data, num_neighbors=[-1], batch_size=32)
    given = None if weights is None else torch.tensor(weights)
    loss_of = torch.nn.CrossEntropyLoss(weight=given, label_smoothing=smoothing)
    batch = next(iter(datamodule.train_dataloader()))
    step = module.training_step(batch, 0)
    rows, y = module(batch)[:32], batch.y[:32]
    torch.testing.assert_close(step["loss"], loss_of(rows, y))
    assert float(step["weight"]) == pytest.approx(32 if given is None else float(given[y].sum()))
    # The loss over an epoch is that of one batch with all nodes, although batches have different weights.
    (found,) = trainer(tmp_path).test(module, datamodule, verbose=False)
    with torch.no_grad():
        expected = loss_of(model.eval()(data.x, data.edge_index), data.y)
    assert found["test_loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.medium
def test_one_number_per_node_may_be_a_vector(tmp_path):
    module = NodeRegressor(GraphSAGE(6, 8, 2, 1))
    run = trainer(tmp_path, max_epochs=1)
    datamodule = NeighborDataModule(make_labeled_graph("one"), num_neighbors=[5, 5], batch_size=32)
    run.fit(module, datamodule=datamodule)
    assert run.test(module, datamodule, verbose=False)[0].keys() == {"test_loss", "test_mae"}
    assert run.predict(module, datamodule)[0].shape[1] == 1


@pytest.mark.medium
def test_a_type_has_numbers(tmp_path):
    data = make_featured_data()
    data["paper"].y = data["paper"].x[:, 0] * 3
    from lightning_gnn.nn import RGCN

    widths = {name: data[name].x.size(1) for name in data.node_types}
    module = NodeRegressor(RGCN(data.metadata(), widths, 16, 2, 1), target="paper", lr=0.02)
    run = trainer(tmp_path, max_epochs=8)
    run.fit(module, datamodule=NeighborDataModule(data, num_neighbors=[5, 5], batch_size=32))
    assert run.callback_metrics["val_mae"] < 1.8


@pytest.mark.parametrize(
    ("make", "y", "message"),
    [
        (
            lambda m: NodeClassifier(m, 3, kind="multilabel"),
            torch.ones(9, dtype=torch.long),
            r"y must hold 3 labels .*\[9\]",
        ),
        (lambda m: NodeClassifier(m, 3, kind="multilabel"), torch.full((9, 3), 2), "y holds 2, but must be 0 or 1"),
        (lambda m: NodeClassifier(m, 3), torch.ones(9, 3), "for several labels per node use kind='multilabel'"),
        (lambda m: NodeRegressor(m), torch.ones(9, dtype=torch.long), "for classes use NodeClassifier"),
        (lambda m: NodeRegressor(m), torch.full((9, 3), torch.nan), "y holds NaN or infinity among the labeled nodes"),
        (lambda m: NodeRegressor(m), torch.ones(9, 2), "the model has 3 outputs, but y has 2 numbers per node"),
    ],
)
def test_labels_that_do_not_fit_are_named(make, y, message):
    data = Data(x=torch.ones(9, 4), edge_index=torch.tensor([[0, 1], [1, 2]]), y=y)
    data.train_mask = torch.ones(9, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        make(GraphSAGE(4, 4, 1, 3)).training_step(data, 0)


def test_arguments_are_checked():
    model = GraphSAGE(4, 4, 1, 3)
    with pytest.raises(ValueError, match="kind='multi' is unknown; use one of multiclass, multilabel"):
        NodeClassifier(model, 3, kind="multi")
    with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
        NodeClassifier(model, 0, kind="multilabel")
    with pytest.raises(ValueError, match=r"class_weights must be 3 positive numbers, got \[1.0, 0.0, 2.0\]"):
        NodeClassifier(model, 3, class_weights=[1, 0, 2])
    with pytest.raises(ValueError, match="class_weights must be 3 positive numbers"):
        NodeClassifier(model, 3, class_weights=[1, 2])
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\), got 1.0"):
        NodeClassifier(model, 3, label_smoothing=1.0)
    with pytest.raises(ValueError, match="leave it out for kind='multilabel'"):
        NodeClassifier(model, 3, kind="multilabel", label_smoothing=0.1)
    with pytest.raises(ValueError, match="metrics: 'hits@0' is unknown; use auc, mrr, hits@10 or recall@10"):
        LinkPredictor(model, metrics=["hits@0"])


def compute_ranks(scores, negatives):
    positive, others = scores[: scores.size(0) // (negatives + 1)], scores[scores.size(0) // (negatives + 1) :]
    others, positive = others.view(-1, negatives), positive.unsqueeze(1)
    return 1 + ((others > positive).sum(1) + (others >= positive).sum(1)) / 2


@pytest.mark.parametrize("typed", [False, True])
def test_ranks_are_those_by_hand(typed, tmp_path):
    torch.manual_seed(0)
    data = make_featured_data() if typed else small_data()
    metrics = ["auc", "mrr", "hits@3", "recall@1"]
    if typed:
        from lightning_gnn.nn import HeteroGraphSAGE

        widths = {name: data[name].x.size(1) for name in data.node_types}
        model, target = HeteroGraphSAGE(data.metadata(), widths, 8, 1, 8), WRITES
        edges = (WRITES, data[WRITES].edge_index[:, :50])
    else:
        model, target, edges = GraphSAGE(data.num_features, 8, 1, 8), None, data.edge_index[:, :50]
    datamodule = LinkDataModule(
        data, edges, input_val_edges=edges, num_neighbors=[-1], batch_size=20, share_memory=False,
        neg_sampling=NegativeSampling("triplet", amount=5),
    )  # fmt: skip
    module = LinkPredictor(model, target=target, metrics=metrics)
    (found,) = trainer(tmp_path).validate(module, datamodule, verbose=False)
    assert set(found) == {"val_loss", *(f"val_{name}" for name in metrics)}
    with torch.no_grad():
        ranks = torch.cat([compute_ranks(module.predict_step(batch, 0), 5) for batch in datamodule.val_dataloader()])
    assert ranks.numel() == 50
    assert found["val_mrr"] == pytest.approx((1 / ranks).mean().item())
    assert found["val_hits@3"] == pytest.approx((ranks <= 3).float().mean().item())
    assert found["val_recall@1"] == pytest.approx((ranks <= 1).float().mean().item())


def test_ranking_needs_to_know_what_is_ranked(tmp_path):
    data = small_data()
    datamodule = LinkDataModule(
        data, data.edge_index[:, :50], input_val_edges=data.edge_index[:, :50], num_neighbors=[2], batch_size=20,
        neg_sampling="binary",
    )  # fmt: skip
    module = LinkPredictor(GraphSAGE(data.num_features, 8, 1, 8), metrics=["mrr"])
    with pytest.raises(ValueError, match="mrr ranks a link among negatives of the same source"):
        trainer(tmp_path).validate(module, datamodule, verbose=False)
