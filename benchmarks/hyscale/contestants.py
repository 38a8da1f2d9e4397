"""Contestants of ``benchmarks.hyscale.epochs``: each runs this script, ``python -m … SPEC PIPE``, with its ranks."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median, mode
from typing import Any

import pytorch_lightning as pl
import torch
from torch_geometric.data import Data

from benchmarks import peers
from benchmarks.harness import Gate
from benchmarks.hyscale.model import with_accelerator
from benchmarks.hyscale.simulated_accelerator import CLASSES, Disturbance, PacedClassifier, SimulatedLink
from benchmarks.sampling.minibatch import make_data
from benchmarks.scripts import serve
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.hyscale import admission
from lightning_gnn.hyscale import analytic as first_mapping
from lightning_gnn.hyscale.analytic import Platform
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.nn import GraphSAGE

FIRST_FIT = "LGNN_BENCHMARK_FIRST_FIT"
"""The number of the fit that starts a rank, which takes no part in those before."""


class Turns(pl.Callback):
    """Reports milliseconds per iteration of one epoch per turn; the first turn includes the warm-up epochs."""

    def __init__(self, gate: Gate | None, iterations: int, settle: int, disturbance: Disturbance) -> None:
        self._gate = gate
        self._iterations = iterations
        self._settle = settle
        self._disturbance = disturbance
        self._start = 0.0
        self.steps: list[float] = []
        """Seconds of each step of the last epoch."""
        self._step_start = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock when a turn begins; ranks wait for rank 0, which waits for the turn."""
        message = None
        if self._gate is not None and trainer.current_epoch > self._settle:
            message = self._gate.wait()
        message = trainer.strategy.broadcast(message)
        self._disturbance.kind = message if isinstance(message, str) else None
        self.steps.clear()
        times = getattr(trainer.train_dataloader, "times", None)
        if times is not None:
            times.reset()
        self._start = time.perf_counter()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Time the step alone."""
        self._step_start = time.perf_counter()

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Time the step alone."""
        self.steps.append(time.perf_counter() - self._step_start)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report when a turn ends."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        if self._gate is not None and trainer.current_epoch >= self._settle:
            self._gate.report((time.perf_counter() - self._start) * 1e3 / self._iterations)


class Linked(pl.Callback):
    """Adds a simulated link to hybrid training's transfers to its first accelerator."""

    def __init__(self, bandwidth: float) -> None:
        self._link = SimulatedLink(bandwidth)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Insert the Data Transfer stage, which a CPU in place of an accelerator lacks."""
        if trainer.global_rank == 0:
            assert isinstance(trainer.strategy, HyScaleStrategy)
            assert trainer.strategy.loader is not None
            assert trainer.strategy.loader.staged is not None
            trainer.strategy.loader.staged.transfer = self._link  # type: ignore[assignment]


class KnownAccelerator:
    """Sets the simulated accelerator's speed in the strategy's short measurements, which cannot measure it.

    Their results for the CPU, the model and its decisions are unchanged. Also records the measurements.
    """

    def __init__(self, speed: float | None, threads: int, link: float) -> None:
        self._speed, self._threads, self._link = speed, threads, link
        self._measure, self._describe = first_mapping.measure_platform, first_mapping.describe_workload
        self._cached, self._admit = admission.cached_platform, admission.admit_cpu_trainers
        self.notes: dict[str, Any] = {}

    def __enter__(self) -> KnownAccelerator:
        """Replace the measurement."""
        first_mapping.measure_platform = self._platform
        first_mapping.describe_workload = admission.describe_workload = self._workload
        admission.cached_platform, admission.admit_cpu_trainers = self._platform, self._admission
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the measurement."""
        first_mapping.measure_platform, admission.cached_platform = self._measure, self._cached
        first_mapping.describe_workload = admission.describe_workload = self._describe
        admission.admit_cpu_trainers = self._admit

    def _admission(self, *arguments: Any) -> Any:
        found = self._admit(*arguments)
        self.notes["admission"] = str(found)
        return found

    def _platform(self, *arguments: Any) -> Platform:
        platform = self._measure(*arguments)
        if self._speed is not None:
            platform = with_accelerator(platform, self._threads, self._speed, self._link)
        self.notes["platform"] = asdict(platform)
        return platform

    def _workload(self, *arguments: Any) -> Any:
        found = self._describe(*arguments)
        self.notes["workload"] = asdict(found[0])
        return found


def make_strategy(spec: dict[str, Any]) -> Any:
    """Return the strategy of one contestant: ``auto`` for a plain Trainer."""
    if spec["trainer"] == "plain":
        return "auto"
    simulated = spec["accelerator"] and spec["device"] == "cpu"
    # A rank must not mistake another contestant's turn for a stall.
    return HyScaleStrategy(
        devices=["cpu"] * spec.get("accelerators", 1) if simulated else None, stall_timeout=3600, **spec["options"]
    )


def make_source(spec: dict[str, Any], data: Data) -> dict[str, Any]:
    """Return the data arguments of ``Trainer.fit``."""
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randperm(spec["nodes"], generator=generator)[: spec["iterations"] * spec["batch_size"]]
    kwargs: dict[str, Any] = {
        "num_neighbors": spec["fanouts"],
        "batch_size": spec["batch_size"],
        "num_workers": spec["num_workers"],
    }
    if spec["library"] == "ours":
        return {"datamodule": NeighborDataModule(data, seeds, seed=0, **kwargs)}
    kwargs["persistent_workers"] = spec["num_workers"] > 0
    loader = peers.neighbor_loader(data, input_nodes=seeds, shuffle=True, **kwargs)
    if spec["device"] == "cuda":
        from torch_geometric.loader import PrefetchLoader

        loader = PrefetchLoader(loader, torch.device("cuda"))
    return {"train_dataloaders": loader}


def train(spec: dict[str, Any], gate: Gate | None) -> None:
    """Run the fits sequentially, each starting with its first turn."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    data = make_data(spec["nodes"], spec["edges"], spec["features"], CLASSES)
    first = int(os.environ.get(FIRST_FIT, "0"))
    for number, fit in enumerate(spec["fits"][first:], first):
        os.environ[FIRST_FIT] = str(number)
        if gate is not None:
            gate.wait()
        train_once({**spec, **fit}, data, gate)


def train_once(spec: dict[str, Any], data: Data, gate: Gate | None) -> None:
    """Train for one epoch per round, then record the decisions and stage times."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if "cores" in spec:  # by rank
        os.sched_setaffinity(0, spec["cores"][rank])
    torch.set_num_threads(spec["torch_threads"])
    pl.seed_everything(0, verbose=False)
    model = GraphSAGE(spec["features"], spec["hidden"], len(spec["fanouts"]), CLASSES)
    simulated = spec["accelerator"] and spec["device"] == "cpu"
    seconds = spec["sleeps"][rank] if "sleeps" in spec else spec.get("seconds_per_seed", 0.0)
    module = PacedClassifier(model, spec["accelerator"], seconds, simulated, "sleeps" in spec)
    source, strategy = make_source(spec, data), make_strategy(spec)
    disturbance = Disturbance(spec["iterations"])
    turns = Turns(gate, spec["iterations"], spec["settle"], disturbance)
    hybrid = isinstance(strategy, HyScaleStrategy)
    linked = [Linked(spec["link"])] if hybrid and simulated and spec.get("link") else []
    trainer = pl.Trainer(
        accelerator="gpu" if spec["accelerator"] and not simulated else "cpu",
        devices=1,
        strategy=strategy,
        max_epochs=spec["settle"] + 1 + spec["runs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[disturbance, turns, *linked],
    )
    speed = None if "sleeps" in spec else spec.get("speed", 1.0)  # the resource manager finds out how long ranks sleep
    with KnownAccelerator(speed, spec["torch_threads"], spec.get("link") or float("inf")) as known:
        trainer.fit(module, **source)
        if rank:
            return
        notes: dict[str, Any] = dict(known.notes)
        if isinstance(strategy, HyScaleStrategy):
            notes |= noted(strategy, spec["iterations"])
        if spec.get("describe"):
            notes |= described(source["datamodule"], module, turns, spec)
    Path(spec["notes"]).write_text(json.dumps(notes))


def noted(strategy: HyScaleStrategy, iterations: int) -> dict[str, Any]:
    """Return the mapping at the start and at the end, all decisions, and medians of the last epoch's stage times."""
    balance = strategy.balance
    if balance is None:
        return {}
    last = [vars(times) for times, _ in list(balance.history)[-iterations:]]
    stages = {
        stage: median(seconds)
        for stage in ("sample_cpu", "load", "transfer")
        if (seconds := [times[stage] for times in last if times[stage] is not None])
    }
    for stage in ("train_cpu", "train_accelerator"):
        if seconds := [times[stage][0] for times in last if times[stage] and times[stage][0]]:
            stages[stage] = median(seconds)
    shares = list(balance.current.shares)
    seeds = list(mode(tuple(times["seeds"]) for times in last)) if last else None
    return {
        "stages": stages,
        "first_shares": list(balance.first.shares),
        "shares": shares,
        "seeds": seeds,
        "threads": list(balance.current.threads),
        "decisions": [] if balance.manager is None else [str(decision) for decision in balance.manager.log],
    }


def described(
    datamodule: NeighborDataModule, module: pl.LightningModule, turns: Turns, spec: dict[str, Any]
) -> dict[str, Any]:
    """Return the workload, the platform from the strategy's short measurements, and a plain Trainer's stage times."""
    assert datamodule.trainer is not None
    loader = datamodule.trainer.train_dataloader
    times = loader.times
    workload, sampled_per_s = first_mapping.describe_workload(loader, module, spec["batch_size"])
    platform = first_mapping.measure_platform(first_mapping.TrainerSet.of(1, [torch.device("cpu")]), sampled_per_s)
    return {
        "stages": {
            "sample_cpu": times.sampling_s / times.batches,
            "load": times.features_s / times.batches,
            "train_cpu": median(turns.steps),
        },
        "workload": asdict(workload),
        "platform": asdict(replace(platform, pcie_bandwidth=1.0)),
        "seeds": [spec["batch_size"]],
        "threads": [1, 1, spec["torch_threads"]],
    }


if __name__ == "__main__":
    serve(train, sys.argv[1:])
