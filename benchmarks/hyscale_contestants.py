"""What ``benchmarks.hyscale`` trains: a model whose accelerator can be slowed down or simulated, in several ways."""

from __future__ import annotations

import json
import logging
import threading
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from statistics import median, mode
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from benchmarks import peers
from benchmarks.harness import Gate
from benchmarks.minibatch import make_data
from benchmarks.timed_epochs import TimedEpochs
from lightning_gnn.hyscale.first_mapping import describe_workload, measure_platform
from lightning_gnn.hyscale.options import Trainers
from lightning_gnn.hyscale.pipeline import HybridLoader
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.sampling.node_datamodule import NeighborDataModule

CLASSES = 32
FORWARD = 1 / 3
"""Part of a wait that comes in the forward pass: the backward pass has about twice the products."""


class Stretch(torch.autograd.Function):
    """Hands a loss on after a wait in the forward pass, and its gradient after one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, seconds: float) -> Tensor:
        """Wait for what the device has to do, then for a part of ``seconds``."""
        ctx.seconds = seconds
        if loss.device.type == "cuda":
            torch.cuda.synchronize(loss.device)
        time.sleep(FORWARD * seconds)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Wait for the other part."""
        time.sleep((1 - FORWARD) * ctx.seconds)
        return gradient, None


class PacedClassifier(NodeClassifier):
    """Trains as :class:`NodeClassifier` does, without logging; an accelerator takes longer by a time for each seed.

    Args:
        model: A PyG model.
        seconds_per_seed: The accelerator waits so long for each seed, beside what its step takes.
        simulated: The accelerator is nothing but the wait: no core may do its work, or a CPU trainer would lose by it.
            Its loss hangs on all parameters with a gradient of zero, which is added and sent back like another one.
        cpu_trainers: How many of hyscale's trainers are on the CPU.
        sync_seconds: How long an accelerator that is not alone waits besides, for gradients and parameters on the bus.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        seconds_per_seed: float = 0.0,
        simulated: bool = False,
        cpu_trainers: int = 0,
        sync_seconds: float = 0.0,
    ) -> None:
        super().__init__(model, CLASSES)
        self.sync_seconds = sync_seconds
        self.cpu_trainers = cpu_trainers
        self.seconds_per_seed = seconds_per_seed
        self.simulated = simulated

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the seeds."""
        if threading.current_thread().name in {f"hyscale-trainer-{i}" for i in range(self.cpu_trainers)}:
            return self._seed_loss(batch)
        if self.simulated:
            loss = 0.0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()
        else:
            loss = self._seed_loss(batch)
        seconds = self.seconds_per_seed * batch.batch_size
        if self._trainer is not None and self.trainer.lightning_module is not self:  # a replica: there are others
            seconds += self.sync_seconds
        return Stretch.apply(loss, seconds) if seconds else loss

    def _seed_loss(self, batch: Data) -> Tensor:
        return F.cross_entropy(self(batch)[: batch.batch_size], batch.y[: batch.batch_size])


class SimulatedLink:
    """Hands a mini-batch on after the time in which its bytes would pass a bus.

    Args:
        bandwidth: Bytes per second.
    """

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth

    def __call__(self, batch: Data) -> Data:
        """Wait; nothing is moved."""
        time.sleep((batch.x.nbytes + batch.edge_index.nbytes + batch.n_id.nbytes) / self.bandwidth)
        return batch


class LinkedClassifier(PacedClassifier):
    """For the plain Trainer, which transfers between two steps: over a :class:`SimulatedLink`."""

    link: SimulatedLink

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Wait for the link."""
        return self.link(batch)


class LinkedStrategy(HyScaleStrategy):
    """Hybrid training whose accelerators, stood for by the CPU, are behind a :class:`SimulatedLink`."""

    link: SimulatedLink

    def process_dataloader(self, dataloader: Any) -> Any:
        """Put the link where the stage Data Transfer is."""
        loader = super().process_dataloader(dataloader)
        if isinstance(loader, HybridLoader) and self.trainers is not None:
            there = range(self.trainers.num_cpu, len(self.trainers.devices))
            places: list[Any] = [self.link if i in there else None for i in range(len(self.trainers.devices))]
            loader._transfers = places
        return loader


class Turns(TimedEpochs):
    """Reports milliseconds per iteration of one epoch per turn, after some epochs in which the balance settles."""

    def __init__(self, gate: Gate, iterations: int, settle: int) -> None:
        super().__init__(gate, unit=1e3 / iterations)
        self._settle = settle
        self.edges = 0
        """Of all mini-batches of the last epoch."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the edges."""
        self.edges += batch.num_edges

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock where a turn begins."""
        self.edges = 0
        if trainer.current_epoch >= self._settle:
            super().on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report where a turn ends."""
        if trainer.current_epoch >= self._settle:
            super().on_train_epoch_end(trainer, pl_module)


def make_strategy(spec: dict[str, Any]) -> Any:
    """Return the strategy of one contestant: ``auto`` for a plain Trainer."""
    if spec["trainer"] == "plain":
        return "auto"
    simulated = spec["accelerator"] and spec["device"] == "cpu"
    options = {
        "cpu_trainers": spec["cpu_trainers"],
        "drm": spec.get("drm", False),
        "prefetch": spec["prefetch"],
        "shares": spec.get("shares"),
        "threads": spec["threads"],
        "accelerator_sampling": spec.get("accelerator_sampling", 0.0),
        "devices": ["cpu"] if simulated else None,
    }
    if not spec.get("link"):
        return HyScaleStrategy(**options)
    strategy = LinkedStrategy(**options)
    strategy.link = SimulatedLink(spec["link"])
    return strategy


def make(spec: dict[str, Any]) -> tuple[PacedClassifier, dict[str, Any]]:
    """Return the model and what ``Trainer.fit`` gets beside it."""
    pl.seed_everything(0, verbose=False)
    data = make_data(spec["nodes"], spec["edges"], spec["features"], CLASSES)
    seeds = torch.randperm(spec["nodes"])[: spec["iterations"] * spec["batch_size"]]
    model = GraphSAGE(spec["features"], spec["hidden"], len(spec["fanouts"]), CLASSES)
    kind = LinkedClassifier if spec["trainer"] == "plain" and spec.get("link") else PacedClassifier
    module = kind(
        model,
        seconds_per_seed=spec.get("seconds_per_seed", 0.0),
        simulated=spec["accelerator"] and spec["device"] == "cpu",
        cpu_trainers=spec.get("cpu_trainers", 0),
        sync_seconds=spec.get("sync_seconds", 0.0),
    )
    if isinstance(module, LinkedClassifier):
        module.link = SimulatedLink(spec["link"])
    kwargs: dict[str, Any] = {
        "num_neighbors": spec["fanouts"],
        "batch_size": spec["batch_size"],
        "num_workers": spec["num_workers"],
        "pin_memory": spec["trainer"] == "plain" and spec["device"] != "cpu",
    }
    if spec["library"] == "ours":
        return module, {"datamodule": NeighborDataModule(data, seeds, seed=0, **kwargs)}
    kwargs["persistent_workers"] = spec["num_workers"] > 0
    return module, {"train_dataloaders": peers.neighbor_loader(data, input_nodes=seeds, shuffle=True, **kwargs)}


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Train for as many epochs as there are rounds, then note what was decided and what the stages took."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(spec["torch_threads"])
    module, source = make(spec)
    strategy = make_strategy(spec)
    turns = Turns(gate, spec["iterations"], spec["settle"])
    on_gpu = spec["accelerator"] and spec["device"] == "cuda"
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        strategy=strategy,
        max_epochs=spec["settle"] + gate.rounds,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[turns],
    )
    trainer.fit(module, **source)
    notes: dict[str, Any] = {"edges": turns.edges / spec["iterations"]}
    if isinstance(strategy, HyScaleStrategy):
        notes |= noted(strategy, spec["iterations"])
    if spec.get("describe"):
        notes |= described(source["datamodule"], module, spec)
    Path(spec["notes"]).write_text(json.dumps(notes))


def noted(strategy: HyScaleStrategy, iterations: int) -> dict[str, Any]:
    """Return the usual mapping of the last epoch, all decisions, and the medians of its stage times in seconds."""
    balance = strategy.balance
    assert balance is not None
    last = [times.to_dict() for times, _ in list(balance.history)[-iterations:]]
    stages = {
        stage: median(seconds)
        for stage in ("sample_cpu", "load", "transfer", "iteration")
        if (seconds := [times[stage] for times in last if times[stage] is not None])
    }
    for stage in ("train_cpu", "train_accelerator"):
        if seconds := [times[stage][0] for times in last if times[stage] and times[stage][0]]:
            stages[stage] = median(seconds)
    decisions = [] if balance.manager is None else list(balance.manager.log)
    return {
        "stages": stages,
        "seeds": list(mode(tuple(times["seeds"]) for times in last)),
        "threads": list(balance.threads),
        "decisions": [str(decision) for decision in decisions],
    }


def described(datamodule: NeighborDataModule, module: pl.LightningModule, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the workload and the platform as the strategy itself would describe them by short measurements."""
    workload, sampled_per_s = describe_workload(datamodule.train_dataloader(), module, spec["batch_size"])
    assert workload is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    platform = measure_platform(Trainers.of(1, [device]), sampled_per_s)
    return {"workload": asdict(workload), "platform": asdict(platform)}
