"""Lightning's callbacks: those that stop, average, prune, write and measure."""

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    ModelPruning,
)

from tests.hyscale.behaviour.task import Task, scenario


class Rated(Task):
    """A rate so high that the loss of validation rises after some epochs."""

    def __init__(self):
        super().__init__(lr=1.5)


@scenario
def training_stops_early(run):
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.02)
    out = run.fit(Rated(), callbacks=[stop], max_epochs=12)
    assert 0 < stop.stopped_epoch < 11
    return {**out, "stopped": stop.stopped_epoch, "best": float(stop.best_score), "waited": stop.wait_count}


@scenario
def one_rank_asks_to_stop(run):
    class Stopping(pl.Callback):
        def on_validation_end(self, trainer, module):
            mean = trainer.strategy.reduce_boolean_decision(trainer.is_global_zero, all=False)
            trainer.should_stop = trainer.should_stop or mean

    out = run.fit(Task(), callbacks=[Stopping()], max_epochs=6)
    assert out["epochs"] == 1
    return out


@scenario
def exponential_weight_averaging(run):
    return run.fit(Task(), callbacks=[EMAWeightAveraging(decay=0.6, update_every_n_steps=2)], max_epochs=3)


@scenario
def pruning(run):
    module = Task()
    pruned = [(module.net.convs[0].lin_l, "weight"), (module.net.convs[1].lin_r, "weight")]
    callback = ModelPruning("l1_unstructured", pruned, amount=0.3, use_lottery_ticket_hypothesis=False)
    out = run.fit(module, callbacks=[callback])
    zeros = [int((getattr(layer, name) == 0).sum()) for layer, name in pruned]
    assert sum(zeros) > 0
    return {**out, "zeros": zeros}


@scenario
def predictions_are_written(run):
    class Writer(BasePredictionWriter):
        def __init__(self):
            super().__init__("batch_and_epoch")
            self.batches, self.epochs = [], []

        def write_on_batch_end(self, trainer, module, prediction, indices, batch, number, loader):
            self.batches.append((number, loader, tuple(prediction.shape[1:])))

        def write_on_epoch_end(self, trainer, module, predictions, indices):
            self.epochs.append(len(predictions))

    writer = Writer()
    run.trainer(callbacks=[writer]).predict(Task(), datamodule=run.data(), return_predictions=False)
    return {"batches": writer.batches, "epochs": writer.epochs}


@scenario
def an_error_reaches_callbacks(run):
    calls = []

    class Told(pl.Callback):
        def on_exception(self, trainer, module, exception):
            calls.append(f"{type(exception).__name__}: {exception}".split("\n")[0])

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                trainer.strategy.barrier()
                raise ValueError("enough")

    class Cleaned(Task):
        def teardown(self, stage):
            calls.append(f"teardown {stage}")

    with pytest.raises(ValueError, match="enough"):
        run.fit(Cleaned(), callbacks=[Told()])
    return {"calls": calls[:1]}
