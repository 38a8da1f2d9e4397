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
from typing import TYPE_CHECKING, Any

import torch

from lightning_gnn.graph.chunks import Chunks
from lightning_gnn.ops import aggregate_reference
from lightning_gnn.ops.library import library
from lightning_gnn.planning.grouping import plan_cores
from lightning_gnn.planning.plan import HybridPlan

if TYPE_CHECKING:
    from lightning_gnn.graph.compress import CompressedGraph

BACKENDS = ("numba", "triton", "reference", "ascend_twin")

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


def operators(backend: str | None, device: torch.device) -> Any:
    """Return the namespace in which a backend's operators are found.

    Args:
        backend: One of ``BACKENDS``, or None for :func:`default_backend`, or else the one that is registered for the
            device.
        device: Where the tensors are.

    Raises:
        ValueError: The backend is unknown, or cannot run on the device.
    """
    _check_name(backend)
    backend = _default if backend is None else backend
    if backend is None:
        return _loaded_npu() if device.type == "npu" else torch.ops.lightning_gnn
    if backend == "numba" and device.type != "cpu":
        raise ValueError(f"backend='numba' runs on the CPU, but the graph is on {device}")
    return importlib.import_module(f"lightning_gnn.ops.aggregate_{backend}")


def _check_name(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}, or None")


def _npu() -> Any:
    return importlib.import_module("lightning_gnn.ops.aggregate_npu")


def _loaded_npu() -> Any:
    npu = _npu()
    npu.available()  # builds and loads the kernels, or says what is missing
    return npu


def chunk_tensors(chunks: Chunks) -> list[torch.Tensor]:
    """Return a direction as the operators take it."""
    return [chunks.rows, chunks.row_ptr, chunks.indptr, chunks.local, chunks.columns, chunks.column_ptr]


def plan_of(graph: CompressedGraph, direction: str, num_columns: int, one_group: bool = False) -> HybridPlan:
    """Return who computes what of an aggregation; remembered, for a plan costs more than a small aggregation.

    Args:
        graph: The graph; unless its settings say otherwise, the workers are the NPU's cores, else torch's threads.
        direction: ``"forward"`` or ``"backward"``.
        num_columns: D, heads times channels.
        one_group: All workers share out the chunks, whatever the settings say: for results per edge, to which every
            column adds.
    """
    settings = replace(graph.settings, num_groups=1) if one_group else graph.settings
    num_workers = settings.num_workers or _num_workers(graph.forward.indptr.device)
    key = ("plan", direction, num_columns, num_workers, settings)
    plan = graph.cache.get(key)
    if plan is None:
        chunks = getattr(graph, direction)
        loads = chunks.indptr[chunks.row_ptr].diff().cpu().numpy()
        plan = graph.cache[key] = plan_cores(num_columns, loads, settings, num_workers)
    return plan


def _num_workers(device: torch.device) -> int:
    on_npu = device.type == "npu" and _default is None
    return _npu().num_cores(device.index or 0) if on_npu else torch.get_num_threads()


def bounds(pairs: tuple[tuple[int, int], ...]) -> list[int]:
    """Return ``(start, stop)`` pairs that follow one another as their bounds."""
    return [pairs[0][0], *(stop for _, stop in pairs)]
