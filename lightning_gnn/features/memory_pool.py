"""Memory for a graph and its mini-batches: which of it a GPU can read, and buffers of the host that are used again."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

PLACES = ("auto", "device", "shard", "pinned")
_SHARE = 0.5  # of the free device memory, how much "auto" takes for one kind of data; the rest is the model's
_SMALL = 1 << 16
_DTYPES: dict[torch.dtype, Any] = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


class Pinnable(Protocol):
    """What can be had in page-locked memory: a graph, a feature table."""

    def pin_memory(self: P) -> P:
        """Return it there: the same memory, if it can be locked where it is, else a copy."""


P = TypeVar("P", bound=Pinnable)


def check_place(place: str, name: str) -> None:
    """Check the name of a place."""
    if place not in PLACES:
        raise ValueError(f"{name}={place!r} is unknown; use one of {', '.join(PLACES)}")


def choose_place(place: str, num_bytes: int, device: torch.device, what: str) -> str:
    """Return ``"device"`` or ``"pinned"``; says so where ``"auto"`` finds the device too small."""
    if place != "auto":
        return place
    if device.type == "cpu":
        return "device"
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes <= _SHARE * free:
        return "device"
    rank_zero_warn(
        f"{what} takes {num_bytes / 1e9:.2f} GB, more than half of the {free / 1e9:.2f} GB free on {device}: "
        "it stays in page-locked host memory"
    )
    return "pinned"


def pinned(data: P, num_bytes: int, device: torch.device, what: str) -> P:
    """Return data in page-locked host memory, in place where possible; for the CPU, any memory will do."""
    if device.type == "cpu":
        return data
    try:
        return data.pin_memory()
    except RuntimeError as error:
        raise RuntimeError(
            f"page-locked memory for {what}, {num_bytes / 1e9:.2f} GB, was refused ({str(error).splitlines()[0]}); "
            "raise the limit (`ulimit -l`), free host memory, or place it on the device"
        ) from error


class BufferPool:
    """Hands out uninitialized host tensors from blocks that return by themselves; safe across threads.

    A buffer returns when the last view of it dies. The system's page faults would cost more time than filling it.
    """

    def __init__(self, max_idle: int = 8) -> None:
        self.max_idle = max_idle
        self._idle: dict[int, deque[np.ndarray]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor; small ones, and dtypes unknown to NumPy, bypass the pool."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL or dtype not in _DTYPES:
            return torch.empty(tuple(shape), dtype=dtype)
        size_class = _size_class(size)
        # No lock: deques append and pop atomically, and a finalizer may run in the middle of anything.
        idle = self._idle.setdefault(size_class, deque(maxlen=self.max_idle))
        try:
            block = idle.pop()
        except IndexError:
            block = np.empty(size_class, np.uint8)
        view = block[:size].view(_DTYPES[dtype]).reshape(tuple(shape))
        weakref.finalize(view, idle.append, block).atexit = False
        return torch.from_numpy(view)


def _size_class(size: int) -> int:
    """Round up in steps of an eighth, so that batches of about one size share blocks."""
    step = 1 << max((size - 1).bit_length() - 3, 12)
    return -(-size // step) * step


pool = BufferPool()  # the pool that samplers and gathers of this process share
