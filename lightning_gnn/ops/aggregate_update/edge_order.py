"""Sorts the edges of a mini-batch by target or source: a counting sort on the CPU, torch's sort elsewhere.

Sorted edges are a list: ``indptr`` int64 ``[num_rows + 1]``, ``indices`` int32 ``[E]``, and weights ``[E]`` if given.
The sort is stable. In a heterogeneous mini-batch, a target has one row per relation of its type, consecutively.
On a device, edges that :func:`mark_sorted` knows are neither sorted nor checked, and layers on the same tensor share
one order by target and one by source (:func:`kept`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_gnn.ops.library import define, is_traced, library

SORTED, UNSORTED = -1, -2  # results of counting edges, unless it returns the number of an invalid edge


_sorted: Any = WeakTensorKeyDictionary()  # edge_index on a device -> its version when it was marked
prepared: Any = WeakTensorKeyDictionary()
"""What was computed ahead for an ``edge_index``, and for views of its first edges."""
_sorted_hops: Any = WeakTensorKeyDictionary()  # edge_index on a device -> its version, and the hops that are sorted


def mark_sorted(edge_index: Tensor, hops: Sequence[tuple[int, int]] | None = None) -> None:
    """Record that edges on a device are sorted by target and inside their mini-batch; writes cancel this.

    With ``hops``, the first edge of each and one past its last, it is only recorded of each hop alone.
    """
    if edge_index.is_cpu or edge_index.is_inference():
        return
    if hops is None:
        _sorted[edge_index] = edge_index._version
    else:
        _sorted_hops[edge_index] = edge_index._version, tuple(hops)


def is_sorted(edge_index: Tensor, hop: tuple[int, int] | None = None) -> bool:
    """Return whether edges, or those of a hop, are known to be sorted by target and inside their mini-batch."""
    if torch.compiler.is_compiling() or type(edge_index) is not Tensor or edge_index.is_inference():
        return False
    if _sorted.get(edge_index) == edge_index._version:
        return True
    version, hops = _sorted_hops.get(edge_index, (None, ())) if hop is not None else (None, ())
    return version == edge_index._version and hop in hops


def first_edges(edge_index: Tensor, stop: int, start: int = 0) -> Tensor:
    """Return edges ``start`` to ``stop`` as a view (compiled: a copy), known to be sorted if all or this hop's are."""
    if is_traced():  # the operator sees the tensor that may be known
        if start == 0 and stop == edge_index.size(1):
            return edge_index
        return torch.ops.lightning_gnn.first_edges(edge_index, stop, start)  # type: ignore[no-any-return]
    return _first_edges(edge_index, stop, start)


def _first_edges(edge_index: Tensor, stop: int, start: int, copies: bool = False) -> Tensor:
    part = edge_index[:, start:stop]
    part = part.clone() if copies else part
    if is_sorted(edge_index, (start, stop)):
        mark_sorted(part)
    if start == 0 and (found := prepared.get(edge_index)) is not None:
        prepared[part] = found
    return part


_kept: Any = WeakTensorKeyDictionary()  # edges on a device -> their version, and what was computed from them


def kept(edges: Tensor, what: tuple[Any, ...], compute: Callable[[], list[Tensor]], *others: Tensor) -> list[Tensor]:
    """Return ``compute()``, or for unchanged edges on a device the result of an earlier call, with the same others.

    Results must not be written. Nothing is kept in CUDA graphs, whose edges change without a trace.
    """
    if not _can_keep(edges):
        return compute()
    version, results = _kept.get(edges, (None, {}))
    if version != edges._version:
        results = {}
        _kept[edges] = (edges._version, results)
    given, result = results.get(what, ((), None))
    if result is None or any(one is not other for one, other in zip(given, others, strict=True)):
        with torch.inference_mode(False):  # training may follow
            result = compute()
        results[what] = others, result
    return result  # type: ignore[no-any-return]


def _can_keep(edges: Tensor) -> bool:
    # Compilers may write into what an operator returns.
    if torch.compiler.is_compiling() or edges.is_cpu or type(edges) is not Tensor or edges.is_inference():
        return False
    return not edges.is_cuda or not torch.cuda.is_current_stream_capturing()


def target_edges(edge_index: Tensor, num_sources: int, num_targets: int) -> list[Tensor]:
    """Return the edges ``[2, E]`` sorted by target, once for all layers on the same tensor."""

    def compute() -> list[Tensor]:
        return torch.ops.lightning_gnn.edges_by_target(edge_index, num_sources, num_targets, None)  # type: ignore[no-any-return]

    return kept(edge_index, ("target", num_sources, num_targets), compute)


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
    keys = torch.cat([edges[1] for edges in moved])
    target, order = torch.sort(keys.to(torch.int32) if num_rows < 2**31 else keys, stable=True)  # half of the digits
    source_rows = torch.cat([edges[0] for edges in moved])[order].to(torch.int32)
    rows = torch.arange(num_rows + 1, device=target.device, dtype=target.dtype)
    return [torch.searchsorted(target, rows), source_rows]


def edges_by_source(edges: list[Tensor], num_sources: int) -> list[Tensor]:
    """Sort target-sorted edges by source with torch's own operators, the same tensors once."""
    indptr, indices, *weight = edges
    return kept(indices, ("source", num_sources), lambda: _edges_by_source(edges, num_sources), indptr, *weight)


def _edges_by_source(edges: list[Tensor], num_sources: int) -> list[Tensor]:
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
    "edges_by_target(Tensor edge_index, SymInt num_sources, SymInt num_targets, Tensor? edge_weight) -> Tensor[]",
    edges_by_target,
)
define(
    "relation_edges(Tensor[] edge_indices, SymInt[] num_sources, SymInt[] num_targets, SymInt[] first_source,"
    " SymInt[] first_row, int[] stride, SymInt num_rows) -> Tensor[]",
    relation_edges,
)
define(
    "first_edges(Tensor edge_index, SymInt stop, SymInt start) -> Tensor",
    lambda edge_index, stop, start: _first_edges(edge_index, stop, start, copies=True),
    lambda edge_index, stop, start: edge_index.new_empty(2, stop - start),
)
define("edges_by_source(Tensor[] edges, SymInt num_sources) -> Tensor[]", edges_by_source)


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
    count = indptr.item(-1)
    pointers, targets = np.zeros(num_sources + 1, np.int64), np.empty(count, np.int32)
    source_weight = edges[2].contiguous() if len(edges) > 2 else torch.empty(0)
    weight = torch.empty_like(source_weight if source_weight.numel() <= count else source_weight[:count])
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
    """Sort edges by source in two passes, a counting sort; entries behind those of the last row are not edges."""
    for e in range(targets.size):
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
