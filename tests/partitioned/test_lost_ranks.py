"""If a rank is killed at any stage, the others end within seconds and name it."""

import functools
import os
import re
import signal

import pytest
import pytorch_lightning as pl
import torch.distributed as dist

from lightning_gnn import PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.nn import GraphSAGE, LinkPredictor
from lightning_gnn.partitioned import partition_graph
from lightning_gnn.partitioned.exchange import RankRPC
from lightning_gnn.partitioned.folder import Partition
from lightning_gnn.partitioned.inference import PublishedRows
from lightning_gnn.partitioned.shard import Shard
from tests.full_graph.launch import observe
from tests.partitioned.test_training import make_module, make_trainer
from tests.patience import NEVER
from tests.sampling.cases import make_plain_graph

LOST, RANKS = 1, 3


def vanish():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_call(kind, name, count=0):
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
    "reading its part": lambda: kill_at_call(Partition, "open"),
    "counting what to keep": lambda: kill_at_call(RankRPC, "call"),
    "answering a question about lists": lambda: kill_at_call(Shard, "picks", 40),
    "asking in the middle of a mini-batch": lambda: kill_at_call(RankRPC, "call", 12),
    "answering a question about rows": lambda: kill_at_call(Shard, "node_rows", 12),
    "a training step": lambda: _At("on_before_optimizer_step"),
    "a validation": lambda: _At("on_validation_batch_start"),
    "the end of an epoch": lambda: _At("on_train_epoch_end"),
    "answering with the outputs of a layer": lambda: kill_at_call(PublishedRows, "read", 5),
}
KINDS = {
    "nodes": (PartitionedDataModule, {"cache": 500}, "ddp"),
    "links": (PartitionedLinkDataModule, {}, "ddp"),
    "whole": (PartitionedDataModule, {"cache": 500, "topology": "whole"}, "ddp"),
    "hyscale": (PartitionedDataModule, {"cache": 500}, "hyscale"),
    "inference": (PartitionedDataModule, {"inference": "full"}, "ddp"),
}
OF_KINDS = [
    *(("nodes", stage) for stage in list(STAGES)[:8]),
    *(("links", stage) for stage in list(STAGES)[2:6]),
    *(("whole", stage) for stage in [list(STAGES)[1], *list(STAGES)[4:6]]),
    *(("hyscale", stage) for stage in [*list(STAGES)[1:6], list(STAGES)[7]]),
    ("inference", list(STAGES)[8]),
]
"""Where a rank is killed: "links" cache nothing and have no validation edges; "whole" requests no lists, and reads all
parts before the process group exists."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost") / "parts"
    partition_graph(make_plain_graph(), folder, RANKS, "ldg")
    return str(folder)


def _train(rank, folder, kind, stage, said):
    file = os.open(f"{said}/{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    callback = STAGES[stage]() if rank == LOST else None
    make, options, strategy = KINDS[kind]
    links = kind == "links"
    seeds = {"input_train_edges": make_plain_graph().edge_index[:, :200], "neg_sampling_ratio": 1.0} if links else {}
    datamodule = make(
        folder, **seeds, num_neighbors=[3, 3], batch_size=8, seed=7, silence=NEVER, num_workers=2, **options
    )
    module = LinkPredictor(GraphSAGE(3, 8, 2, 3)) if links else make_module()
    make_trainer(RANKS, strategy, callbacks=[] if callback is None else [callback]).fit(module, datamodule=datamodule)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), OF_KINDS)
def test_a_killed_rank_ends_the_others_by_name(folder, kind, stage, tmp_path):
    outcome = observe(_train, RANKS, folder, kind, stage, str(tmp_path), nodes=RANKS)
    assert outcome.exit_codes[LOST] == -signal.SIGKILL
    for rank in set(range(RANKS)) - {LOST}:
        # Either by an exception, or at exit of the process where the main thread still waits.
        said = outcome.errors[rank] + (tmp_path / str(rank)).read_text()
        assert re.search(rf"rank {LOST} \(process \d+ on \S+\) died: its process exited unexpectedly", said), said


def _read_without_trainer(rank, folder, number, said):
    """Iterate over loaders without a Trainer; rank 1 sends itself a signal."""
    os.dup2(os.open(f"{said}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    datamodule = PartitionedDataModule(folder, num_neighbors=[3, 3], batch_size=8, seed=7, rpc_timeout=5.0)
    datamodule.setup("fit")
    if rank == 1 and number:
        os.kill(os.getpid(), number)
    return sum(batch.num_nodes for batch in datamodule.train_dataloader())  # then end without teardown


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_without_a_trainer_a_lost_rank_ends_the_others_too(number, tmp_path):
    folder = tmp_path / "parts"
    partition_graph(make_plain_graph(), folder, 2, "ldg")
    outcome = observe(_read_without_trainer, 2, str(folder), number, str(tmp_path), lost=[1])
    said = outcome.errors[0] + (tmp_path / "0").read_text()
    assert re.search(r"rank 1 \(process \d+ on \S+\) (died|is stopped)|rank 1 does not answer", said), said
