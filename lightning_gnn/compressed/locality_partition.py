"""Locality-aware partitioning into chunks of vertices that share in-neighbors (NeutronAscend, algorithm 2)."""

from itertools import pairwise
from typing import Any, Literal

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.csr import CSR

_Array = npt.NDArray[Any]

WORK_PER_EDGE = 16
"""Maximum steps through out-lists per edge of the graph and sweep over the chunks; bounds the work."""


def locality_aware_partition(
    graph: CSCGraph, num_chunks: int, kind: Literal["balanced", "paper"] = "balanced"
) -> tuple[Tensor, Tensor]:
    """Partition the vertices into chunks that share in-neighbors (section 6.2, algorithm 2).

    Phase 1 selects one seed per chunk: the unused vertex with the most in-neighbors in the chunk's interval of ids.
    Phase 2 fills one chunk after the other with the vertices that share the most in-neighbors with the chunk, while any
    share one. The remaining vertices fill the chunks that are not full in the same way, starting from the lowest id.
    Differences from the paper, whose algorithm runs line by line with ``kind="paper"``:

    - a seed must be unvisited; otherwise one hub could be the seed of every interval;
    - chunks are filled to quotas of floor or ceil of V / k; otherwise the last ones would stay empty;
    - a vertex that shares nothing is left for the second sweep instead of being added;
    - a chunk walks through the out-lists of its in-neighbors for at most ``16 * E / k`` steps, and skips out-lists
      longer than its remaining steps (those of hubs, which nearly every chunk reads), so the work is O(E + V).

    Among seeds, ties go to the lowest id; otherwise, to the vertex whose count increased last.

    Returns:
        Vertices chunk by chunk, in the order in which they were added, int32 ``[V]``, and the start of each chunk,
        int64 ``[k + 1]``.

    Raises:
        TypeError, ValueError: ``graph`` is not a CSCGraph, or ``num_chunks`` is not from 1 to V.
    """
    if not isinstance(graph, CSCGraph):
        raise TypeError(f"graph must be a CSCGraph, but is {type(graph).__name__}")
    if not 1 <= num_chunks <= max(1, graph.num_nodes):
        raise ValueError(f"num_chunks must be from 1 to the number of vertices, {graph.num_nodes}, but is {num_chunks}")
    graph = graph.to("cpu")
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    if kind == "paper":
        order, bounds = partition_rows_as_published(indptr, indices, graph.num_nodes, num_chunks)
        return torch.from_numpy(order), torch.from_numpy(bounds)
    by_column = CSR(graph.indptr, graph.indices.detach(), graph.num_nodes).transposed()  # not cached with the graph
    bounds = even_bounds(graph.num_nodes, num_chunks)
    order = partition_rows(indptr, indices, by_column.indptr.numpy(), by_column.indices.numpy(), bounds)
    return torch.from_numpy(order), torch.from_numpy(bounds)


def even_bounds(count: int, parts: int) -> _Array:
    """Return the bounds of parts of floor or ceil of ``count / parts``, int64 ``[parts + 1]``."""
    return np.arange(parts + 1, dtype=np.int64) * count // parts


def partition_rows(
    indptr: _Array,  # first entry of each row, int64 [V + 1]
    indices: _Array,  # column of each entry, [E]
    offsets: _Array,  # first entry of each column, int64 [C + 1]
    targets: _Array,  # rows with an entry in each column, ascending, int32 [E]
    bounds: _Array,  # start of each chunk, int64 [k + 1], which also sets its quota
) -> _Array:
    """Order the rows of a sparse matrix by algorithm 2, int32 ``[V]``; see :func:`locality_aware_partition`."""
    num_rows, num_chunks = indptr.size - 1, bounds.size - 1
    lists, ends = _distinct_lists(offsets, targets)
    visited = np.zeros(num_rows, np.bool_)
    # Rows are in buckets by the number of in-neighbors that they share with the current chunk: doubly linked lists.
    shared = np.zeros(num_rows, np.int32)  # this number for each row
    head = np.full(offsets.size, -1, np.int32)  # first row of each bucket
    following, preceding = (np.empty(num_rows, np.int32) for _ in range(2))  # links between rows of a bucket
    touched = np.empty(num_rows, np.int32)  # rows that share any
    stamps = np.full(offsets.size - 1, -1, np.int32)  # last chunk that read each column
    order = np.empty(num_rows, np.int32)
    filled = bounds[:-1].copy()
    _choose_seeds(offsets, lists, ends, bounds, order, filled, visited, shared)
    steps = WORK_PER_EDGE * indices.size // num_chunks
    for sweep in (0, 1):
        _fill_chunks(
            indptr, indices, offsets, lists, ends, bounds, order, filled, sweep, steps, visited, shared, head,
            following, preceding, touched, stamps,
        )  # fmt: skip
    return order


def partition_rows_as_published(
    indptr: _Array, indices: _Array, num_columns: int, num_chunks: int
) -> tuple[_Array, _Array]:
    """Order the rows by algorithm 2 line by line, O(k (E + V log V)); int32 ``[V]``, and the chunks' bounds.

    Ties, which the paper leaves open, go to the lowest id. The vertex of line 4 may be the seed of an earlier chunk, as
    a hub is: then it stays there, and its in-neighbors select the rows of the later chunk, too. Line 9 counts the
    in-neighbors that a row shares with the seed, the only member of the chunk at that time.
    """
    num_rows = indptr.size - 1
    if not num_rows:
        return np.zeros(0, np.int32), np.zeros(num_chunks + 1, np.int64)
    # Count each edge once, even if it occurs several times.
    pairs = np.unique(np.repeat(np.arange(num_rows), np.diff(indptr)) * num_columns + indices)
    rows, columns = np.divmod(pairs, num_columns) if num_columns else (pairs, pairs)
    by_column = np.argsort(columns, kind="stable")
    starts = np.searchsorted(columns[by_column], even_bounds(num_columns, num_chunks))
    visited = np.zeros(num_rows, np.bool_)
    seeds, chunks, chunk_size = [], [], -(-num_rows // num_chunks)
    for begin, end in pairwise(starts):  # lines 3 to 6
        seed = int(np.bincount(rows[by_column[begin:end]], minlength=num_rows).argmax())
        chunks.append([] if visited[seed] else [seed])
        visited[seed] = True
        seeds.append(seed)
    for chunk, seed in zip(chunks, seeds, strict=True):  # lines 7 to 11
        of_seed = np.zeros(num_columns, np.bool_)
        of_seed[columns[slice(*np.searchsorted(rows, [seed, seed + 1]))]] = True
        shared = np.bincount(rows[of_seed[columns]], minlength=num_rows)
        unvisited = np.flatnonzero(~visited)
        top = unvisited[np.argsort(-shared[unvisited], kind="stable")[: chunk_size - 1]]
        chunk += top.tolist()
        visited[top] = True
    for row in np.flatnonzero(~visited).tolist():  # lines 12 and 13
        min(chunks, key=len).append(row)
    bounds = np.cumsum([0, *map(len, chunks)])
    return np.concatenate([np.array(chunk, np.int32) for chunk in chunks]), bounds


@numba.njit(nogil=True, cache=True)
def _distinct_lists(offsets: _Array, targets: _Array) -> tuple[_Array, _Array]:
    """Copy the out-lists without duplicates, which are adjacent; return the lists and their ends."""
    lists = np.empty_like(targets)
    ends = np.empty(offsets.size - 1, np.int64)
    for column in range(offsets.size - 1):
        at = offsets[column]
        for e in range(offsets[column], offsets[column + 1]):
            if e == offsets[column] or targets[e] != targets[e - 1]:
                lists[at] = targets[e]
                at += 1
        ends[column] = at
    return lists, ends


@numba.njit(nogil=True, cache=True)
def _choose_seeds(
    offsets: _Array, lists: _Array, ends: _Array, bounds: _Array, order: _Array, filled: _Array, visited: _Array,
    shared: _Array,
) -> None:  # fmt: skip
    """Run phase 1. An interval whose out-lists are empty or contain only seeds gets no seed."""
    num_chunks, num_columns = filled.size, ends.size
    for chunk in range(num_chunks):
        begin = chunk * num_columns // num_chunks
        end = (chunk + 1) * num_columns // num_chunks
        # Count the in-neighbors of each row in the interval: one per out-list that contains the row.
        for column in range(begin, end):
            for at in range(offsets[column], ends[column]):
                shared[lists[at]] += 1
        seed = -1
        for column in range(begin, end):
            for at in range(offsets[column], ends[column]):
                row = lists[at]
                if not visited[row] and (
                    seed < 0 or shared[row] > shared[seed] or (shared[row] == shared[seed] and row < seed)
                ):
                    seed = row
        # Reset the counts through the same lists, which is cheaper than resetting all rows for each chunk.
        for column in range(begin, end):
            for at in range(offsets[column], ends[column]):
                shared[lists[at]] = 0
        if seed >= 0 and filled[chunk] < bounds[chunk + 1]:
            visited[seed] = True
            order[filled[chunk]] = seed
            filled[chunk] += 1


@numba.njit(nogil=True, cache=True)
def _fill_chunks(
    indptr: _Array, indices: _Array, offsets: _Array, lists: _Array, ends: _Array, bounds: _Array, order: _Array,
    filled: _Array, sweep: int, budget: int, visited: _Array, shared: _Array, head: _Array, following: _Array,
    preceding: _Array, touched: _Array, stamps: _Array,
) -> None:  # fmt: skip
    """Run phase 2; the second sweep starts from another row if none shares in-neighbors with the chunk."""
    num_chunks, cursor = filled.size, 0
    for chunk in range(num_chunks):
        quota = bounds[chunk + 1]
        mark = sweep * num_chunks + chunk
        steps = budget
        most = 0
        num_touched = 0
        # The first sweep starts by expanding the seed, which is in the chunk already; the second one looks for a row.
        expand = bounds[chunk] if sweep == 0 else filled[chunk]
        while True:
            if expand == filled[chunk]:
                if filled[chunk] == quota:
                    break
                # Add the row that shares most: the first one of the highest non-empty bucket.
                while most > 0 and head[most] < 0:
                    most -= 1
                if most > 0:
                    row = head[most]
                    head[most] = following[row]
                    if head[most] >= 0:
                        preceding[head[most]] = -1
                    shared[row] = 0
                elif sweep == 0:
                    break
                else:
                    while visited[cursor]:
                        cursor += 1
                    row = cursor
                visited[row] = True
                order[filled[chunk]] = row
                filled[chunk] += 1
            row = order[expand]
            expand += 1
            if filled[chunk] == quota and expand == quota:
                break
            # Each new in-neighbor of the chunk increases the count of all rows in its out-list.
            for e in range(indptr[row], indptr[row + 1]):
                column = indices[e]
                if stamps[column] == mark:
                    continue
                stamps[column] = mark
                length = ends[column] - offsets[column]
                if length > steps:
                    continue
                steps -= length
                at = offsets[column]
                while at < ends[column]:
                    other = lists[at]
                    if visited[other]:
                        # It is in a chunk: remove it from the out-list.
                        ends[column] -= 1
                        lists[at] = lists[ends[column]]
                        continue
                    at += 1
                    # Move it from its bucket to the front of the next one.
                    count = shared[other]
                    if count == 0:
                        touched[num_touched] = other
                        num_touched += 1
                    else:
                        before, after = preceding[other], following[other]
                        if before >= 0:
                            following[before] = after
                        else:
                            head[count] = after
                        if after >= 0:
                            preceding[after] = before
                    count += 1
                    shared[other] = count
                    following[other] = head[count]
                    preceding[other] = -1
                    if head[count] >= 0:
                        preceding[head[count]] = other
                    head[count] = other
                    most = max(most, count)
        # Empty the buckets for the next chunk.
        for i in range(num_touched):
            head[shared[touched[i]]] = -1
            shared[touched[i]] = 0
