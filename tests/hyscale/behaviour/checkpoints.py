"""Checkpoints: which are saved, what is in them, and how training goes on from them."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from torch import nn
from torch.optim import lr_scheduler

from tests.hyscale.behaviour.task import ByHand, Task, metrics, scenario, shown, weights


def files(folder):
    """Return the names of the checkpoints there."""
    return sorted(path.name for path in folder.rglob("*.ckpt"))


def saving(run, module=None, trainer_options=(), **options):
    """Train with a ``ModelCheckpoint``; return the trainer, the callback and what was seen."""
    callback = ModelCheckpoint(dirpath=run.folder / "saved", **options)
    module = Task() if module is None else module
    out = run.fit(module, callbacks=[callback], enable_checkpointing=True, **dict(trainer_options))
    trainer = out["trainer"]
    trainer.strategy.barrier()
    out["files"] = files(run.folder / "saved")
    out["best"] = callback.best_model_path.rsplit("/", 1)[-1]
    out["score"] = None if callback.best_model_score is None else float(callback.best_model_score)
    assert out["files"]
    return out


@scenario
def the_best_are_saved(run):
    options = {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{val_loss:.6f}"}
    return saving(run, Task(lr=1.5), {"max_epochs": 5}, **options)


@scenario
def the_largest_are_saved(run):
    return saving(
        run, Task(lr=1.5), {"max_epochs": 4}, monitor="val_loss", mode="max", filename="{step}-{val_loss:.6f}"
    )


@scenario
def all_are_saved(run):
    return saving(run, Task(), {"max_epochs": 3}, save_top_k=-1, filename="{epoch}-{step}")


@scenario
def every_second_step_is_saved(run):
    return saving(run, every_n_train_steps=2, save_top_k=-1, filename="{step}")


@scenario
def every_second_epoch_is_saved(run):
    return saving(run, None, {"max_epochs": 4}, every_n_epochs=2, save_top_k=-1, filename="{epoch}")


@scenario
def the_last_is_saved(run):
    out = saving(run, save_last=True, filename="{epoch}")
    last = torch.load(run.folder / "saved" / "last.ckpt", weights_only=False)
    return {**out, "last": torch.cat([value.flatten() for value in last["state_dict"].values()])}


@scenario
def a_metric_of_training_is_monitored(run):
    options = {
        "monitor": "train_loss_epoch",
        "save_on_train_epoch_end": True,
        "filename": "{epoch}-{train_loss_epoch:.6f}",
    }
    return saving(run, Task(lr=1.5), {"max_epochs": 4}, **options)


@scenario
def a_metric_within_the_epoch_is_monitored(run):
    options = {"monitor": "val_loss", "save_top_k": 2, "filename": "{step}-{val_loss:.6f}"}
    return saving(run, Task(lr=1.5), {"max_epochs": 3, "val_check_interval": 1}, **options)


@scenario
def weights_only_are_saved(run):
    out = saving(run, save_weights_only=True, filename="end")
    saved = torch.load(run.folder / "saved" / "end.ckpt", weights_only=False)
    return {**out, "keys": sorted(set(saved) - {"hyscale", "ascend_hybrid"})}


@scenario
def what_a_checkpoint_holds(run):
    module = Task()
    out = run.fit(module)
    out["trainer"].save_checkpoint(run.folder / "end.ckpt")
    saved = torch.load(run.folder / "end.ckpt", weights_only=False)
    optimizer = saved["optimizer_states"][0]
    progress = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    return {
        **out,
        "keys": sorted(set(saved) - {"hyscale", "ascend_hybrid"}),
        "names": list(saved["state_dict"]),
        "same": all(torch.equal(value, module.state_dict()[name]) for name, value in saved["state_dict"].items()),
        "optimizer": optimizer["param_groups"][0]["lr"],
        "progress": dict(progress),
        "numbers": (saved["epoch"], saved["global_step"]),
    }


@scenario
def the_module_adds_to_its_checkpoint(run):
    class Adding(Task):
        note = "none"

        def on_save_checkpoint(self, checkpoint):
            checkpoint["note"] = {"step": self.global_step}

        def on_load_checkpoint(self, checkpoint):
            self.note = checkpoint["note"]

    run.fit(Adding())["trainer"].save_checkpoint(run.folder / "end.ckpt")
    module = Adding()
    out = run.fit(module, max_epochs=3, ckpt_path=run.folder / "end.ckpt")
    assert module.note == {"step": 6}
    return {**out, "note": module.note}


@scenario
def hyperparameters_are_saved(run):
    class Described(Task):
        def __init__(self, lr=0.1, kind="sage"):
            super().__init__(lr)
            self.save_hyperparameters()

    run.fit(Described(0.3, "gat"))["trainer"].save_checkpoint(run.folder / "end.ckpt")
    module = Described.load_from_checkpoint(run.folder / "end.ckpt")
    return {"lr": module.lr, "kind": module.hparams.kind, "weights": weights(module)}


def again(run, make, until, whole, ckpt=None, data=None, **options):
    """Train for a while, save, go on in a new module and trainer; return that beside training in one go."""
    part = run.fit(make(), data() if data else None, **options, **until)
    path = run.folder / "part.ckpt"
    part["trainer"].save_checkpoint(path)
    module = make()
    rest = run.fit(module, data() if data else None, ckpt_path=path, **options, **whole)
    rest.pop("stopped")
    return rest


@scenario
def training_goes_on_at_an_epoch(run):
    out = again(run, lambda: Task(), {"max_epochs": 2}, {"max_epochs": 4})
    straight = run.fit(Task(), max_epochs=4)
    assert torch.allclose(out["weights"], straight["weights"], rtol=0, atol=1e-12)
    return out


@scenario
def training_goes_on_with_the_optimizers_state(run):
    class Adam(Task):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 0.05)
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.7)]

    out = again(run, Adam, {"max_epochs": 2}, {"max_epochs": 4})
    straight = run.fit(Adam(), max_epochs=4)
    assert torch.allclose(out["weights"], straight["weights"], rtol=0, atol=1e-12)
    return out


@scenario
def training_goes_on_in_mid_epoch(run):
    return again(run, lambda: Task(), {"max_steps": 4, "max_epochs": -1}, {"max_epochs": 3})


@scenario
def training_goes_on_by_hand(run):
    return again(run, ByHand, {"max_epochs": 1}, {"max_epochs": 3})


@scenario
def training_goes_on_with_accumulation(run):
    return again(run, Task, {"max_epochs": 1}, {"max_epochs": 3}, accumulate_grad_batches=2)


@scenario
def training_goes_on_with_callbacks(run):
    def options():
        return {"callbacks": [EarlyStopping("val_loss", patience=2, min_delta=10.0)]}

    part = run.fit(Task(), max_epochs=2, **options())
    part["trainer"].save_checkpoint(run.folder / "part.ckpt")
    chosen = options()
    out = run.fit(Task(), max_epochs=8, ckpt_path=run.folder / "part.ckpt", **chosen)
    stop = chosen["callbacks"][0]
    assert out["epochs"] == 3
    return {**out, "waited": stop.wait_count, "stopped": stop.stopped_epoch}


@scenario
def training_goes_on_from_the_last(run):
    options = {"dirpath": run.folder / "saved", "save_last": True, "filename": "{epoch}"}
    run.fit(Task(), callbacks=[ModelCheckpoint(**options)], enable_checkpointing=True)
    return run.fit(
        Task(), max_epochs=4, ckpt_path="last", callbacks=[ModelCheckpoint(**options)], enable_checkpointing=True
    )


@scenario
def training_goes_on_from_a_step_of_the_checkpoints(run):
    """From a checkpoint that a callback wrote in the middle of an epoch."""
    options = {"dirpath": run.folder / "saved", "every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}
    run.fit(Task(), callbacks=[ModelCheckpoint(**options)], enable_checkpointing=True)
    out = run.fit(Task(), max_epochs=3, ckpt_path=run.folder / "saved" / "step=4.ckpt")
    straight = run.fit(Task(), max_epochs=3)
    assert torch.allclose(out["weights"], straight["weights"], rtol=0, atol=1e-12)
    return out


@scenario
def training_goes_on_after_an_error(run):
    class Failing(Task):
        fails = True

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.fails and self.global_step == 4:
                raise KeyError("lost")

    try:
        callback = OnExceptionCheckpoint(run.folder, "broken")
        run.fit(Failing(), callbacks=[callback], enable_checkpointing=True)
    except KeyError:
        pass
    return {"files": files(run.folder)}


@scenario
def a_checkpoint_is_tested(run):
    callback = ModelCheckpoint(dirpath=run.folder / "saved", monitor="val_loss", filename="best")
    module, data = Task(lr=1.5), run.data()
    trainer = run.trainer(callbacks=[callback], enable_checkpointing=True, max_epochs=4)
    trainer.fit(module, datamodule=data)
    tested = trainer.test(datamodule=data, ckpt_path="best", verbose=False)
    return {"tested": tested, "weights": weights(module)}


@scenario
def a_checkpoint_of_another_strategy(run):
    """What one process without a strategy of ours has saved is read, and the other way round."""
    module = Task()
    run.fit(module)["trainer"].save_checkpoint(run.folder / "end.ckpt")
    other = Task.load_from_checkpoint(run.folder / "end.ckpt")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    missing = other.load_state_dict(torch.load(run.folder / "end.ckpt", weights_only=False)["state_dict"])
    return {"weights": weights(other), "missing": list(missing.missing_keys) + list(missing.unexpected_keys)}


@scenario
def a_checkpoint_that_lacks_a_weight(run):
    class Larger(Task):
        def __init__(self):
            super().__init__()
            self.strict_loading = False
            self.more = nn.Parameter(torch.ones(2, dtype=torch.float64))

    run.fit(Task())["trainer"].save_checkpoint(run.folder / "end.ckpt", weights_only=True)
    trainer = run.trainer()
    module = Larger()
    tested = trainer.test(module, datamodule=run.data(), ckpt_path=run.folder / "end.ckpt", verbose=False)
    return {"tested": tested, "metrics": metrics(trainer)}


@scenario
def fitting_goes_on_with_the_same_trainer(run):
    module, data, trainer = Task(), run.data(), run.trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=data)
    return shown(trainer, module)


@scenario
def a_callbacks_state_is_restored(run):
    class Counter(pl.Callback):
        count = 0

        def on_train_batch_end(self, *args):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    run.fit(Task(), callbacks=[Counter()])["trainer"].save_checkpoint(run.folder / "end.ckpt")
    callback = Counter()
    run.fit(Task(), callbacks=[callback], max_epochs=3, ckpt_path=run.folder / "end.ckpt")
    assert callback.count == 9
    return {"count": callback.count}


@scenario
def a_datamodules_state_is_restored(run):
    def data():
        made = run.data()
        made.own = 0
        state, load = made.state_dict, made.load_state_dict
        made.state_dict = lambda: {**state(), "own": 7}
        made.load_state_dict = lambda saved: (setattr(made, "own", saved["own"]), load(saved))
        return made

    part = run.fit(Task(), data())
    part["trainer"].save_checkpoint(run.folder / "end.ckpt")
    restored = data()
    out = run.fit(Task(), restored, max_epochs=3, ckpt_path=run.folder / "end.ckpt")
    assert restored.own == 7
    return {**out, "own": restored.own}
