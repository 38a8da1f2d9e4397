"""Who gets how much of the work in a hybrid run: trainers their seeds, tasks their CPU threads."""

from __future__ import annotations

import os
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Trainers:
    """The trainers of one node: those on the CPU first.

    Args:
        devices: Of each trainer.
        num_cpu: How many are CPU trainers. An accelerator trainer may be on ``cpu`` too, where it stands for one.
    """

    devices: tuple[torch.device, ...]
    num_cpu: int

    @classmethod
    def of(cls, cpu_trainers: int, accelerators: Sequence[torch.device]) -> Trainers:
        """Put them together.

        Raises:
            ValueError: There are none.
        """
        if cpu_trainers == 0 and not accelerators:
            raise ValueError(
                "cpu_trainers=0 and no accelerator: nobody would train; set cpu_trainers=1 or Trainer(accelerator=...)"
            )
        return cls((torch.device("cpu"),) * cpu_trainers + tuple(accelerators), cpu_trainers)

    @property
    def num_accelerators(self) -> int:
        """How many are not CPU trainers."""
        return len(self.devices) - self.num_cpu

    @property
    def names(self) -> list[str]:
        """What messages call them."""
        cpu = [f"{i} (CPU)" for i in range(self.num_cpu)]
        return cpu + [f"{self.num_cpu + i} ({device})" for i, device in enumerate(self.devices[self.num_cpu :])]

    def destinations(self, transfer_dtype: str | None) -> list[torch.device | None]:
        """Return where mini-batches must be transferred to, None for trainers that find them in host memory."""
        cpu: list[torch.device | None] = [None] * self.num_cpu
        rest = self.devices[self.num_cpu :]
        return [*cpu, *(None if device.type == "cpu" and transfer_dtype is None else device for device in rest)]

    def weights(self, cpu_share: float) -> list[float]:
        """Return each trainer's share; CPU trainers have equal ones, accelerators too.

        Args:
            cpu_share: Of all CPU trainers together; without accelerators they have everything anyway.
        """
        if not self.num_accelerators:
            return [1 / self.num_cpu] * self.num_cpu
        if not self.num_cpu:
            return [1 / self.num_accelerators] * self.num_accelerators
        cpu = [cpu_share / self.num_cpu] * self.num_cpu
        return cpu + [(1 - cpu_share) / self.num_accelerators] * self.num_accelerators


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def seeds_of_iteration(loader: Any) -> int:
    """Return the seeds of a full mini-batch of a PyG node loader, 0 if it does not tell.

    A batch size beyond all the seeds there are counts as so many: no mini-batch would ever be full.
    """
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return min(size, len(sampler)) if isinstance(sampler, Sized) else size


def default_threads(num_workers: int, trains_on_cpu: bool, balanced: bool) -> tuple[int, int, int]:
    """Return the CPU threads of sampling, feature loading and training where none are given.

    Args:
        num_workers: Of the loader; they are shared out among the first two.
        trains_on_cpu: Whether there is a CPU trainer.
        balanced: Whether a manager moves threads, so that they must not be more than cores. Otherwise CPU trainers get
            as many as torch would use.
    """
    if balanced:
        num_workers = min(num_workers, num_cores() - int(trains_on_cpu))
    sampling, loading = max(1, (num_workers + 1) // 2), max(1, num_workers // 2)
    training = torch.get_num_threads() if trains_on_cpu else 1
    return sampling, loading, max(1, min(training, num_cores() - sampling - loading)) if balanced else training
