"""Validation, testing and prediction alone, the tuner and the profilers."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import SimpleProfiler
from pytorch_lightning.tuner import Tuner
from torch_geometric.loader import NeighborLoader

from lightning_gnn import NeighborSampler
from tests.hyscale.behaviour.task import Task, graph, metrics, of_split, scenario, shown, weights


@scenario
def validation_alone(run):
    trainer = run.trainer()
    found = trainer.validate(Task(), datamodule=run.data(), verbose=False)
    assert found[0]["val_loss"] > 0
    return {"found": found, "metrics": metrics(trainer)}


@scenario
def testing_alone(run):
    trainer = run.trainer()
    found = trainer.test(Task(), datamodule=run.data(), verbose=False)
    assert found[0]["test_loss"] > 0
    return {"found": found, "metrics": metrics(trainer)}


@scenario
def prediction_alone(run):
    found = run.trainer().predict(Task(), datamodule=run.data())
    return {"found": torch.cat(found), "batches": len(found)}


@scenario
def prediction_after_training(run):
    module, data, trainer = Task(), run.data(), run.trainer()
    trainer.fit(module, datamodule=data)
    found = trainer.predict(module, datamodule=data)
    assert torch.cat(found).shape[0] >= 60
    return {**shown(trainer, module), "found": torch.cat(found)}


@scenario
def prediction_of_nothing(run):
    class Silent(Task):
        def predict_step(self, batch, batch_idx):
            return None

    return {"found": run.trainer().predict(Silent(), datamodule=run.data())}


@scenario
def all_stages_one_after_another(run):
    module, data, trainer = Task(), run.data(), run.trainer()
    seen = [trainer.validate(module, datamodule=data, verbose=False)]
    trainer.fit(module, datamodule=data)
    seen += [trainer.validate(module, datamodule=data, verbose=False)]
    seen += [trainer.test(module, datamodule=data, verbose=False)]
    seen += [torch.cat(trainer.predict(module, datamodule=data))]
    return {**shown(trainer, module), "seen": seen}


@scenario
def validation_limited(run):
    return {"found": run.trainer(limit_val_batches=1).validate(Task(), datamodule=run.data(), verbose=False)}


@scenario
def validation_by_a_metric_of_validation_after_training(run):
    module, data, trainer = Task(), run.data(), run.trainer()
    trainer.fit(module, datamodule=data)
    before = metrics(trainer)["val_loss"]
    found = trainer.validate(module, datamodule=data, verbose=False)[0]["val_loss"]
    assert abs(before - found) < 1e-6
    return {"found": found}


@scenario
def gradients_in_validation(run):
    class Sloped(Task):
        def validation_step(self, batch, batch_idx):
            with torch.enable_grad():
                batch.x.requires_grad_(True)
                self.loss(batch, "val").backward()
            assert batch.x.grad is not None
            batch.x.requires_grad_(False)
            self.zero_grad()

    return run.fit(Sloped(), inference_mode=False)


@scenario
def modes_in_all_stages(run):
    seen = []

    class Modes(Task):
        def training_step(self, batch, batch_idx):
            seen.append(("training", self.training, torch.is_grad_enabled()))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.append(("validation", self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    module = Modes()
    module.net.dropout_is = torch.nn.Dropout(0.5).eval()
    out = run.fit(module)
    return {**out, "seen": seen, "kept": module.net.dropout_is.training}


@scenario
def a_rate_is_found(run):
    class Rated(Task):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.lr)

    module, data, trainer = Rated(), run.data(), run.trainer(max_epochs=3)
    before = weights(module)
    finder = Tuner(trainer).lr_find(
        module, datamodule=data, num_training=8, min_lr=1e-3, max_lr=1.0, early_stop_threshold=None
    )
    assert torch.equal(before, weights(module))
    trainer.fit(module, datamodule=data)
    return {**shown(trainer, module), "losses": finder.results["loss"], "rates": finder.results["lr"], "lr": module.lr}


@scenario(full=False)
def a_batch_size_is_found(run):
    class Sized(pl.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.batch_size = 2

        def train_dataloader(self):
            return run.data(batch_size=self.batch_size).train_dataloader()

        def val_dataloader(self):
            return run.data().val_dataloader()

    module, data, trainer = Task(), Sized(), run.trainer(max_epochs=1)
    found = Tuner(trainer).scale_batch_size(module, datamodule=data, steps_per_trial=1, max_trials=2)
    trainer.fit(module, datamodule=data)
    return {**shown(trainer, module), "found": found, "size": data.batch_size}


@scenario
def the_users_own_sections_of_the_profiler(run):
    profiler = SimpleProfiler()

    class Profiled(Task):
        def forward(self, batch):
            with self.trainer.profiler.profile("my own section"):
                return super().forward(batch)

    out = run.fit(Profiled(), profiler=profiler)
    durations = profiler.recorded_durations
    return {**out, "count": len(durations["my own section"]), "steps": len(durations["run_training_batch"])}


@scenario
def the_profilers_sections(run):
    profiler = SimpleProfiler()
    out = run.fit(Task(), profiler=profiler)
    names = ("run_training_epoch", "run_training_batch", "[LightningModule]Task.on_train_batch_end")
    names += ("[LightningModule]Task.optimizer_step", "[LightningModule]Task.configure_optimizers")
    return {**out, "counts": {name: len(profiler.recorded_durations[name]) for name in names}}


def pyg_loader(**options):
    data = graph()
    sampler = NeighborSampler(data, [-1, -1], seed=5)
    return NeighborLoader(data, [-1, -1], data.train_mask, batch_size=10, neighbor_sampler=sampler, **options)


@scenario(full=False)
def pygs_own_loader(run):
    module, trainer = Task(), run.trainer()
    trainer.fit(module, pyg_loader(shuffle=False))
    return shown(trainer, module)


@scenario(full=False)
def pygs_own_loader_with_a_transform(run):
    def double(batch):
        batch.x = batch.x * 2
        return batch

    module, trainer = Task(), run.trainer()
    trainer.fit(module, pyg_loader(shuffle=False, transform=double))
    return shown(trainer, module)


@scenario(full=False)
def a_transform_of_batches(run):
    def scale(batch):
        batch.x = batch.x * 0.5 + batch.n_id.unsqueeze(1) / 60
        return batch

    return run.fit(Task(), run.data(transform=scale))


@scenario(full=False)
def a_last_batch_of_one_seed(run):
    """One of two trainers has nothing to do in it."""
    return run.fit(Task(), run.data(batch_size=13))


@scenario(full=False)
def batches_of_one_seed(run):
    return run.fit(Task(), run.data(batch_size=1), limit_train_batches=4)


@scenario(full=False)
def the_last_batch_is_dropped(run):
    return run.fit(Task(), run.data(drop_last=True))


@scenario(full=False)
def batches_in_order(run):
    return run.fit(Task(), run.data(shuffle=False))


@scenario(full=False)
def batches_that_threads_prepare(run):
    return run.fit(Task(), run.data(num_workers=2))


@scenario(full=False)
def two_loaders_of_training(run):
    class Paired(Task):
        def training_step(self, batches, batch_idx):
            return sum(self.loss(batch) for batch in batches)

    module, trainer = Paired(), run.trainer()
    trainer.fit(module, [run.data().train_dataloader(), run.data(seed=6).train_dataloader()])
    return shown(trainer, module)


@scenario
def several_loaders_of_validation(run):
    class Several(Task):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.tell("val", self.loss(batch, "val") * (1 + dataloader_idx), batch, "val")
            self.tell(f"own_{dataloader_idx}", self.loss(batch, "val"), batch, "val", add_dataloader_idx=False)

    module, trainer = Several(), run.trainer()
    data = run.data()
    data.val_dataloader = lambda made=data.val_dataloader: [made(), made()]
    trainer.fit(module, datamodule=data)
    assert "val/dataloader_idx_1" in trainer.callback_metrics
    return shown(trainer, module)


@scenario
def outputs_of_validation_are_collected(run):
    class Collecting(Task):
        rows = ()

        def validation_step(self, batch, batch_idx):
            out = of_split(self(batch), batch, "val")
            gathered = self.all_gather(out.sum(0))
            self.rows = (*self.rows, gathered.reshape(-1, out.shape[1]).sum(0))

        def on_validation_epoch_end(self):
            self.log("collected", torch.stack(self.rows).sum(), sync_dist=True)
            self.rows = ()

    return run.fit(Collecting())
