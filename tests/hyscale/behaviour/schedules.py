"""Schedules of the learning rate, and callbacks that follow it."""

import pytest
import torch
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.loggers import CSVLogger
from torch.optim import lr_scheduler

from tests.hyscale.behaviour.task import Task, scenario


class Scheduled(Task):
    """Keeps the rate that each step had.

    Args:
        make: Takes the module and its optimizer, and returns the scheduler as ``configure_optimizers`` may.
    """

    def __init__(self, make):
        super().__init__()
        self.make, self.rates = make, []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        return {"optimizer": optimizer, "lr_scheduler": self.make(self, optimizer)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def follow(run, make, **options):
    module = Scheduled(make)
    out = run.fit(module, **options)
    assert len(set(module.rates)) > 1
    return {**out, "rates": module.rates}


@scenario
def a_rate_by_epoch(run):
    return follow(run, lambda module, optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), max_epochs=3)


@scenario
def a_rate_by_step(run):
    def make(module, optimizer):
        return {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step", "frequency": 2}

    return follow(run, make, max_epochs=3)


@scenario
def a_rate_by_step_with_accumulation(run):
    def make(module, optimizer):
        return {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}

    return follow(run, make, accumulate_grad_batches=2)


@scenario
def a_rate_over_all_steps(run):
    def make(module, optimizer):
        module.total = module.trainer.estimated_stepping_batches
        return {"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=module.total), "interval": "step"}

    return follow(run, make)


@scenario
def a_rate_that_falls_on_a_plateau_of_validation(run):
    def make(module, optimizer):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"scheduler": scheduler, "monitor": "val_loss"}

    return follow(run, make, max_epochs=4)


@scenario
def a_rate_that_falls_on_a_plateau_of_training(run):
    def make(module, optimizer):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"scheduler": scheduler, "monitor": "train_loss_epoch"}

    return follow(run, make, max_epochs=4, limit_val_batches=0)


@scenario
def a_rate_that_falls_on_a_plateau_of_steps(run):
    def make(module, optimizer):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.01)
        return {"scheduler": scheduler, "monitor": "train_loss_step", "interval": "step"}

    return follow(run, make)


@scenario
def a_monitor_that_is_missing(run):
    def make(module, optimizer):
        return {"scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "nothing"}

    with pytest.raises(Exception, match="conditioned on metric nothing"):
        follow(run, make)
    return {}


@scenario
def a_rate_by_group(run):
    class Grouped(Task):
        rates = ()

        def configure_optimizers(self):
            first, second = self.net.convs
            groups = [{"params": first.parameters(), "lr": 0.3}, {"params": second.parameters(), "lr": 0.1}]
            optimizer = torch.optim.SGD(groups)
            return [optimizer], [lr_scheduler.LambdaLR(optimizer, [lambda e: 0.5**e, lambda e: 1 / (1 + e)])]

        def on_train_epoch_end(self):
            self.rates = (*self.rates, *(group["lr"] for group in self.optimizers().param_groups))

    module = Grouped()
    return {**run.fit(module, max_epochs=3), "rates": module.rates}


@scenario
def the_module_steps_the_scheduler(run):
    class Own(Scheduled):
        calls = 0

        def lr_scheduler_step(self, scheduler, metric):
            self.calls += 1
            if self.calls % 2:
                scheduler.step()

    module = Own(lambda module, optimizer: {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"})
    return {**run.fit(module), "rates": module.rates, "calls": module.calls}


@scenario
def a_rate_that_is_monitored(run):
    monitor = LearningRateMonitor(logging_interval="step", log_momentum=True)
    module = Scheduled(lambda module, optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5))
    out = run.fit(module, callbacks=[monitor], logger=CSVLogger(run.folder))
    return {**out, "rates": module.rates, "monitored": {name: list(rates) for name, rates in monitor.lrs.items()}}


@scenario
def a_warm_up_then_a_fall(run):
    def make(module, optimizer):
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        fall = lr_scheduler.CosineAnnealingLR(optimizer, 3)
        return {"scheduler": lr_scheduler.SequentialLR(optimizer, [warm, fall], [3]), "interval": "step"}

    return follow(run, make)
