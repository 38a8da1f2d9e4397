"""Who executes the functions under ``aggregate`` and ``edge_softmax``.

Every backend has the same six: those of ``reference.py`` here and in ``edge_softmax``, which define them. Each takes a
:class:`~lightning_gnn.ops.aggregate.matrix.Matrix` first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from lightning_gnn.ops.aggregate import numba, reference
from lightning_gnn.ops.edge_softmax import numba as softmax_numba
from lightning_gnn.ops.edge_softmax import reference as softmax_reference
from lightning_gnn.ops.library import triton_installed

BACKENDS = ("numba", "triton", "reference", "ascend_twin")
DEVICE = "device"  # in place of a backend's name: what belongs to the device

_default: str | None = None


def _together(*modules: Any) -> SimpleNamespace:
    names = (
        "aggregate",
        "aggregate_max_backward",
        "edge_products",
        "edge_softmax",
        "edge_softmax_backward",
        "edge_sums",
    )
    found = {name: getattr(module, name) for module in modules for name in names if hasattr(module, name)}
    return SimpleNamespace(**found)


REFERENCE = _together(reference, softmax_reference)
NUMBA = _together(numba, softmax_numba)


@contextmanager
def default_backend(name: str | None) -> Iterator[None]:
    """Let aggregations for which nobody names a backend, such as those of layers, run on this one, in all threads.

    The gradient of an aggregation runs where the aggregation ran.

    Args:
        name: One of ``BACKENDS``, or None for what belongs to the device.

    Raises:
        ValueError: There is no such backend.
    """
    global _default
    _check_name(name)
    previous, _default = _default, name
    try:
        yield
    finally:
        _default = previous


def backend_name(backend: str | None) -> str:
    """Return which backend is meant: the one given, or else :func:`default_backend`, or else ``"device"``."""
    _check_name(backend)
    return backend or _default or DEVICE


def functions_of(backend: str, device: torch.device) -> Any:
    """Return the namespace in which a backend's functions are found."""
    if backend == "reference":
        return REFERENCE
    if backend == "numba" and device.type != "cpu":
        raise ValueError(f"backend='numba' runs on the CPU, but the graph is on {device}")
    if runs_on_chip(device, backend):
        from lightning_gnn.ops.aggregate.chip import Chip

        return Chip(*chip_executor(device, backend))
    if device.type == "cpu" and backend != "triton":
        return NUMBA
    if backend == "triton" or (device.type == "cuda" and triton_installed()):
        from lightning_gnn.ops.aggregate import triton

        return triton
    return REFERENCE


def _check_name(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}, or None")


def _npu() -> Any:
    from lightning_gnn.ops.aggregate import npu

    return npu


def runs_on_chip(device: torch.device, backend: str) -> bool:
    """Say whether the Ascend C kernels execute a sum, in simulation or on an NPU; the first call builds them."""
    return backend == "ascend_twin" or (device.type == "npu" and backend == DEVICE and bool(_npu().available()))


def chip_executor(device: torch.device, backend: str) -> tuple[Any, int]:
    """Return the module whose functions run Ascend C kernels where :func:`runs_on_chip`, and the AI cores there."""
    if backend != "ascend_twin":
        return _npu(), _npu().num_cores(device.index or 0)
    from lightning_gnn.ops.aggregate import ascend_twin

    return ascend_twin, torch.get_num_threads()
