"""Collective batching: shared tables, and training; tests/sampling/test_same_batches.py covers mini-batches."""

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.features import DiskFeatures, FeatureTable
from tests.batch_checks import assert_same_batches
from tests.batching_data import small_data
from tests.sampling.test_typed import CITES, Typed, typed_data

pytestmark = pytest.mark.usefixtures("no_thread_left")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLLECTIVE = CollectivePlan("collective", 2, 1)


def compare(data, options, plan, **more):
    """Compare all loaders with the CPU's; return the training loader."""
    ours = CollectiveDataModule(data, plan=plan, **options, **more)
    theirs = NeighborDataModule(data, **options)
    names = ("train_dataloader", "val_dataloader", "predict_dataloader")
    loaders = [getattr(ours, name)() for name in names]
    for name, loader in zip(names, loaders, strict=True):
        assert_same_batches(loader, getattr(theirs, name)())
    return loaders[0]


@pytest.mark.slow
def test_both_sides_may_read_from_disk(tmp_path):
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    data = small_data(num_nodes=60, num_edges=300)
    store = FeatureTable(data.x).save(tmp_path / "x.npy")
    given = {"device": DEVICE, "num_workers": 1, "memory": "4MB", "store": store}
    options = {"num_neighbors": [3, 2], "batch_size": 8, "seed": 3}
    loader = compare(data, options, COLLECTIVE, **given)
    assert isinstance(loader.pipeline.tables["x"], DiskFeatures), "the CPU's"
    assert loader.prefetcher.route.tables["x"] is loader.pipeline.tables["x"], "the GPU's too"
    assert loader.pipeline.tables["x"].counts.rows > 0


@pytest.mark.slow
@pytest.mark.parametrize("thread_safe", [False, True])
@pytest.mark.parametrize("plan", [COLLECTIVE, CollectivePlan("cpu", 1, 2)], ids=lambda plan: plan.mode)
def test_transforms_of_the_users_own(plan, thread_safe):
    def transform(batch):
        batch["venue"].x = torch.nn.functional.one_hot(batch["venue"].n_id, 7).float()
        batch[CITES].late = batch["paper"].time[batch[CITES].edge_index[0]]
        if not thread_safe:
            batch["paper"].noise = torch.rand(batch["paper"].num_nodes)
        return batch

    options = {"num_neighbors": [3, 2], "batch_size": 30, "seed": 3, "transform": transform, "thread_safe": thread_safe}
    compare(typed_data(), options, plan, gpu_route="cpu", num_workers=2)


def fit_model(datamodule, data, tmp_path, **kwargs):
    pl.seed_everything(3, verbose=False)
    module = Typed(data)
    with torch.no_grad():
        module(next(iter(datamodule.val_dataloader())))  # initialize lazy layers
    module.seen.clear()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **{"max_epochs": 2, **kwargs},
    )  # fmt: skip
    trainer.fit(module, datamodule=datamodule)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"time_attr": "time"}], ids=["types", "types with times"])
@pytest.mark.parametrize("plan", ["auto", COLLECTIVE], ids=["auto", "collective"])
def test_training_is_that_of_the_neighbor_datamodule_bit_for_bit(plan, options, tmp_path):
    data, sizes = typed_data(), {"num_neighbors": [4, 3], "batch_size": 10, "seed": 5}
    ours = CollectiveDataModule(
        data, plan=plan, gpu_route="cpu", num_workers=2, profile_batches=2, gpu_buffer_size=2, **sizes, **options
    )
    found = fit_model(ours, data, tmp_path)
    expected = fit_model(NeighborDataModule(data, **sizes, **options), data, tmp_path)
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.cat(found.seen), torch.cat(expected.seen))
    assert ours.plan is not None
    assert plan != "auto" or ours.plan.times is not None


def test_rows_of_a_type_that_are_trained_are_those_of_the_step():
    data = typed_data()
    data["venue"].x = torch.nn.Parameter(torch.randn(7, 4))
    options = {"num_neighbors": [4, 3], "batch_size": 20, "seed": 3}
    batches = CollectiveDataModule(
        data, plan=COLLECTIVE, gpu_route="cpu", num_workers=2, sparse_grad=True, **options
    ).train_dataloader()
    for batch in batches:
        assert torch.equal(batch["venue"].x, data["venue"].x[batch["venue"].n_id])
        batch["venue"].x.sum().backward()
        assert data["venue"].x.grad.is_sparse
        with torch.no_grad():
            data["venue"].x += 1
            data["venue"].x.grad = None
    assert len(batches) > 3
