"""Aggregation for inference out-of-core: sources are read once, in the order of their file, for many targets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.csr import CSR
from lightning_gnn.ops.aggregate.definition import Reduce
from lightning_gnn.ops.worker_threads import run_all

_CHUNK_BYTES = 16 << 20  # bytes of the sources that are read at a time; they should fit in a core's cache
_EDGE_BYTES = 8  # bytes of an edge that waits for its source


def iter_target_ranges(rows: CSR, width: int, dtype: torch.dtype, weighted: bool, limit: float) -> Iterator[slice]:
    """Yield ranges of targets whose sums and edges take at most ``limit`` bytes, at least one target each."""
    indptr, first = rows.indptr, 0
    per_target, per_edge = width * dtype.itemsize, _EDGE_BYTES + (dtype.itemsize if weighted else 0)
    while first < rows.num_rows:

        def required_bytes(last: int, first: int = first) -> int:
            return (last - first) * per_target + int(indptr[last] - indptr[first]) * per_edge

        last = bisect_right(range(first + 1, rows.num_rows + 1), limit, key=required_bytes) + first
        last = max(last, first + 1)
        yield slice(first, last)
        first = last


def aggregate_in_source_order(
    rows: CSR,
    targets: slice,
    source: Tensor,  # features of all sources, floating [num_columns, D], in memory or memory-mapped
    weight: Tensor | None,  # [num_edges], of dtype
    reduce: Reduce,  # sum or mean
    dtype: torch.dtype,  # of the result, float32 or float64
    stop: Callable[[], None],  # called after each chunk of sources
) -> Tensor:
    """Return the aggregated features of a range of targets, ``[num_targets, D]``.

    The edges are grouped by chunks of sources, in each of which they keep the order of their targets.
    """
    num_targets, width = targets.stop - targets.start, source.size(1)
    sums = torch.zeros(num_targets, width, dtype=dtype)
    chunk = max(_CHUNK_BYTES // max(width * dtype.itemsize, 1), 1)
    weights = None if weight is None else weight.numpy()
    indptr, indices = rows.indptr[targets.start : targets.stop + 1].numpy(), rows.indices.numpy()
    begins, sources, places, grouped = _group_edges(indptr, indices, weights, chunk, -(-rows.num_columns // chunk))
    for number, (begin, end) in enumerate(pairwise(begins.tolist())):
        if begin < end:
            block = source[number * chunk : (number + 1) * chunk].to(dtype).numpy()
            add = partial(_add_rows, block, sources, places, grouped, sums.numpy())
            cuts = _cut_between_targets(places, begin, end, torch.get_num_threads())
            run_all([partial(add, *cut) for cut in pairwise(cuts)])
        stop()
    return sums.div_(torch.from_numpy(np.diff(indptr)).clamp(min=1)[:, None]) if reduce == "mean" else sums


def _cut_between_targets(targets: np.ndarray, begin: int, end: int, parts: int) -> list[int]:
    """Cut a range of edges into parts of about the same size, none of which shares a target with another."""
    cuts = [begin]
    for part in range(1, parts):
        at = begin + (end - begin) * part // parts
        cuts.append(at + int(np.searchsorted(targets[at:end], targets[at - 1], "right")) if at > begin else begin)
    return [*cuts, end]


@numba.njit(nogil=True, cache=True)
def _group_edges(
    indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray | None, chunk: int, num_chunks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the begin of each chunk's edges, and their sources within the chunk, targets and weights."""
    begins = np.zeros(num_chunks + 1, np.int64)
    for e in range(indptr[0], indptr[-1]):
        begins[indices[e] // chunk + 1] += 1
    begins = np.cumsum(begins)
    places = begins.copy()
    sources, targets = np.empty(begins[-1], np.int32), np.empty(begins[-1], np.int32)
    grouped: np.ndarray | None = None if weights is None else np.empty(begins[-1], weights.dtype)
    for target in range(indptr.size - 1):
        for e in range(indptr[target], indptr[target + 1]):
            number = indices[e] // chunk
            place = places[number]
            places[number] += 1
            sources[place], targets[place] = indices[e] - number * chunk, target
            if weights is not None and grouped is not None:
                grouped[place] = weights[e]
    return begins, sources, targets, grouped


@numba.njit(nogil=True, cache=True)
def _add_rows(
    block: np.ndarray,  # rows of a chunk of sources
    sources: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray | None,
    sums: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Add the rows of the edges' sources, times their weights, to the sums of their targets."""
    for e in range(begin, end):
        source, target = sources[e], targets[e]
        if weights is None:
            for column in range(block.shape[1]):
                sums[target, column] += block[source, column]
        else:
            for column in range(block.shape[1]):
                sums[target, column] += weights[e] * block[source, column]
