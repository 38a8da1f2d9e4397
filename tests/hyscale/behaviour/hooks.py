"""Which hooks are called, in which order, and what they may change."""

import copy

import pytorch_lightning as pl
import torch

from tests.hyscale.behaviour.task import ByHand, Task, scenario

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


def telling(base, names, calls, prefix=""):
    """Return a subclass whose methods of these names write down that they were called."""

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


def calls_of(run, use, base=Task, **options):
    calls = []
    module = telling(base, [*_HOOKS, *_STEPS], calls)()
    callback = telling(pl.Callback, _OF_CALLBACKS, calls, "callback ")()
    trainer = run.trainer(callbacks=[callback], **options)
    out = use(trainer, module)
    assert len(calls) > 20
    return {"calls": calls, **(out or {})}


@scenario
def hooks_of_fitting(run):
    return calls_of(run, lambda trainer, module: trainer.fit(module, datamodule=run.data()))


@scenario
def hooks_of_fitting_with_accumulation(run):
    return calls_of(
        run,
        lambda trainer, module: trainer.fit(module, datamodule=run.data()),
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )


@scenario
def hooks_of_fitting_by_hand(run):
    return calls_of(run, lambda trainer, module: trainer.fit(module, datamodule=run.data()), ByHand)


@scenario
def hooks_of_fitting_after_a_sanity_check(run):
    return calls_of(
        run, lambda trainer, module: trainer.fit(module, datamodule=run.data()), num_sanity_val_steps=1, max_epochs=1
    )


@scenario
def hooks_of_fitting_without_validation(run):
    return calls_of(run, lambda trainer, module: trainer.fit(module, datamodule=run.data()), limit_val_batches=0)


@scenario
def hooks_of_going_on(run):
    run.fit(Task())["trainer"].save_checkpoint(run.folder / "end.ckpt")

    def use(trainer, module):
        trainer.fit(module, datamodule=run.data(), ckpt_path=run.folder / "end.ckpt")

    return calls_of(run, use, max_epochs=3)


@scenario
def hooks_of_evaluation(run):
    def use(trainer, module):
        data = run.data()
        trainer.validate(module, datamodule=data, verbose=False)
        trainer.test(module, datamodule=data, verbose=False)

    return calls_of(run, use)


@scenario
def hooks_of_prediction(run):
    return calls_of(run, lambda trainer, module: trainer.predict(module, datamodule=run.data()) and None)


@scenario
def hooks_of_the_datamodule(run):
    calls = []
    data = run.data()
    names = ["setup", "teardown", "train_dataloader", "val_dataloader", "transfer_batch_to_device"]
    names += ["on_before_batch_transfer", "on_after_batch_transfer"]
    data.__class__ = telling(type(data), names, calls)
    out = run.fit(Task(), data)
    return {**out, "calls": calls}


@scenario
def what_hooks_of_batches_see(run):
    seen = []

    class Seeing(Task):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append((batch_idx, self.current_epoch, self.global_step, batch.x.shape[1]))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((batch_idx, sorted(outputs), outputs["loss"].requires_grad, batch.x.shape[1]))

    return {**run.fit(Seeing()), "seen": seen}


@scenario
def hooks_change_batches(run):
    class Changing(Task):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return changed(batch, batch.x * 0.5)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return changed(batch, batch.x + 1.0)

    return run.fit(Changing())


def changed(batch, x):
    """Return a batch with other features; a full graph is the same object in all steps, and stays as it is."""
    batch = copy.copy(batch)
    batch.x = x
    return batch


@scenario
def a_step_changes_its_batch(run):
    class Changing(Task):
        def training_step(self, batch, batch_idx):
            return super().training_step(changed(batch, batch.x * (1 + batch_idx)), batch_idx)

    return run.fit(Changing())


@scenario
def the_loss_of_the_backward_pass(run):
    seen = []

    class Seeing(Task):
        def on_before_backward(self, loss):
            seen.append((tuple(loss.shape), loss.requires_grad))

    return {**run.fit(Seeing(), accumulate_grad_batches=2), "seen": seen}


@scenario
def modes_are_restored(run):
    module = Task()
    module.net.convs[0].eval()
    run.fit(module)
    return {"modes": [part.training for part in module.modules()]}


@scenario
def the_current_hook_is_known(run):
    seen = []

    class Knowing(Task):
        def on_train_epoch_start(self):
            seen.append(self._current_fx_name)

        def training_step(self, batch, batch_idx):
            seen.append(self._current_fx_name)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.append(self._current_fx_name)

    return {**run.fit(Knowing()), "seen": seen}


@scenario
def a_module_in_a_module(run):
    class Inner(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(6)
            self.layer = torch.nn.Linear(4, 4).double()

        def forward(self, x):
            return self.layer(x) * (1 + self.trainer.current_epoch)

    class Outer(Task):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, batch):
            return self.net(self.inner(batch.x), batch.edge_index)

    return run.fit(Outer())


@scenario
def arguments_by_other_names(run):
    class Named(Task):
        def training_step(self, graph_batch, number):
            return super().training_step(graph_batch, number)

        def validation_step(self, graph_batch, number):
            return super().validation_step(graph_batch, number)

    return run.fit(Named())


@scenario
def a_step_without_a_number(run):
    class Unnumbered(Task):
        def training_step(self, batch):
            return super().training_step(batch, 0)

        def validation_step(self, batch):
            return super().validation_step(batch, 0)

    return run.fit(Unnumbered(), accumulate_grad_batches=2)
