"""Two nodes, each with several trainers, are one: gradients, weights, logs, evaluation, resume."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch_geometric.loader import NeighborLoader

from lightning_gnn import NeighborDataModule
from lightning_gnn.pyg import enable_pyg_sampling
from lightning_gnn.runtime.heartbeat import Process
from tests.full_graph.launch import observe, run
from tests.full_graph.test_faults import Signal, until
from tests.hyscale.models import CLASSES, Module, Steps, data_module, fit, graph, hybrid, left_threads, trainer
from tests.hyscale.test_loss_weights import Weighted
from tests.hyscale.test_resume import SaveAt
from tests.patience import NEVER

pytestmark = pytest.mark.slow  # every node is a process


class Logging(Module):
    def __init__(self, **options):
        super().__init__(**options)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch, batch_idx):
        out = self.net(batch.x, batch.edge_index)[: batch.batch_size]
        loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
        self.accuracy(out, batch.y[: batch.batch_size])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=batch.batch_size)
        self.log("count", float(batch.batch_size), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("largest", out.max(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        return loss


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def small():
    data = graph()
    data.train_mask = torch.arange(120) < 61  # the last batch has a single seed
    return data


CASES = {
    "equal": (Logging, [{}, {}], {}),
    "accumulated": (Logging, [{"cpu_trainers": 3}, {"shares": [0.9, 0.1]}], {"accumulate_grad_batches": 3}),
    "manual": (Manual, [{}, {"cpu_trainers": 1}], {"max_epochs": 1}),
    "class weights": (partial(Weighted, "class weights"), [{}, {"cpu_trainers": 3}], {"accumulate_grad_batches": 2}),
    "ignored": (partial(Weighted, "ignored", own_backward=True), [{"cpu_trainers": 1}, {}], {}),
    "summed": (partial(Weighted, "sum"), [{}, {"cpu_trainers": 1}], {}),
}


def outcome(kind, strategy, num_nodes=1, **options):
    module = kind()
    steps, fitted = fit(module, strategy, data_module(data=small()), num_nodes=num_nodes, **options)
    logged = {name: float(value) for name, value in fitted.callback_metrics.items() if not name.startswith("val")}
    fitted.test(module, datamodule=data_module(data=small()), verbose=False)
    assert not left_threads()
    gradients = [[None if g is None else g.numpy() for g in step] for step in steps.gradients]
    return gradients, [parameter.detach().numpy() for parameter in module.parameters()], logged


def averaged_statistics():
    module = Module(norm=True)
    fit(module, hybrid(), num_nodes=2, max_epochs=1)
    return module.net.norm.running_mean.numpy(), module.net.norm.running_var.numpy()


def resumes_bit_for_bit(path):
    def train(callbacks=(), ckpt_path=None):
        module = Module("adam", dropout=0.5).double()
        torch.manual_seed(11)
        steps = Steps()
        fitted = trainer(hybrid(), [steps, *callbacks], num_nodes=2)
        fitted.fit(
            module, datamodule=data_module(fanouts=[3, 2], num_workers=1), ckpt_path=ckpt_path, weights_only=True
        )
        return module, steps

    whole, _ = train()
    train([SaveAt(path, 3, stop=True)])
    resumed, rest = train(ckpt_path=path)
    assert rest.gradients
    return all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


class Loaders(Module):
    """With PyG's own loader, whose order Lightning shares out."""

    def train_dataloader(self):
        return NeighborLoader(small(), [-1, -1], input_nodes=small().train_mask, batch_size=20, shuffle=True)


def with_pygs_loader():
    enable_pyg_sampling()
    steps = Steps()
    trainer(hybrid(), [steps], num_nodes=2, max_epochs=1).fit(Loaders().double())
    return [[gradient.numpy() for gradient in step] for step in steps.gradients]


def on_two_nodes(rank, path):
    found = {name: outcome(kind, hybrid(**each[rank]), 2, **options) for name, (kind, each, options) in CASES.items()}
    return {
        **found,
        "statistics": averaged_statistics(),
        "resumed": resumes_bit_for_bit(path),
        "loader": with_pygs_loader(),
    }


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """One start of two processes for all that they are to show."""
    return run(on_two_nodes, 2, str(tmp_path_factory.mktemp("nodes") / "middle.ckpt"))


def compare(found, expected):
    gradients, weights, logged = expected
    assert len(found[0]) == len(gradients) > 0
    for a, b in zip([*found[0], found[1]], [*gradients, weights], strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None)
            if y is not None:
                np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-13)
    assert found[2] == {name: pytest.approx(value, rel=1e-6) for name, value in logged.items()}


@pytest.mark.parametrize("case", CASES)
def test_two_nodes_are_one_device(case, two_nodes):
    kind, _, options = CASES[case]
    expected = outcome(kind, "auto", **options)
    for found in two_nodes:
        compare(found[case], expected)


def test_statistics_of_batch_normalisation_are_the_same_on_all_nodes(two_nodes):
    first, second = (found["statistics"] for found in two_nodes)
    assert first[0].any()
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def test_two_nodes_resume_bit_for_bit(two_nodes):
    assert [found["resumed"] for found in two_nodes] == [True, True]


def test_pygs_loaders_go_through_one_order(two_nodes):
    first, second = (found["loader"] for found in two_nodes)
    assert len(first) == len(second) == 4
    assert all((a == b).all() for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


def on_three_nodes(rank):
    return outcome(Logging, hybrid(1 + rank % 2), 3, gradient_clip_val=0.1)


def test_three_nodes_are_one_device_also_where_some_have_no_seed():
    for found in run(on_three_nodes, 3):
        compare(found, outcome(Logging, "auto", gradient_clip_val=0.1))


def with_another_order(rank):
    fit(Module(), hybrid(), NeighborDataModule(graph(), num_neighbors=[-1, -1], batch_size=20, seed=rank), num_nodes=2)


def test_nodes_with_different_orders_are_refused():
    found = observe(with_another_order, 2)
    assert all("different orders of seeds" in error for error in found.errors)


def that_fails(rank):
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if rank == 1 and batch_idx == 1:
                raise ValueError("node 1 is broken")
            return self.loss(batch)

    fit(Failing(), hybrid(), num_nodes=2)


def test_a_node_that_fails_ends_the_others():
    found = observe(that_fails, 2)
    assert "node 1 is broken" in found.errors[1]
    assert "rank 1 (process" in found.errors[0]
    assert "failed: ValueError: node 1 is broken" in found.errors[0]


class SaysWhenItTrains(pl.Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 2:
            Path(os.environ["RANK_FOLDER"], f"{trainer.global_rank}.trains").touch()


def that_train_for_ever(rank, num_nodes, timeout, can_be_seen=True):
    os.dup2(os.open(Path(os.environ["RANK_FOLDER"], f"{rank}.stderr"), os.O_CREAT | os.O_WRONLY), 2)
    if not can_be_seen:  # as a process of another machine
        Process.state = lambda self, seen_from: "unknown"
    callbacks = [SaysWhenItTrains()]
    fit(Module(), hybrid(stall_timeout=timeout), num_nodes=num_nodes, max_epochs=-1, callbacks=callbacks)


@pytest.mark.parametrize("lost", [1, 0])  # rank 0 keeps the store in which the signs of life are
def test_a_node_that_is_killed_ends_the_others(lost):
    sent = Signal(lost, signal.SIGKILL)
    found = observe(that_train_for_ever, 3, 3, NEVER, during=sent, lost=[lost])
    for rank in {0, 1, 2} - {lost}:
        assert f"rank {lost} (process {sent.pid} on " in found.errors[rank]
        assert "died" in found.errors[rank]


def test_a_node_that_is_killed_on_another_machine_is_named_by_its_silence():
    sent = Signal(1, signal.SIGKILL)
    found = observe(that_train_for_ever, 2, 2, NEVER, False, during=sent, lost=[1])
    assert f"rank 1 (process {sent.pid} on " in found.errors[0]
    assert "its machine cannot be reached" in found.errors[0]


@pytest.mark.parametrize("lost", [2, 0])
def test_a_node_that_is_stopped_ends_the_others(lost):
    """Gloo waits on, for half an hour: the first one's process is ended, and says why; others may see it go."""
    sent, said, rest = Signal(lost, signal.SIGSTOP), {}, {0, 1, 2} - {lost}

    def during(processes, folder):
        sent(processes, folder)
        until(lambda: not any(processes[rank].is_alive() for rank in rest))
        said.update({rank: (folder / f"{rank}.stderr").read_text() for rank in rest})

    found = observe(that_train_for_ever, 3, 3, 4.0, during=during, lost=[lost])
    assert 1 in {found.exit_codes[rank] for rank in rest}
    for rank in rest:
        ended = found.exit_codes[rank] == 1
        message = said[rank] if ended else found.errors[rank]
        assert f"rank {lost} (process {sent.pid} on " in message
        assert "is stopped" in message
        assert not ended or f"rank {rank} ends, because rank {lost} " in message


class Slow(pl.Callback):
    """Node 1 takes longer than the timeout for the first step, a validation, and between two runs."""

    def __init__(self, rank, seconds):
        self.seconds = seconds if rank == 1 else 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        time.sleep(self.seconds if trainer.global_step == 0 else 0.0)

    def on_validation_start(self, trainer, module):
        time.sleep(self.seconds)


def that_is_slow(rank, timeout):
    slow, module = Slow(rank, 1.6 * timeout), Module()
    steps, fitted = fit(module, hybrid(stall_timeout=timeout), num_nodes=2, max_epochs=1, callbacks=[slow])
    time.sleep(slow.seconds)
    fitted.test(module, datamodule=data_module(), verbose=False)
    return [parameter.detach().numpy() for parameter in module.parameters()], len(steps.gradients)


def test_a_node_that_is_only_slow_is_waited_for():
    module = Module()
    steps, _ = fit(module, max_epochs=1)
    for weights, num_steps in run(that_is_slow, 2, 2.0):
        assert num_steps == len(steps.gradients)
        for found, expected in zip(weights, module.parameters(), strict=True):
            np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-9, atol=1e-13)
