"""Who executes the operators under ``aggregate`` and ``edge_softmax``, and the plan they follow.

Every operator takes plain tensors. ``chunks`` is one direction of a graph as six tensors: ``rows``, ``row_ptr``,
``indptr``, ``local``, ``columns`` and ``column_ptr`` of :class:`~lightning_gnn.graph.chunks.Chunks`. The two files
``reference.py`` define the operators; a backend registers what it has for its dispatch key. On a GPU and an NPU
attention works on what is prepared for aggregation, and is in the same file.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.graph.chunks import Chunks
from lightning_gnn.graph.hybrid_plan import HybridPlan, PlanSettings, plan_cores
from lightning_gnn.ops.aggregate import reference as aggregate_reference  # noqa: F401  defines the operators
from lightning_gnn.ops.edge_softmax import reference as softmax_reference  # noqa: F401  defines the operators
from lightning_gnn.ops.library import references

BACKENDS = ("numba", "triton", "reference", "ascend_twin")
DEVICE = "device"
"""In place of a backend's name: what is registered for the device."""

_default: str | None = None


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


def operators(backend: str, device: torch.device) -> Any:
    """Return the namespace in which a backend's operators are found.

    Args:
        backend: What :func:`backend_name` returned; ``"device"`` is what is registered for the device.
    """
    if backend == "reference":
        return references
    if backend == "numba" and device.type != "cpu":
        raise ValueError(f"backend='numba' runs on the CPU, but the graph is on {device}")
    if backend in (DEVICE, "numba"):
        return _loaded_npu() if device.type == "npu" else torch.ops.lightning_gnn
    if backend == "triton":
        from lightning_gnn.ops.aggregate import triton

        return triton
    return _twin()


def _check_name(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}, or None")


def _npu() -> Any:
    from lightning_gnn.ops.aggregate import npu

    return npu


def _twin() -> Any:
    from lightning_gnn.ops.aggregate import ascend_twin

    return ascend_twin


def _loaded_npu() -> Any:
    npu = _npu()
    npu.available()  # builds and loads the kernels, or says what is missing
    return npu


def chunk_tensors(chunks: Chunks) -> list[torch.Tensor]:
    """Return a direction as the operators take it."""
    return [chunks.rows, chunks.row_ptr, chunks.indptr, chunks.local, chunks.columns, chunks.column_ptr]


_plans: MutableMapping[torch.Tensor, dict[tuple[int, int, PlanSettings], HybridPlan]] = WeakIdKeyDictionary()
_cuts: MutableMapping[torch.Tensor, dict[Any, Any]] = WeakIdKeyDictionary()


def plan_of(
    chunks: list[torch.Tensor], num_columns: int, settings: PlanSettings, backend: str, one_group: bool = False
) -> HybridPlan:
    """Return who computes what of an aggregation; kept as long as the chunks, for it costs more than a small one.

    Args:
        settings: Unless they say otherwise, the workers are the NPU's cores, else torch's threads.
        one_group: All workers share out the chunks, whatever the settings say: for results per edge, to which every
            column adds.
    """
    settings = replace(settings, num_groups=1) if one_group else settings
    _, row_ptr, indptr = chunks[:3]
    num_workers = settings.num_workers or _num_workers(indptr.device, backend)
    plans = _plans.get(indptr)
    if plans is None:
        plans = _plans[indptr] = {}
    key = (num_columns, num_workers, settings)
    plan = plans.get(key)
    if plan is None:
        loads = indptr[row_ptr].diff().cpu().numpy()
        plan = plans[key] = plan_cores(num_columns, loads, settings, num_workers)
    return plan


def chip_plan_of(
    chunks: list[torch.Tensor],
    shape: tuple[int, int],
    num_columns: int,
    settings: PlanSettings,
    backend: str,
    heads: int = 1,
    by_vertex: bool = False,
) -> tuple[list[torch.Tensor], HybridPlan]:
    """Return the chunks of an aggregation on an NPU, cut as its plan wants them, and the plan, which names the kernel.

    Args:
        shape: Vertices on its row side and on its column side.
    """
    from lightning_gnn.ops.aggregate.chip_plan import HEIGHT, plan_chip

    known = _cuts.setdefault(chunks[2], {})
    if "whole" not in known:
        rows, row_ptr, indptr, local, columns, column_ptr = chunks
        indptr = indptr.clone()  # what is kept must not keep its key alive
        known["whole"] = Chunks(rows, row_ptr, indptr, local, columns, column_ptr, None, *shape)
    cores = settings.num_workers or _num_workers(chunks[2].device, backend)
    key = num_columns, cores, settings, heads, by_vertex
    if key not in known:
        kernels: tuple[Any, ...] = ("vector",) if by_vertex else ("cube", "vector")
        known[key] = plan_chip(num_columns, known["whole"], settings, cores, kernels=kernels, heads=heads)
    plan: HybridPlan = known[key]
    if plan.kernel not in known:
        known[plan.kernel] = chunk_tensors(known["whole"].recut(HEIGHT[plan.kernel]))
    return known[plan.kernel], plan


def runs_on_chip(device: torch.device, backend: str) -> bool:
    """Say whether the Ascend C kernels execute a sum, in simulation or on an NPU."""
    return backend == "ascend_twin" or (device.type == "npu" and backend == DEVICE and bool(_npu().available()))


def chip_executor(device: torch.device, backend: str) -> tuple[Any, int]:
    """Return the module whose ``launch`` runs Ascend C kernels where :func:`runs_on_chip`, and the AI cores there."""
    module = _twin() if backend == "ascend_twin" else _npu()
    return module, _num_workers(device, backend)


def _num_workers(device: torch.device, backend: str) -> int:
    on_npu = device.type == "npu" and backend == DEVICE
    return _npu().num_cores(device.index or 0) if on_npu else torch.get_num_threads()


def bounds(pairs: tuple[tuple[int, int], ...]) -> list[int]:
    """Return ``(start, stop)`` pairs that follow one another as their bounds."""
    return [pairs[0][0], *(stop for _, stop in pairs)]
