"""Global random state of the process: saving, restoring, and temporary seeding from a key."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_LOW_32_BITS = (1 << 32) - 1


def random_state() -> dict[str, Any]:
    """Return the process's random state (torch, Python, NumPy) in types that ``weights_only=True`` can load."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),  # type: ignore[union-attr]
    }
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        backend = getattr(torch, accelerator.type)
        if getattr(backend, "is_initialized", lambda: True)():  # do not initialize an unused backend
            state[accelerator.type] = backend.get_rng_state()
    return state


def set_random_state(state: dict[str, Any] | None) -> None:
    """Restore the random state of :func:`random_state`, as far as this machine has the devices."""
    for name, value in (state or {}).items():
        if name == "python":
            random.setstate((value[0], tuple(value[1]), value[2]))
        elif name == "numpy":
            np.random.set_state((value[0], value[1].numpy().astype(np.uint32), *value[2:]))
        elif name == "cpu":
            torch.set_rng_state(value)
        elif getattr(getattr(torch, name, None), "is_available", bool)():
            getattr(torch, name).set_rng_state(value)


@contextmanager
def keyed_random(key: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch, NumPy and ``random`` from ``key``, and restore them on exit. Not thread-safe."""
    accelerator: Any = None if device is None or device.type == "cpu" else getattr(torch, device.type, None)
    python, array, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device_state = None if accelerator is None else accelerator.get_rng_state(device)
    key &= (1 << 64) - 1
    try:
        random.seed(key)
        np.random.seed([key & _LOW_32_BITS, key >> 32 & _LOW_32_BITS])
        torch.default_generator.manual_seed(key)
        if accelerator is not None:
            accelerator.set_rng_state(torch.Generator(device).manual_seed(key).get_state(), device)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(host)
        if device_state is not None:
            accelerator.set_rng_state(device_state, device)
