"""Loops: limits, validation intervals, stopping and interruptions."""

import pytest
import pytorch_lightning as pl

from tests.hyscale.behaviour.task import Task, scenario


class OrderRecorder(pl.Callback):
    """Records the order of training and validation batches."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(("train", trainer.current_epoch, batch_idx))

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(("val", trainer.current_epoch, batch_idx))


def record_order(run, **options):
    order = OrderRecorder()
    return {**run.fit(Task(), callbacks=[order], **options), "order": order.seen}


@scenario
def validation_within_an_epoch(run):
    return record_order(run, val_check_interval=1)


@scenario
def an_interruption(run):
    exceptions = []

    class Pressed(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 4:
                trainer.strategy.barrier()
                raise KeyboardInterrupt

        def on_exception(self, trainer, module, exception):
            exceptions.append(type(exception).__name__)

    trainer, module = run.trainer(callbacks=[Pressed()]), Task()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(module, datamodule=run.data())
    return {"exceptions": exceptions, "steps": trainer.global_step, "interrupted": trainer.interrupted}
