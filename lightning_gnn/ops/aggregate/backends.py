"""Backend selection for ``aggregate`` and ``edge_softmax``: each has the six functions of the two ``reference.py``."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from lightning_gnn.ops.aggregate import numba, reference
from lightning_gnn.ops.edge_softmax import numba as softmax_numba
from lightning_gnn.ops.edge_softmax import reference as softmax_reference
from lightning_gnn.ops.library import runs_triton

BACKENDS = ("numba", "triton", "reference", "ascend_twin")
DEVICE = "device"  # selects the backend of the tensors' device

_default: str | None = None

REFERENCE = SimpleNamespace(**vars(reference) | vars(softmax_reference))
NUMBA = SimpleNamespace(**vars(numba) | vars(softmax_numba))


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
    """Return an object with the functions of a backend: a module, a namespace or a ``Chip``."""
    if backend == "reference":
        return REFERENCE
    if backend == "numba" and device.type != "cpu":
        raise ValueError(f"backend='numba' runs on the CPU only, but the graph is on {device}; leave the backend out")
    if runs_on_chip(device, backend):
        from lightning_gnn.ops.aggregate.chip import Chip

        return Chip(*chip_executor(device, backend))
    if device.type == "cpu" and backend != "triton":
        return NUMBA
    if backend == "triton" or (device.type == "cuda" and runs_triton(device)):
        from lightning_gnn.ops.aggregate import triton

        return triton
    return REFERENCE


def _check_name(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}, or None")


def runs_on_chip(device: torch.device, backend: str) -> bool:
    """Return whether the Ascend C kernels run, simulated or on an NPU; the first call builds them."""
    if device.type != "npu" or backend != DEVICE:
        return backend == "ascend_twin"
    from lightning_gnn.ops.aggregate import npu

    return npu.available()


def chip_executor(device: torch.device, backend: str) -> tuple[Any, int]:
    """Return the module that launches Ascend C kernels where :func:`runs_on_chip`, and the number of AI cores."""
    if backend == "ascend_twin":
        from lightning_gnn.ops.aggregate import ascend_twin

        return ascend_twin, torch.get_num_threads()
    from lightning_gnn.ops.aggregate import npu

    return npu, npu.num_cores(device.index or 0)
