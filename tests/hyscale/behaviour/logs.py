"""Logged values: per step and epoch, for batches and ranks of different sizes."""

import pytorch_lightning as pl
import torch
from torchmetrics.classification import MulticlassAccuracy

from tests.hyscale.behaviour.task import CLASSES, Task, scenario, select_split


class MetricRecorder(pl.Callback):
    """Stores the metrics that are logged after each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *args):
        self.seen.append({name: float(value) for name, value in trainer.logged_metrics.items()})

    def on_validation_batch_end(self, trainer, *args):
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train_and_log(run, training, **options):
    """Train a module whose steps log with the given functions."""

    class Logging(Task):
        def training_step(self, batch, batch_idx):
            out = select_split(self(batch), batch, "train")
            loss = torch.nn.functional.cross_entropy(out, select_split(batch.y, batch, "train"))
            training(self, batch, batch_idx, out, loss)
            return loss

    steps = MetricRecorder()
    out = run.fit(Logging(), callbacks=[steps], **options)
    assert out["metrics"]
    logged = {name: float(value) for name, value in out["trainer"].logged_metrics.items()}
    return {**out, "each": steps.seen, "logged": logged}


@scenario
def a_mean_without_a_batch_size(run):
    return train_and_log(run, lambda module, batch, batch_idx, out, loss: module.log("loss", loss, on_epoch=True))


@scenario
def a_metric_by_step(run):
    steps = MetricRecorder()

    class Measured(Task):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

        def training_step(self, batch, batch_idx):
            out, y = select_split(self(batch), batch, "train"), select_split(batch.y, batch, "train")
            self.accuracy(out, y)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            return torch.nn.functional.cross_entropy(out, y)

    return {**run.fit(Measured(), callbacks=[steps]), "each": steps.seen}


@scenario
def in_all_hooks(run):
    class Everywhere(Task):
        def on_train_start(self):
            self.log("train_start", 1.0)

        def on_train_epoch_start(self):
            self.log("epoch_start", self.current_epoch)

        def on_train_batch_start(self, batch, batch_idx):
            self.log("batch_start", float(batch_idx), on_epoch=True, on_step=True, batch_size=1)

        def on_before_backward(self, loss):
            self.log("before_backward", 2.0)

        def on_after_backward(self):
            self.log("norm", self.net.convs[0].lin_l.weight.grad.norm())

        def on_before_optimizer_step(self, optimizer):
            self.log("before_step", self.net.convs[1].lin_l.weight.grad.norm())

        def on_before_zero_grad(self, optimizer):
            self.log("zero", 3.0)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("batch_end", float(batch_idx), reduce_fx="sum", on_epoch=True, on_step=False)

        def on_train_epoch_end(self):
            self.log("epoch_end", compute_weights_norm(self))

        def on_validation_start(self):
            self.log("val_start", 4.0)

        def on_validation_epoch_start(self):
            self.log("val_epoch_start", 5.0)

        def on_validation_batch_end(self, outputs, batch, batch_idx):
            self.log("val_batch_end", float(batch_idx), batch_size=1)

        def on_validation_epoch_end(self):
            self.log("val_epoch_end", compute_weights_norm(self))

    out = run.fit(Everywhere())
    assert len(out["metrics"]) > 13
    return out


def compute_weights_norm(module):
    return sum(parameter.detach().square().sum() for parameter in module.parameters())


@scenario
def by_rank_zero_alone(run):
    def training(module, batch, batch_idx, out, loss):
        if batch_idx == 0:
            module.log("step", float(module.current_epoch), rank_zero_only=True, on_step=True, on_epoch=False)

    out = train_and_log(run, training)
    metrics, each, logged = out.pop("metrics"), out.pop("each"), out.pop("logged")
    del each, logged
    return {**out, **({"rank 0": metrics} if out["trainer"].is_global_zero else {})}


@scenario
def gathered_from_all_ranks(run):
    class Gathering(Task):
        def training_step(self, batch, batch_idx):
            count = torch.tensor(float(select_split(batch.y, batch, "train").numel()))
            everywhere = self.all_gather(count)
            self.total = float(everywhere.sum())
            self.summed = float(self.trainer.strategy.reduce(count, reduce_op="sum"))
            return super().training_step(batch, batch_idx)

    module = Gathering()
    out = run.fit(module)
    assert module.total == module.summed
    return {**out, "total": module.total}
