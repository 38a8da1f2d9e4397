"""Lightning's callbacks: early stopping and weight averaging."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging

from tests.hyscale.behaviour.task import Task, scenario


class Rated(Task):
    """Uses a learning rate so high that the validation loss rises after some epochs."""

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
