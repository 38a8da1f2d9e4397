"""The options of hybrid training, checked once; its trainers, and what they have if nothing is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeGuard

import torch
from torch_geometric.loader import LinkLoader, NodeLoader

from lightning_gnn.hyscale.transfer import TRANSFER_DTYPES
from lightning_gnn.runtime.cores import num_cores
from lightning_gnn.runtime.messages import removed, whole_number

PyGLoader: TypeAlias = NodeLoader | LinkLoader  # those of this package are such, too
_MAX_TIMEOUT_S = 1e8
"""Nothing that waits takes infinity."""


@dataclass(frozen=True)
class TrainerSet:
    """The trainers of one node: those on the CPU first."""

    devices: tuple[torch.device, ...]
    num_cpu: int  # how many are CPU trainers. An accelerator trainer may be on ``cpu`` too, where it stands for one.

    @classmethod
    def of(cls, cpu_trainers: int, accelerators: Sequence[torch.device]) -> TrainerSet:
        """Put them together."""
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
    def accelerators(self) -> list[torch.device]:
        """Those that are not CPU trainers."""
        return list(self.devices[self.num_cpu :])

    @property
    def names(self) -> list[str]:
        """What messages call them."""
        cpu = [f"{i} (CPU)" for i in range(self.num_cpu)]
        return cpu + [f"{self.num_cpu + i} ({device})" for i, device in enumerate(self.devices[self.num_cpu :])]

    def of_rank(self, local_rank: int) -> int:
        """Return which trainer a rank of the node is: the first ranks are the accelerators."""
        accelerators = self.num_accelerators
        return self.num_cpu + local_rank if local_rank < accelerators else local_rank - accelerators

    def rank_of(self, trainer: int) -> int:
        """Return which rank of the node a trainer is."""
        return trainer - self.num_cpu if trainer >= self.num_cpu else trainer + self.num_accelerators

    @property
    def equal_weights(self) -> list[float]:
        """The share of each trainer where all have the same."""
        return [1 / len(self.devices)] * len(self.devices)

    def weights(self, cpu_share: str | float) -> list[float]:
        """Return each trainer's share; CPU trainers have equal ones, accelerators too."""
        if not self.num_accelerators or not self.num_cpu:
            return self.equal_weights
        share = 0.5 if isinstance(cpu_share, str) else cpu_share
        cpu = [share / self.num_cpu] * self.num_cpu
        return cpu + [(1 - share) / self.num_accelerators] * self.num_accelerators


def trainers_of(wanted: int, accelerators: Sequence[torch.device], devices: Sequence[torch.device]) -> TrainerSet:
    """Return the trainers of a node."""
    on_cpu = sum(device.type == "cpu" for device in devices)
    if accelerators is devices:
        accelerators = [device for device in devices if device.type != "cpu"]
        mixed = bool(accelerators) and on_cpu > 0
        if mixed or on_cpu > 1:
            if not mixed and wanted not in (1, on_cpu):
                raise ValueError(
                    f"Trainer(accelerator='cpu', devices={on_cpu}) and cpu_trainers={wanted}: "
                    f"set one of them, or both to the number of CPU trainers"
                )
            wanted = on_cpu
    return TrainerSet.of(wanted, accelerators)


def measurements_decide() -> bool:
    """Tell whether choices may follow from measurements, which no two runs share: not with ``deterministic=True``."""
    return not torch.are_deterministic_algorithms_enabled()


def balances(drm: bool | str | Path) -> bool:
    """Whether a manager follows from measurements: this package's (True), or the published one (``"paper"``)."""
    return drm is True or drm == "paper"


def replays(drm: bool | str | Path) -> TypeGuard[str | Path]:
    """Whether this is the path of recorded decisions."""
    return drm is not False and not balances(drm)


def allowed_drm(drm: bool | str | Path) -> bool | str | Path:
    """Return ``drm``, but False for a manager where measurements decide nothing; a replay needs none."""
    return False if balances(drm) and not measurements_decide() else drm


TURNED_OFF = (
    "hyscale: Trainer(deterministic=True) turns off what follows from measurements: drm=True or 'paper' acts as False, "
    "cpu_share='auto' as equal shares, accelerator_sampling='auto' as 0.0. Give a mapping by hand, as `lgnn plan` "
    "finds one: shares= or cpu_share=0.3, threads=(4, 2, 10), accelerator_sampling=0.2; or replay what decision_log= "
    "recorded: drm='decisions.jsonl'"
)


def seeds_of_iteration(loader: PyGLoader) -> int:
    """Return the seeds of a full mini-batch of a PyG node loader, 0 if that is unknown."""
    # A batch size beyond all the seeds counts as so many: no mini-batch would ever be full.
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return min(size, len(sampler)) if isinstance(sampler, Sized) else size


def default_threads(num_workers: int, trainers: TrainerSet, balanced: bool) -> tuple[int, int, int]:
    """Return the CPU threads of sampling, feature loading and training of a node where none are given."""
    # A manager moves threads, so that they must not be more than cores; else the CPU trainers get all cores.
    cores, num_cpu = num_cores(), trainers.num_cpu
    if balanced:
        num_workers = min(num_workers, cores - int(num_cpu > 0))
    sampling, loading = max(1, (num_workers + 1) // 2), max(1, num_workers // 2)
    training = cores - sampling - loading if balanced else cores
    return sampling, loading, max(1, num_cpu, training if num_cpu else 1)


@dataclass
class HyScaleOptions:
    """The options of :class:`~lightning_gnn.hyscale.HyScaleStrategy`, where they are described."""

    cpu_trainers: int
    cpu_share: str | float
    drm: bool | str | Path
    prefetch: int
    stall_timeout: float
    transfer_dtype: str | None
    shares: Sequence[float] | None
    threads: Sequence[int] | None
    devices: Sequence[str | torch.device] | None
    decision_log: str | Path | None
    accelerator_sampling: str | float
    agree_every: int

    def __post_init__(self) -> None:
        if (gone := removed(f"strategy.cpu_trainers={self.cpu_trainers}")) is not None:
            raise ValueError(gone)
        whole_number(self.cpu_trainers, "cpu_trainers", 0)
        whole_number(self.agree_every, "agree_every", 1)
        share, sampling, drm, stall_timeout = self.cpu_share, self.accelerator_sampling, self.drm, self.stall_timeout
        if share != "auto" and not (isinstance(share, (int, float)) and 0.0 < share <= 1.0):
            raise ValueError(
                f"cpu_share is 'auto' or the CPU trainers' part of the seeds, in (0, 1], but is {share!r}; "
                f"cpu_trainers=0 leaves the CPU out"
            )
        if sampling != "auto" and not (isinstance(sampling, (int, float)) and 0.0 <= sampling <= 1.0):
            raise ValueError(
                f"accelerator_sampling is 'auto' or a share of the sampling, in [0, 1], but is {sampling!r}"
            )
        # A log of decisions must exist before the run begins, not when its first decision is read.
        if not isinstance(drm, (bool, str, Path)):
            raise ValueError(f"drm is True, 'paper', False or the path of a log of decisions, but is {drm!r}")
        if replays(drm) and not Path(drm).is_file():
            raise ValueError(
                f"drm={str(drm)!r} is no file; give a log that decision_log= has left, or True, 'paper' or False"
            )
        if self.prefetch not in (0, 1, 2):
            raise ValueError(f"prefetch is 0 (none), 1 or 2 (stages), but is {self.prefetch!r}")
        if not isinstance(stall_timeout, (int, float)) or not stall_timeout > 0:
            raise ValueError(f"stall_timeout must be a positive number of seconds, but is {stall_timeout!r}")
        self.stall_timeout = min(stall_timeout, _MAX_TIMEOUT_S)
        if self.transfer_dtype not in TRANSFER_DTYPES:
            raise ValueError(f"transfer_dtype is one of {TRANSFER_DTYPES}, but is {self.transfer_dtype!r}")
        if self.shares is not None:
            self.shares = checked_shares(self.shares)
        if self.threads is not None:
            threads = tuple(self.threads) if isinstance(self.threads, Iterable) else ()
            if len(threads) != 3 or not all(isinstance(number, int) and number >= 1 for number in threads):
                raise ValueError(
                    "threads are those of sampling, feature loading and CPU trainers, each at least 1, but are "
                    f"{self.threads!r}"
                )
            if sum(threads) > max(num_cores(), 3):
                raise ValueError(
                    f"threads={list(threads)} are {sum(threads)}, but this process may use {num_cores()} cores"
                )
            self.threads = threads
        if isinstance(self.devices, (str, torch.device)):
            self.devices = [self.devices]

    @property
    def automatic(self) -> bool:
        """Whether measurements, or the number of trainers, decide who has how many seeds."""
        return self.shares is None and self.cpu_share == "auto"

    def accelerators(self, devices: list[torch.device]) -> list[torch.device]:
        """Return the devices that the user named, or else the Trainer's."""
        return devices if self.devices is None else [torch.device(device) for device in self.devices]

    def first_weights(self, trainers: TrainerSet) -> list[float]:
        """Return the shares to begin with where nothing was measured."""
        if self.shares is not None:
            return list(self.shares)
        equal = self.automatic and not measurements_decide()
        return trainers.equal_weights if equal else trainers.weights(self.cpu_share)

    def first_threads(self, threads: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the threads that the user gave, or else these."""
        return threads if self.threads is None else (self.threads[0], self.threads[1], self.threads[2])


def checked_shares(shares: object) -> list[float]:
    """Return the shares of trainers, which add up to one."""
    if isinstance(shares, str) or not isinstance(shares, Iterable):
        raise ValueError(f"shares is one number for each trainer, CPU trainers first, but is {shares!r}")
    checked = [float(share) for share in shares]
    if any(not 0.0 <= share <= 1.0 for share in checked) or abs(sum(checked) - 1.0) > 1e-6:
        raise ValueError(f"shares must be in [0, 1] and add up to 1, but are {checked}")
    return checked
