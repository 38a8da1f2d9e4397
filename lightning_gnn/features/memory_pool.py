"""Memory placement for GPU sampling (device, shard, pinned), and a pool of reusable host buffers."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.runtime.lightning import rank_zero_warn

PLACES = ("auto", "device", "shard", "pinned")
_AUTO_MEMORY_SHARE = 0.5  # "auto" uses this share of free device memory for one kind of data; the model needs the rest
_MIN_POOLED_BYTES = 1 << 16
_MAX_IDLE = 8  # blocks of one size


class Pinnable(Protocol):
    """Data that can be moved to pinned memory: a graph or a feature table."""

    def pin_memory(self: P) -> P:
        """Return the data in pinned memory: in place if its pages can be locked, else as a copy."""


P = TypeVar("P", bound=Pinnable)


def check_place(place: str, name: str) -> None:
    """Raise a ValueError for an unknown placement; ``name`` is the option."""
    if place not in PLACES:
        raise ValueError(f"{name}={place!r} is unknown; use one of {', '.join(PLACES)}")


def choose_place(place: str, num_bytes: int, device: torch.device, what: str) -> str:
    """Resolve ``"auto"`` to ``"device"``, or to ``"pinned"`` with a warning if the device is too small."""
    if place != "auto":
        return place
    if device.type == "cpu":
        return "device"
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes <= _AUTO_MEMORY_SHARE * free:
        return "device"
    rank_zero_warn(
        f"{what} takes {num_bytes / 1e9:.2f} GB, more than half of the {free / 1e9:.2f} GB free on {device}: "
        "it is stored in page-locked host memory instead"
    )
    return "pinned"


def pinned(data: P, num_bytes: int, device: torch.device, what: str) -> P:
    """Return data in page-locked host memory, in place if possible; unchanged if the device is the CPU."""
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
    """Allocates uninitialized host tensors from blocks that return when their last view is freed. Thread-safe.

    Reusing blocks saves page faults, which would take longer than filling the buffer.
    """

    def __init__(self) -> None:
        self._idle: dict[int, deque[np.ndarray]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor; small ones bypass the pool."""
        size = math.prod(shape) * dtype.itemsize
        if size < _MIN_POOLED_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        # Round up in steps of about an eighth, so that batches of similar size share blocks.
        step = 1 << max((size - 1).bit_length() - 3, 12)
        size_class = -(-size // step) * step
        # No lock: a finalizer may run at any point and could deadlock. Appending to and popping from a deque is atomic.
        idle = self._idle.setdefault(size_class, deque(maxlen=_MAX_IDLE))
        try:
            block = idle.pop()
        except IndexError:
            block = np.empty(size_class, np.uint8)
        view = block[:size]
        weakref.finalize(view, idle.append, block).atexit = False
        return torch.frombuffer(view, dtype=dtype).view(tuple(shape))


pool = BufferPool()  # shared by all samplers and gathers of this process
