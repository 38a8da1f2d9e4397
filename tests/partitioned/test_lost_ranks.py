"""A rank that is killed, whatever it is about, ends the others in seconds, and they say which one it was."""

import functools
import os
import re
import signal

import pytest
import pytorch_lightning as pl

from lightning_gnn import PartitionedDataModule
from lightning_gnn.partitioned import partition_graph
from lightning_gnn.partitioned.exchange import Exchange
from lightning_gnn.partitioned.folder import Partition
from lightning_gnn.partitioned.shard import Shard
from tests.full_graph.launch import observe
from tests.partitioned.graphs import plain_graph
from tests.partitioned.test_training import module_of, trainer_of

LOST, RANKS = 1, 3


def vanish():
    os.kill(os.getpid(), signal.SIGKILL)


def before(kind, name, count=0):
    """Kill this process when a method is called the ``count``-th time."""
    method = getattr(kind, name)
    left = iter(range(count))

    @functools.wraps(method)
    def killed(*args, **kwargs):
        if next(left, None) is None:
            vanish()
        return method(*args, **kwargs)

    setattr(kind, name, killed)


class _At(pl.Callback):
    def __init__(self, hook):
        setattr(self, hook, self._called)

    def _called(self, trainer, *args, **kwargs):
        if trainer.current_epoch == 1:
            vanish()


STAGES = {
    "reading its part": lambda: before(Partition, "open"),
    "counting what to keep": lambda: before(Exchange, "ask"),
    "answering a question about lists": lambda: before(Shard, "picks", 40),
    "asking in the middle of a mini-batch": lambda: before(Exchange, "ask", 12),
    "answering a question about rows": lambda: before(Shard, "node_rows", 12),
    "a training step": lambda: _At("on_before_optimizer_step"),
    "a validation": lambda: _At("on_validation_batch_start"),
    "the end of an epoch": lambda: _At("on_train_epoch_end"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost") / "parts"
    partition_graph(plain_graph(), folder, RANKS, "ldg", batches=0)
    return str(folder)


def _train(rank, folder, stage, said):
    file = os.open(f"{said}/{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    callback = STAGES[stage]() if rank == LOST else None
    datamodule = PartitionedDataModule(
        folder, num_neighbors=[3, 3], batch_size=8, seed=7, silence=20, cache=500, num_workers=2
    )
    trainer = trainer_of(RANKS, callbacks=[] if callback is None else [callback])
    trainer.fit(module_of(), datamodule=datamodule)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_rank_ends_the_others_by_name(folder, stage, tmp_path):
    outcome = observe(_train, RANKS, folder, stage, str(tmp_path), nodes=RANKS)
    assert outcome.exit_codes[LOST] == -signal.SIGKILL
    for rank in set(range(RANKS)) - {LOST}:
        # By an exception, or where the main thread waits on, at the end of the process.
        said = outcome.errors[rank] + (tmp_path / str(rank)).read_text()
        assert re.search(rf"rank {LOST} \(process \d+ on \S+\) died: its process has ended without a word", said), said
