"""The edges of a mini-batch by target and by source: sorted by counting on the CPU, by torch elsewhere.

Sorted edges are a list: ``indptr`` int64 ``[num_rows + 1]``, ``indices`` int32 ``[E]``, and, if edges are weighted,
their weights ``[E]``. The order within a row is that in which the edges were given.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.library import define, library

SORTED, UNSORTED = -1, -2
"""What counting edges returns in place of a bad one."""


def edges_by_target(edge_index: Tensor, num_sources: int, num_targets: int, edge_weight: Tensor | None) -> list[Tensor]:
    """Sort edges by target, where they are not, with torch's own operators; nothing waits for the device.

    Args:
        edge_index: int64 ``[2, E]``.
        edge_weight: ``[E]``, or None.
    """
    source, target = edge_index
    if edge_index.size(1):
        inside = (edge_index >= 0).all() & (source < num_sources).all() & (target < num_targets).all()
        torch._assert_async(inside, "edge_index holds a node that the batch does not have")
    target, order = torch.sort(target, stable=True)
    return [
        torch.searchsorted(target, torch.arange(num_targets + 1, device=target.device)),
        source[order].to(torch.int32),
        *(() if edge_weight is None else (edge_weight[order],)),
    ]


def edges_by_source(edges: list[Tensor], num_sources: int, own: bool) -> list[Tensor]:
    """Sort edges that are sorted by target by their source, with torch's own operators.

    Args:
        own: Give source i, for each of the ``num_targets`` targets, a last edge of weight 1 to ``num_targets + i``.
    """
    indptr, indices, *weight = edges
    num_targets, device = indptr.numel() - 1, indptr.device
    target = torch.repeat_interleave(indptr.diff(), output_size=indices.numel())
    if own:
        each = torch.arange(num_targets, device=device)
        indices, target = torch.cat([indices, each.to(torch.int32)]), torch.cat([target, each + num_targets])
        weight = [torch.cat([values, values.new_ones(num_targets)]) for values in weight]
    source, order = torch.sort(indices, stable=True)
    return [
        torch.searchsorted(source, torch.arange(num_sources + 1, device=device, dtype=source.dtype)),
        target[order].to(torch.int32),
        *(values[order] for values in weight),
    ]


def first_rows(edges: list[Tensor], count: int) -> list[Tensor]:
    """Return the first rows of sorted edges, without a copy."""
    indptr = edges[0][: count + 1]
    last = int(indptr[-1])
    return [indptr, *(values[:last] for values in edges[1:])]


define(
    "edges_by_target(Tensor edge_index, int num_sources, int num_targets, Tensor? edge_weight) -> Tensor[]",
    edges_by_target,
)
define("edges_by_source(Tensor[] edges, int num_sources, bool own) -> Tensor[]", edges_by_source)


@torch.library.impl(library, "edges_by_target", "CPU")
def _by_target_cpu(edge_index: Tensor, num_sources: int, num_targets: int, edge_weight: Tensor | None) -> list[Tensor]:
    source, target = (part.contiguous().numpy() for part in edge_index)
    indptr, indices = np.zeros(num_targets + 1, np.int64), np.empty(source.size, np.int32)
    found = _count(source, target, num_sources, indptr, indices)
    check_inside(found, source, target, num_sources, num_targets)
    if found == UNSORTED:
        order = np.empty(source.size, np.int64)
        _place(source, target, indptr, indices, order)
        edge_weight = None if edge_weight is None else edge_weight[torch.from_numpy(order)]
    edges = [torch.from_numpy(indptr), torch.from_numpy(indices)]
    return edges if edge_weight is None else [*edges, edge_weight.contiguous().clone()]


def check_inside(found: int, source: np.ndarray, target: np.ndarray, num_sources: int, num_targets: int) -> None:
    """Explain what counting found: a bad edge, or none."""
    if found >= 0:
        ends = (("0", source, num_sources, "sources"), ("1", target, num_targets, "targets"))
        row, ids, count, name = next(end for end in ends if not 0 <= end[1][found] < end[2])
        raise IndexError(f"edge_index[{row}] holds node {ids[found]} (edge {found}), but there are {count} {name}")


@torch.library.impl(library, "edges_by_source", "CPU")
def _by_source_cpu(edges: list[Tensor], num_sources: int, own: bool) -> list[Tensor]:
    indptr, indices = edges[0].numpy(), edges[1].numpy()
    count = indices.size + (indptr.size - 1 if own else 0)
    pointers, targets = np.zeros(num_sources + 1, np.int64), np.empty(count, np.int32)
    given = edges[2] if len(edges) > 2 else torch.empty(0)
    weight = given.new_empty(count if len(edges) > 2 else 0)
    # float16 and bfloat16 are moved as the bits that they are.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[given.element_size()]
    one = given.new_ones(1).view(bits).numpy()
    _transpose(indptr, indices, given.contiguous().view(bits).numpy(), own, one, pointers, targets,
               weight.view(bits).numpy())  # fmt: skip
    result = [torch.from_numpy(pointers), torch.from_numpy(targets)]
    return [*result, weight] if len(edges) > 2 else result


@numba.njit(nogil=True, cache=True)
def _count(source: np.ndarray, target: np.ndarray, num_sources: int, indptr: np.ndarray, indices: np.ndarray) -> int:
    """Count the edges of each target and copy the sources; return a bad edge, or whether they are sorted."""
    num_targets = indptr.size - 1
    previous, answer = np.int64(0), SORTED
    for e in range(source.size):
        s, t = source[e], target[e]
        if s < 0 or s >= num_sources or t < 0 or t >= num_targets:
            return e
        if t < previous:
            answer = UNSORTED
        previous = t
        # Of sorted edges this copy is the answer already; of others it is overwritten.
        indptr[t + 1] += 1
        indices[e] = s
    for t in range(num_targets):
        indptr[t + 1] += indptr[t]
    return answer


@numba.njit(nogil=True, cache=True)
def _place(source: np.ndarray, target: np.ndarray, indptr: np.ndarray, indices: np.ndarray, order: np.ndarray) -> None:
    """Write each edge's source to the next free place of its target: a stable counting sort's second pass."""
    free = indptr[:-1].copy()
    for e in range(source.size):
        at = free[target[e]]
        free[target[e]] = at + 1
        indices[at], order[at] = source[e], e


@numba.njit(nogil=True, cache=True)
def _transpose(
    indptr: np.ndarray, indices: np.ndarray, weight: np.ndarray, own: bool, one: np.ndarray, pointers: np.ndarray,
    targets: np.ndarray, weights: np.ndarray,
) -> None:  # fmt: skip
    """Sort edges by source, in two passes of counting; with ``own``, each target's own edge comes last."""
    num_targets = indptr.size - 1
    # 1. Edges per source, added up to where each source's edges begin.
    for e in range(indices.size):
        pointers[indices[e] + 1] += 1
    if own:
        for t in range(num_targets):
            pointers[t + 1] += 1
    for s in range(pointers.size - 1):
        pointers[s + 1] += pointers[s]
    # 2. Each edge to the next free place of its source; targets come in order, so theirs is kept.
    free = pointers[:-1].copy()
    for t in range(num_targets):
        for e in range(indptr[t], indptr[t + 1]):
            at = free[indices[e]]
            free[indices[e]] = at + 1
            targets[at] = t
            if weights.size:
                weights[at] = weight[e]
    if own:
        for t in range(num_targets):
            at = free[t]
            targets[at] = num_targets + t
            if weights.size:
                weights[at] = one[0]
