"""Implementations of the fused layers' operators: what each supports, and the size from which on it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.backends import backend_name, chip_executor
from lightning_gnn.ops.library import runs_triton

_FLOATS, _HALVES = (torch.float32, torch.float64), (torch.bfloat16, torch.float16)
_ALL = _FLOATS + _HALVES


@dataclass(frozen=True)
class Impl:
    """An implementation of an operator, which the operator itself selects by the tensors' device."""

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # of features, without autocast
    autocast: tuple[torch.dtype, ...]  # dtypes of autocast
    least_size: int = 0  # least edges times columns for which it is measured to be faster than PyG's operators
    available: Callable[[torch.device], bool] = lambda device: True  # whether it can run on one of its devices
    compiles: bool = True  # whether compilers can call it

    def runs_on(self, device: torch.device) -> bool:
        """Return whether it runs on a device of this machine."""
        return device.type in self.devices and self.available(device)


IMPLS: dict[str, tuple[Impl, ...]] = {
    "aggregate": (
        Impl(
            "ascend",
            ("npu", "cpu"),  # the CPU simulates the chip on request
            _ALL,
            _HALVES,
            available=lambda device: chip_executor(device, backend_name(None)) is not None,
            compiles=False,
        ),
        Impl("numba", ("cpu",), (*_FLOATS, torch.bfloat16), (torch.bfloat16,), least_size=1 << 19),
        # The size is an estimate: below it, both wait for the host.
        Impl("triton", ("cuda",), _ALL, _HALVES, least_size=1 << 20, available=runs_triton),
    ),
    "attention": (
        Impl("triton", ("cuda",), _ALL, _HALVES, least_size=1 << 20, available=runs_triton),  # estimated
        Impl("numba", ("cpu",), _FLOATS, (torch.bfloat16,), least_size=1 << 17),
    ),
    "relations": (
        Impl("numba", ("cpu",), _ALL, (torch.bfloat16,)),
        Impl("triton", ("cuda",), _ALL, _HALVES, available=runs_triton),
    ),
    "relation_attention": (
        Impl("triton", ("cuda",), _ALL, _HALVES, available=runs_triton),
        Impl("numba", ("cpu",), _FLOATS, (torch.bfloat16,)),
    ),
}
"""The implementations of each operator, in the order of preference."""


def choose(operator: str, x: Tensor, size: int | None = None) -> Impl | None:
    """Return the implementation for features and torch's autocast, or None: then PyG's operators run.

    Args:
        operator: A key of :data:`IMPLS`.
        x: The features of the sources.
        size: Edges times columns; None ignores the least sizes.
    """
    autocast = _autocast_dtype(x.device)
    for impl in IMPLS[operator]:
        fits = x.dtype in (impl.dtypes if autocast is None else accepted_dtypes(x))
        fits = fits and (autocast is None or autocast in impl.autocast) and impl.runs_on(x.device)
        if fits and (size is None or size >= impl.least_size):
            return impl
    return None


def accepted_dtypes(x: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes that inputs beside the features ``x`` may have: theirs, or under autocast two."""
    autocast = _autocast_dtype(x.device)
    return (x.dtype,) if autocast is None else (torch.float32, autocast)


def has_fused_layers(device: torch.device) -> bool:
    """Return whether some operator has an implementation for a device."""
    return any(impl.runs_on(device) for impls in IMPLS.values() for impl in impls)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    kind = device.type
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # not on "meta"
    return torch.get_autocast_dtype(kind) if enabled else None
