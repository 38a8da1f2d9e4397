"""Schedules of the learning rate, and callbacks that follow it."""

import torch
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
def a_rate_that_falls_on_a_plateau_of_validation(run):
    def make(module, optimizer):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"scheduler": scheduler, "monitor": "val_loss"}

    return follow(run, make, max_epochs=4)
