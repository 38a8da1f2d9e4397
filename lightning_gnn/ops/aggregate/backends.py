"""The operators under ``aggregate`` and ``edge_softmax``: their schemas, who implements them, and the plan they follow.

Every operator takes plain tensors. ``chunks`` is one direction of a graph as six tensors: ``rows``, ``row_ptr``,
``indptr``, ``local``, ``columns`` and ``column_ptr`` of :class:`~lightning_gnn.graph.chunks.Chunks`. A backend
registers what it has for its dispatch key; a device without a kernel of its own runs the reference, which is made of
torch's own operators.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.graph.chunks import Chunks
from lightning_gnn.graph.hybrid_plan import HybridPlan, PlanSettings, plan_cores
from lightning_gnn.ops.aggregate import reference as aggregate_reference
from lightning_gnn.ops.library import library

BACKENDS = ("numba", "triton", "reference", "ascend_twin")
DEVICE = "device"
"""In place of a backend's name: what is registered for the device."""

_default: str | None = None

SCHEMAS = (
    "aggregate_chunks(Tensor[] chunks, int num_rows, Tensor x, Tensor? weight, str reduce, int[] slices,"
    " int[] chunk_ranges) -> (Tensor, Tensor)",
    "aggregate_max_backward(Tensor[] chunks, int num_rows, Tensor grad, Tensor best, Tensor x, Tensor? weight,"
    " int[] slices, int[] chunk_ranges) -> Tensor",
    "edge_products(Tensor[] chunks, Tensor row_side, Tensor column_side, Tensor? best, Tensor? weight, int[] slices,"
    " int[] chunk_ranges) -> Tensor",
    "edge_softmax(Tensor[] chunks, Tensor row_scores, Tensor column_scores, float negative_slope, int[] chunk_ranges)"
    " -> Tensor",
    "edge_softmax_backward(Tensor[] chunks, Tensor row_scores, Tensor column_scores, float negative_slope,"
    " Tensor attention, Tensor grad, int[] chunk_ranges) -> Tensor",
    "edge_sums(Tensor[] chunks, int num_rows, Tensor? edge_ids, Tensor values, int[] chunk_ranges) -> Tensor",
)
for _schema in SCHEMAS:
    _name = _schema.partition("(")[0]
    library.define(_schema)
    # Below any device's own kernel, above the fallback: what runs on a device that this package does not know.
    library.impl(_name, getattr(aggregate_reference, _name), "CompositeExplicitAutograd")


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
    """Return which backend is meant: the one given, or else :func:`default_backend`, or else ``"device"``.

    Raises:
        ValueError: There is no such backend.
    """
    _check_name(backend)
    return backend or _default or DEVICE


def operators(backend: str, device: torch.device) -> Any:
    """Return the namespace in which a backend's operators are found.

    Args:
        backend: What :func:`backend_name` returned; ``"device"`` is what is registered for the device.
        device: Where the tensors are.

    Raises:
        ValueError: The backend cannot run on the device.
    """
    if backend == DEVICE:
        return _loaded_npu() if device.type == "npu" else torch.ops.lightning_gnn
    if backend == "numba" and device.type != "cpu":
        raise ValueError(f"backend='numba' runs on the CPU, but the graph is on {device}")
    return importlib.import_module(f"lightning_gnn.ops.aggregate.{backend}")


def _check_name(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}, or None")


def _npu() -> Any:
    return importlib.import_module("lightning_gnn.ops.aggregate.npu")


def _loaded_npu() -> Any:
    npu = _npu()
    npu.available()  # builds and loads the kernels, or says what is missing
    return npu


def chunk_tensors(chunks: Chunks) -> list[torch.Tensor]:
    """Return a direction as the operators take it."""
    return [chunks.rows, chunks.row_ptr, chunks.indptr, chunks.local, chunks.columns, chunks.column_ptr]


_plans = WeakIdKeyDictionary()


def plan_of(
    chunks: list[torch.Tensor], num_columns: int, settings: PlanSettings, backend: str, one_group: bool = False
) -> HybridPlan:
    """Return who computes what of an aggregation; kept as long as the chunks, for it costs more than a small one.

    Args:
        chunks: One direction of a graph.
        num_columns: D, heads times channels.
        settings: Unless they say otherwise, the workers are the NPU's cores, else torch's threads.
        backend: What :func:`backend_name` returned.
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


def _num_workers(device: torch.device, backend: str) -> int:
    on_npu = device.type == "npu" and backend == DEVICE
    return _npu().num_cores(device.index or 0) if on_npu else torch.get_num_threads()


def bounds(pairs: tuple[tuple[int, int], ...]) -> list[int]:
    """Return ``(start, stop)`` pairs that follow one another as their bounds."""
    return [pairs[0][0], *(stop for _, stop in pairs)]
