"""Learning-rate schedules, and callbacks that follow them."""

import torch
from torch.optim import lr_scheduler

from tests.hyscale.behaviour.task import Task, scenario


class Scheduled(Task):
    """Records the learning rate of each step; ``make(module, optimizer)`` returns the scheduler."""

    def __init__(self, make):
        super().__init__()
        self.make, self.rates = make, []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        return {"optimizer": optimizer, "lr_scheduler": self.make(self, optimizer)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def train_with_schedule(run, make, **options):
    module = Scheduled(make)
    out = run.fit(module, **options)
    assert len(set(module.rates)) > 1
    return {**out, "rates": module.rates}


@scenario
def a_rate_that_falls_on_a_plateau_of_validation(run):
    def make(module, optimizer):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"scheduler": scheduler, "monitor": "val_loss"}

    return train_with_schedule(run, make, max_epochs=4)
