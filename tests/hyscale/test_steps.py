"""How the trainers take a step: without waiting for each other in its middle; a lone one in its thread as a whole."""

import os
import signal
import threading
import time

import pytest
import pytorch_lightning as pl
import torch
from torch_geometric.loader import NeighborLoader

from lightning_gnn.hyscale.checks import draws_nothing
from lightning_gnn.sampling.loader import ThreadedNodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.hyscale.models import Module, data_module, fit, graph, hybrid, left_threads, trainer, worst_difference
from tests.patience import PATIENCE


def weights(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Told(torch.autograd.Function):
    """Tells when its backward pass has begun."""

    @staticmethod
    def forward(ctx, x, event):
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.event.set()
        return gradient, None


class SlowForward(Module):
    """Trainer 1 ends its forward pass when trainer 0 has begun with its backward pass."""

    def __init__(self):
        super().__init__()
        self.waited = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if threading.current_thread().name.endswith("-0"):
            return Told.apply(loss, EVENTS.setdefault(batch_idx, threading.Event()))
        self.waited.append(EVENTS.setdefault(batch_idx, threading.Event()).wait(PATIENCE))
        return loss


EVENTS = {}


def test_no_trainer_waits_for_the_forward_pass_of_another():
    EVENTS.clear()
    module = SlowForward()
    found, _ = fit(module, hybrid(shares=[0.6, 0.4]), max_epochs=1)
    assert module.waited
    assert all(module.waited)
    alone, _ = fit(Module(), max_epochs=1)
    assert worst_difference(found.gradients, alone.gradients) < 1e-12
    EVENTS.clear()


class OwnBackward(Module):
    """Lightning asks this hook for the backward pass, so that it cannot come before."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def backward(self, loss, *args, **kwargs):
        self.asked += 1
        loss.backward(*args, **kwargs)


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.9, 0.1], [0.5, 0.3, 0.2]])
def test_gradients_with_and_without_waiting_for_lightnings_backward(shares, accumulated):
    options = {"accumulate_grad_batches": accumulated, "max_epochs": 1}
    alone, _ = fit(Module(), **options)
    own = OwnBackward()
    asked, _ = fit(own, hybrid(len(shares), shares=shares), **options)
    found, _ = fit(Module(), hybrid(len(shares), shares=shares), **options)
    assert own.asked
    assert worst_difference(asked.gradients, alone.gradients) < 1e-12
    assert worst_difference(found.gradients, asked.gradients) < 1e-14


class Elsewhere(Module):
    """Optimises a tensor that is none of its parameters, which all replicas share."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def training_step(self, batch, batch_idx):
        out = self.net(batch.x, batch.edge_index)[: batch.batch_size] * self.scale
        return torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), self.scale], 0.05)


class RowLoss(Module):
    """Returns a loss of one row, and has a parameter without any."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch, batch_idx):
        out = self.net(batch.x, batch.edge_index)[: batch.batch_size] * self.scale
        return torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size]).view(1)


class SharedMemory(Module):
    """Torch lets the gradients of these two parameters be one tensor."""

    def __init__(self):
        super().__init__()
        self.row, self.square = torch.nn.Parameter(torch.ones(1, 4)), torch.nn.Parameter(torch.ones(2, 2))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + ((self.row.squeeze(0) + self.square.view(4)) ** 2).mean()


@pytest.mark.parametrize(
    ("kind", "accumulated"), [(Elsewhere, 1), (Elsewhere, 2), (RowLoss, 1), (RowLoss, 2), (SharedMemory, 1)]
)
def test_weights_of_unusual_modules_equal_those_of_the_plain_trainer(kind, accumulated):
    found, plain = kind(), kind()
    for module, strategy in ((found, hybrid()), (plain, "auto")):
        fit(module, strategy, accumulate_grad_batches=accumulated)
    assert worst_difference([weights(found)], [weights(plain)]) < 1e-12
    if kind is Elsewhere:
        assert worst_difference([[found.scale.detach()]], [[plain.scale.detach()]]) < 1e-12


def test_a_trainer_that_returns_nothing_beside_one_that_returns_a_dict():
    seen = []

    class Some(Module):
        def training_step(self, batch, batch_idx):
            if threading.current_thread().name.endswith("-0") and batch_idx == 1:
                return None
            return {"loss": self.loss(batch), "rows": batch.y[: batch.batch_size]}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((len(outputs["rows"]), batch.seeds))

    fit(Some(), hybrid(), max_epochs=1)
    assert [rows for rows, _ in seen] == [sum(seeds[1:] if i == 1 else seeds) for i, (_, seeds) in enumerate(seen)]


def test_only_what_is_known_to_draw_nothing_shares_torchs_generator():
    class Drawing(NeighborSampler):
        def sample_from_nodes(self, index, **kwargs):
            torch.rand(())
            return super().sample_from_nodes(index, **kwargs)

    data = data_module()
    assert draws_nothing(data.train_dataloader())
    # What the user's own code draws is put back where it runs in the training thread.
    for options in ({"transform": lambda batch: batch}, {"node_sampler": Drawing(graph(), [2, 2])}):
        assert draws_nothing(data_module(**options).train_dataloader())
        assert not draws_nothing(data_module(**options, thread_safe=True).train_dataloader())
    shuffled = ThreadedNodeLoader(graph(), NeighborSampler(graph(), [2, 2]), input_nodes=None, shuffle=True)
    assert not draws_nothing(shuffled)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_lone_trainer_equals_the_plain_trainer_bit_for_bit_with_dropout(prefetch, optimizer):
    runs = []
    for strategy in ("auto", hybrid(1, prefetch=prefetch)):
        torch.manual_seed(3)
        module = Module(optimizer, dropout=0.5)
        fit(module, strategy, data_module(fanouts=(3, 2), num_workers=2))
        runs.append((weights(module), torch.get_rng_state()))
    assert equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.usefixtures("pyg_sampling")
def test_a_lone_trainer_keeps_its_own_random_numbers_where_preparing_draws_some():
    """PyG's sampler, and a transform, draw from torch's generator at times of their own."""

    def transform(batch):
        time.sleep(0.002 * float(torch.rand(())))
        return batch

    class Loader(pl.LightningDataModule):
        def train_dataloader(self):
            data = graph()
            return NeighborLoader(data, [-1, -1], input_nodes=data.train_mask, batch_size=20)

    for make in (lambda: data_module(transform=transform, num_workers=1), Loader):
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            module = Module(dropout=0.5)
            fit(module, hybrid(1), make(), limit_val_batches=0)
            found.append(weights(module))
        assert equal(*found)


def test_a_lone_trainer_takes_the_whole_step_in_its_thread():
    where = {}

    def note(what):
        where.setdefault(what, set()).add(threading.current_thread().name)

    class Noting(Module):
        def training_step(self, batch, batch_idx):
            note("forward")
            return super().training_step(batch, batch_idx)

        def on_after_backward(self):
            note("backward")

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda *args: note("step"))
            return optimizer

        def on_train_batch_end(self, outputs, batch, batch_idx):
            note("end")

    fit(Noting(), hybrid(1))
    assert where.pop("end") == {threading.main_thread().name}
    assert where == {what: {"hyscale-trainer-0"} for what in ("forward", "backward", "step")}
    where.clear()
    fit(Noting(), hybrid(2))
    assert where["step"] == {threading.main_thread().name}


def test_an_interrupt_waits_for_the_end_of_the_optimizer_step():
    seen = []

    class Interrupted(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(self.begin)
            optimizer.register_step_post_hook(lambda *args: seen.append("stepped"))
            return optimizer

        def begin(self, *args):
            if self.global_step == 1:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)
                seen.append("interrupted")

    class Told(pl.Callback):
        def on_exception(self, trainer, module, exception):
            seen.append(type(exception).__name__)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer(hybrid(1), [Told()]).fit(Interrupted().double(), datamodule=data_module())
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["stepped", "interrupted", "stepped", "KeyboardInterrupt"]
    assert not left_threads()


@pytest.mark.slow
def test_a_lone_trainer_that_stalls_in_the_optimizer_is_shown():
    release = threading.Event()

    def wait_for_nothing(*args):
        release.wait(PATIENCE)

    class Stalling(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(wait_for_nothing)
            return optimizer

    try:
        with pytest.raises(TimeoutError, match="wait_for_nothing"):
            fit(Stalling(), hybrid(1, stall_timeout=1.0))
    finally:
        release.set()
    assert not left_threads(patience=10)


@pytest.mark.slow
def test_a_long_step_of_a_lone_trainer_is_no_stall_as_long_as_its_passes_show_life():
    class Slow(Module):
        def training_step(self, batch, batch_idx):
            time.sleep(0.6)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return Thrice(self.parameters(), 0.05)

    class Thrice(torch.optim.SGD):
        def step(self, closure=None):
            for _ in range(3):
                loss = super().step(closure)
            return loss

    found, plain = Slow(), Slow()
    fit(found, hybrid(1, stall_timeout=1.0), max_steps=1, limit_val_batches=0)
    fit(plain, max_steps=1, limit_val_batches=0)
    assert equal(weights(found), weights(plain))
