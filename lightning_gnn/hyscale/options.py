"""The options of hybrid training, checked once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_gnn.hyscale.transfer import TRANSFER_DTYPES
from lightning_gnn.hyscale.work_share import num_cores


def check_options(cpu_trainers: Any, drm: Any, prefetch: Any, stall_timeout: Any, transfer_dtype: Any) -> None:
    """Refuse options of :class:`~lightning_gnn.hyscale.HyScaleStrategy` that are out of range or of another kind.

    Raises:
        ValueError: Names the option, and what it may be.
    """
    if not isinstance(cpu_trainers, int):
        raise ValueError(f"cpu_trainers must be a whole number, but is {cpu_trainers!r}")
    if cpu_trainers < 0:
        raise ValueError(f"cpu_trainers must not be negative, but is {cpu_trainers}")
    if not isinstance(drm, (bool, str, Path)):
        raise ValueError(f"drm is True, False or the path of a log of decisions, but is {drm!r}")
    if not isinstance(drm, bool) and not Path(drm).is_file():
        raise ValueError(f"drm={str(drm)!r} is no file; give a log that decision_log= has left, or True or False")
    if prefetch not in (0, 1, 2):
        raise ValueError(f"prefetch is 0 (none), 1 or 2 (stages), but is {prefetch!r}")
    if not isinstance(stall_timeout, (int, float)) or not stall_timeout > 0:
        raise ValueError(f"stall_timeout must be a positive number of seconds, but is {stall_timeout!r}")
    if transfer_dtype not in TRANSFER_DTYPES:
        raise ValueError(f"transfer_dtype is one of {TRANSFER_DTYPES}, but is {transfer_dtype!r}")


def check_devices(devices: Any) -> list[torch.device] | None:
    """Return the accelerators that the user names, None where they are the Trainer's."""
    if devices is None:
        return None
    return [torch.device(device) for device in ([devices] if isinstance(devices, (str, torch.device)) else devices)]


def check_share(cpu_share: str | float) -> str | float:
    """Return the share.

    Raises:
        ValueError: Neither ``"auto"`` nor in (0, 1].
    """
    if cpu_share == "auto":
        return cpu_share
    if not isinstance(cpu_share, (int, float)) or not 0.0 < cpu_share <= 1.0:
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


def check_sampling(share: str | float) -> str | float:
    """Return the share of the sampling that accelerators do.

    Raises:
        ValueError: Neither ``"auto"`` nor in [0, 1].
    """
    if share == "auto":
        return share
    if not isinstance(share, (int, float)) or not 0.0 <= share <= 1.0:
        raise ValueError(f"accelerator_sampling is 'auto' or a share of the sampling, in [0, 1], but is {share!r}")
    return float(share)


def check_threads(threads: Sequence[int] | None) -> tuple[int, int, int] | None:
    """Return the CPU threads of sampling, feature loading and training.

    Raises:
        ValueError: Not three positive numbers, or more than cores; one each is always allowed.
    """
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
