"""Manual optimisation: the module steps by itself."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.hyscale.behaviour.task import CLASSES, FEATURES, ByHand, of_split, scenario


def stepping(step, configure=None):
    """Return a module with a ``training_step`` of its own."""

    class Stepping(ByHand):
        def training_step(self, batch, batch_idx):
            return step(self, batch, batch_idx)

        def configure_optimizers(self):
            return super().configure_optimizers() if configure is None else configure(self)

    return Stepping()


@scenario
def by_hand(run):
    return run.fit(ByHand())


@scenario
def by_hand_gradients_are_clipped(run):
    norms = []

    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.01)))
        optimizer.step()

    out = run.fit(stepping(step))
    assert min(norms) > 0.01
    return {**out, "norms": norms}


@scenario
def by_hand_gradients_are_clipped_by_the_module(run):
    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        module.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")
        optimizer.step()

    return run.fit(stepping(step))


@scenario
def by_hand_gradients_are_edited(run):
    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        for parameter in module.parameters():
            parameter.grad.copy_(parameter.grad.sign() * 0.1)
        module.net.convs[0].lin_l.bias.grad = None
        optimizer.step()

    return run.fit(stepping(step))


@scenario
def by_hand_gradients_are_accumulated(run):
    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        module.manual_backward(module.loss(batch) / 2)
        if batch_idx % 2 or module.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()

    return run.fit(stepping(step))


@scenario
def by_hand_two_backward_passes_for_a_step(run):
    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        loss = module.loss(batch)
        module.manual_backward(loss * 0.5, retain_graph=True)
        module.manual_backward(loss * 0.5)
        optimizer.step()

    return run.fit(stepping(step))


def one_each(module):
    return [torch.optim.SGD(layer.parameters(), 0.2) for layer in module.net.convs]


@scenario
def by_hand_two_optimizers_take_turns(run):
    def step(module, batch, batch_idx):
        optimizer = module.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        optimizer.step()

    return run.fit(stepping(step, one_each))


@scenario
def by_hand_an_optimizer_is_toggled(run):
    wanted = []

    def step(module, batch, batch_idx):
        for optimizer in module.optimizers():
            module.toggle_optimizer(optimizer)
            wanted.append([parameter.requires_grad for parameter in module.parameters()])
            optimizer.zero_grad()
            module.manual_backward(module.loss(batch))
            optimizer.step()
            module.untoggle_optimizer(optimizer)

    out = run.fit(stepping(step, one_each))
    assert not all(wanted[0])
    return {**out, "wanted": wanted}


@scenario
def by_hand_an_optimizer_is_toggled_for_a_while(run):
    def step(module, batch, batch_idx):
        for place, optimizer in enumerate(module.optimizers()):
            with optimizer.toggle_model(sync_grad=True):
                module.manual_backward(module.loss(batch) * (1 + place))
                optimizer.step()
                optimizer.zero_grad()

    return run.fit(stepping(step, one_each))


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

    return run.fit(stepping(step))


@scenario
def by_hand_a_step_with_a_closure(run):
    calls = []

    def step(module, batch, batch_idx):
        optimizer = module.optimizers()

        def closure():
            calls.append(batch_idx)
            optimizer.zero_grad()
            loss = module.loss(batch)
            module.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    return {**run.fit(stepping(step)), "calls": calls}


@scenario
def by_hand_lbfgs(run):
    calls = []

    def step(module, batch, batch_idx):
        optimizer = module.optimizers()

        def closure():
            calls.append(batch_idx)
            optimizer.zero_grad()
            loss = module.loss(batch)
            module.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    make = lambda module: torch.optim.LBFGS(module.parameters(), 0.5, max_iter=3)  # noqa: E731
    out = run.fit(stepping(step, make))
    assert len(calls) > 6
    return {**out, "calls": calls}


@scenario
def by_hand_a_scheduler_steps(run):
    rates = []

    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        optimizer.step()
        module.lr_schedulers().step()
        rates.append(optimizer.param_groups[0]["lr"])

    def configure(module):
        optimizer = torch.optim.SGD(module.parameters(), 0.2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    return {**run.fit(stepping(step, configure)), "rates": rates}


@scenario
def by_hand_a_plateau_scheduler_steps(run):
    class Plateau(ByHand):
        rates = ()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.2)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

        def on_train_epoch_end(self):
            self.lr_schedulers().step(self.trainer.callback_metrics["val_loss"])
            self.rates = (*self.rates, self.optimizers().param_groups[0]["lr"])

    module = Plateau()
    out = run.fit(module, max_epochs=4)
    assert module.rates[0] > module.rates[-1]
    return {**out, "rates": module.rates}


@scenario
def by_hand_an_adversary(run):
    class Adversary(ByHand):
        """Two networks against each other: each step's loss needs gradients through both."""

        def __init__(self):
            super().__init__()
            self.judge = nn.Linear(CLASSES, 1).double()

        def training_step(self, batch, batch_idx):
            of_net, of_judge = self.optimizers()
            made = of_split(self(batch), batch, "train")
            real = F.one_hot(of_split(batch.y, batch, "train"), CLASSES).double()
            self.toggle_optimizer(of_judge)
            verdict = F.softplus(self.judge(made.detach())).mean() + F.softplus(-self.judge(real)).mean()
            self.manual_backward(verdict)
            of_judge.step()
            of_judge.zero_grad()
            self.untoggle_optimizer(of_judge)
            self.toggle_optimizer(of_net)
            self.manual_backward(F.softplus(-self.judge(made)).mean())
            of_net.step()
            of_net.zero_grad()
            self.untoggle_optimizer(of_net)

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), 0.2), torch.optim.Adam(self.judge.parameters(), 0.1)

    return run.fit(Adversary())


@scenario
def by_hand_with_logs_and_outputs(run):
    seen = []

    class Logging(ByHand):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.tell("train_loss", loss, batch, "train", on_step=True, on_epoch=True)
            return {"kind": torch.tensor(float(batch_idx))}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(float(outputs["kind"]))

    return {**run.fit(Logging()), "seen": seen}


@scenario
def by_hand_gradients_are_read(run):
    norms = []

    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in module.parameters())
        module.manual_backward(module.loss(batch))
        norms.extend(float(parameter.grad.norm()) for parameter in module.parameters())
        optimizer.step()

    return {**run.fit(stepping(step)), "norms": norms}


@scenario
def by_hand_an_auxiliary_network(run):
    """Two losses of two networks, one of which gets no gradient in some steps."""

    class Auxiliary(ByHand):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(FEATURES, CLASSES).double()

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                y = of_split(batch.y, batch, "train")
                self.manual_backward(F.cross_entropy(self.other(of_split(batch.x, batch, "train")), y))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), 0.2), torch.optim.SGD(self.other.parameters(), 0.1)

    return run.fit(Auxiliary())


@scenario
def by_hand_hooks_are_called(run):
    calls = []

    class Hooked(ByHand):
        def on_before_backward(self, loss):
            calls.append("before the backward pass")

        def on_after_backward(self):
            calls.append(("after it", round(float(self.net.convs[0].lin_l.weight.grad.norm()), 8)))

        def on_before_optimizer_step(self, optimizer):
            calls.append("before the step")

        def on_before_zero_grad(self, optimizer):
            calls.append("before gradients are zero")

    return {**run.fit(Hooked()), "calls": calls}
