"""Memory for mini-batches that is used again once a batch is gone.

A mini-batch can take a hundred megabytes. The system hands such blocks out page by page and takes them back when they
are freed, which costs more time than filling them. The pool keeps them instead: a buffer returns by itself when the
last tensor that looks at it dies, so a batch that the user keeps is never overwritten.
"""

import math
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_SMALL = 1 << 16
_DTYPES = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


class BufferPool:
    """Hands out uninitialised host tensors from blocks that return by themselves; safe across threads.

    Args:
        max_idle: How many unused blocks of one size class to keep.
    """

    def __init__(self, max_idle: int = 8) -> None:
        self.max_idle = max_idle
        self._idle: dict[int, deque[np.ndarray]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor.

        Args:
            shape: Its shape.
            dtype: One of float16, float32, float64, int32, int64; others, and small tensors, bypass the pool.
        """
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL or dtype not in _DTYPES:
            return torch.empty(tuple(shape), dtype=dtype)
        size_class = _size_class(size)
        # No lock: deques append and pop atomically, and a finaliser may run in the middle of anything.
        idle = self._idle.setdefault(size_class, deque(maxlen=self.max_idle))
        try:
            block = idle.pop()
        except IndexError:
            block = np.empty(size_class, np.uint8)
        view = block[:size].view(_DTYPES[dtype]).reshape(tuple(shape))
        weakref.finalize(view, idle.append, block).atexit = False
        return torch.from_numpy(view)

    def idle_bytes(self) -> int:
        """Return how many bytes the pool holds that no tensor uses."""
        return sum(size * len(blocks) for size, blocks in list(self._idle.items()))


def _size_class(size: int) -> int:
    """Round up in steps of an eighth, so that batches of about one size share blocks."""
    step = 1 << max((size - 1).bit_length() - 3, 12)
    return -(-size // step) * step


pool = BufferPool()
"""The pool that samplers and gathers of this process share."""
