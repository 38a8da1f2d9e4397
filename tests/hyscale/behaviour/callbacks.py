"""Lightning's callbacks: those that stop, average, prune, write and measure."""

import time

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from pytorch_lightning.loggers import CSVLogger

from tests.hyscale.behaviour.task import Task, of_split, scenario, weights


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
def training_stops_early_by_a_metric_of_training(run):
    stop = EarlyStopping("train_loss_epoch", stopping_threshold=1.0, check_on_train_epoch_end=True)
    out = run.fit(Rated(), callbacks=[stop], max_epochs=12, limit_val_batches=0)
    return {**out, "stopped": stop.stopped_epoch, "best": float(stop.best_score)}


@scenario
def training_stops_when_it_diverges(run):
    stop = EarlyStopping("train_loss_step", divergence_threshold=1.05, check_on_train_epoch_end=True)
    out = run.fit(Task(lr=50.0), callbacks=[stop], max_epochs=6)
    return {**out, "stopped": stop.stopped_epoch, "reason": str(stop.stopping_reason)}


@scenario
def training_stops_when_the_loss_is_not_finite(run):
    class Broken(Task):
        def validation_step(self, batch, batch_idx):
            value = float("nan") if self.current_epoch == 1 else 1.0
            self.tell("val_loss", torch.tensor(value), batch, "val")

    stop = EarlyStopping("val_loss", check_finite=True)
    out = run.fit(Broken(), callbacks=[stop], max_epochs=5)
    assert stop.stopped_epoch == 1
    return {"weights": out["weights"], "stopped": stop.stopped_epoch}


@scenario
def training_goes_on_to_its_least_epochs(run):
    stop = EarlyStopping("val_loss", patience=0, min_delta=10.0)
    return run.fit(Task(), callbacks=[stop], min_epochs=3, max_epochs=6)


@scenario
def training_goes_on_to_its_least_steps(run):
    class Stopping(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = True

    out = run.fit(Task(), callbacks=[Stopping()], min_steps=4, max_epochs=6)
    assert out["steps"] == 4
    return out


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
def stochastic_weight_averaging(run):
    return run.fit(Task(), callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=2)], max_epochs=5)


@scenario
def weight_averaging(run):
    callback = WeightAveraging()
    out = run.fit(Task(), callbacks=[callback])
    return {**out, "averages": int(callback._average_model.n_averaged)}


@scenario
def exponential_weight_averaging(run):
    return run.fit(Task(), callbacks=[EMAWeightAveraging(decay=0.6, update_every_n_steps=2)], max_epochs=3)


@scenario
def averaged_weights_are_saved(run):
    class Average(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(run.folder / "last.ckpt")

    out = run.fit(Task(), callbacks=[EMAWeightAveraging(decay=0.6), Average()])
    saved = torch.load(run.folder / "last.ckpt", weights_only=False)
    state, current = saved["state_dict"], saved["current_model_state"]
    names = sorted(state)
    return {
        **out,
        "average": torch.cat([state[name].flatten() for name in names]),
        "current": torch.cat([current[f"{name}"].flatten() for name in sorted(current)]),
    }


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
def a_timer_that_has_time(run):
    timer = Timer(duration={"hours": 2})
    out = run.fit(Task(), callbacks=[timer])
    assert timer.time_elapsed("train") > 0
    return out


@scenario
def a_timer_whose_time_is_over(run):
    class Waiting(Task):
        def training_step(self, batch, batch_idx):
            time.sleep(0.002)
            return super().training_step(batch, batch_idx)

    timer = Timer(duration={"milliseconds": 1}, interval="step")
    out = run.fit(Waiting(), callbacks=[timer])
    assert out["steps"] == 1
    return out


@scenario
def max_time(run):
    return run.fit(Task(), max_time="00:02:00:00")


@scenario
def lambdas_as_callback(run):
    calls = []
    callback = LambdaCallback(
        on_train_epoch_start=lambda *_: calls.append("epoch"),
        on_train_batch_end=lambda trainer, module, outputs, batch, number: calls.append(number),
        on_before_optimizer_step=lambda *_: calls.append("step"),
    )
    return {**run.fit(Task(), callbacks=[callback]), "calls": calls}


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
def throughput_is_measured(run):
    monitor = ThroughputMonitor(lambda batch: of_split(batch.y, batch, "train").numel(), window_size=2)
    logger = CSVLogger(run.folder)
    out = run.fit(Task(), callbacks=[monitor], logger=logger)
    names = sorted(monitor._throughputs)
    return {**out, "stages": [str(name) for name in names]}


@scenario
def a_progress_bar_counts(run):
    class Bar(TQDMProgressBar):
        seen = ()

        def on_train_batch_end(self, trainer, module, *args):
            super().on_train_batch_end(trainer, module, *args)
            self.seen = (*self.seen, (self.train_progress_bar.n, self.train_progress_bar.total))

        def get_metrics(self, trainer, module):
            found = super().get_metrics(trainer, module)
            return {name: value for name, value in found.items() if name != "v_num"}

    class Shown(Task):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.tell("shown", loss, batch, "train", prog_bar=True)
            return loss

    bar = Bar()
    out = run.fit(Shown(), callbacks=[bar], enable_progress_bar=True)
    seen = {"rank 0": bar.seen} if out["trainer"].is_global_zero else {}
    return {**out, **seen, "shown": float(out["trainer"].progress_bar_metrics["shown"])}


@scenario
def a_summary_of_the_model(run):
    class Kept(ModelSummary):
        @staticmethod
        def summarize(summary_data, total_parameters, trainable_parameters, *args, **kwargs):
            Kept.seen = (total_parameters, trainable_parameters)

    Kept.seen = None
    out = run.fit(Task(), callbacks=[Kept()], enable_model_summary=True)
    return {**out, **({"rank 0": Kept.seen} if out["trainer"].is_global_zero else {})}


@scenario
def the_devices_are_watched(run):
    out = run.fit(Task(), callbacks=[DeviceStatsMonitor(cpu_stats=False)], logger=CSVLogger(run.folder))
    return {"weights": out["weights"]}


@scenario
def the_module_brings_callbacks(run):
    class Bringing(Task):
        def configure_callbacks(self):
            return [EarlyStopping("val_loss", patience=0, min_delta=10.0)]

    out = run.fit(Bringing(), max_epochs=5)
    assert out["epochs"] == 2
    return out


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


@scenario
def weights_before_and_after_validation(run):
    """A callback that swaps weights for the time of validation, as averages do."""

    class Swap(pl.Callback):
        def on_validation_start(self, trainer, module):
            self.kept = weights(module)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.5)

        def on_validation_end(self, trainer, module):
            torch.nn.utils.vector_to_parameters(self.kept, module.parameters())

    return run.fit(Task(), callbacks=[Swap()])
