"""Random numbers of unlike ranks: steps draw from a stream of the rank's own, hooks from one that all ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_gnn.ops.hashing import mix


class RankRNG:
    """Torch's CPU generator as one rank's steps see it."""

    # Dropout takes other amounts of random numbers on ranks with other shares. Drawn from the generator of the hooks,
    # it would make the ranks' hooks, new parameters and orders part ways.

    def __init__(self, seed: int, rank: int, resumed: Sequence[Tensor | None] = ()) -> None:
        key = mix(seed + (rank + 1) * 1_000_003)  # mix(0) is 0: never that of the hooks
        state = next(iter(resumed), None)
        self._state: Tensor = torch.Generator().manual_seed(key).get_state() if state is None else state
        self._inside = False
        accelerator = torch.accelerator.current_accelerator()
        if rank and state is None and accelerator is not None and torch.accelerator.is_available():
            getattr(torch, accelerator.type).manual_seed(key)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Let what runs within draw from this stream; a block within another one changes nothing."""
        if self._inside:
            yield
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(self._state)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._state = torch.get_rng_state()
            torch.set_rng_state(outside)

    def state(self) -> Tensor:
        """Return where it stands."""
        return torch.get_rng_state() if self._inside else self._state
