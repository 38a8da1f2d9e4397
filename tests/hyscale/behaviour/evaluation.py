"""Validation, testing and prediction without training; validation with several loaders."""

import torch
from torch_geometric.loader import NeighborLoader

from lightning_gnn import NeighborSampler
from tests.hyscale.behaviour.task import Task, make_graph, scenario, summarize_training


@scenario
def all_stages_one_after_another(run):
    module, data, trainer = Task(), run.data(), run.trainer()
    seen = [trainer.validate(module, datamodule=data, verbose=False)]
    trainer.fit(module, datamodule=data)
    seen += [trainer.validate(module, datamodule=data, verbose=False)]
    seen += [trainer.test(module, datamodule=data, verbose=False)]
    seen += [torch.cat(trainer.predict(module, datamodule=data))]
    return {**summarize_training(trainer, module), "seen": seen}


def pyg_loader(**options):
    data = make_graph()
    sampler = NeighborSampler(data, [-1, -1], seed=5)
    return NeighborLoader(data, [-1, -1], data.train_mask, batch_size=10, neighbor_sampler=sampler, **options)


@scenario(full=False)
def pygs_own_loader(run):
    module, trainer = Task(), run.trainer()
    trainer.fit(module, pyg_loader(shuffle=False))
    return summarize_training(trainer, module)


@scenario
def several_loaders_of_validation(run):
    class Several(Task):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log_value("val", self.loss(batch, "val") * (1 + dataloader_idx), batch, "val")
            self.log_value(f"own_{dataloader_idx}", self.loss(batch, "val"), batch, "val", add_dataloader_idx=False)

    module, trainer = Several(), run.trainer()
    data = run.data()
    data.val_dataloader = lambda made=data.val_dataloader: [made(), made()]
    trainer.fit(module, datamodule=data)
    assert "val/dataloader_idx_1" in trainer.callback_metrics
    return summarize_training(trainer, module)
