"""Metrics by name: torchmetrics' values for any mini-batches."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torchmetrics.functional import mean_squared_error, r2_score
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
    multiclass_f1_score,
    multilabel_auroc,
    multilabel_average_precision,
    multilabel_exact_match,
)

from lightning_gnn import NeighborDataModule
from lightning_gnn.nn import GraphSAGE, NodeClassifier, NodeRegressor
from lightning_gnn.nn.metrics import named_metric
from tests.batching_data import small_data
from tests.nn.quiet import trainer
from tests.nn.test_tasks import make_labeled_graph


def run_test(module, data, tmp_path):
    """Return the logged values of a test in mini-batches, and outputs and labels of the test nodes."""
    datamodule = NeighborDataModule(data, num_neighbors=[-1], batch_size=16)
    logged = trainer(tmp_path).test(module, datamodule=datamodule, verbose=False)[0]
    with torch.no_grad():
        rows = module.eval().model(data.x, data.edge_index)[data.test_mask]
    return {name.removeprefix("test_"): value for name, value in logged.items()}, rows, data.y[data.test_mask]


def make_class_data():
    data = small_data()
    data.x = torch.randn(data.num_nodes, 6, generator=torch.Generator().manual_seed(0))
    data.y = torch.randint(4, (data.num_nodes,), generator=torch.Generator().manual_seed(1))
    for split in ("train", "val", "test"):
        data[f"{split}_mask"] = torch.ones(data.num_nodes, dtype=torch.bool)
    return data


@pytest.mark.medium
def test_of_classes(tmp_path):
    pl.seed_everything(0, verbose=False)
    names = ["top2", "macro_f1", "weighted_acc", "ece", "macro_auroc", "mcc", "kappa", "acc", "ogbn-arxiv"]
    module = NodeClassifier(GraphSAGE(6, 8, 1, 4), 4, metrics=names)
    found, rows, y = run_test(module, make_class_data(), tmp_path)
    assert set(found) == {*names, "loss"}
    assert found["ogbn-arxiv"] == found["acc"]  # like OGB's evaluator
    top = rows.topk(2).indices
    assert found["top2"] == pytest.approx((top == y[:, None]).any(1).float().mean().item())
    assert found["macro_f1"] == pytest.approx(multiclass_f1_score(rows, y, 4, average="macro").item(), abs=1e-6)
    assert found["weighted_acc"] == pytest.approx(multiclass_accuracy(rows, y, 4, average="weighted").item(), abs=1e-6)
    assert found["ece"] == pytest.approx(multiclass_calibration_error(rows.softmax(1), y, 4).item(), abs=1e-5)


def test_of_labels(tmp_path):
    pl.seed_everything(0, verbose=False)
    names = ["macro_auroc", "micro_ap", "exact"]
    module = NodeClassifier(GraphSAGE(6, 8, 1, 3), 3, kind="multilabel", metrics=names)
    found, rows, y = run_test(module, make_labeled_graph("multilabel"), tmp_path)
    assert set(found) == {*names, "f1", "loss"}
    rows, y = rows.double().sigmoid(), y.long()
    assert found["macro_auroc"] == pytest.approx(multilabel_auroc(rows, y, 3).item(), abs=1e-5)
    assert found["micro_ap"] == pytest.approx(
        multilabel_average_precision(rows, y, 3, average="micro").item(), abs=1e-5
    )
    assert found["exact"] == pytest.approx(multilabel_exact_match(rows, y, 3).item())
    far = module._to_scores(torch.tensor([[50.0, 60.0, 0.0]]))  # where sigmoids are equal
    assert far[0, 0] < far[0, 1] < 1
    assert far[0, 2] == 0.5


def test_of_numbers(tmp_path):
    pl.seed_everything(0, verbose=False)
    module = NodeRegressor(GraphSAGE(6, 8, 1, 2), metrics=["rmse", "r2"])
    found, rows, y = run_test(module, make_labeled_graph("regression"), tmp_path)
    assert found["rmse"] == pytest.approx(mean_squared_error(rows, y, squared=False).item(), rel=1e-5)
    assert found["r2"] == pytest.approx(r2_score(rows, y).item(), rel=1e-4)
    assert found["loss"] == pytest.approx(F.mse_loss(rows, y).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("top9", "multiclass", "'top9' is unknown; use top1 to top4, macro_ or weighted_ with acc, f1, "),
        ("micro_f1", "multiclass", "'micro_f1' is unknown"),
        ("top2", "multilabel", "use micro_, macro_ or weighted_ with"),
        ("ogbn-arxiv", "regression", "use mse, rmse, r2"),
    ],
)
def test_names_that_are_none(name, kind, message):
    with pytest.raises(ValueError, match=message):
        named_metric(name, kind, 4)
