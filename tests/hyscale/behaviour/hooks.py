"""The order in which hooks are called, and what they may change."""

import copy

import pytorch_lightning as pl

from tests.hyscale.behaviour.task import Task, scenario

_STAGES = ("train", "validation", "test", "predict")
_HOOKS = [
    *(f"on_{stage}_{when}" for stage in _STAGES for when in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{stage}_batch_{when}" for stage in _STAGES for when in ("start", "end")),
    *(f"on_{stage}_model_{mode}" for stage in ("validation", "test", "predict") for mode in ("eval", "train")),
    *("on_fit_start", "on_fit_end", "prepare_data", "setup", "teardown", "configure_model"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"),
    *("on_save_checkpoint", "on_load_checkpoint"),
]
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "optimizer_step")
_STEPS += ("optimizer_zero_grad", "backward", "configure_gradient_clipping", "lr_scheduler_step")
_OF_CALLBACKS = [name for name in _HOOKS if hasattr(pl.Callback, name)] + [
    "on_sanity_check_start",
    "on_sanity_check_end",
]


def record_calls(base, names, calls, prefix=""):
    """Return a subclass whose methods of these names append their name to ``calls``."""

    def wrap(name):
        def method(self, *args, **kwargs):
            calls.append(prefix + name)
            return getattr(super(made, self), name)(*args, **kwargs)

        method.__name__ = name
        original = getattr(base, name)
        method.__wrapped__ = original
        return method

    made = type(base.__name__, (base,), {name: wrap(name) for name in names if hasattr(base, name)})
    return made


def collect_calls(run, use, base=Task, **options):
    calls = []
    module = record_calls(base, [*_HOOKS, *_STEPS], calls)()
    callback = record_calls(pl.Callback, _OF_CALLBACKS, calls, "callback ")()
    trainer = run.trainer(callbacks=[callback], **options)
    out = use(trainer, module)
    assert len(calls) > 20
    return {"calls": calls, **(out or {})}


@scenario
def hooks_of_fitting(run):
    return collect_calls(run, lambda trainer, module: trainer.fit(module, datamodule=run.data()))


@scenario
def hooks_of_prediction(run):
    return collect_calls(run, lambda trainer, module: trainer.predict(module, datamodule=run.data()) and None)


@scenario
def hooks_change_batches(run):
    class Changing(Task):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return change_features(batch, batch.x * 0.5)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return change_features(batch, batch.x + 1.0)

    return run.fit(Changing())


def change_features(batch, x):
    """Return a batch with other features; a full graph is one object for all steps and stays unchanged."""
    batch = copy.copy(batch)
    batch.x = x
    return batch
