"""Several ranks train the same weights as a plain Trainer, for many kinds of modules, in a few launches."""

import collections
import functools
import traceback
from typing import ClassVar

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.profilers import SimpleProfiler
from torch.utils.checkpoint import checkpoint

from lightning_gnn.nn import GAT, GraphSAGE, NodeClassifier
from tests.campaigns import cases_of
from tests.full_graph.launch import run
from tests.hyscale.training import Plain, copy_state, fit, make_data, make_hybrid

pytestmark = pytest.mark.medium


class Switch(Plain):
    """Sets an attribute of a submodule in a hook, and counts in an attribute."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Module()
        self.gate.scale, self.gate.steps = 1.0, 0

    def on_train_epoch_start(self):
        self.gate.scale = 1.0 + self.current_epoch

    def loss(self, batch):
        self.gate.steps += 1
        return super().loss(batch) * self.gate.scale * (1 + self.gate.steps)


class Manual(Plain):
    """Manual optimization that reads and modifies gradients between the backward pass and the step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("norms", torch.zeros(0, dtype=torch.float64))

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        self.net.convs[0].lin_l.weight.grad.mul_(2.0)
        optimizer.step()


class History(Plain):
    """Float rows written by seed, as in GNNAutoScale, a histogram, counters and a switch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("history", torch.zeros(230, 3, dtype=torch.float64))
        self.register_buffer("histogram", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("begun", torch.tensor(False))

    def loss(self, batch):
        scores = self.scores(batch)
        before = self.history[batch.n_id[: batch.batch_size]]
        self.history[batch.n_id[: batch.batch_size]] = scores.detach()
        self.histogram += torch.bincount(batch.y[: batch.batch_size], minlength=3)
        self.seen += batch.batch_size
        self.steps += 1
        self.begun.fill_(True)
        return F.cross_entropy(scores + 0.1 * before, batch.y[: batch.batch_size])


class Target(Plain):
    """A moving average as target, and manual weight decay, both within the step."""

    def __init__(self):
        super().__init__()
        self.target = GraphSAGE(6, 8, num_layers=1, out_channels=3).double().requires_grad_(False)
        self.target.load_state_dict(self.net.state_dict())

    def training_step(self, batch, index):
        with torch.no_grad():
            for mine, other in zip(self.net.parameters(), self.target.parameters(), strict=True):
                other.lerp_(mine, 0.5)
                mine.mul_(0.99)
            aim = self.target(batch.x, batch.edge_index)[: batch.batch_size]
        return self.loss(batch) + F.mse_loss(self.scores(batch), aim)


class Bound(Plain):
    """A bound method stored at construction, and a network inside a plain object."""

    def __init__(self):
        super().__init__()
        self.call = self.net.forward
        self.inside = [torch.nn.Linear(3, 3).double()]

    def scores(self, batch):
        return self.inside[0](self.call(batch.x, batch.edge_index)[: batch.batch_size])

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), *self.inside[0].parameters()], lr=0.1)

    def on_train_end(self):
        self.register_buffer("original", self.inside[0].weight.detach())


class Hooked(Plain):
    """Hooks on parameters, and custom profiler sections."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)

    def training_step(self, batch, index):
        with self.trainer.profiler.profile("mine"):
            return self.loss(batch)


Hooked.options = {"profiler": SimpleProfiler()}


class Elsewhere(Plain):
    """Optimizes a tensor that is not one of its parameters, with a loss of one row."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def training_step(self, batch, index):
        return F.cross_entropy(self.scores(batch) * self.scale, batch.y[: batch.batch_size]).view(1)

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), self.scale], 0.05)

    def on_train_end(self):
        self.register_buffer("original", self.scale.detach())


class OwnBackward(Plain):
    """Overrides the backward pass and gradient clipping, and modifies gradients just before the step."""

    def backward(self, loss, *args, **kwargs):
        (loss * 3).backward(*args, **kwargs)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.05, 0.05)

    def on_before_optimizer_step(self, optimizer):
        self.net.convs[0].lin_l.weight.grad.add_(0.01)


class Packaged(NodeClassifier):
    """Module and models of this package, two layers, with the loss weight returned and metrics logged."""

    options: ClassVar = {}
    fanouts = (-1, -1)

    def __init__(self, model=GraphSAGE):
        torch.manual_seed(1)
        super().__init__(model(6, 8, num_layers=2, out_channels=3).double(), num_classes=3)


class Attentive(Packaged):
    """Uses an attention layer."""

    def __init__(self):
        super().__init__(GAT)


def make_case(kind, **more):
    """Return a module class with Trainer options."""
    return type(f"{kind.__name__}{len(more)}", (kind,), {"options": {**kind.options, **more}})


KINDS = {kind.__name__: kind for kind in (Plain, Switch, Manual, History, Target, Bound, Hooked, Elsewhere)} | {
    "Packaged": make_case(Packaged, limit_val_batches=1.0),
    "Attentive": Attentive,
    "OwnBackward": make_case(OwnBackward, gradient_clip_val=1.0),
    "accumulated": make_case(Plain, accumulate_grad_batches=3),
    "accumulated history": make_case(History, accumulate_grad_batches=2),
    "norm": make_case(Plain, gradient_clip_val=0.1),
    "value": make_case(Plain, gradient_clip_val=0.02, gradient_clip_algorithm="value", accumulate_grad_batches=2),
}


def train_state(name, strategy="auto"):
    """Train a module by name and return its state."""
    module = KINDS[name]()
    fit(module, strategy, data=make_data(getattr(module, "fanouts", (-1,))))
    return copy_state(module)


def train_all(rank, num_ranks, names, **strategy):
    """Train all named modules on this rank."""
    found = {}
    for name in names:
        try:
            found[name] = train_state(name, make_hybrid(num_ranks, **strategy))
        except Exception:
            found[name] = traceback.format_exc()
            break
    return found


@functools.cache
def run_all(session, num_ranks):
    cases = cases_of(session, test_all_ranks_have_what_a_plain_trainer_has)
    names = [case["name"] for case in cases if case["num_ranks"] == num_ranks]
    return run(train_all, num_ranks, num_ranks, names)


@functools.cache
def train_alone(name):
    return train_state(name)


def compare(found, expected, tolerance=1e-12):
    assert not isinstance(found, str), found
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        why = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, equal_nan=True, msg=why)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_all_ranks_have_what_a_plain_trainer_has(name, num_ranks, request):
    for found in run_all(request.session, num_ranks):
        assert name in found, f"not reached: {list(found.values())[-1]}"
        compare(found[name], train_alone(name))


OPTIONS = {
    "two equal": (2, {"shares": None}),
    "nine to one": (2, {"cpu_trainers": 1, "devices": ["cpu"], "shares": None, "cpu_share": 0.9}),
    "uneven": (3, {"shares": [0.2, 0.5, 0.3], "cpu_trainers": 1, "devices": ["cpu", "cpu"]}),
    "one with nothing": (2, {"shares": [0.0, 1.0]}),
    "rounded to nothing": (3, {"shares": [0.02, 0.001, 0.979]}),
    "no prefetching": (2, {"prefetch": 0}),
    "more threads": (2, {"threads": None, "prefetch": 1}),
    "balanced": (2, {"shares": None, "drm": True, "cpu_trainers": 1, "devices": ["cpu"]}),
    "often made one": (2, {"agree_every": 1}),
}
FEW = ["Plain", "Manual", "History", "accumulated"]


def train_some(rank, num_ranks, names):
    found = {}
    for name in names:
        found[name] = train_all(rank, num_ranks, FEW, **OPTIONS[name][1])
    return found


@functools.cache
def run_with_options(session, num_ranks):
    names = [case["name"] for case in cases_of(session, test_with_any_options_of_the_strategy)]
    return run(train_some, num_ranks, num_ranks, [name for name in names if OPTIONS[name][0] == num_ranks])


@pytest.mark.campaign
@pytest.mark.parametrize("name", OPTIONS)
def test_with_any_options_of_the_strategy(name, request):
    for found in run_with_options(request.session, OPTIONS[name][0]):
        for kind in FEW:
            assert kind in found[name], f"not reached: {list(found[name].values())[-1]}"
            compare(found[name][kind], train_alone(kind))


def count_messages(rank, shares):
    """Return how often ranks wait for each other in each step of the second epoch."""
    counts, steps = collections.Counter(), []

    class Steps(pl.Callback):
        def on_train_batch_end(self, *arguments):
            steps.append(dict(counts))
            counts.clear()

    def counted(name, inner):
        def call(*arguments, **options):
            counts[name] += 1
            return inner(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as monkey:
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier"):
            monkey.setattr(dist, name, counted(name, getattr(dist, name)))
        fit(Plain(), make_hybrid(2, shares=shares), callbacks=[Steps()])
    return steps[len(steps) // 2 + 1 :]


@pytest.mark.medium
@pytest.mark.parametrize("shares", [[0.3, 0.7], [0.0, 1.0]], ids=["shared", "one has all"])
def test_ranks_wait_for_one_another_once_a_step(shares):
    for steps in run(count_messages, 2, shares):
        assert len(steps) >= 2
        assert all(step == {"all_reduce": 1} for step in steps), steps  # of gradients, metadata and signals


# Comparisons within the limits of random numbers and mini-batch statistics


class Recomputed(Plain):
    """Recomputes activations in the backward pass, with the same dropout."""

    def __init__(self, again=True):
        super().__init__(dropout=0.5)
        self.again = again
        self.first, self.drop = torch.nn.Linear(6, 6).double(), torch.nn.Dropout(0.5)

    def scores(self, batch):
        x = self.first(batch.x)
        x = checkpoint(self.drop, x, use_reentrant=False) if self.again else self.drop(x)
        return self.net(x.relu(), batch.edge_index)[: batch.batch_size]


class Normalized(Plain):
    """Keeps running statistics of mini-batches."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3).double()
        self.parts = []

    def scores(self, batch):
        scores = super().scores(batch)
        self.parts.append((scores.detach().mean(0), batch.batch_size))
        return self.norm(scores)


class Drawing(Plain):
    """Draws random numbers in a step and in a hook."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.drawn, self.hooked = [], []

    def training_step(self, batch, index):
        self.drawn.append(torch.rand(batch.batch_size))
        return self.loss(batch)

    def on_train_batch_end(self, *args):
        self.hooked.append(torch.rand(3))


class InFloat32(Plain):
    """Trains in other precisions."""

    def __init__(self):
        super().__init__()
        self.float()


DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.float32, "64-true": torch.float64}


def train_others(rank):
    recomputed = []
    for again in (False, True):
        module = Recomputed(again)
        torch.manual_seed(3)
        fit(module, make_hybrid(2))
        recomputed.append(copy_state(module))
    norm = Normalized()
    fit(norm, make_hybrid(2), max_epochs=1)
    drawing = Drawing()
    torch.manual_seed(4)
    fit(drawing, make_hybrid(2))
    narrow = {}
    for precision in DTYPES:
        module = InFloat32()
        fit(module, make_hybrid(2), make_data(dtype=DTYPES[precision]), precision=precision)
        narrow[precision] = copy_state(module)
    return recomputed, copy_state(norm), norm.parts, drawing.drawn, drawing.hooked, narrow


@functools.cache
def run_others():
    return run(train_others, 2)


def test_recomputed_activations_see_the_same_dropout():
    for recomputed, *_ in run_others():
        compare(recomputed[1], recomputed[0], 1e-14)


def test_running_statistics_are_the_weighted_mean():
    (_, first, parts, *_), (_, second, other_parts, *_) = run_others()
    mean = torch.zeros(3, dtype=torch.float64)
    for (one, seeds), (other, more) in zip(parts, other_parts, strict=True):
        mean = 0.9 * mean + 0.1 * (one * seeds + other * more) / (seeds + more)
    for found in (first, second):
        torch.testing.assert_close(found["norm.running_mean"], mean, rtol=0, atol=1e-12)
        assert found["norm.num_batches_tracked"] == len(parts)


def test_steps_draw_other_numbers_on_each_rank_and_hooks_the_same():
    (*_, drawn, hooked, _), (*_, other_drawn, other_hooked, _) = run_others()
    assert all(one.equal(other) for one, other in zip(hooked, other_hooked, strict=True))
    size = min(len(drawn[0]), len(other_drawn[0]))
    assert not drawn[0][:size].equal(other_drawn[0][:size])
    assert not drawn[0].equal(drawn[1])


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 5e-2), ("64-true", 1e-12)])
def test_in_other_precisions(precision, tolerance):
    module = InFloat32()
    fit(module, data=make_data(dtype=DTYPES[precision]), precision=precision)
    for found in run_others():
        compare(found[5][precision], copy_state(module), tolerance)


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"drm": True, "cpu_share": "auto"}])
def test_a_lone_trainer_is_the_plain_trainer_bit_for_bit(options):
    found, expected = Drawing(), Drawing()
    for module, strategy in ((found, make_hybrid(1, **options)), (expected, "auto")):
        torch.manual_seed(4)
        trainer = fit(module, strategy, data=make_data([3], num_workers=2))
    assert trainer.train_dataloader is not None
    compare(copy_state(found), copy_state(expected), 0.0)
    assert all(one.equal(other) for one, other in zip(found.drawn, expected.drawn, strict=True))


def test_a_lone_trainer_gets_the_loader_as_it_is():
    module = Plain()
    trainer = fit(module, make_hybrid(1))
    assert type(trainer.train_dataloader).__name__ == "NodeLoader"
    assert trainer.strategy.launcher is None
    assert not torch.distributed.is_initialized()
