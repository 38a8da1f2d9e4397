"""The random numbers of a user's own code: drawn from the key of a mini-batch, so that they can be drawn again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_HALF = (1 << 32) - 1


@contextmanager
def keyed_random(key: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch, NumPy and Python's ``random`` within a block, and put them back afterwards as they were.

    These generators are the process's: nobody else may draw from them meanwhile, so this is for the training thread.

    Args:
        key: 64-bit.
        device: Whose generator is seeded too, beside the CPU's.
    """
    accelerator: Any = None if device is None or device.type == "cpu" else getattr(torch, device.type, None)
    python, array, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    there = None if accelerator is None else accelerator.get_rng_state(device)
    key &= (1 << 64) - 1
    try:
        random.seed(key)
        np.random.seed([key & _HALF, key >> 32 & _HALF])
        torch.default_generator.manual_seed(key)
        if accelerator is not None:
            accelerator.set_rng_state(torch.Generator(device).manual_seed(key).get_state(), device)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(host)
        if there is not None:
            accelerator.set_rng_state(there, device)
