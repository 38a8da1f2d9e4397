"""Sorts the edges of a mini-batch by target or source: a counting sort on the CPU, torch's sort elsewhere.

Sorted edges are a list: ``indptr`` int64 ``[num_rows + 1]``, ``indices`` int32 ``[E]``, and weights ``[E]`` if given.
The sort is stable. In a heterogeneous mini-batch, a target has one row per relation of its type, consecutively.
On a device, edges that :func:`mark_sorted` knows are neither sorted nor checked.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_gnn.ops.library import define, library

SORTED, UNSORTED = -1, -2  # results of counting edges, unless it returns the number of an invalid edge


_sorted: Any = WeakTensorKeyDictionary()  # edge_index on a device -> its version when it was marked
prepared: Any = WeakTensorKeyDictionary()
"""What was computed ahead for an ``edge_index``, and for views of its first edges."""


def mark_sorted(edge_index: Tensor) -> None:
    """Record that edges on a device are sorted by target and inside their mini-batch; writes cancel this."""
    if not edge_index.is_cpu and not edge_index.is_inference():
        _sorted[edge_index] = edge_index._version


def is_sorted(edge_index: Tensor) -> bool:
    """Return whether edges are known to be sorted by target and inside their mini-batch, without a look at them."""
    if torch.compiler.is_compiling() or type(edge_index) is not Tensor or edge_index.is_inference():
        return False
    return bool(_sorted.get(edge_index) == edge_index._version)


def first_edges(edge_index: Tensor, stop: int, start: int = 0) -> Tensor:
    """Return edges ``start`` to ``stop`` as a view, which is known to be sorted if all are."""
    part = edge_index[:, start:stop]
    if is_sorted(edge_index):
        mark_sorted(part)
    if start == 0 and (found := prepared.get(edge_index)) is not None:
        prepared[part] = found
    return part


def edges_by_target(edge_index: Tensor, num_sources: int, num_targets: int, edge_weight: Tensor | None) -> list[Tensor]:
    """Sort edges ``[2, E]`` by target with torch's own operators, without synchronizing the device."""
    source, target = edge_index
    if not is_sorted(edge_index):
        _check(edge_index, num_sources, num_targets)
        target, order = torch.sort(target, stable=True)
        source, edge_weight = source[order], None if edge_weight is None else edge_weight[order]
    return [
        torch.searchsorted(target, torch.arange(num_targets + 1, device=target.device)),
        source.to(torch.int32),
        *(() if edge_weight is None else (edge_weight,)),
    ]


def _check(edge_index: Tensor, num_sources: int, num_targets: int) -> None:
    """Assert asynchronously that edges are inside their mini-batch."""
    if edge_index.size(1):
        inside = (edge_index >= 0).all() & (edge_index[0] < num_sources).all() & (edge_index[1] < num_targets).all()
        torch._assert_async(inside, "edge_index holds a node that is not in the mini-batch")


def relation_edges(
    edge_indices: list[Tensor],  # edges of each relation, int64 [2, E_r], with ids within its node types
    num_sources: list[int],
    num_targets: list[int],
    first_source: list[int],  # row of x that holds the first source of each relation
    first_row: list[int],  # row of the first target of each relation
    stride: list[int],  # distance between the rows of consecutive targets
    num_rows: int,
) -> list[Tensor]:
    """Sort the edges of all relations by target and relation, with torch's own operators."""
    moved = [edge_indices[0].new_empty(2, 0)] if edge_indices else [torch.empty(2, 0, dtype=torch.int64)]
    for edges, sources, targets, source, row, step in zip(
        edge_indices, num_sources, num_targets, first_source, first_row, stride, strict=True
    ):
        if not is_sorted(edges):
            _check(edges, sources, targets)
        moved.append(torch.stack([edges[0] + source, edges[1] * step + row]))
    target, order = torch.sort(torch.cat([edges[1] for edges in moved]), stable=True)
    source_rows = torch.cat([edges[0] for edges in moved])[order].to(torch.int32)
    return [torch.searchsorted(target, torch.arange(num_rows + 1, device=target.device)), source_rows]


def edges_by_source(edges: list[Tensor], num_sources: int) -> list[Tensor]:
    """Sort target-sorted edges by source with torch's own operators."""
    indptr, indices, *weight = edges
    target = torch.repeat_interleave(indptr.diff(), output_size=indices.numel())
    source, order = torch.sort(indices, stable=True)
    return [
        torch.searchsorted(source, torch.arange(num_sources + 1, device=indptr.device, dtype=source.dtype)),
        target[order].to(torch.int32),
        *(values[order] for values in weight),
    ]


def first_rows(edges: list[Tensor], count: int, num_edges: int | None = None) -> list[Tensor]:
    """Return the first ``count`` rows of sorted edges as views; without their ``num_edges`` this waits for a device."""
    indptr = edges[0][: count + 1]
    last = int(indptr[-1]) if num_edges is None else num_edges
    return [indptr, *(values[:last] for values in edges[1:])]


define(
    "edges_by_target(Tensor edge_index, int num_sources, int num_targets, Tensor? edge_weight) -> Tensor[]",
    edges_by_target,
)
define(
    "relation_edges(Tensor[] edge_indices, int[] num_sources, int[] num_targets, int[] first_source, int[] first_row,"
    " int[] stride, int num_rows) -> Tensor[]",
    relation_edges,
)
define("edges_by_source(Tensor[] edges, int num_sources) -> Tensor[]", edges_by_source)


@torch.library.impl(library, "edges_by_target", "CPU")
def _by_target_cpu(edge_index: Tensor, num_sources: int, num_targets: int, edge_weight: Tensor | None) -> list[Tensor]:
    source, target = _to_arrays(edge_index)
    indptr, indices = np.zeros(num_targets + 1, np.int64), np.empty(source.size, np.int32)
    status = _count(source, target, num_sources, num_targets, 0, 1, indptr, indices)
    check_inside(status, source, target, num_sources, num_targets)
    next_slot = _cumulate(indptr)
    if status == UNSORTED:
        order = np.empty(source.size, np.int64)
        _scatter(source, target, 0, 0, 1, next_slot, indices, order)
        edge_weight = None if edge_weight is None else edge_weight[torch.from_numpy(order)]
    edges = [torch.from_numpy(indptr), torch.from_numpy(indices)]
    return edges if edge_weight is None else [*edges, edge_weight.contiguous().clone()]


@torch.library.impl(library, "relation_edges", "CPU")
def _relation_edges_cpu(
    edge_indices: list[Tensor],
    num_sources: list[int],
    num_targets: list[int],
    first_source: list[int],
    first_row: list[int],
    stride: list[int],
    num_rows: int,
) -> list[Tensor]:
    indptr, none = np.zeros(num_rows + 1, np.int64), np.empty(0, np.int32)
    ends = [_to_arrays(edges) for edges in edge_indices]
    for (source, target), sources, targets, row, step in zip(
        ends, num_sources, num_targets, first_row, stride, strict=True
    ):
        status = _count(source, target, sources, targets, row, step, indptr, none)
        check_inside(status, source, target, sources, targets)
    next_slot, indices = _cumulate(indptr), np.empty(int(indptr[-1]), np.int32)
    for (source, target), first, row, step in zip(ends, first_source, first_row, stride, strict=True):
        _scatter(source, target, first, row, step, next_slot, indices, none.astype(np.int64))
    return [torch.from_numpy(indptr), torch.from_numpy(indices)]


def _to_arrays(edge_index: Tensor) -> tuple[np.ndarray, np.ndarray]:
    source, target = (part.contiguous().numpy() for part in edge_index)
    return source, target


def check_inside(status: int, source: np.ndarray, target: np.ndarray, num_sources: int, num_targets: int) -> None:
    """Raise an IndexError if ``status``, the result of counting edges, is an invalid edge."""
    if status >= 0:
        ends = (("0", source, num_sources, "sources"), ("1", target, num_targets, "targets"))
        row, ids, count, name = next(end for end in ends if not 0 <= end[1][status] < end[2])
        raise IndexError(f"edge_index[{row}] holds node {ids[status]} (edge {status}), but there are {count} {name}")


@torch.library.impl(library, "edges_by_source", "CPU")
def _by_source_cpu(edges: list[Tensor], num_sources: int) -> list[Tensor]:
    indptr, indices = edges[0].numpy(), edges[1].numpy()
    pointers, targets = np.zeros(num_sources + 1, np.int64), np.empty(indices.size, np.int32)
    source_weight = edges[2].contiguous() if len(edges) > 2 else torch.empty(0)
    weight = torch.empty_like(source_weight)
    # Weights are moved as integers of the same size, because NumPy lacks bfloat16.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[source_weight.element_size()]
    _transpose(indptr, indices, source_weight.view(bits).numpy(), pointers, targets, weight.view(bits).numpy())
    result = [torch.from_numpy(pointers), torch.from_numpy(targets)]
    return [*result, weight] if len(edges) > 2 else result


@numba.njit(nogil=True, cache=True)
def _count(
    source: np.ndarray, target: np.ndarray, num_sources: int, num_targets: int, first: int, stride: int,
    indptr: np.ndarray, indices: np.ndarray,
) -> int:  # fmt: skip
    """Count each row's edges, copy sources to non-empty ``indices``; return an invalid edge, SORTED or UNSORTED."""
    previous, status = np.int64(0), SORTED
    for e in range(source.size):
        s, t = source[e], target[e]
        if s < 0 or s >= num_sources or t < 0 or t >= num_targets:
            return e
        if t < previous:
            status = UNSORTED
        previous = t
        indptr[first + t * stride + 1] += 1
        if indices.size:
            indices[e] = s
    return status


@numba.njit(nogil=True, cache=True)
def _cumulate(indptr: np.ndarray) -> np.ndarray:
    """Convert counts to ``indptr`` in place, and return a copy of the row starts."""
    for row in range(indptr.size - 1):
        indptr[row + 1] += indptr[row]
    next_slot: np.ndarray = indptr[:-1].copy()
    return next_slot


@numba.njit(nogil=True, cache=True)
def _scatter(
    source: np.ndarray, target: np.ndarray, first_source: int, first: int, stride: int, next_slot: np.ndarray,
    indices: np.ndarray, order: np.ndarray,
) -> None:  # fmt: skip
    """Write each edge's source (and number) to the next free slot of its row: the second pass of a counting sort."""
    for e in range(source.size):
        row = first + target[e] * stride
        at = next_slot[row]
        next_slot[row] = at + 1
        indices[at] = first_source + source[e]
        if order.size:
            order[at] = e


@numba.njit(nogil=True, cache=True)
def _transpose(
    indptr: np.ndarray, indices: np.ndarray, weight: np.ndarray, pointers: np.ndarray, targets: np.ndarray,
    weights: np.ndarray,
) -> None:  # fmt: skip
    """Sort edges by source in two passes, a counting sort."""
    for e in range(indices.size):
        pointers[indices[e] + 1] += 1
    next_slot = _cumulate(pointers)
    # Targets are visited in order, so the sort is stable.
    for t in range(indptr.size - 1):
        for e in range(indptr[t], indptr[t + 1]):
            at = next_slot[indices[e]]
            next_slot[indices[e]] = at + 1
            targets[at] = t
            if weights.size:
                weights[at] = weight[e]
