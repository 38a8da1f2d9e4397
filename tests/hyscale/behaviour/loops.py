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
def validation_within_an_epoch(run):
    return ordered(run, val_check_interval=1)


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
