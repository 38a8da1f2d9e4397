"""Manual optimization: the module calls the optimizer's ``step`` itself."""

import torch

from tests.hyscale.behaviour.task import ManualOptimization, scenario


def make_stepping_module(step, configure=None):
    """Return a module with the given ``training_step``."""

    class Stepping(ManualOptimization):
        def training_step(self, batch, batch_idx):
            return step(self, batch, batch_idx)

        def configure_optimizers(self):
            return super().configure_optimizers() if configure is None else configure(self)

    return Stepping()


def make_two_optimizers(module):
    return [torch.optim.SGD(layer.parameters(), 0.2) for layer in module.net.convs]


@scenario
def by_hand_two_optimizers_take_turns(run):
    def step(module, batch, batch_idx):
        optimizer = module.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        optimizer.step()

    return run.fit(make_stepping_module(step, make_two_optimizers))


@scenario
def by_hand_gradients_are_not_reduced_until_the_last(run):
    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        last = bool(batch_idx % 2) or module.trainer.is_last_batch
        with optimizer.toggle_model(sync_grad=last):
            module.manual_backward(module.loss(batch))
            if last:
                optimizer.step()
                optimizer.zero_grad()

    return run.fit(make_stepping_module(step))


@scenario
def by_hand_with_logs_and_outputs(run):
    seen = []

    class Logging(ManualOptimization):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.log_value("train_loss", loss, batch, "train", on_step=True, on_epoch=True)
            return {"kind": torch.tensor(float(batch_idx))}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(float(outputs["kind"]))

    return {**run.fit(Logging()), "seen": seen}
