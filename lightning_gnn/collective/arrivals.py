"""The device memory of mini-batches that came by a stream of their own, given back to it in the order of that stream.

Torch's allocator keeps a block that another stream used until the host has seen that use end. The host queues steps far
ahead of the device, so that meanwhile new blocks are taken, for as many mini-batches as it is ahead. Here the stream of
the transfers waits, on the device, for the step that trained on a mini-batch, and its memory is free at once; what
somebody still looks at is left to the allocator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData

from lightning_gnn.runtime.devices import parts_of, used_on

_KEPT = 1
"""Mini-batches whose step may still be running when memory is asked for; those before them are waited for."""
_ROUNDS = 2
"""Steps after which a mini-batch that somebody still holds is left to the allocator."""


@dataclass(eq=False)
class _Arrived:
    """A mini-batch that has been handed out.

    Args:
        parts: Its tensors on the device, under names of our own: whoever shares their memory is somebody else.
        done: Event after which nobody uses it; None as long as somebody may yet.
        rounds: Steps that it has been held for.
    """

    parts: list[Tensor]
    done: Any = None
    rounds: int = 0


class Arrivals:
    """Notes mini-batches that are handed out, and gives their memory back to the stream that brought them.

    Args:
        stream: Of the transfers, on which the memory was allocated.
    """

    def __init__(self, stream: Any, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._held: deque[_Arrived] = deque()

    def __len__(self) -> int:
        """Mini-batches whose memory has not been given back."""
        return len(self._held)

    def end_steps(self, consumer: Any) -> None:
        """Note that the steps on all that has been handed out are queued."""
        for arrived in [arrived for arrived in self._held if arrived.done is None]:
            arrived.rounds += 1
            if not any(_is_shared(part) for part in arrived.parts):
                arrived.done = consumer.record_event()
            elif arrived.rounds >= _ROUNDS:
                self._leave(arrived, consumer)
        self.reuse()  # perhaps there is no further transfer

    def hand_out(self, batch: BaseData, consumer: Any) -> None:
        """Note a mini-batch, of the stream's memory, that another stream uses from now on."""
        parts: list[Tensor] = []

        def note(value: Any) -> Any:
            if not isinstance(value, Tensor):
                used_on(value, consumer)
            elif value.device.type == self._device.type:
                parts.extend(part.detach() for part in parts_of(value))
            return value

        batch.apply(note)
        self._held.append(_Arrived(parts))

    def reuse(self) -> None:
        """Give back what has been trained on, before memory is asked for; the stream waits, and not the host."""
        for arrived in [arrived for arrived in self._held if arrived.done is not None]:
            is_done = bool(arrived.done.query())
            if not is_done and len(self._held) <= _KEPT:
                return
            if not is_done:
                self._stream.wait_event(arrived.done)
            self._held.remove(arrived)

    def leave_all(self, consumer: Any) -> None:
        """Leave to the allocator what is held."""
        for arrived in list(self._held):
            self._leave(arrived, consumer)

    def _leave(self, arrived: _Arrived, consumer: Any) -> None:
        for part in arrived.parts:
            used_on(part, consumer)
        self._held.remove(arrived)


def _is_shared(part: Tensor) -> bool:
    """Whether another tensor has the same memory: one that the user, or autograd, still has."""
    storage = part.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2  # the part's own, and the name above
