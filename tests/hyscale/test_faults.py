"""If a rank fails during any kind of work, the others end within seconds and name it."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.full_graph.launch import observe
from tests.full_graph.test_faults import SignalSender, wait_until
from tests.hyscale.training import Plain, fit, make_data, make_hybrid
from tests.patience import NEVER

pytestmark = pytest.mark.slow  # every rank is a process


def mark_reached(rank, place):
    """Create the file by which the test sees that a rank has reached this place."""
    Path(os.environ["RANK_FOLDER"], f"{rank}.{place}").touch()


class BackwardNotifier(torch.autograd.Function):
    """Calls ``module.reach`` in the backward pass."""

    @staticmethod
    def forward(ctx, loss, module):
        ctx.module = module
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.module.reach("backward")
        return grad, None


class Busy(Plain):
    """Marks when it reaches ``place``; there, after four steps, ``rank`` calls ``own``."""

    def __init__(self, place, own=None, rank=1):
        super().__init__()
        self.place, self.own, self.rank = place, own, rank

    def reach(self, place):
        if place == self.place and self.global_step > 3:
            mark_reached(self.global_rank, place)
            if self.own is not None and self.global_rank == self.rank:
                self.own()
            time.sleep(0.02)

    def training_step(self, batch, index):
        self.reach("training")
        return BackwardNotifier.apply(super().training_step(batch, index), self)

    def validation_step(self, batch, index):
        if not self.trainer.sanity_checking:
            self.reach("validation")

    def prepare(self, batch):
        """Transform of the loader, which runs in a pipeline thread."""
        self.reach("preparing")
        return batch


def train_for_ever(rank, place, timeout, own=None, on=1):
    os.dup2(os.open(Path(os.environ["RANK_FOLDER"], f"{rank}.stderr"), os.O_CREAT | os.O_WRONLY), 2)
    num_ranks = int(os.environ["WORLD_SIZE"])
    module = Busy(place, own, on)
    data = make_data(transform=module.prepare, thread_safe=True, eval_loader_kwargs={"transform": None}, num_workers=2)
    fit(module, make_hybrid(num_ranks, stall_timeout=timeout), data, epochs=-1, limit_val_batches=3)


class RankLoss:
    """Loses a rank at a place, by signal ``number`` or by itself (None); stores the stderr of all ranks.

    ``seconds`` is the time from the loss until all other ranks have ended.
    """

    def __init__(self, rank, number, place):
        self.rank, self.signal, self.place = rank, number and SignalSender(rank, number, place), place

    def __call__(self, processes, folder):
        self.pid = processes[self.rank].pid
        if self.signal is None:
            wait_until(lambda: (folder / f"{self.rank}.{self.place}").exists())
        else:
            self.signal(processes, folder)
        began = time.monotonic()
        rest = [process for rank, process in enumerate(processes) if rank != self.rank]
        wait_until(lambda: not any(process.is_alive() for process in rest))
        self.seconds = time.monotonic() - began
        self.stderr = [(folder / f"{rank}.stderr").read_text() for rank in range(len(processes))]

    def assert_named(self, found, how):
        """Assert that every other rank names the lost one in its error or its last output."""
        for rank, error in enumerate(found.errors):
            if rank != self.rank:
                text = self.stderr[rank] if error == "no result" else error
                assert re.search(rf"rank {self.rank} \(process {self.pid} on \S+\) {how}", text), text
                assert error != "no result" or f"rank {rank} exits because rank {self.rank} " in text


# Rank 0 hosts the store that holds the heartbeats.
@pytest.mark.parametrize(("lost", "place"), [(0, "training"), (1, "preparing"), (1, "validation")])
def test_a_rank_that_is_killed(lost, place):
    said = RankLoss(lost, signal.SIGKILL, place)
    found = observe(train_for_ever, 2 + lost, place, NEVER, during=said, lost=[lost])
    said.assert_named(found, "died: its process exited unexpectedly")


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "place"), [(1, "training"), (0, "preparing"), (0, "validation")])
def test_a_rank_that_is_stopped(lost, place):
    """Gloo alone would wait for half an hour."""
    said = RankLoss(lost, signal.SIGSTOP, place)
    found = observe(train_for_ever, 2 + lost, place, 3.0, during=said, lost=[lost])
    said.assert_named(found, "is stopped")


def sleep_for_ever():
    time.sleep(NEVER)


def run_for_ever():
    while True:
        pass


@pytest.mark.parametrize(
    ("lost", "place", "own", "where"),
    [
        (0, "training", sleep_for_ever, "training_step"),
        (1, "backward", run_for_ever, "backward"),
        (1, "validation", sleep_for_ever, "validation_step"),
    ],
)
def test_a_rank_that_hangs_in_a_step(lost, place, own, where):
    said = RankLoss(lost, None, place)
    found = observe(train_for_ever, 2, place, 2.0, own, lost, during=said)
    said.assert_named(found, rf"failed: hangs in {where} for \d+ s")
    assert found.exit_codes[lost] == 1
    assert f"rank {lost} hangs in {where}" in said.stderr[lost]
    assert own.__name__ in said.stderr[lost]  # its stack


def test_a_rank_that_hangs_in_the_pipeline():
    said = RankLoss(1, None, "preparing")
    found = observe(train_for_ever, 2, "preparing", 2.0, run_for_ever, during=said)
    said.assert_named(found, "failed: TimeoutError")
    assert "TimeoutError" in found.errors[1]
    assert "run_for_ever" in found.errors[1]


def raise_it():
    raise ArithmeticError("the labels are odd")


@pytest.mark.parametrize("place", ["training", "backward", "preparing", "validation"])
def test_a_rank_that_raises(place):
    said = RankLoss(1, None, place)
    found = observe(train_for_ever, 2, place, NEVER, raise_it, during=said)
    said.assert_named(found, "failed: ArithmeticError: the labels are odd")
    assert "in raise_it" in found.errors[1]
    assert found.errors[1].rstrip().endswith("ArithmeticError: the labels are odd")
