"""Whether the Ascend C kernels execute the operators of a mini-batch."""

from typing import Any

import torch

from lightning_gnn.ops.aggregate.backends import backend_name, chip_executor, runs_on_chip


def chip_of(device: torch.device) -> Any:
    """Return what executes the operators on an NPU or in its simulation, or None: then torch's dispatcher finds it."""
    backend = backend_name(None)
    if not runs_on_chip(device, backend):
        return None
    from lightning_gnn.ops.aggregate_update.ascend import Chip

    executor, cores = chip_executor(device, backend)
    return Chip(executor.launch, cores)
