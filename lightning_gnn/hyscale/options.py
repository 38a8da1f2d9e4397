"""The options of hybrid training, checked once; its trainers, and what they have if nothing is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from torch_geometric.loader import LinkLoader, NodeLoader

from lightning_gnn.hyscale.numa import numa_cores
from lightning_gnn.hyscale.transfer import TRANSFER_DTYPES
from lightning_gnn.runtime.cores import num_cores
from lightning_gnn.runtime.messages import whole_number

PyGLoader: TypeAlias = NodeLoader | LinkLoader  # those of this package are such, too
_MAX_TIMEOUT_S = 1e8
"""Nothing that waits takes infinity."""


@dataclass(frozen=True)
class Trainers:
    """The trainers of one node: those on the CPU first.

    Args:
        num_cpu: How many are CPU trainers. An accelerator trainer may be on ``cpu`` too, where it stands for one.
    """

    devices: tuple[torch.device, ...]
    num_cpu: int

    @classmethod
    def of(cls, cpu_trainers: int, accelerators: Sequence[torch.device]) -> Trainers:
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
        """Return each trainer's share; CPU trainers have equal ones, accelerators too.

        Args:
            cpu_share: Of all CPU trainers together, ``"auto"`` for half; without accelerators they have everything.
        """
        if not self.num_accelerators or not self.num_cpu:
            return self.equal_weights
        share = 0.5 if isinstance(cpu_share, str) else cpu_share
        cpu = [share / self.num_cpu] * self.num_cpu
        return cpu + [(1 - share) / self.num_accelerators] * self.num_accelerators


def trainers_of(
    cpu_trainers: int | str, accelerators: Sequence[torch.device], devices: Sequence[torch.device]
) -> Trainers:
    """Return the trainers of a node.

    Args:
        accelerators: Devices of which those on the CPU are left out, unless they are not the Trainer's own.
    """
    wanted = len(numa_cores()) if isinstance(cpu_trainers, str) else cpu_trainers
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
    return Trainers.of(wanted, accelerators)


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


def turned_off(
    trainers: Trainers, drm: bool | str | Path, shares: Sequence[float] | None, accelerator_sampling: str | float
) -> str | None:
    """Return the words for which choices follow from no measurement although the options ask for it, None for none.

    Args:
        drm: The option, which is not in force where it asks for a manager.
        shares: What the trainers have with ``cpu_share="auto"``; None with another option.
    """
    off = []
    if balances(drm):
        off.append(f"drm={drm!r} (nothing moves)")
    if shares is not None and trainers.num_cpu and trainers.num_accelerators:
        off.append(f"cpu_share='auto' (instead, shares={[round(share, 4) for share in shares]})")
    accelerators = any(device.type != "cpu" for device in trainers.devices)
    if not replays(drm) and accelerator_sampling == "auto" and accelerators:
        off.append("accelerator_sampling='auto' (instead, 0.0)")
    if measurements_decide() or not off:
        return None
    return (
        f"hyscale: Trainer(deterministic=True) turns off what follows from measurements: {', '.join(off)}. "
        "Give a mapping by hand, as `lgnn plan` finds one: shares= or cpu_share=0.3, threads=(4, 2, 10), "
        "accelerator_sampling=0.2; or replay what decision_log= recorded: drm='decisions.jsonl'"
    )


def seeds_of_iteration(loader: PyGLoader) -> int:
    """Return the seeds of a full mini-batch of a PyG node loader, 0 if it does not tell.

    A batch size beyond all the seeds there are counts as so many: no mini-batch would ever be full.
    """
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return min(size, len(sampler)) if isinstance(sampler, Sized) else size


def default_threads(num_workers: int, trainers: Trainers, balanced: bool) -> tuple[int, int, int]:
    """Return the CPU threads of sampling, feature loading and training of a node where none are given.

    Args:
        balanced: Whether a manager moves threads, so that they must not be more than cores. Otherwise the CPU trainers
            get all cores.
    """
    cores, num_cpu = num_cores(), trainers.num_cpu
    if balanced:
        num_workers = min(num_workers, cores - int(num_cpu > 0))
    sampling, loading = max(1, (num_workers + 1) // 2), max(1, num_workers // 2)
    training = cores - sampling - loading if balanced else cores
    return sampling, loading, max(1, num_cpu, training if num_cpu else 1)


@dataclass
class HyScaleOptions:
    """The options of :class:`~lightning_gnn.hyscale.HyScaleStrategy`, where they are described.

    Raises:
        ValueError: One is out of range or of another kind.
    """

    cpu_trainers: int | Literal["numa"]
    cpu_share: str | float
    drm: bool | str | Path
    prefetch: int
    stall_timeout: float
    transfer_dtype: str | None
    shares: list[float] | None
    threads: tuple[int, int, int] | None
    devices: list[torch.device] | None
    decision_log: str | Path | None
    accelerator_sampling: str | float
    agree_every: int

    def __post_init__(self) -> None:
        # Trainers and intervals are counts.
        drm, prefetch, stall_timeout = self.drm, self.prefetch, self.stall_timeout
        if self.cpu_trainers != "numa":
            whole_number(self.cpu_trainers, "cpu_trainers", 0)
        whole_number(self.agree_every, "agree_every", 1)
        # Shares are fractions, unless they are found automatically.
        share, sampling = self.cpu_share, self.accelerator_sampling
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
        # Check the pipeline and the transfer.
        if prefetch not in (0, 1, 2):
            raise ValueError(f"prefetch is 0 (none), 1 or 2 (stages), but is {prefetch!r}")
        if not isinstance(stall_timeout, (int, float)) or not stall_timeout > 0:
            raise ValueError(f"stall_timeout must be a positive number of seconds, but is {stall_timeout!r}")
        if self.transfer_dtype not in TRANSFER_DTYPES:
            raise ValueError(f"transfer_dtype is one of {TRANSFER_DTYPES}, but is {self.transfer_dtype!r}")
        # The timeout is cut to the longest that the waiting primitives accept.
        self.stall_timeout = min(stall_timeout, _MAX_TIMEOUT_S)


def check_devices(devices: Any) -> list[torch.device] | None:
    """Return the accelerators that the user names, None where they are the Trainer's."""
    if devices is None:
        return None
    return [torch.device(device) for device in ([devices] if isinstance(devices, (str, torch.device)) else devices)]


def check_shares(shares: Sequence[float] | None, num_trainers: int | None = None) -> list[float] | None:
    """Return the shares, which add up to one."""
    if shares is None:
        return None
    if isinstance(shares, str) or not isinstance(shares, Iterable):
        raise ValueError(f"shares is one number for each trainer, CPU trainers first, but is {shares!r}")
    checked = [float(share) for share in shares]
    if any(not 0.0 <= share <= 1.0 for share in checked) or abs(sum(checked) - 1.0) > 1e-6:
        raise ValueError(f"shares must be in [0, 1] and add up to 1, but are {checked}")
    if num_trainers is not None and len(checked) != num_trainers:
        raise ValueError(
            f"shares has {len(checked)} entries, but there are {num_trainers} trainers (CPU trainers first)"
        )
    return checked


def check_threads(threads: Sequence[int] | None) -> tuple[int, int, int] | None:
    """Return the CPU threads of sampling, feature loading and training."""
    if threads is None:
        return None
    checked = tuple(threads) if isinstance(threads, Iterable) else (threads,)
    if len(checked) != 3 or not all(isinstance(number, int) and number >= 1 for number in checked):
        raise ValueError(
            f"threads are those of sampling, feature loading and CPU trainers, each at least 1, but are {threads!r}"
        )
    if sum(checked) > max(num_cores(), 3):
        raise ValueError(f"threads={list(checked)} are {sum(checked)}, but this process may use {num_cores()} cores")
    return checked[0], checked[1], checked[2]
