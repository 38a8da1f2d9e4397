"""Random number streams for ranks with different workloads: one per rank for steps, one shared by all for hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_gnn.ops.hashing import mix


class RankRNG:
    """This rank's private state of torch's CPU generator, used while its steps run."""

    # Dropout consumes a different amount of random numbers on ranks with different shares. If steps used the shared
    # generator, then hooks, parameter initialization and shuffling would diverge between the ranks.

    def __init__(self, seed: int, rank: int, resumed: Sequence[Tensor | None] = ()) -> None:
        key = mix(seed + (rank + 1) * 1_000_003)  # rank + 1, since mix(0) is 0: differs from the seed of the hooks
        state = next(iter(resumed), None)
        self._state: Tensor = torch.Generator().manual_seed(key).get_state() if state is None else state
        self._is_active = False
        accelerator = torch.accelerator.current_accelerator()
        if rank and state is None and accelerator is not None and torch.accelerator.is_available():
            getattr(torch, accelerator.type).manual_seed(key)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Use this stream inside the ``with`` block; nested blocks have no further effect."""
        if self._is_active:
            yield
            return
        shared_state = torch.get_rng_state()
        torch.set_rng_state(self._state)
        self._is_active = True
        try:
            yield
        finally:
            self._is_active = False
            self._state = torch.get_rng_state()
            torch.set_rng_state(shared_state)

    def state(self) -> Tensor:
        """Return the current generator state of this stream."""
        return torch.get_rng_state() if self._is_active else self._state
