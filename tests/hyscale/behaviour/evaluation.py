"""Validation, testing and prediction alone, the tuner and the profilers."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.tuner import Tuner
from torch_geometric.loader import NeighborLoader

from lightning_gnn import NeighborSampler
from tests.hyscale.behaviour.task import Task, graph, scenario, shown, weights


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
def a_last_batch_of_one_seed(run):
    """One of two trainers has nothing to do in it."""
    return run.fit(Task(), run.data(batch_size=13))


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
