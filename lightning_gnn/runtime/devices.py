"""Device-dependent helpers: cores, feature probes, streams, asynchronous copies, mixed precision."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn.runtime.lightning import MixedPrecision, Precision

T = TypeVar("T")
DEVICE_BACKENDS = {"cuda": "nccl", "npu": "hccl"}
"""Backends of ``torch.distributed`` for collectives among accelerators."""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy() -> bool:
    """Return whether the load average of the last minute is at least half of the cores."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] >= max(1.0, 0.5 * num_cores())


def works(attempt: Callable[[], object]) -> bool:
    """Return whether a call succeeds, to probe a backend that may lack streams, events or pinned memory."""
    try:
        attempt()
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True


def new_stream(device: torch.device, priority: int = 0) -> torch.Stream | None:
    """Create a stream on a device, urgent if ``priority`` is -1; return None without streams, as on the CPU."""
    if device.type == "cpu" or not works(lambda: torch.Stream(device).record_event().synchronize()):
        return None
    return torch.Stream(device, priority=priority)


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream current, and with it its device; None keeps the current one. Threads may share a stream."""
    # ``with stream`` stores the previous stream in the object: older torch refuses to enter it twice.
    if stream is None:
        yield
        return
    index, previous = torch.accelerator.current_device_index(), current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous)
        torch.accelerator.set_device_index(index)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the current stream of a device."""
    return torch.accelerator.current_stream(device)


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to a device through pinned memory, asynchronously on the device's current stream."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def record_stream(tensor: Tensor, stream: torch.Stream) -> Tensor:
    """Record a stream for a tensor of any layout, so that its memory is not reused too early; return the tensor."""
    if not isinstance(tensor, Tensor):  # a torch_sparse.SparseTensor
        tensor.record_stream(stream)
    elif not tensor.is_cpu:
        for component in parts_of(tensor):
            component.record_stream(stream)
    return tensor


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors of a sparse or dense tensor; sparse ones do not support ``record_stream``."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks. All ranks must call this."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def collective_backend(devices: Iterable[torch.device]) -> str:
    """Return the process group backend for ranks on these devices: gloo, and that of devices of one type."""
    # Gloo accepts tensors on CPUs and GPUs only: messages between CPUs and NPUs pass through the host.
    kinds = {device.type for device in devices}
    kind = kinds.pop() if len(kinds) == 1 else "cpu"
    return f"cpu:gloo,{kind}:{DEVICE_BACKENDS[kind]}" if kind in DEVICE_BACKENDS else "gloo"


def match_device(plugin: Precision, device: torch.device) -> None:
    """Make a precision plugin autocast and scale losses on the training device; call in ``setup_environment``.

    Lightning sets the plugin's device to ``"cuda"`` for every third-party accelerator.
    """
    if not isinstance(plugin, MixedPrecision) or plugin.device == device.type:
        return
    plugin.device = device.type
    scaler = plugin.scaler
    if type(scaler) is torch.amp.GradScaler and scaler._device != device.type:
        plugin.scaler = torch.amp.GradScaler(device.type)
        if state := scaler.state_dict():  # empty if torch disabled the scaler because CUDA is missing
            plugin.scaler.load_state_dict(state)
