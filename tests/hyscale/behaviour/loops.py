"""How long the loops run: limits, intervals, ends and interruptions."""

import pytest
import pytorch_lightning as pl

from tests.hyscale.behaviour.task import Task, scenario


class Order(pl.Callback):
    """Writes down in which order training and validation came."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(("train", trainer.current_epoch, batch_idx))

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(("val", trainer.current_epoch, batch_idx))


def ordered(run, **options):
    order = Order()
    return {**run.fit(Task(), callbacks=[order], **options), "order": order.seen}


@scenario
def a_part_of_the_batches(run):
    out = ordered(run, limit_train_batches=0.7, limit_val_batches=0.5)
    assert out["steps"] == 4
    return out


@scenario
def validation_within_an_epoch(run):
    return ordered(run, val_check_interval=1)


@scenario
def loaders_are_made_anew(run):
    data = run.data()
    made, calls = data.train_dataloader, []
    data.train_dataloader = lambda: (calls.append(1), made())[1]
    out = run.fit(Task(), data, reload_dataloaders_every_n_epochs=2, max_epochs=5)
    assert len(calls) > 1
    return {**out, "calls": len(calls)}


@scenario
def an_epoch_that_ends_early(run):
    class Ending(Task):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 and self.current_epoch == 0 else None

    out = run.fit(Ending(), max_epochs=3)
    assert out["steps"] == 7
    return out


@scenario
def an_interruption(run):
    told = []

    class Pressed(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 4:
                trainer.strategy.barrier()
                raise KeyboardInterrupt

        def on_exception(self, trainer, module, exception):
            told.append(type(exception).__name__)

    trainer, module = run.trainer(callbacks=[Pressed()]), Task()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(module, datamodule=run.data())
    return {"told": told, "steps": trainer.global_step, "interrupted": trainer.interrupted}


@scenario
def a_loader_without_a_strategys_help(run):
    module, data = Task(), run.data()
    return run.fit(module, data, use_distributed_sampler=False)
