"""A signal to one rank or all stops all after the same step; the resumed run equals an undisturbed one bit for bit."""

import os
import signal

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_gnn import FullGraphDataModule, NeighborDataModule, PartitionedDataModule
from lightning_gnn.nn import GCN, NodeClassifier
from lightning_gnn.partitioned import partition_graph
from tests.cli.command import SignalAt
from tests.full_graph.launch import run
from tests.full_graph.training import small_data
from tests.partitioned.test_training import OPTIONS, make_module
from tests.sampling.cases import make_plain_graph

STEP = 4
CASES = {
    "graph": (lambda parts: NeighborDataModule(make_plain_graph(), **OPTIONS), "ddp", [1]),
    "parts": (lambda parts: PartitionedDataModule(parts, **OPTIONS), "ddp", [0, 1]),
    "hyscale": (lambda parts: NeighborDataModule(make_plain_graph(), **OPTIONS), "hyscale", [1]),
    "full graph": (lambda parts: FullGraphDataModule(small_data(dtype=torch.float32)), "ascend_hybrid", [0]),
}
"""A DataModule, a strategy, and the ranks that receive a signal."""


def train(rank, case, parts, folder, number=None):
    """Train from the last checkpoint on, and send a signal; return the exit code, the step and the weights."""
    torch.set_num_threads(1)
    make, strategy, ranks = CASES[case]
    module = NodeClassifier(GCN(6, 8, 2, 7), num_classes=7) if case == "full graph" else make_module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy=strategy, max_epochs=8 if case == "full graph" else 2,
        logger=False, enable_progress_bar=False, enable_model_summary=False, deterministic=strategy == "hyscale",
        callbacks=[ModelCheckpoint(folder, save_last=True, save_top_k=0)], default_root_dir=folder,
    )  # fmt: skip
    if rank in ranks and number is not None:
        trainer.callbacks.append(SignalAt(STEP, number))
    code = 0
    try:
        trainer.fit(module, datamodule=make(parts), ckpt_path="last", weights_only=True)
        torch.distributed.destroy_process_group()
    except SystemExit as exit_:
        code = exit_.code
    return code, trainer.global_step, module.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_signal_stops_all_ranks_after_the_same_step(case, tmp_path):
    parts, cut = str(tmp_path / "parts"), str(tmp_path / "cut")
    partition_graph(make_plain_graph(), parts, 2, "ldg")
    whole = run(train, 2, case, parts, str(tmp_path / "whole"), nodes=2)
    stopped = run(train, 2, case, parts, cut, signal.SIGTERM, nodes=2)
    assert [(code, step) for code, step, _ in stopped] == [(128 + signal.SIGTERM, STEP)] * 2
    resumed = run(train, 2, case, parts, cut, nodes=2)
    for (code, step, weights), (_, last, expected) in zip(resumed, whole, strict=True):
        assert (code, step) == (0, last)
        assert last > STEP
        assert all(torch.equal(value, weights[name]) for name, value in expected.items())


def train_under_slurm(rank, folder):
    os.environ.update(
        PATH=f"{folder}:{os.environ['PATH']}", SLURM_JOB_ID="77", SLURM_PROCID=str(rank), SLURM_NTASKS="2",
        SLURM_LOCALID="0", SLURM_NODEID=str(rank), SLURM_JOB_NAME="train", SLURM_NTASKS_PER_NODE="1",
    )  # fmt: skip
    del os.environ["TORCHELASTIC_RUN_ID"]
    return train(rank, "parts", f"{folder}/parts", folder, signal.SIGUSR1)[:2]


@pytest.mark.slow
def test_slurms_signal_also_requeues_the_job(tmp_path):
    partition_graph(make_plain_graph(), tmp_path / "parts", 2, "ldg")
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    assert run(train_under_slurm, 2, str(tmp_path), nodes=2) == [(0, STEP)] * 2
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    # One for ckpt_path="last", and one where Lightning looks without ckpt_path.
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"last-interrupted.ckpt", "hpc_ckpt_1.ckpt"}
