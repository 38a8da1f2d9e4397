"""The edges of all relations of a mini-batch, sorted by target and relation, in the form of ``aggregate_update``.

Nodes of all types stand in one table. A target that R relations reach has R rows, one after the other, one per
relation: with the rows' sums side by side, the products of all relations are one.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate_update.edge_order import check_inside, edges_by_target
from lightning_gnn.ops.library import define, library


def relation_edges(
    edge_indices: list[Tensor],
    num_sources: list[int],
    num_targets: list[int],
    first_source: list[int],
    first_row: list[int],
    stride: list[int],
    num_rows: int,
) -> list[Tensor]:
    """Sort the edges of all relations by row, with torch's own operators; nothing waits for the device.

    Args:
        edge_indices: Of each relation, int64 ``[2, E_r]``, counted within its types.
        first_source: The row of the table that holds the first of these nodes.
        first_row: The row of each relation's first target.
        num_rows: How many rows there are.

    Returns:
        ``indptr`` int64 ``[num_rows + 1]`` and ``indices`` int32 ``[E]``, rows of the table; the order within a row is
        that in which the edges were given.
    """
    moved = [edge_indices[0].new_empty(2, 0)] if edge_indices else [torch.empty(2, 0, dtype=torch.int64)]
    for edges, sources, targets, source, row, step in zip(
        edge_indices, num_sources, num_targets, first_source, first_row, stride, strict=True
    ):
        if edges.size(1):
            inside = (edges >= 0).all() & (edges[0] < sources).all() & (edges[1] < targets).all()
            torch._assert_async(inside, "edge_index holds a node that the batch does not have")
        moved.append(torch.stack([edges[0] + source, edges[1] * step + row]))
    size = max((source + count for source, count in zip(first_source, num_sources, strict=True)), default=0)
    return edges_by_target(torch.cat(moved, 1), size, num_rows, None)


define(
    "relation_edges(Tensor[] edge_indices, int[] num_sources, int[] num_targets, int[] first_source, int[] first_row,"
    " int[] stride, int num_rows) -> Tensor[]",
    relation_edges,
)


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
    indptr = np.zeros(num_rows + 1, np.int64)
    ends = [tuple(part.contiguous().numpy() for part in edges) for edges in edge_indices]
    for (source, target), sources, targets, row, step in zip(
        ends, num_sources, num_targets, first_row, stride, strict=True
    ):
        found = _count(source, target, sources, targets, row, step, indptr)
        check_inside(found, source, target, sources, targets)
    free = _add_up(indptr)
    indices = np.empty(int(indptr[-1]), np.int32)
    for (source, target), first, row, step in zip(ends, first_source, first_row, stride, strict=True):
        _place(source, target, first, row, step, free, indices)
    return [torch.from_numpy(indptr), torch.from_numpy(indices)]


@numba.njit(nogil=True, cache=True)
def _count(
    source: np.ndarray, target: np.ndarray, num_sources: int, num_targets: int, first: int, stride: int,
    indptr: np.ndarray,
) -> int:  # fmt: skip
    """Count the edges of each row; return a bad edge, or -1."""
    for e in range(source.size):
        s, t = source[e], target[e]
        if s < 0 or s >= num_sources or t < 0 or t >= num_targets:
            return e
        indptr[first + t * stride + 1] += 1
    return -1


@numba.njit(nogil=True, cache=True)
def _add_up(indptr: np.ndarray) -> np.ndarray:
    """Turn counts into where each row begins, and return the rows' beginnings."""
    for row in range(indptr.size - 1):
        indptr[row + 1] += indptr[row]
    free: np.ndarray = indptr[:-1].copy()
    return free


@numba.njit(nogil=True, cache=True)
def _place(
    source: np.ndarray, target: np.ndarray, first_source: int, first: int, stride: int, free: np.ndarray,
    indices: np.ndarray,
) -> None:  # fmt: skip
    """Write each edge's source to the next free place of its row."""
    for e in range(source.size):
        row = first + target[e] * stride
        at = free[row]
        free[row] = at + 1
        indices[at] = first_source + source[e]
