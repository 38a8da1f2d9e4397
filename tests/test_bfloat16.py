"""Features stored in bfloat16 and training in it: DataModules, modules and the Trainer together."""

import copy

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn import FullGraphDataModule, LinkDataModule, NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GAT, GCN, GIN, GraphSAGE, NodeClassifier
from tests.nn.test_fused_bfloat16 import refuse_pygs_path
from tests.refusals import refuses


@pytest.fixture
def data():
    return planted_power_law(300, 2000, num_classes=3, num_features=8, split=(0.5, 0.2, 0.2), seed=0)


def build(kind, data, **options):
    sizes = {} if kind is FullGraphDataModule else {"num_neighbors": [3, 3], "batch_size": 32}
    return kind(data, **sizes, **options)


def fit(data, model, kind, precision, epochs=1, **options):
    pl.seed_everything(0)
    module = NodeClassifier(model(8, 16, num_layers=2, out_channels=3), num_classes=3, lr=0.05)
    trainer = pl.Trainer(
        accelerator="cpu", precision=precision, max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, build(kind, data, **options))
    return module, trainer


@pytest.mark.parametrize("kind", [NeighborDataModule, FullGraphDataModule, LinkDataModule])
@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_batches_have_rows_of_the_dtype_and_the_users_graph_stays(kind, data, dtype):
    before = copy.copy(data)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    batch = next(iter(build(kind, data, feature_dtype=dtype).train_dataloader()))
    assert batch.x.dtype == wanted
    n_id = batch.get("n_id", torch.arange(300))
    assert torch.equal(batch.x, data.x.to(wanted)[n_id])
    assert data.x is before.x
    assert data.x.dtype == torch.float32


@pytest.mark.parametrize("given", [torch.float64, torch.bfloat16, np.float32])
def test_features_of_any_floating_dtype_are_kept_in_another(data, given):
    data.x = data.x.to(given) if isinstance(given, torch.dtype) else data.x.numpy().astype(given)
    stored = build(NeighborDataModule, data, feature_dtype="bfloat16").data.x
    assert torch.equal(stored, torch.as_tensor(data.x).bfloat16())


@pytest.mark.parametrize(
    ("change", "dtype", "error", "message"),
    [
        ({}, "int8", TypeError, "feature_dtype='int8' is unknown; use 'bfloat16'"),
        ({}, "no dtype", TypeError, "is unknown"),
        ({}, torch.float64, TypeError, "is unknown"),
        ({"x": None, "num_nodes": 300}, "bfloat16", ValueError, "data has no x"),
        ({"x": torch.ones(300, 2, requires_grad=True)}, "bfloat16", ValueError, "data.x requires gradients"),
        ({"x": torch.ones(300, 2).long()}, "bfloat16", TypeError, "but are torch.int64"),
        ({"x": torch.full((300, 2), 1e5)}, "float16", ValueError, "ends at 65504; use feature_dtype='bfloat16'"),
    ],
)
@pytest.mark.parametrize("kind", [NeighborDataModule, FullGraphDataModule])
def test_what_cannot_be_kept_is_told_at_once(kind, data, change, dtype, error, message):
    for key, value in change.items():
        data[key] = value
    refuses(error, message, build, kind, data, feature_dtype=dtype)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("kind", [NeighborDataModule, FullGraphDataModule])
@pytest.mark.parametrize("model", [GraphSAGE, GCN, GAT])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_any_precision_trains_on_features_of_any_dtype(data, kind, model, dtype, precision):
    module, trainer = fit(data, model, kind, precision, feature_dtype=dtype)
    assert trainer.callback_metrics["train_loss"].isfinite()
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


@pytest.mark.medium
@pytest.mark.parametrize("model", [GraphSAGE, GCN, GIN, GAT])
def test_mini_batches_train_by_fused_layers_in_bf16_mixed(data, monkeypatch, fused_always, model):
    refuse_pygs_path(monkeypatch)
    _, trainer = fit(data, model, NeighborDataModule, "bf16-mixed", 2, feature_dtype="bfloat16")
    assert trainer.callback_metrics["train_loss"].isfinite()


@pytest.mark.medium
def test_features_of_bfloat16_train_a_float32_model_as_the_same_numbers_in_float32_do(data):
    rounded = copy.copy(data)
    rounded.x = data.x.bfloat16().float()
    models = [
        fit(graph, GraphSAGE, NeighborDataModule, "32-true", 2, feature_dtype=dtype)[0]
        for graph, dtype in ((data, "bfloat16"), (rounded, None))
    ]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
