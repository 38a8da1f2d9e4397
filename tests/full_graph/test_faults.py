"""If a rank fails, the others end within seconds and name it."""

import os
import signal
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from lightning_gnn.distributed.heartbeat import Heartbeats
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy
from tests.full_graph.launch import observe, run
from tests.full_graph.training import SideBySide, small_data, trainer_of
from tests.patience import NEVER, PATIENCE

MODEL = (("gcn", 0.0),)


class TrainingMarker(pl.Callback):
    """Creates a file when a rank begins its third epoch."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 2:
            Path(os.environ["RANK_FOLDER"], f"{trainer.global_rank}.trains").touch()


def train_for_ever(rank, num_ranks, timeout):
    strategy = AscendHybridParallelStrategy(timeout=timeout)
    trainer = trainer_of(strategy, num_ranks, max_epochs=-1, callbacks=[TrainingMarker()])
    trainer.fit(SideBySide(MODEL), datamodule=FullGraphDataModule(small_data()))


class SignalSender:
    """Sends a signal to a rank once all train, and records the time."""

    def __init__(self, rank, number, name="trains"):
        self.rank, self.number, self.name = rank, number, name

    def __call__(self, processes, folder):
        wait_until(lambda: all((folder / f"{rank}.{self.name}").exists() for rank in range(len(processes))))
        self.pid = processes[self.rank].pid
        os.kill(self.pid, self.number)
        self.sent = time.monotonic()


def wait_until(condition, limit=PATIENCE):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_late(rank, num_ranks, timeout):
    strategy = AscendHybridParallelStrategy(timeout=timeout)
    trainer_of(strategy, num_ranks)
    if rank == 1:
        time.sleep(2 * timeout)  # as if it were still importing
    strategy.setup_distributed()
    alone = torch.ones(1)
    dist.all_reduce(alone)
    limit = strategy._heartbeats.timeout
    strategy._heartbeats.stop()
    return int(alone), limit


@pytest.mark.slow
def test_a_rank_that_comes_later_than_the_timeout_is_waited_for():
    assert run(start_late, 2, 2, 2.0) == [(2, 2.0)] * 2


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_long_before_the_timeout():
    lost = 0  # it hosts the store that holds the heartbeats
    signal_ = SignalSender(lost, signal.SIGKILL)
    outcome = observe(train_for_ever, 3, 3, NEVER, during=signal_, lost=[lost])
    for rank in {0, 1, 2} - {lost}:
        assert f"rank {lost} (process {signal_.pid} on " in outcome.errors[rank]
        assert "died" in outcome.errors[rank]


def train_with(rank, num_ranks, module, data, options):
    strategy = AscendHybridParallelStrategy(timeout=NEVER, **options)
    trainer = trainer_of(strategy, num_ranks, max_epochs=4)
    trainer.fit(module(MODEL), datamodule=FullGraphDataModule(data(rank)))


def same(rank):
    return small_data()


def another_graph(rank):
    return small_data(seed=int(rank == 2))


def other_splits(rank):
    data = small_data()
    data.val_mask = torch.rand(data.num_nodes, generator=torch.Generator().manual_seed(rank // 2)) < 0.5
    return data


def small_split(rank):
    data = small_data()
    data.val_mask = torch.arange(data.num_nodes) < 2
    return data


class OfTheWholeGraph:
    """A runner, which replaces the call of the model in training, too."""

    trains = True


def with_runner(rank):
    data = small_data()
    data.runner = OfTheWholeGraph()
    return data


class Normalized(SideBySide):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.norm = torch.nn.BatchNorm1d(4)


REFUSED = [
    (SideBySide, another_graph, {}, "all ranks must have the same graph, but rank 2 differs from rank 0"),
    (SideBySide, other_splits, {}, "all ranks must have the same splits, but rank 2 differs from rank 0"),
    (SideBySide, small_split, {}, "the val split has 2 nodes, but there are 3 ranks"),
    (SideBySide, same, {"num_groups": 2}, "num_groups=2 does not divide the 3 devices"),
    (SideBySide, same, {"memory_limit": 12_000}, "GB are available; use more ranks"),
    (SideBySide, with_runner, {}, "run by OfTheWholeGraph, which needs the whole graph"),
    (Normalized, same, {}, "norm (BatchNorm1d) normalizes over all nodes"),
]


def collect_refusals(rank, num_ranks):
    errors = []
    for module, data, options, _ in REFUSED:
        with pytest.raises(ValueError, match=r"\w") as error:
            train_with(rank, num_ranks, module, data, options)
        errors.append(str(error.value))
    train_with(rank, num_ranks, SideBySide, same, {})  # valid training still works afterwards
    return errors


@pytest.mark.slow
def test_what_cannot_work_is_refused_on_every_rank():
    for errors in run(collect_refusals, 3, 3):
        for error, (_, _, _, message) in zip(errors, REFUSED, strict=True):
            assert message in error


def wait_for_ever(rank):
    """Send heartbeats while the main thread waits forever, as in a backend that does not detect lost ranks."""
    dist.init_process_group("gloo")
    folder = Path(os.environ["RANK_FOLDER"])
    store = dist.distributed_c10d._get_default_store()
    Heartbeats(store, rank, 2, timeout=NEVER, end=lambda message: end(folder / "message", message)).start()
    (folder / f"{rank}.waits").touch()
    time.sleep(600)


def end(path, message):
    path.write_text(message)
    os._exit(1)


@pytest.mark.slow
def test_a_main_thread_that_does_not_notice_is_ended():
    signal_ = SignalSender(1, signal.SIGKILL, "waits")
    messages = []

    def during(processes, folder):
        signal_(processes, folder)
        wait_until(lambda: (folder / "message").exists())
        messages.append((folder / "message").read_text())

    outcome = observe(wait_for_ever, 2, during=during)
    assert outcome.exit_codes[0] == 1
    assert f"rank 0 exits because rank 1 (process {signal_.pid} on " in messages[0]
