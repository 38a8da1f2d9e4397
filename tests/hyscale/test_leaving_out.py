"""CPU trainers that slow accelerators down are left out after a trial, and have no seeds from then on."""

import signal
from dataclasses import replace
from typing import ClassVar

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics

from lightning_gnn.distributed.mixed_device_group import MAX_SENT
from lightning_gnn.distributed.step_sync import SIGNAL_INTERVAL
from lightning_gnn.hyscale.costs import TaskMapping
from lightning_gnn.hyscale.drm import DynamicResourceManager
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from tests.cli.command import SignalAt
from tests.full_graph.launch import run
from tests.hyscale.closed_loop import Node
from tests.hyscale.closed_loop import run as simulate
from tests.hyscale.training import SILENT, Counting, beside_a_slow_cpu, copy_state, fit, make_data

LAG, ITERATIONS, LAST = 6, 60, 16


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("speeds", [[4e3, 1.2e4], [2e4, 1e4, 1e4, 1e4, 1e4]])
@pytest.mark.parametrize("drag", [1.0, 2.5])
def test_a_cpu_that_does_not_pay_trains_in_at_most_20_iterations(speeds, drag, noise):
    accelerators = [256] * (len(speeds) - 1)
    start = TaskMapping((100, *accelerators), 1, (2, 2, 2))
    manager = DynamicResourceManager(start, lag=LAG)
    node = Node(speeds, drag=drag, noise=noise, reference_threads=2)
    held, _ = simulate(manager, node, ITERATIONS, LAG)
    actions = [decision.action for decision in manager.log]
    assert actions[:2] == ["start", "bring_in"]
    assert ("leave_out" in actions) == manager.leaves_out_cpu == (drag > 1)
    with_cpu = [number for number, mapping in enumerate(held) if mapping.cpu_seeds]
    assert with_cpu == [*range(with_cpu[0], with_cpu[-1] + 1)]
    assert with_cpu[0] <= 20
    assert len(with_cpu) <= 20 if drag > 1 else with_cpu[-1] == ITERATIONS - 1
    best = sum(speeds[drag > 1 :])
    assert sum(map(node.seconds, held[-20:])) / 20 <= 1.05 * start.total / best


class Settling(Node):
    """Iterations take longer until memory has grown."""

    left = 20

    def measured(self, mapping):
        self.left -= 1
        times = super().measured(mapping)
        return replace(times, iteration=times.iteration * (1.35 if self.left >= 0 else 1.0))


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("kind", "drag", "pays"), [(Node, 1.75, False), (Settling, 1.3, True)])
def test_small_differences_decide_a_trial(kind, drag, pays, noise):
    manager = DynamicResourceManager(TaskMapping((100, 256), 1, (2, 2, 2)), lag=LAG)
    node = kind([4e3, 1.2e4], drag=drag, noise=noise, reference_threads=2)
    held, _ = simulate(manager, node, 2 * ITERATIONS, LAG)
    assert manager.leaves_out_cpu != pays
    assert (held[-1].cpu_seeds > 0) == pays


@pytest.mark.parametrize(("speed", "factor", "pays"), [(1.0, 1, False), (6e3, 6000, True)])
def test_a_cpu_that_is_too_slow_is_left_out_but_not_for_its_first_iteration(speed, factor, pays):
    class Compiling(Node):
        first = True

        def measured(self, mapping):
            times = super().measured(mapping)
            if self.first and mapping.cpu_seeds:  # compiles in the first iteration
                self.first = False
                times = replace(times, train_cpu=(times.train_cpu[0] * factor,))
            return times

    node, start = Compiling([speed, 1e4]), TaskMapping((400, 624), 1)
    manager = DynamicResourceManager(start, lag=LAG)
    held, _ = simulate(manager, node, 200, LAG)
    assert manager.leaves_out_cpu != pays
    assert (held[-1].cpu_seeds > 0) == pays
    assert [decision.action for decision in manager.log].count("bring_in") == 1


def test_cpu_trainers_without_seeds_are_left_out_from_the_start():
    manager = DynamicResourceManager(TaskMapping((0, 300, 100), 1), lag=LAG)
    assert manager.leaves_out_cpu
    node = Node([4e3, 1e4, 1e4])
    manager.observe(node.measured(manager.mapping))
    assert manager.costs() is not None  # which a plan from a profile needs
    held, _ = simulate(manager, node, ITERATIONS, LAG)
    assert held[-1].seeds == (0, 200, 200)


class Contended(Node):
    """Each seed of the CPU trainers slows the accelerators down, which no stage time shows."""

    def seconds(self, mapping):
        return super().seconds(mapping) * (1 + 2 * max(0.0, mapping.shares[0] - 0.1))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_changes_after_which_iterations_are_slower_are_undone(noise):
    manager = DynamicResourceManager(TaskMapping((100, 924), 1), lag=LAG)
    node = Contended([3e3, 6e3], noise=noise)
    held, _ = simulate(manager, node, 200, LAG)
    assert "undo" in [decision.action for decision in manager.log]
    best = min(node.seconds(TaskMapping((seeds, 1024 - seeds), 1)) for seeds in range(1, 1024))
    assert sum(map(node.seconds, held[50:])) / 150 <= 1.1 * best


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_threads_move_before_the_trial(noise):
    node = Node([400, 1000, 1000], sampling=0.8, loading=0.6, reference_threads=4, noise=noise)
    manager = DynamicResourceManager(TaskMapping((700, 200, 124), 1, (1, 1, 6)), lag=LAG)
    held, _ = simulate(manager, node, 100, LAG)
    assert not manager.leaves_out_cpu, "iterations were as long as those of one sampling thread, with and without it"
    assert node.seconds(held[-1]) <= 1.1 * node.seconds(TaskMapping((170, 427, 427), 1, (2, 2, 4)))


def test_a_saved_trial_goes_on():
    speeds, manager = [4e3, 1.2e4], DynamicResourceManager(TaskMapping((100, 300), 1), lag=LAG)
    _, in_flight = simulate(manager, Node(speeds, drag=2.0), 14, LAG)
    other = DynamicResourceManager(TaskMapping((200, 200), 1), lag=LAG)
    other.load_state_dict(manager.state_dict())
    for each in (manager, other):
        simulate(each, Node(speeds, drag=2.0), 20, in_flight=in_flight.copy())
    assert other.state_dict() == manager.state_dict()
    assert other.leaves_out_cpu


class Gathering(Counting):
    """Calls a collective in each step."""

    def training_step(self, batch, index):
        self.all_gather(torch.ones(1))
        return super().training_step(batch, index)


class Measured(Counting):
    """Computes a metric over all ranks at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.seen = torchmetrics.CatMetric()

    def training_step(self, batch, index):
        self.seen.update(batch.y[: batch.batch_size].float())
        return super().training_step(batch, index)

    def on_train_epoch_end(self):
        self.seen.compute()
        self.seen.reset()


class Validated(Counting):
    """Has a metric that training does not use."""

    def __init__(self):
        super().__init__()
        self.seen = torchmetrics.CatMetric()


class Late(Counting):
    """Creates metrics when training starts, and uses them in two mini-batches of the last epochs only."""

    def on_train_start(self):
        self.mean, self.seen = torchmetrics.MeanMetric(), torchmetrics.CatMetric()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if self.current_epoch == LAST - 2 and index == 1:
            self.mean.update(loss.detach(), batch.batch_size)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
        if self.current_epoch == LAST - 3 and index == 1:
            self.seen.update(batch.y[: batch.batch_size].float())
        return loss

    def on_train_epoch_end(self):
        if self.current_epoch == LAST - 3:
            self.seen.compute()


class Returning(Counting):
    """Returns scores, which a hook may use."""

    def training_step(self, batch, index):
        return {"loss": super().training_step(batch, index), "scores": self.scores(batch)}

    def on_train_batch_end(self, outputs, batch, index):
        assert len(outputs["scores"]) == batch.batch_size


class Accumulating(Counting):
    """Adds the gradients of three mini-batches, between which the CPU may be left out."""

    options: ClassVar = {"accumulate_grad_batches": 3}


class Manual(Counting):
    """Adds the gradients of two mini-batches itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss, optimizer = super().training_step(batch, index), self.optimizers()
        self.manual_backward(loss)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


class Sparse(Counting):
    """Has a parameter with sparse gradients in every other mini-batch, and one without any."""

    def __init__(self):
        super().__init__()
        self.table, self.unused = torch.nn.Embedding(3, 2, sparse=True).double(), torch.nn.Linear(1, 1).double()

    def loss(self, batch):
        is_odd = self.trainer.fit_loop.batch_idx % 2
        return super().loss(batch) + (self.table(batch.y[: batch.batch_size]).square().mean() if is_odd else 0.0)


KINDS = (Counting, Gathering, Measured, Validated, Late, Returning, Accumulating, Manual, Sparse)


def make_strategy(accelerators):
    options = {"cpu_share": 0.3, "threads": (1, 1, 1), "agree_every": 1000}
    return HyScaleStrategy(1, devices=["cpu"] * accelerators, **options)


def train_beside_a_slow_cpu(rank, accelerators):
    """Train, and return the weights, steps and logs."""
    found = []
    with beside_a_slow_cpu():
        for kind in KINDS:
            module, strategy = kind(), make_strategy(accelerators)
            trainer = fit(module, strategy, epochs=LAST)
            actions = [decision.action for decision in strategy.balance.manager.log]
            logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
            found.append((copy_state(module), module.steps, logged, actions))
    return found


def stop_beside_a_slow_cpu(rank, accelerators, receiver):
    """Send a signal to one rank; return the exit code, the step, and whether the CPU was left out."""
    module, strategy, code = Counting(), make_strategy(accelerators), 0
    callbacks = [SignalAt(41, signal.SIGTERM)] if rank == receiver else []
    with beside_a_slow_cpu():
        try:
            fit(module, strategy, epochs=40, callbacks=callbacks)
        except SystemExit as exit_:
            code = exit_.code
    return code, module.trainer.global_step, strategy.balance.leaves_out_cpu


@pytest.mark.medium
@pytest.mark.parametrize("receiver", [0, 1])
def test_a_signal_stops_all_ranks_after_the_same_step(receiver):
    first, second = run(stop_beside_a_slow_cpu, 2, 1, receiver)
    assert first == second == (128 + signal.SIGTERM, first[1], True)
    assert 41 <= first[1] <= 41 + SIGNAL_INTERVAL + MAX_SENT


def resume_beside_a_slow_cpu(rank, accelerators, folder):
    """Train until the CPU is left out, and resume with new modules; return their weights and whether it still is."""
    found = []
    with beside_a_slow_cpu():
        for kind in (Counting, Gathering, Returning, Measured):
            path = f"{folder}/{kind.__name__}.ckpt"
            fit(kind(), make_strategy(accelerators), epochs=6).save_checkpoint(path)
            module, strategy = kind(), make_strategy(accelerators)
            trainer = pl.Trainer(strategy=strategy, **SILENT, max_epochs=12, limit_val_batches=0)
            trainer.fit(module, make_data(), ckpt_path=path, weights_only=True)
            found.append((copy_state(module), strategy.balance.leaves_out_cpu))
    return found


@pytest.mark.medium
def test_a_resumed_run_still_leaves_the_cpu_out(tmp_path):
    for rank in run(resume_beside_a_slow_cpu, 2, 1, str(tmp_path)):
        for kind, (weights, is_left_out) in zip((Counting, Gathering, Returning, Measured), rank, strict=True):
            fit(plain := kind(), epochs=12)
            assert is_left_out
            for name, value in copy_state(plain).items():
                assert torch.allclose(weights[name].double(), value.double(), atol=1e-9), (kind, name)


@pytest.mark.medium
@pytest.mark.parametrize("accelerators", [1, 2])
def test_weights_and_logs_are_those_of_one_device_without_the_cpu(accelerators):
    ranks = run(train_beside_a_slow_cpu, accelerators + 1, accelerators)
    for number, kind in enumerate(KINDS):
        plain = kind()
        logged = {name: float(value) for name, value in fit(plain, epochs=LAST).callback_metrics.items()}
        for weights, steps, logs, actions in (rank[number] for rank in ranks):
            assert "leave_out" in actions
            assert logs["loss_epoch"] == pytest.approx(logged["loss_epoch"], rel=1e-6)
            assert logs["least"] <= logged["least"] + 1e-6
            for name, value in copy_state(plain).items():
                assert torch.allclose(weights[name].double(), value.double(), atol=1e-9), name
            assert logs.get("mean", 0.0) == pytest.approx(logged.get("mean", 0.0), rel=1e-6)
            assert ("mean" in logs) == (kind is Late)
            assert steps == plain.steps
        *others, cpu = (rank[number] for rank in ranks)
        assert all(logs == pytest.approx(cpu[2], rel=1e-6) for _, _, logs, _ in others)  # the CPU rank's are float32
