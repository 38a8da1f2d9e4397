"""How long the gradients of a step take from the last of them until those of all ranks are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from lightning_gnn.runtime.timeline import Recorder

EXCHANGE = "exchange"
"""What this is called among the stages; it is a part of that of the model."""


class RankWaits:
    """Notes, for each backward pass, when the last gradient is computed and when the pass is over.

    In between lies what DDP does: gradients travel, and a rank that is early waits for the others. A device's clock
    tells, as the stream that trains is what waits.

    Args:
        recorder: Is told, as long as somebody wants to know.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handle: Any = None

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch a model's parameters from now on, instead of others; a run of one process has nobody to wait for."""
        self.close()
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if trained and dist.is_initialized() and dist.get_world_size() > 1:
            self._handle = register_multi_grad_hook(trained, self._computed, mode="all")

    def close(self) -> None:
        """Watch nothing any more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _computed(self, gradients: Any) -> None:
        start = self._recorder.now()
        if start is None:
            return
        # Once for what is queued at present, of which DDP's own end of the pass will be a part only now; and once more,
        # so that it comes before this.
        _at_the_end(lambda: _at_the_end(lambda: self._over(start)))

    def _over(self, start: Any) -> None:
        on_stage, end = self._recorder.on_stage, self._recorder.now()
        if on_stage is not None and end is not None:
            on_stage(EXCHANGE, start, end)


def _at_the_end(call: Callable[[], None]) -> None:
    """Call something when the backward pass that is under way is over, on the stream that began it."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
