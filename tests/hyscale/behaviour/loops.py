"""How long the loops run: limits, intervals, ends and interruptions."""

import pytest
import pytorch_lightning as pl

from tests.hyscale.behaviour.task import Task, scenario, shown


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
def some_batches_of_training(run):
    out = ordered(run, limit_train_batches=2)
    assert out["steps"] == 4
    return out


@scenario
def a_part_of_the_batches(run):
    out = ordered(run, limit_train_batches=0.7, limit_val_batches=0.5)
    assert out["steps"] == 4
    return out


@scenario
def no_batch_of_training(run):
    return run.fit(Task(), limit_train_batches=0)


@scenario
def one_batch_of_validation(run):
    return ordered(run, limit_val_batches=1)


@scenario
def no_validation(run):
    return ordered(run, limit_val_batches=0)


@scenario
def a_number_of_steps(run):
    out = ordered(run, max_steps=4, max_epochs=-1)
    assert out["steps"] == 4
    return out


@scenario
def a_number_of_steps_with_accumulation(run):
    out = ordered(run, max_steps=3, max_epochs=-1, accumulate_grad_batches=2)
    assert out["steps"] == 3
    return out


@scenario
def no_steps(run):
    return run.fit(Task(), max_steps=0)


@scenario
def no_epochs(run):
    return run.fit(Task(), max_epochs=0)


@scenario
def a_fast_run(run):
    out = ordered(run, fast_dev_run=True)
    assert out["steps"] == 1
    return out


@scenario
def a_fast_run_of_two_batches(run):
    out = ordered(run, fast_dev_run=2)
    assert out["steps"] == 2
    return out


@scenario
def a_batch_is_learnt_by_heart(run):
    out = ordered(run, overfit_batches=1, max_epochs=3)
    assert out["steps"] == 3
    return out


@scenario
def a_part_of_the_batches_is_learnt_by_heart(run):
    return ordered(run, overfit_batches=0.7)


@scenario
def validation_within_an_epoch(run):
    return ordered(run, val_check_interval=1)


@scenario
def validation_at_a_part_of_an_epoch(run):
    return ordered(run, val_check_interval=0.34)


@scenario
def validation_over_epochs(run):
    return ordered(run, val_check_interval=4, check_val_every_n_epoch=None, max_epochs=3)


@scenario
def validation_every_second_epoch(run):
    return ordered(run, check_val_every_n_epoch=2, max_epochs=4)


@scenario
def validation_before_training(run):
    return ordered(run, num_sanity_val_steps=-1)


@scenario
def validation_while_gradients_are_accumulated(run):
    return ordered(run, val_check_interval=1, accumulate_grad_batches=2)


@scenario
def loaders_are_made_anew(run):
    data = run.data()
    made, calls = data.train_dataloader, []
    data.train_dataloader = lambda: (calls.append(1), made())[1]
    out = run.fit(Task(), data, reload_dataloaders_every_n_epochs=2, max_epochs=5)
    assert len(calls) > 1
    return {**out, "calls": len(calls)}


@scenario
def an_end_asked_for_within_an_epoch(run):
    class Ending(Task):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 4:
                self.trainer.should_stop = True

    out = run.fit(Ending(), max_epochs=4)
    assert out["steps"] == 4
    return out


@scenario
def an_epoch_that_ends_early(run):
    class Ending(Task):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 and self.current_epoch == 0 else None

    out = run.fit(Ending(), max_epochs=3)
    assert out["steps"] == 7
    return out


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


@scenario
def barebones(run):
    class Bare(Task):
        def __init__(self):
            super().__init__(logs=False)

    trainer = pl.Trainer(accelerator="cpu", devices=run.num_ranks, strategy=run.strategy, barebones=True, max_epochs=2)
    module = Bare()
    trainer.fit(module, datamodule=run.data())
    return shown(trainer, module)


@scenario
def counters_of_progress(run):
    out = run.fit(Task(), accumulate_grad_batches=2, val_check_interval=2)
    loop = out["trainer"].fit_loop
    progress = loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    return {
        **out,
        "epochs in progress": loop.epoch_progress.total.completed,
        "batches": loop.epoch_loop.batch_progress.total.completed,
        "in this epoch": loop.epoch_loop.batch_progress.current.completed,
        "optimizer": (progress.step.total.completed, progress.zero_grad.total.completed),
        "validation": loop.epoch_loop.val_loop.batch_progress.total.completed,
    }


@scenario
def the_numbers_of_batches_are_known(run):
    seen = []

    class Knowing(Task):
        def on_train_start(self):
            trainer = self.trainer
            seen.append(
                (trainer.num_training_batches, list(trainer.num_val_batches), trainer.estimated_stepping_batches)
            )

    return {**run.fit(Knowing(), accumulate_grad_batches=2), "seen": seen}


@scenario
def two_trainers_one_after_another(run):
    module = Task()
    first = run.fit(module)
    second = run.fit(module)
    return {"first": first["weights"], "second": second["weights"]}


@scenario
def the_same_trainer_for_another_module(run):
    trainer, data = run.trainer(), run.data()
    trainer.fit(Task(), datamodule=data)
    module = Task(lr=0.05)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=data)
    return shown(trainer, module)


@scenario
def loops_by_the_module_of_data(run):
    """Without a DataModule: the loaders themselves."""
    module, trainer, data = Task(), run.trainer(), run.data()
    trainer.fit(module, data.train_dataloader(), data.val_dataloader())
    return shown(trainer, module)


@scenario
def a_loader_without_a_strategys_help(run):
    module, data = Task(), run.data()
    return run.fit(module, data, use_distributed_sampler=False)
