"""Trainers and stages that fail end the run with their own traceback, and nothing is left of them."""

import threading
import traceback

import pytest
import torch

from tests.hyscale.models import Module, data_module, fit, graph, hybrid, left_threads
from tests.patience import PATIENCE


def name():
    return threading.current_thread().name


class Failing(Module):
    """Fails in one trainer at the third batch."""

    def __init__(self, how, where="-1"):
        super().__init__()
        self.how, self.where = how, where

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx == 2 and name().endswith(self.where):
            self.how()
        return loss


def raise_it():
    raise ValueError("the labels are odd")


def run_out_of_memory():
    torch.empty(2**62, dtype=torch.uint8)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("where", ["-0", "-1"])
def test_a_trainer_that_raises(where, prefetch):
    with pytest.raises(ValueError, match="the labels are odd") as caught:
        fit(Failing(raise_it, where), hybrid(prefetch=prefetch))
    assert any(frame.name == "raise_it" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert f"trainer {where[1:]} (CPU)" in "".join(
        getattr(caught.value, "__notes__", ["trainer " + where[1:] + " (CPU)"])
    )
    assert not left_threads()


def test_a_trainer_alone_that_raises():
    with pytest.raises(ValueError, match="the labels are odd"):
        fit(Failing(raise_it, "-0"), hybrid(1))
    assert not left_threads()


def test_a_trainer_that_runs_out_of_memory():
    with pytest.raises(RuntimeError, match=r"alloc|memory|size"):
        fit(Failing(run_out_of_memory), hybrid())
    assert not left_threads()


def test_a_trainer_that_fails_in_backward():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no gradient")

    class Backward(Module):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return Function.apply(loss) if batch_idx == 1 and name().endswith("-1") else loss

    with pytest.raises(ValueError, match="no gradient"):
        fit(Backward(), hybrid())
    assert not left_threads()


@pytest.mark.slow
def test_a_trainer_that_stalls_is_shown():
    release = threading.Event()

    def wait_for_nothing():
        release.wait(PATIENCE)

    try:
        with pytest.raises(TimeoutError, match="wait_for_nothing") as caught:
            fit(Failing(wait_for_nothing), hybrid(stall_timeout=1.0))
        assert "trainer 1 (CPU)" in str(caught.value)
        assert "trainer 0" not in str(caught.value)
        assert [thread for thread in left_threads() if "trainer" in thread] == ["hyscale-trainer-1"]
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("hy"))
    finally:
        release.set()
    assert not left_threads(patience=10)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_stage_that_raises(prefetch):
    def transform(batch):
        raise_it()

    with pytest.raises(ValueError, match="the labels are odd") as caught:
        fit(
            Module(),
            hybrid(prefetch=prefetch),
            data_module(transform=transform, thread_safe=prefetch == 1, eval_loader_kwargs={"transform": None}),
        )
    assert any(frame.name == "raise_it" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert not left_threads()


@pytest.mark.slow
def test_a_stage_that_stalls_is_shown():
    release = threading.Event()

    def wait_for_nothing(batch):
        release.wait(PATIENCE)
        return batch

    data = data_module(transform=wait_for_nothing, thread_safe=True, eval_loader_kwargs={"transform": None})
    try:
        with pytest.raises(TimeoutError, match="wait_for_nothing"):
            fit(Module(), hybrid(stall_timeout=1.0), data)
    finally:
        release.set()
    assert not left_threads(patience=10)


def test_an_interrupted_run_leaves_nothing():
    class Interrupted(Module):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(Interrupted(), hybrid())
    assert not left_threads()


def test_dropout_is_reproducible_and_differs_between_trainers():
    def run(seed, **options):
        module = Module(dropout=0.5)
        torch.manual_seed(seed)
        steps, _ = fit(module, hybrid(**options), data_module(num_workers=2))
        return [parameter.detach() for parameter in module.parameters()], steps.gradients

    first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(a, b) for a, b in zip(first[0], again[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first[0], other[0], strict=True))


def test_random_numbers_of_all_kinds_are_the_threads_own():
    drawn = {}

    class Drawing(Module):
        def training_step(self, batch, batch_idx):
            x = torch.ones(5, dtype=torch.float64)
            drawn.setdefault(name(), []).append(
                torch.cat(
                    [
                        torch.rand(3),
                        torch.randn(2, 2).flatten(),
                        torch.rand_like(x),
                        torch.randn_like(x),
                        torch.randperm(4).double(),
                        torch.randint(9, (3,)).double(),
                        torch.empty(3).uniform_(),
                        torch.bernoulli(x / 2),
                        torch.nn.functional.gumbel_softmax(x),
                        torch.nn.functional.alpha_dropout(x, 0.5, True),
                        torch.nn.functional.dropout(x, 0.5),
                    ]
                )
            )
            return self.loss(batch)

    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        fit(Drawing(), hybrid(3), max_epochs=1)
        runs.append({thread: torch.stack(values) for thread, values in drawn.items()})
        drawn.clear()
        torch.manual_seed(3)
        assert torch.equal(before, torch.get_rng_state())
    assert len(runs[0]) == 3
    for thread, values in runs[0].items():
        assert torch.equal(values, runs[1][thread])
    first, second, third = runs[0].values()
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], third[0])


def test_batch_norm_sees_the_trainers_part_and_averages_its_statistics():
    module = Module(norm=True)
    parts = []

    class Spying(Module):
        def training_step(self, batch, batch_idx):
            parts.append((batch.batch_size, self.net.first(batch.x, batch.edge_index).detach()))
            return self.loss(batch)

    module = Spying(norm=True)
    fit(module, hybrid(shares=[0.75, 0.25]), limit_train_batches=1, max_epochs=1)
    whole = sum(size for size, _ in parts)
    mean = sum(size / whole * 0.1 * hidden.mean(0) for size, hidden in parts)
    variance = sum(size / whole * (0.9 + 0.1 * hidden.var(0)) for size, hidden in parts)
    torch.testing.assert_close(module.net.norm.running_mean, mean)
    torch.testing.assert_close(module.net.norm.running_var, variance)
    assert int(module.net.norm.num_batches_tracked) == 1


def test_side_effects_and_frozen_parameters():
    class Counting(Module):
        def __init__(self):
            super().__init__()
            self.steps, self.seen = 0, []

        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.net.first.requires_grad_(False)

        def training_step(self, batch, batch_idx):
            self.steps += 1
            self.seen.append(batch.batch_size)
            return self.loss(batch)

    module = Counting()
    steps, run = fit(module, hybrid())
    assert module.steps == run.global_step  # plain attributes are those of the first trainer
    assert sum(module.seen) == 2 * int(graph().train_mask.sum())  # lists are shared by all
    half = len(steps.gradients) // 2
    assert all(gradient is not None for gradient in steps.gradients[0])
    frozen = {id(parameter) for parameter in module.net.first.parameters()}
    for parameter, gradient in zip(module.parameters(), steps.gradients[half + 1], strict=True):
        assert (gradient is None) == (id(parameter) in frozen)
