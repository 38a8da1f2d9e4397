"""Hybrid training beside other parts of Lightning that set up loaders, cut epochs or change the module."""

import threading

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_gnn.hyscale.options import seeds_of_iteration
from lightning_gnn.hyscale.pipeline import HybridLoader
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from tests.hyscale.models import CLASSES, Module, data_module, fit, graph, hybrid, left_threads, worst_difference


def balanced(**options):
    fixed = {"devices": ["cpu"], "threads": [1, 1, 1], "stall_timeout": 60.0, "accelerator_sampling": 0.5}
    return HyScaleStrategy(1, 0.5, **{**fixed, **options})


class Sized(pl.LightningDataModule):
    """Whose batch size can be changed."""

    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size, self.graph = batch_size, graph()

    def train_dataloader(self):
        return data_module(batch_size=self.batch_size, data=self.graph).train_dataloader()

    def val_dataloader(self):
        return data_module(batch_size=self.batch_size, data=self.graph).val_dataloader()


@pytest.mark.slow
def test_the_batch_size_finder():
    """It sets up the loaders of validation in the stage of training, and changes the batch size in mid-fit."""
    strategy, data = balanced(), Sized()
    module, found = Module(), []
    module.on_validation_batch_start = lambda batch, *args: found.append(type(batch).__name__)
    fit(module, strategy, data, callbacks=[BatchSizeFinder(steps_per_trial=2, max_trials=3, init_val=4)])
    assert data.batch_size == 16
    assert strategy.balance.total == strategy.balance.mapping.total == 16
    assert isinstance(strategy.loader, HybridLoader)
    assert set(found) == {"Data"}
    assert not left_threads()


def test_the_learning_rate_finder():
    class Rated(Module):
        def __init__(self):
            super().__init__()
            self.lr = 0.05

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.lr)

    found = []
    for strategy in ("auto", balanced(drm=False)):
        module = Rated()
        finder = LearningRateFinder(num_training_steps=12)
        fit(module, strategy, callbacks=[finder], max_epochs=4)
        found.append((module.lr, finder.optimal_lr.results["loss"]))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] == pytest.approx(found[1][1])
    assert not left_threads()


@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 2},
        {"val_check_interval": 7, "check_val_every_n_epoch": None},
        {"accumulate_grad_batches": 3},
        {"limit_train_batches": 1, "max_epochs": 4},
        {"limit_train_batches": 0.5},
        {"reload_dataloaders_every_n_epochs": 1},
        {"overfit_batches": 2},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"max_steps": 7, "max_epochs": -1},
    ],
    ids=str,
)
def test_options_of_the_trainer_while_work_is_balanced(options):
    expected, _ = fit(Module(), **options)
    strategy = balanced()
    found, _ = fit(Module(), strategy, **options)
    assert worst_difference(found.gradients, expected.gradients) < 1e-12
    assert not strategy.balance._issued or "max_steps" in options or "limit_train_batches" in options
    assert not left_threads()


def test_averaged_weights():
    modules = [Module(), Module()]
    for module, strategy in zip(modules, ("auto", balanced()), strict=True):
        fit(module, strategy, callbacks=[StochasticWeightAveraging(0.01, swa_epoch_start=1)], max_epochs=4)
    for a, b in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_an_interruption_in_mid_epoch():
    class Interrupt(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(Module(), balanced(), callbacks=[Interrupt()])
    assert not left_threads()


def test_a_batch_size_beyond_all_seeds_is_balanced_too():
    strategy = balanced()
    fit(Module(), strategy, data_module(batch_size=1000), max_epochs=12)
    loader = data_module(batch_size=1000).train_dataloader()
    assert strategy.balance.mapping.total == seeds_of_iteration(loader) == len(loader.dataset) < 1000
    assert not any("does not count" in decision.explanation for _, decision in strategy.balance.history)


def test_endless_patience():
    fit(Module(), balanced(stall_timeout=float("inf")), max_epochs=1)


class Curve(Module):
    """With a metric that keeps what it was given, which hangs on the graph."""

    def __init__(self):
        super().__init__()
        self.area = torchmetrics.AUROC(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch, batch_idx):
        out = self.net(batch.x, batch.edge_index)[: batch.batch_size]
        target = batch.y[: batch.batch_size]
        self.area(out.softmax(-1), target)
        self.log("area", self.area, on_step=True, on_epoch=True)
        return F.cross_entropy(out, target)


def test_a_metric_that_keeps_tensors_of_the_graph():
    logged = [fit(Curve(), strategy)[0].logged for strategy in ("auto", hybrid(3))]
    for expected, found in zip(*logged, strict=True):
        assert found == pytest.approx(expected, nan_ok=True)


def returns(what):
    class Returning(Module):
        def training_step(self, batch, batch_idx):
            return what(self, batch)

    return Returning()


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (lambda module, batch: {"x": 1}, MisconfigurationException, "'loss' key needs to be present"),
        (lambda module, batch: 3.0, MisconfigurationException, "must return a Tensor, a dict, or None"),
        (lambda module, batch: module.loss(batch).expand(2), ValueError, r"trainer 0 has the shape \[2\]"),
    ],
)
def test_what_is_no_loss_is_refused(what, error, message):
    with pytest.raises(error, match=message):
        fit(returns(what), hybrid())
    assert not left_threads()


def test_manual_optimisation_needs_to_return_no_loss():
    class Manual(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            return {"seeds": torch.tensor(float(batch.batch_size))}

    modules = [Manual(), Manual()]
    for module, strategy in zip(modules, ("auto", hybrid()), strict=True):
        fit(module, strategy)
    for a, b in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_batch_statistics_are_not_synchronised_and_it_says_so():
    with pytest.warns(UserWarning, match="sync_batchnorm=True changes nothing"):
        fit(Module(norm=True), hybrid(), max_epochs=1, sync_batchnorm=True)


def test_a_sampling_accelerator_that_fails(monkeypatch):
    from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling

    original, calls, lock = AcceleratorSampling.sample, [], threading.Lock()

    def sample(self, *args):
        with lock:
            calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("the device is lost")
        return original(self, *args)

    monkeypatch.setattr(AcceleratorSampling, "sample", sample)
    with pytest.raises(RuntimeError, match="the device is lost"):
        fit(Module(), balanced())
    assert not left_threads()


def test_features_in_fewer_bits_need_the_transfer_of_the_strategy():
    class Hooked(Module):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    with pytest.warns(UserWarning, match="transfer_dtype='int8' changes nothing"):
        fit(Hooked(), balanced(transfer_dtype="int8"), max_epochs=1)
    module = Hooked()
    fit(module, balanced(), max_epochs=1)
    assert "_on_before_batch_transfer" not in module.__dict__
