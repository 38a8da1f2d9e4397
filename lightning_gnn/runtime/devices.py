"""What differs between devices: whether they have something, memory that several streams use, mixed precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pytorch_lightning.plugins import MixedPrecision, Precision
from torch import Tensor


def works(attempt: Callable[[], object]) -> bool:
    """Whether a device has something; a backend that is new to torch may have neither streams nor pinned memory."""
    try:
        attempt()
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a stream of its own on a device; None on the CPU, and on a backend that has none."""
    if device.type == "cpu" or not works(lambda: torch.Stream(device).record_event().synchronize()):
        return None
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which a device works at present."""
    return torch.accelerator.current_stream(device)


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a small host tensor, by page-locked memory, on a device, whose current stream makes it."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def record_stream(tensor: Tensor, stream: torch.Stream) -> Tensor:
    """Keep the memory of a tensor, of any layout, from reuse before a stream is done with it; return the tensor."""
    if not isinstance(tensor, Tensor):  # a sparse matrix of torch_sparse
        tensor.record_stream(stream)
    elif not tensor.is_cpu:
        for part in parts_of(tensor):
            part.record_stream(stream)
    return tensor


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that a tensor consists of; streams cannot be recorded for sparse ones."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def match_device(plugin: Precision, device: torch.device) -> None:
    """Make a precision plugin autocast, and scale losses, on the device that trains; call in ``setup_environment``.

    Lightning gives it the device ``"cuda"`` for every accelerator that it does not know by name.
    """
    if not isinstance(plugin, MixedPrecision) or plugin.device == device.type:
        return
    plugin.device = device.type
    scaler = plugin.scaler
    if type(scaler) is torch.amp.GradScaler and scaler._device != device.type:
        plugin.scaler = torch.amp.GradScaler(device.type)
        if state := scaler.state_dict():  # empty where torch disabled it for want of CUDA
            plugin.scaler.load_state_dict(state)
