import time

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnn.callbacks import BestCheckpoint, LearningCurves, Throughput
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GraphSAGE, NodeClassifier

DATA = planted_power_law(300, 2000, 3, 8, split=(0.5, 0.2, 0.2))


def train(datamodule, *callbacks, epochs=3, **kwargs):
    module = NodeClassifier(GraphSAGE(8, 8, 2, 3), 3)
    trainer = pl.Trainer(
        callbacks=list(callbacks), max_epochs=epochs, logger=False, enable_progress_bar=False, accelerator="cpu",
        enable_checkpointing=False, enable_model_summary=False, **kwargs,
    )  # fmt: skip
    trainer.fit(module, datamodule)
    return trainer


@pytest.mark.parametrize("num_workers", [0, 2])
def test_neighbour_sampling(num_workers):
    throughput = Throughput()
    datamodule = NeighborDataModule(DATA, num_neighbors=[4, 4], batch_size=50, num_workers=num_workers)
    trainer = train(datamodule, throughput)
    assert len(throughput.epochs) == 3
    for epoch in throughput.epochs:
        assert epoch.batches == 3
        assert epoch.sampling_s > 0
        assert epoch.features_s > 0
        assert epoch.model_s + epoch.wait_s <= epoch.epoch_time_s * 1.05
        assert epoch.sampled_edges_per_s == pytest.approx(epoch.edges / epoch.sampling_s)
    times = trainer.train_dataloader.times
    assert sum(epoch.edges for epoch in throughput.epochs) == times.edges
    assert trainer.callback_metrics["mteps"] == pytest.approx(throughput.epochs[-1].mteps)


def test_full_graph_counts_all_edges():
    throughput = Throughput()
    train(FullGraphDataModule(DATA), throughput)
    assert [epoch.edges for epoch in throughput.epochs] == [2000] * 3
    assert throughput.summary().sampling_s is None
    assert throughput.summary().sampled_edges_per_s is None


def test_validation_is_left_out_and_waiting_is_seen():
    class Slow(pl.Callback):
        def on_validation_batch_start(self, *args):
            time.sleep(0.3)

    class SlowData(Data):
        pass

    class SlowList(list):
        def __getitem__(self, index):
            time.sleep(0.1)
            return super().__getitem__(index)

    class Module(FullGraphDataModule):
        def train_dataloader(self):
            return DataLoader(SlowList([self.data]), batch_size=None, collate_fn=lambda data: data)

    throughput = Throughput()
    train(Module(DATA), Slow(), throughput)
    summary = throughput.summary()
    assert summary.epoch_time_s < 0.3
    assert 0.1 <= summary.wait_s <= summary.epoch_time_s


def test_curves_keep_the_epochs_behind_the_checkpoint_that_is_tested(tmp_path):
    curves, datamodule = LearningCurves(), NeighborDataModule(DATA, num_neighbors=[4, 4], batch_size=50)
    trainer = train(datamodule, curves)
    rows = list(curves.epochs)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    curves.epochs = [*rows, {"epoch": 3}]
    trainer.test(trainer.lightning_module, datamodule, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert curves.epochs == [*rows, {"epoch": 3}]
    tested = LearningCurves()  # without training, a checkpoint's own history is shown
    trainer.callbacks = [tested]
    trainer.test(trainer.lightning_module, datamodule, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert tested.epochs == rows


def test_best_checkpoint_is_kept_when_the_directory_changes(tmp_path):
    (tmp_path / "best.ckpt").touch()
    old = BestCheckpoint(tmp_path, monitor="val_acc", mode="max")
    old.best_model_path, old.best_model_score = str(tmp_path / "best.ckpt"), torch.tensor(0.9)
    old.best_k_models = {old.best_model_path: old.best_model_score}
    new = BestCheckpoint(tmp_path / "new", monitor="val_acc", mode="max")
    new.load_state_dict(old.state_dict())
    assert new.best_model_score == 0.9
    (tmp_path / "best.ckpt").unlink()
    forgetful = BestCheckpoint(tmp_path / "new", monitor="val_acc", mode="max")
    forgetful.load_state_dict(old.state_dict())
    assert forgetful.best_model_score is None
