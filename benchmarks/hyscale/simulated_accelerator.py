"""A slowed-down or simulated accelerator, and disturbances during a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.nn import NodeClassifier

CLASSES = 32
FORWARD = 1 / 3
"""Fraction of a step in the forward pass; the backward pass has about twice the products."""
KERNELS = 120
"""Kernel launches of a step: a GraphSAGE layer has about ten forward and twenty backward, the optimizer a few."""
LAUNCH = 10e-6
"""Seconds of a launch in Python and torch, during which the interpreter lock is held."""


def launch(kernels: int, seconds: float) -> None:
    """Hold the interpreter lock for the launches, then release it and wait until the device has finished."""
    start = time.perf_counter()
    for number in range(1, kernels + 1):
        while time.perf_counter() < start + number * LAUNCH:
            pass
    rest = start + seconds - time.perf_counter()
    if rest > 0:
        time.sleep(rest)


class Step(torch.autograd.Function):
    """Delays a loss by the forward pass, and its gradient by the backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, kernels: int, seconds: float) -> Tensor:
        """Wait for the rest of a real device's work, and for the forward pass's part of the step."""
        ctx.kernels, ctx.seconds = kernels, seconds
        if loss.device.type == "cuda":
            torch.cuda.synchronize(loss.device)
        launch(round(FORWARD * kernels), FORWARD * seconds)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Wait for the backward pass's part."""
        launch(ctx.kernels - round(FORWARD * ctx.kernels), (1 - FORWARD) * ctx.seconds)
        return gradient, None, None


class PacedClassifier(NodeClassifier):
    """Trains as :class:`NodeClassifier` does, without logging; rank 0, or every rank, may be an accelerator."""

    def __init__(
        self,
        model: torch.nn.Module,
        accelerator: bool = False,
        seconds_per_seed: float = 0.0,
        simulated: bool = False,
        every_rank: bool = False,
    ) -> None:
        super().__init__(model, CLASSES)
        self.every_rank = every_rank
        self.accelerator = accelerator
        self.seconds_per_seed = seconds_per_seed
        self.simulated = simulated
        self.slowness = 1.0
        """Factor on the accelerator's time."""

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the seeds."""
        is_slowed = self.simulated or self.seconds_per_seed > 0
        if not (self.accelerator and is_slowed) or (self.trainer.global_rank and not self.every_rank):
            return self._seed_loss(batch)
        kernels, loss = 0, torch.zeros(())
        if self.simulated:
            kernels = KERNELS
            loss = 0.0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()
        else:
            loss = self._seed_loss(batch)
        return Step.apply(loss, kernels, self.slowness * self.seconds_per_seed * batch.batch_size)

    def _seed_loss(self, batch: Data) -> Tensor:
        return F.cross_entropy(self(batch)[: batch.batch_size], batch.y[: batch.batch_size])


class SimulatedLink:
    """Replaces hybrid training's transfer of a mini-batch: delays it by the time of its bytes on a bus."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth

    def __call__(self, batch: Data) -> Data:
        """Wait without moving data."""
        time.sleep((batch.x.nbytes + batch.edge_index.nbytes + batch.n_id.nbytes) / self.bandwidth)
        return batch


class Disturbance(pl.Callback):
    """Blocks a core or slows the accelerator down in the middle third of an epoch."""

    def __init__(self, iterations: int, factor: float = 2.5) -> None:
        self.kind: str | None = None
        """Set the disturbance of the next epoch: ``core``, ``accelerator``, or any other value for none."""
        self._thirds = iterations // 3, 2 * iterations // 3
        self._factor = factor
        self._burner: subprocess.Popen[bytes] | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start and end the disturbance, on rank 0 only."""
        if trainer.global_rank or batch_idx not in self._thirds:
            return
        begins = batch_idx == self._thirds[0]
        if self.kind == "accelerator":
            pl_module.slowness = self._factor if begins else 1.0
        elif self.kind == "core" and begins:
            self._burner = burner(max(os.sched_getaffinity(0)))
        else:
            self.end()

    def end(self) -> None:
        """Release the core."""
        burner, self._burner = self._burner, None
        if burner is not None:
            burner.kill()
            burner.wait()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop the blocking process."""
        self.end()


def burner(core: int) -> subprocess.Popen[bytes]:
    """Start a process that occupies a core, with higher priority if permitted."""
    code = (
        "import os\n"
        f"os.sched_setaffinity(0, {{{core}}})\n"
        "try: os.setpriority(os.PRIO_PROCESS, 0, -15)\n"
        "except PermissionError: pass\n"
        "parent = os.getppid()\n"
        "while os.getppid() == parent:\n"
        "    for _ in range(100000): pass\n"
    )
    return subprocess.Popen([sys.executable, "-S", "-c", code])
