"""Who gets how much of the work in a hybrid run: trainers their seeds, tasks their CPU threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

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


def check_share(cpu_share: str | float) -> str | float:
    """Return the share.

    Raises:
        ValueError: Neither ``"auto"`` nor in (0, 1].
    """
    if cpu_share == "auto":
        return cpu_share
    if isinstance(cpu_share, str) or not 0.0 < cpu_share <= 1.0:
        raise ValueError(
            f"cpu_share is 'auto' or the CPU trainers' part of the seeds, in (0, 1], but is {cpu_share!r}; "
            f"cpu_trainers=0 leaves the CPU out"
        )
    return float(cpu_share)


def check_shares(shares: Sequence[float] | None, num_trainers: int | None = None) -> list[float] | None:
    """Return the shares, which add up to one.

    Raises:
        ValueError: They do not, or there are not as many as trainers.
    """
    if shares is None:
        return None
    checked = [float(share) for share in shares]
    if any(not 0.0 <= share <= 1.0 for share in checked) or abs(sum(checked) - 1.0) > 1e-6:
        raise ValueError(f"shares must be in [0, 1] and add up to 1, but are {checked}")
    if num_trainers is not None and len(checked) != num_trainers:
        raise ValueError(
            f"shares has {len(checked)} entries, but there are {num_trainers} trainers (CPU trainers first)"
        )
    return checked


def check_sampling(share: str | float) -> str | float:
    """Return the share of the sampling that accelerators do.

    Raises:
        ValueError: Neither ``"auto"`` nor in [0, 1].
    """
    if share == "auto":
        return share
    if isinstance(share, str) or not 0.0 <= share <= 1.0:
        raise ValueError(f"accelerator_sampling is 'auto' or a share of the sampling, in [0, 1], but is {share!r}")
    return float(share)


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(threads: Sequence[int] | None) -> tuple[int, int, int] | None:
    """Return the CPU threads of sampling, feature loading and training.

    Raises:
        ValueError: Not three positive numbers, or more than cores; one each is always allowed.
    """
    if threads is None:
        return None
    checked = tuple(int(number) for number in threads)
    if len(checked) != 3 or min(checked) < 1:
        raise ValueError(
            f"threads are those of sampling, feature loading and CPU trainers, each at least 1, but are {list(threads)}"
        )
    if sum(checked) > max(num_cores(), 3):
        raise ValueError(f"threads={list(checked)} are {sum(checked)}, but this process may use {num_cores()} cores")
    return checked[0], checked[1], checked[2]


def default_threads(num_workers: int, trains_on_cpu: bool, balanced: bool) -> tuple[int, int, int]:
    """Return the CPU threads of sampling, feature loading and training where none are given.

    Args:
        num_workers: Of the loader; they are shared out among the first two.
        trains_on_cpu: Whether there is a CPU trainer.
        balanced: Whether a manager moves threads, so that they must not be more than cores. Otherwise CPU trainers get
            as many as torch would use.
    """
    sampling, loading = max(1, (num_workers + 1) // 2), max(1, num_workers // 2)
    training = torch.get_num_threads() if trains_on_cpu else 1
    return sampling, loading, max(1, min(training, num_cores() - sampling - loading)) if balanced else training
