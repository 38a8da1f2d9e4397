"""Checkpoints: which are saved, what they contain, and how training resumes from them."""

import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.hyscale.behaviour.task import Task, scenario, summarize_training


def list_checkpoints(folder):
    """Return the names of the checkpoints in a folder."""
    return sorted(path.name for path in folder.rglob("*.ckpt"))


def train_and_save(run, module=None, trainer_options=(), **options):
    """Train with a ``ModelCheckpoint``; return the trainer, the callback and the observed values."""
    callback = ModelCheckpoint(dirpath=run.folder / "saved", **options)
    module = Task() if module is None else module
    out = run.fit(module, callbacks=[callback], enable_checkpointing=True, **dict(trainer_options))
    trainer = out["trainer"]
    trainer.strategy.barrier()
    out["files"] = list_checkpoints(run.folder / "saved")
    out["best"] = callback.best_model_path.rsplit("/", 1)[-1]
    out["score"] = None if callback.best_model_score is None else float(callback.best_model_score)
    assert out["files"]
    return out


@scenario
def the_best_are_saved(run):
    options = {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{val_loss:.6f}"}
    return train_and_save(run, Task(lr=1.5), {"max_epochs": 5}, **options)


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


def train_and_resume(run, make, until, whole, ckpt=None, data=None, **options):
    """Train and save, resume in a new module and trainer; return the result and that of uninterrupted training."""
    part = run.fit(make(), data() if data else None, **options, **until)
    path = run.folder / "part.ckpt"
    part["trainer"].save_checkpoint(path)
    module = make()
    rest = run.fit(module, data() if data else None, ckpt_path=path, **options, **whole)
    rest.pop("stopped")
    return rest


@scenario
def training_goes_on_in_mid_epoch(run):
    return train_and_resume(run, lambda: Task(), {"max_steps": 4, "max_epochs": -1}, {"max_epochs": 3})


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
    return {"files": list_checkpoints(run.folder)}


@scenario
def fitting_goes_on_with_the_same_trainer(run):
    module, data, trainer = Task(), run.data(), run.trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=data)
    return summarize_training(trainer, module)
