"""Backend selection for ``aggregate`` and ``edge_softmax``: each has the six functions of ``reference.py``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_gnn.ops.aggregate import numba, reference
from lightning_gnn.ops.library import runs_triton

BACKENDS = ("numba", "triton", "reference", "ascend_twin")
DEVICE = "device"  # selects the backend of the tensors' device

_default: str | None = None


@contextmanager
def default_backend(name: str | None) -> Iterator[None]:
    """Set the backend of aggregations without an explicit one, such as those of layers, in all threads, with gradients.

    Args:
        name: One of ``BACKENDS``, or None for the backend of the device; any other name raises a ValueError.
    """
    global _default
    _check_name(name)
    previous, _default = _default, name
    try:
        yield
    finally:
        _default = previous


def backend_name(backend: str | None) -> str:
    """Return the given backend, else the one of :func:`default_backend`, else ``"device"``."""
    _check_name(backend)
    return backend or _default or DEVICE


def functions_of(backend: str, device: torch.device) -> Any:
    """Return an object with the functions of a backend: a module or a ``Chip``."""
    if backend == "reference":
        return reference
    if backend == "numba" and device.type != "cpu":
        raise ValueError(f"backend='numba' runs on the CPU only, but the graph is on {device}; leave the backend out")
    if (executor := chip_executor(device, backend)) is not None:
        from lightning_gnn.ops.aggregate.chip import Chip

        return Chip(*executor)
    if device.type == "cpu" and backend != "triton":
        return numba
    if backend == "triton" or (device.type == "cuda" and runs_triton(device)):
        from lightning_gnn.ops.aggregate import triton

        return triton
    return reference


def _check_name(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}, or None")


def chip_executor(device: torch.device, backend: str) -> tuple[Any, int] | None:
    """Return the module that launches Ascend C kernels, simulated or on an NPU, and the number of AI cores, or None.

    The first call for an NPU builds the kernels.
    """
    if backend == "ascend_twin":
        from lightning_gnn.ops.aggregate import ascend_twin

        return ascend_twin, torch.get_num_threads()
    if device.type != "npu" or backend != DEVICE:
        return None
    from lightning_gnn.ops.aggregate import npu

    return (npu, npu.num_cores(device.index or 0)) if npu.available() else None
