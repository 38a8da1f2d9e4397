"""Manual optimisation: replicas meet, the main module steps once."""

import threading

import pytest
import torch

from tests.hyscale.models import Module, difference, fit, hybrid, left_threads


class Manual(Module):
    """Two optimizers, clipping, a scheduler, accumulation by hand."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net.first.parameters(), 0.05)
        second = torch.optim.SGD(self.net.second.parameters(), 0.1)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 3, 0.5)]


class TwoOptimizers(Manual):
    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        self.untoggle_optimizer(first)
        loss = self.loss(batch)
        with second.toggle_model():
            second.zero_grad()
            self.manual_backward(2 * loss)
            second.step()
        self.lr_schedulers().step()
        return {"loss": loss}


class Accumulating(Manual):
    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()


class WithClosure(Manual):
    def training_step(self, batch, batch_idx):
        first, _ = self.optimizers()

        def closure():
            first.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        first.step(closure=closure)


class WithoutManualBackward(Manual):
    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.loss(batch).backward()
        first.step()
        second.step()


@pytest.mark.parametrize("kind", [TwoOptimizers, Accumulating, WithClosure, WithoutManualBackward])
@pytest.mark.parametrize("options", [{}, {"shares": [0.8, 0.2]}, {"cpu_trainers": 1}], ids=["equal", "uneven", "alone"])
def test_the_weights_are_those_of_one_device(kind, options):
    plain, ours = kind(), kind()
    fit(plain, max_epochs=3)
    _, run = fit(ours, hybrid(**options), max_epochs=3)
    assert difference(list(ours.parameters()), list(plain.parameters())) < 1e-11
    assert run.global_step > 3
    assert not left_threads()


def in_first_trainer():
    return threading.current_thread().name.endswith("-0")


def test_steps_outside_of_the_order_of_others_are_refused():
    class Uneven(Manual):
        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            self.manual_backward(self.loss(batch))
            (first if in_first_trainer() else second).step()

    with pytest.raises(RuntimeError, match="same steps of optimisation in the same order"):
        fit(Uneven(), hybrid())
    assert not left_threads()


def test_one_that_ends_early_is_refused():
    class Early(Manual):
        def training_step(self, batch, batch_idx):
            if not in_first_trainer():
                self.manual_backward(self.loss(batch))

    with pytest.raises(RuntimeError, match="have finished"):
        fit(Early(), hybrid())
    assert not left_threads()


def test_an_optimizer_that_fails_releases_the_trainers_that_wait_for_it():
    class Broken(Manual):
        def configure_optimizers(self):
            return [BrokenSGD(self.parameters(), 0.1), torch.optim.SGD(self.net.second.parameters(), 0.1)]

        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            self.manual_backward(self.loss(batch))
            first.step()

    class BrokenSGD(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError("no step")

    with pytest.raises(ArithmeticError, match="no step"):
        fit(Broken(), hybrid())
    assert not left_threads()
