"""A rank of ``benchmarks.data.shared_memory``, started by Lightning: ``python -m … SPEC FILE``.

It trains for some steps, and writes the total memory of all ranks to a JSON file.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from benchmarks.sampling.minibatch import make_data
from lightning_gnn import AscendHybridParallelStrategy, FullGraphDataModule, NeighborDataModule
from lightning_gnn.nn import GCN, GraphSAGE, NodeClassifier

STEPS = 8
CLASSES = 8


def proportional_mb() -> float:
    """Return this process's proportional set size, in units of 10^6 bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:"))


class Memory(pl.Callback):
    """Measures all ranks at the same time, while they train."""

    def __init__(self) -> None:
        self.megabytes = 0.0
        self.step_s: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Stop the clock; after the last step, measure the memory."""
        self.step_s.append(time.perf_counter() - self._start)
        if trainer.global_step == STEPS:
            trainer.strategy.barrier()
            self.megabytes = proportional_mb()
            trainer.strategy.barrier()


def main() -> None:
    spec, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    before = proportional_mb()
    data = make_data(spec["nodes"], spec["edges"], spec["features"], CLASSES)
    data.train_mask = torch.arange(spec["nodes"]) % 10 == 0
    full = spec["strategy"] == "ascend_hybrid"
    if full:
        datamodule: Any = FullGraphDataModule(data, share_memory=spec["shared"])
    else:
        datamodule = NeighborDataModule(data, num_neighbors=[10, 5], batch_size=256, share_memory=spec["shared"])
    setup, setup_s = datamodule.setup, []

    def timed_setup(stage: str) -> None:
        start = time.perf_counter()
        setup(stage)
        setup_s.append(time.perf_counter() - start)

    datamodule.setup = timed_setup
    memory = Memory()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=spec["ranks"],
        strategy=AscendHybridParallelStrategy(memory_limit=None) if full else "ddp" if spec["ranks"] > 1 else "auto",
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[memory],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = (GCN if full else GraphSAGE)(spec["features"], 8, 2, CLASSES)
    trainer.fit(NodeClassifier(model, CLASSES), datamodule=datamodule)
    mine = [memory.megabytes, before, setup_s[0], statistics.median(memory.step_s[1:])]
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * spec["ranks"]
        dist.all_gather_object(everyone, mine)
    if trainer.global_rank == 0:
        megabytes, empty, setups, steps = (list(figures) for figures in zip(*everyone, strict=True))
        found = {"megabytes": sum(megabytes), "empty": sum(empty), "setup_s": max(setups), "step_s": max(steps)}
        out.write_text(json.dumps({**found, "arrays": sum(value.nbytes for value in data.to_dict().values()) / 1e6}))


if __name__ == "__main__":
    main()
