import re
import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.tuner import Tuner
from torch_geometric.nn import GraphSAGE

from lightning_gnn.datamodules.node import NeighborDataModule
from tests.batching_data import small_data
from tests.full_graph import launch


class Model(pl.LightningModule):
    """Logs the training seeds; dropout and OneCycleLR make resuming hard."""

    def __init__(self):
        super().__init__()
        self.model = GraphSAGE(12, 16, 2, 4, dropout=0.5)
        self.history = []

    def training_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
        self.history.append((batch_idx, batch.input_id.tolist(), batch.e_id.sum().item(), loss.item()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", batch.x.mean(), batch_size=batch.batch_size)

    def test_step(self, batch, batch_idx):
        self.log("test", 1.0, batch_size=batch.batch_size)

    def predict_step(self, batch, batch_idx):
        return batch.n_id[: batch.batch_size]

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_trainer(**kwargs):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    kwargs.setdefault("enable_checkpointing", "callbacks" in kwargs)
    return pl.Trainer(**{**quiet, "max_epochs": 3, **kwargs})


def make_datamodule(**kwargs):
    return NeighborDataModule(small_data(), **{"num_neighbors": [4, 3], "batch_size": 32, "num_workers": 2, **kwargs})


def test_the_keywords_of_lightning_node_data_work():
    data = small_data()
    module = NeighborDataModule(
        data,
        input_train_nodes=torch.arange(50),
        input_val_nodes=data.val_mask,
        input_test_nodes=data.test_mask,
        num_neighbors=[4, 3],
        batch_size=16,
        num_workers=1,
        disjoint=False,
        pin_memory=True,
        persistent_workers=True,
        subgraph_type="directional",
        eval_loader_kwargs={"num_neighbors": [-1, -1], "batch_size": 64},
    )
    seen = torch.cat([batch.input_id for batch in module.train_dataloader()])
    assert sorted(seen.tolist()) == list(range(50))
    assert seen.tolist() != list(range(50))
    evaluated = list(module.val_dataloader())
    assert evaluated[0].batch_size == 64
    assert torch.cat([batch.input_id for batch in evaluated]).tolist() == data.val_mask.nonzero().view(-1).tolist()
    degrees = torch.bincount(data.edge_index[1], minlength=400)
    assert evaluated[0].num_sampled_edges[0] == int(degrees[evaluated[0].input_id].sum())
    assert "num_neighbors=[4, 3]" in repr(module)


def test_fit_test_and_predict():
    model, data = Model(), make_datamodule()
    run = make_trainer(max_epochs=1)
    run.fit(model, data)
    assert [step[0] for step in model.history] == list(range(len(data.train_dataloader())))
    run.test(model, data, verbose=False)
    predicted = torch.cat(run.predict(model, data))
    assert predicted.tolist() == list(range(400))


@pytest.mark.medium
@pytest.mark.parametrize("num_workers", [0, 3])
def test_epochs_differ_and_runs_repeat(num_workers):
    histories = []
    for seed in (1, 1, 2):
        pl.seed_everything(seed, verbose=False)
        model = Model()
        make_trainer(max_epochs=2).fit(model, make_datamodule(num_workers=num_workers))
        histories.append(model.history)
    assert histories[0] == histories[1] != histories[2]
    half = len(histories[0]) // 2
    first, second = ([seed for step in part for seed in step[1]] for part in (histories[0][:half], histories[0][half:]))
    assert sorted(first) == sorted(second)
    assert first != second
    assert histories[0][0][1:3] != histories[0][half][1:3]


@pytest.mark.medium
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resuming_in_mid_epoch_is_bit_exact(tmp_path, accumulate):
    def run(**kwargs):
        pl.seed_everything(5, verbose=False)
        model = Model()
        saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        make_trainer(callbacks=[saver], accumulate_grad_batches=accumulate).fit(model, make_datamodule(), **kwargs)
        return model

    whole = run()
    for step in (2, 4, 6):
        resumed = run(ckpt_path=tmp_path / f"step={step}.ckpt")
        assert resumed.history == whole.history[-len(resumed.history) :]
        batches = len(whole.history) // 3
        steps = -(-batches // accumulate)
        assert len(resumed.history) == len(whole.history) - step // steps * batches - step % steps * accumulate
        for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.medium
def test_a_resumed_run_keeps_its_seed(tmp_path):
    pl.seed_everything(5, verbose=False)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    whole = Model()
    make_trainer(callbacks=[saver]).fit(whole, make_datamodule())
    pl.seed_everything(99, verbose=False)
    resumed = Model()
    make_trainer(callbacks=[saver]).fit(resumed, make_datamodule(), ckpt_path=tmp_path / "step=3.ckpt")
    assert resumed.history == whole.history[3:]


@pytest.mark.medium
def test_resuming_with_another_batch_size_warns_in_mid_epoch_only(tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = Model()
    make_trainer(callbacks=[saver]).fit(whole, make_datamodule())
    steps = len(whole.history) // 3
    said = "within an epoch with batch_size=.*, but this run has batch_size=40: the epoch continues after 2 mini"
    for step, batch_size, warned in ((2, 40, True), (2, 32, False), (steps, 40, False)):
        resumed = make_datamodule(batch_size=batch_size)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            make_trainer().fit(Model(), resumed, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert any(re.search(said, str(warning.message)) for warning in found) == warned, step
        assert any("saved within an epoch" in str(warning.message) for warning in found) == warned, step


class Recorder(Model):
    validated = ()

    def validation_step(self, batch, batch_idx):
        self.validated += tuple(batch.input_id.tolist())


def train_on_rank(rank, folder, ckpt_path):
    """Train an epoch and save checkpoints; return the training and validation nodes, and the weights."""
    pl.seed_everything(1, verbose=False)
    model = Recorder()
    saver = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    run = make_trainer(devices=2, strategy="ddp", max_epochs=1, num_sanity_val_steps=0, callbacks=[saver])
    run.fit(model, make_datamodule(), ckpt_path=ckpt_path)
    return model.history, model.validated, [parameter.detach().numpy() for parameter in model.parameters()]


@pytest.mark.slow
def test_two_processes_share_the_seeds_and_resume_exactly(tmp_path):
    """Two gloo ranks see disjoint halves of an epoch, evaluate each node once, and resume bit for bit."""
    whole = launch.run(train_on_rank, 2, str(tmp_path / "whole"), None)
    data = small_data()
    train = [[seed for step in history for seed in step[1]] for history, _, _ in whole]
    assert len(train[0]) == len(train[1])
    assert set(train[0]) | set(train[1]) == set(data.train_mask.nonzero().view(-1).tolist())
    assert len(set(train[0]) & set(train[1])) <= 1  # with an odd number of seeds, one is repeated
    assert sorted(whole[0][1] + whole[1][1]) == data.val_mask.nonzero().view(-1).tolist()

    resumed = launch.run(train_on_rank, 2, str(tmp_path / "resumed"), str(tmp_path / "whole" / "step=2.ckpt"))
    for rank in (0, 1):
        assert resumed[rank][0] == whole[rank][0][2:]
        assert all((a == b).all() for a, b in zip(resumed[rank][2], whole[rank][2], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, 7])
def test_lightnings_tuner_scales_the_batch_size(own, tmp_path):
    datamodule = NeighborDataModule(
        small_data(),
        num_neighbors=[3, 2],
        batch_size=2,
        seed=1,
        eval_loader_kwargs={} if own is None else {"batch_size": own},
    )
    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    found = Tuner(trainer).scale_batch_size(model, datamodule=datamodule, max_trials=2, steps_per_trial=1)
    assert found == datamodule.batch_size == 4
    assert datamodule.train_dataloader().batch_size == 4
    assert datamodule.val_dataloader().batch_size == (own or 4)
    model.history.clear()
    trainer.fit(model, datamodule=datamodule)
    assert len(model.history[0][1]) == 4
    with pytest.raises(ValueError, match="at least 1"):
        datamodule.batch_size = 0
    assert datamodule.batch_size == 4


def test_a_class_of_the_users_own_may_have_a_batch_size_before_ours_knows_it():
    class Own(NeighborDataModule):
        def __init__(self, batch_size):
            self.batch_size = batch_size
            super().__init__(small_data(), num_neighbors=[2], batch_size=batch_size)

    assert Own(5).batch_size == 5
