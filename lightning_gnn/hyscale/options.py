"""Validated options of hybrid training, the set of trainers, and their default shares and threads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeGuard

import torch
from torch_geometric.loader import LinkLoader, NodeLoader

from lightning_gnn.distributed.heartbeat import check_stall_timeout
from lightning_gnn.hyscale.costs import TaskMapping, Threads, split_seeds
from lightning_gnn.hyscale.transfer import TRANSFER_DTYPES
from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.messages import whole_number
from lightning_gnn.runtime.urls import cached_path

PyGLoader: TypeAlias = NodeLoader | LinkLoader  # base classes of this package's loaders, too


@dataclass(frozen=True)
class TrainerSet:
    """The trainers of one node, CPU trainers first."""

    devices: tuple[torch.device, ...]
    num_cpu: int  # number of CPU trainers; an emulated accelerator on device ``cpu`` does not count

    @classmethod
    def of(cls, cpu_trainers: int, accelerators: Sequence[torch.device]) -> TrainerSet:
        """Combine CPU trainers and accelerators."""
        if cpu_trainers == 0 and not accelerators:
            raise ValueError(
                "cpu_trainers=0 without an accelerator leaves no trainer; set cpu_trainers=1 or "
                "Trainer(accelerator=...)"
            )
        return cls((torch.device("cpu"),) * cpu_trainers + tuple(accelerators), cpu_trainers)

    @property
    def num_accelerators(self) -> int:
        """Number of accelerator trainers."""
        return len(self.devices) - self.num_cpu

    @property
    def accelerators(self) -> list[torch.device]:
        """Devices of the accelerator trainers."""
        return list(self.devices[self.num_cpu :])

    @property
    def names(self) -> list[str]:
        """Names of the trainers in messages."""
        cpu = [f"{i} (CPU)" for i in range(self.num_cpu)]
        return cpu + [f"{self.num_cpu + i} ({device})" for i, device in enumerate(self.devices[self.num_cpu :])]

    def trainer_of_rank(self, local_rank: int) -> int:
        """Return the trainer index of a local rank; accelerators have the first ranks."""
        accelerators = self.num_accelerators
        return self.num_cpu + local_rank if local_rank < accelerators else local_rank - accelerators

    def rank_of_trainer(self, trainer: int) -> int:
        """Return the local rank of a trainer index."""
        return trainer - self.num_cpu if trainer >= self.num_cpu else trainer + self.num_accelerators

    @property
    def equal_weights(self) -> list[float]:
        """Equal shares for all trainers."""
        return [1 / len(self.devices)] * len(self.devices)

    def weights(self, cpu_share: str | float) -> list[float]:
        """Return each trainer's share: equal among the CPU trainers, and equal among the accelerators."""
        if not self.num_accelerators or not self.num_cpu:
            return self.equal_weights
        share = 0.5 if isinstance(cpu_share, str) else cpu_share
        cpu = [share / self.num_cpu] * self.num_cpu
        return cpu + [(1 - share) / self.num_accelerators] * self.num_accelerators


def build_trainer_set(wanted: int, accelerators: Sequence[torch.device], devices: Sequence[torch.device]) -> TrainerSet:
    """Return the trainers of a node; ``devices`` are the Trainer's."""
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
    """Whether decisions may use measurements, which vary between runs: False with ``deterministic=True``."""
    return not torch.are_deterministic_algorithms_enabled()


def is_adaptive(drm: bool | str | Path) -> bool:
    """Whether ``drm`` selects a manager that uses measurements: this package's (True) or the paper's (``"paper"``)."""
    return drm is True or drm == "paper"


def replays(drm: bool | str | Path) -> TypeGuard[str | Path]:
    """Whether ``drm`` is the path of a decision log to replay."""
    return drm is not False and not is_adaptive(drm)


def allowed_drm(drm: bool | str | Path) -> bool | str | Path:
    """Return ``drm``, or False if its manager needs measurements and these are not allowed."""
    return False if is_adaptive(drm) and not measurements_decide() else drm


ADMITTED = "LGNN_CPU_TRAINERS"
"""Environment variable with the CPU trainers that the process which starts the others has decided on."""
NOMINAL_SEEDS = 1 << 16
"""Seeds of the mapping of mini-batches of unknown sizes, which are split in proportion."""
DETERMINISTIC_MODE_WARNING = (
    "hyscale: Trainer(deterministic=True) disables all decisions based on measurements: drm=True or 'paper' acts as "
    "False, cpu_share='auto' as equal shares, accelerator_sampling='auto' as 0.0. Set a mapping explicitly, such as "
    "one from `lgnn plan`: shares= or cpu_share=0.3, threads=(4, 2, 10), accelerator_sampling=0.2; or replay a log "
    "recorded with decision_log=: drm='decisions.jsonl'"
)


def seeds_of_iteration(loader: PyGLoader) -> int:
    """Return the number of seeds in a full mini-batch of a PyG loader, 0 if unknown."""
    # At most the number of all seeds: with a larger batch size, no mini-batch would ever be full.
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return min(size, len(sampler)) if isinstance(sampler, Sized) else size


def default_threads(num_workers: int, trainers: TrainerSet, balanced: bool) -> Threads:
    """Return a node's default CPU threads for sampling, feature loading and training."""
    # With balancing, the threads must not exceed the cores; otherwise the CPU trainers use all cores.
    cores, num_cpu = num_cores(), trainers.num_cpu
    if balanced:
        num_workers = min(num_workers, cores - int(num_cpu > 0))
    sampling, loading = max(1, (num_workers + 1) // 2), max(1, num_workers // 2)
    training = cores - sampling - loading if balanced else cores
    return sampling, loading, max(1, num_cpu, training if num_cpu else 1)


@dataclass
class HyScaleOptions:
    """Validated options of :class:`~lightning_gnn.hyscale.HyScaleStrategy`, which documents them."""

    cpu_trainers: int | str
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
        if self.cpu_trainers != "auto":
            whole_number(self.cpu_trainers, "cpu_trainers", 0)
        whole_number(self.agree_every, "agree_every", 1)
        share, sampling, drm, stall_timeout = self.cpu_share, self.accelerator_sampling, self.drm, self.stall_timeout
        if share != "auto" and not (isinstance(share, (int, float)) and 0.0 < share <= 1.0):
            raise ValueError(
                f"cpu_share must be 'auto' or the CPU trainers' fraction of the seeds, in (0, 1], but is {share!r}; "
                f"cpu_trainers=0 excludes the CPU"
            )
        if sampling != "auto" and not (isinstance(sampling, (int, float)) and 0.0 <= sampling <= 1.0):
            raise ValueError(
                f"accelerator_sampling must be 'auto' or a fraction of the sampling, in [0, 1], but is {sampling!r}"
            )
        # Check that the decision log exists now, not when its first decision is read.
        if not isinstance(drm, (bool, str, Path)):
            raise ValueError(f"drm must be True, False, 'paper' or the path of a decision log, but is {drm!r}")
        if replays(drm) and not cached_path(drm).is_file():
            raise ValueError(
                f"drm={str(drm)!r} is not a file; give a log written by decision_log=, or True, False or 'paper'"
            )
        if self.prefetch not in (0, 1, 2):
            raise ValueError(f"prefetch must be 0 (off), 1 or 2 (stages), but is {self.prefetch!r}")
        self.stall_timeout = check_stall_timeout(stall_timeout)
        if self.transfer_dtype not in TRANSFER_DTYPES:
            raise ValueError(f"transfer_dtype must be one of {TRANSFER_DTYPES}, but is {self.transfer_dtype!r}")
        if self.shares is not None:
            self.shares = validate_shares(self.shares)
        if self.threads is not None:
            threads = tuple(self.threads) if isinstance(self.threads, Iterable) else ()
            if len(threads) != 3 or not all(isinstance(number, int) and number >= 1 for number in threads):
                raise ValueError(
                    "threads must be three numbers (sampling, feature loading, CPU trainers), each at least 1, but are "
                    f"{self.threads!r}"
                )
            if sum(threads) > max(num_cores(), 3):
                raise ValueError(
                    f"threads={list(threads)} sum to {sum(threads)}, but this process may use {num_cores()} cores"
                )
            self.threads = threads
        if isinstance(self.devices, (str, torch.device)):
            self.devices = [self.devices]

    @property
    def automatic(self) -> bool:
        """Whether the shares are chosen automatically, not by the user or a recorded log."""
        return self.shares is None and self.cpu_share == "auto" and not replays(self.drm)

    @property
    def first_cpu_trainers(self) -> int:
        """CPU trainers per node if nothing was predicted; those of the process that has started this one, if any."""
        return int(os.environ.get(ADMITTED, 1) if isinstance(self.cpu_trainers, str) else self.cpu_trainers)

    def models_shares(self, trainers: TrainerSet) -> bool:
        """Whether the performance model divides the seeds between CPU trainers and accelerators."""
        is_hybrid = 0 < trainers.num_cpu < len(trainers.devices)
        return is_hybrid and self.automatic and measurements_decide()

    def admits_cpu_trainers(self, trainers: TrainerSet) -> bool:
        """Whether predictions decide on CPU trainers: nothing that the user has set depends on them."""
        return self.cpu_trainers == "auto" and self.models_shares(trainers)

    def accelerators(self, devices: list[torch.device]) -> list[torch.device]:
        """Return the user's accelerators, by default the Trainer's."""
        return devices if self.devices is None else [torch.device(device) for device in self.devices]

    def first_weights(self, trainers: TrainerSet) -> list[float]:
        """Return the initial shares if nothing was measured."""
        if self.shares is not None:
            return list(self.shares)
        equal = self.automatic and not measurements_decide()
        return trainers.equal_weights if equal else trainers.weights(self.cpu_share)

    def first_mapping(self, trainers: TrainerSet, total: int, threads: Threads) -> TaskMapping:
        """Return the initial mapping if nothing was measured; ``total`` is 0 for mini-batches of unknown sizes."""
        ranges = split_seeds(total or NOMINAL_SEEDS, self.first_weights(trainers))
        return TaskMapping(tuple(stop - start for start, stop in ranges), trainers.num_cpu, threads)

    def first_threads(self, threads: Threads) -> Threads:
        """Return the user's thread counts, by default ``threads``."""
        return threads if self.threads is None else (self.threads[0], self.threads[1], self.threads[2])


def validate_shares(shares: object) -> list[float]:
    """Return the trainers' shares as floats; raise ValueError unless they are in [0, 1] and sum to 1."""
    if isinstance(shares, str) or not isinstance(shares, Iterable):
        raise ValueError(f"shares must be one number per trainer, CPU trainers first, but is {shares!r}")
    checked = [float(share) for share in shares]
    if any(not 0.0 <= share <= 1.0 for share in checked) or abs(sum(checked) - 1.0) > 1e-6:
        raise ValueError(f"shares must be in [0, 1] and sum to 1, but are {checked}")
    return checked
