"""Edge softmax on the CPU; a worker processes whole rows in a fixed order, so the number of workers has no effect."""

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.matrix import Matrix, Scores
from lightning_gnn.ops.aggregate.numba_rows import Rows, flatten, get_rows, run_rows, use_huge_pages, widen
from lightning_gnn.ops.intrinsics import exp_span, prefetch

_AHEAD = 24  # prefetch distance of column scores, in entries
_WORK_PER_SCORE = 8  # approximate cost of a score, in summed feature elements


def edge_softmax(matrix: Matrix, scores: Scores) -> Tensor:
    """Compiled version of the function of the same name in ``reference.py``."""
    rows, heads, out, (source, target, slope) = _prepare(matrix, scores)
    result = flatten(out)

    def normalize(_: int, first: int, last: int) -> None:
        _softmax_rows(source, target, slope, rows.indptr, rows.indices, first, last, heads, result)

    run_rows(matrix, _WORK_PER_SCORE * result.size, normalize)
    return out.to(scores.row.dtype)


def edge_softmax_backward(matrix: Matrix, scores: Scores, attention: Tensor, grad: Tensor) -> Tensor:
    """Compiled version of the function of the same name in ``reference.py``."""
    rows, heads, out, (source, target, slope) = _prepare(matrix, scores)
    weights, grads, result = flatten(widen(attention)), flatten(widen(grad)), flatten(out)

    def differentiate(_: int, first: int, last: int) -> None:
        _softmax_backward_rows(
            source, target, slope, weights, grads, rows.indptr, rows.indices, first, last, heads, result
        )

    run_rows(matrix, _WORK_PER_SCORE * result.size, differentiate)
    return out.to(scores.row.dtype)


def edge_sums(matrix: Matrix, edge_ids: Tensor | None, values: Tensor) -> Tensor:
    """Compiled version of the function of the same name in ``reference.py``."""
    dtype, values = values.dtype, widen(values)
    heads, indptr = values.size(1), matrix.indptr.numpy()
    out = torch.zeros((matrix.num_rows, heads), dtype=values.dtype)
    ids = np.empty(0, np.int32) if edge_ids is None else edge_ids.numpy()
    source, result = flatten(values), flatten(out)

    def add(_: int, first: int, last: int) -> None:
        _sum_edges(source, ids, indptr, first, last, heads, result)

    run_rows(matrix, _WORK_PER_SCORE * source.size, add)
    return out.to(dtype)


def _prepare(matrix: Matrix, scores: Scores) -> tuple[Rows, int, Tensor, tuple[np.ndarray, np.ndarray, float]]:
    """Return the rows, number of heads, output buffer, and scores of columns and rows with slope."""
    row, column, rows = widen(scores.row), widen(scores.column), get_rows(matrix)
    out = use_huge_pages(torch.empty((matrix.num_edges, row.size(1)), dtype=row.dtype))
    target = flatten(row)
    return rows, row.size(1), out, (flatten(column), target, target.dtype.type(scores.slope))


@numba.njit(nogil=True, cache=True)
def _softmax_rows(
    source: np.ndarray, target: np.ndarray, slope: float, indptr: np.ndarray, indices: np.ndarray, first: int,
    last: int, heads: int, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the attention weights ``[num_edges * heads]`` of the entries of rows ``[first, last)``."""
    largest, total = np.empty(heads, source.dtype), np.empty(heads, source.dtype)
    zero = source.dtype.type(0)
    for r in range(first, last):
        begin, end, own = indptr[r], indptr[r + 1], r * heads
        largest[:] = -np.inf
        total[:] = 0
        # 1. Scores and the largest per head. "Not less or equal" makes NaN the largest, as in torch.
        for e in range(begin, end):
            prefetch(source, np.int64(indices[min(e + _AHEAD, indices.size - 1)]) * heads)
            column = np.int64(indices[e]) * heads
            for h in range(heads):
                score = source[column + h] + target[own + h]
                score = score if score > zero else score * slope
                out[e * heads + h] = score
                if not score <= largest[h]:
                    largest[h] = score
        # 2. Their exponentials, divided by the sums.
        exponentiate(out, begin, end, heads, largest, total)
        for e in range(begin, end):
            for h in range(heads):
                out[e * heads + h] /= total[h]


@numba.njit(inline="always", cache=True)
def exponentiate(scores: np.ndarray, begin: int, end: int, heads: int, largest: np.ndarray, total: np.ndarray) -> None:
    """Replace scores by the exp of their distance to the largest of their head, and add them to the heads' sums."""
    # Subtract the largest, so that exp cannot overflow.
    for e in range(begin, end):
        for h in range(heads):
            scores[e * heads + h] -= largest[h]
    # exp of all heads in one loop. The compiler also types the branch of float32 for float64, which requires the view.
    if scores.itemsize == 4:
        exp_span(scores.view(np.float32), begin * heads, end * heads)
    else:
        for i in range(begin * heads, end * heads):
            scores[i] = np.exp(scores[i])
    for e in range(begin, end):
        for h in range(heads):
            total[h] += scores[e * heads + h]
    # As in PyG, a small constant keeps the sums from being 0.
    for h in range(heads):
        total[h] += scores.dtype.type(1e-16)


@numba.njit(nogil=True, cache=True)
def _softmax_backward_rows(
    source: np.ndarray, target: np.ndarray, slope: float, attention: np.ndarray, grad: np.ndarray,
    indptr: np.ndarray, indices: np.ndarray, first: int, last: int, heads: int, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the gradient of ``source + target`` of each entry."""
    total = np.empty(heads, source.dtype)
    zero = source.dtype.type(0)
    for r in range(first, last):
        begin, end, own = indptr[r], indptr[r + 1], r * heads
        # The softmax's gradient is attention * (grad - sum of attention * grad over the row) ...
        total[:] = 0
        for e in range(begin, end):
            for h in range(heads):
                total[h] += attention[e * heads + h] * grad[e * heads + h]
        # ... times the slope of the leaky ReLU at the score, which is cheaper to recompute than to store.
        for e in range(begin, end):
            prefetch(source, np.int64(indices[min(e + _AHEAD, indices.size - 1)]) * heads)
            column = np.int64(indices[e]) * heads
            for h in range(heads):
                i = e * heads + h
                value = attention[i] * (grad[i] - total[h])
                out[i] = value if source[column + h] + target[own + h] > zero else value * slope


@numba.njit(nogil=True, cache=True)
def _sum_edges(
    values: np.ndarray, edge_ids: np.ndarray, indptr: np.ndarray, first: int, last: int, heads: int, out: np.ndarray,
) -> None:  # fmt: skip
    """Sum ``values[edge_ids[e]]``, or ``values[e]`` if ``edge_ids`` is empty, over each row's entries into ``out``."""
    for r in range(first, last):
        own = r * heads
        for e in range(indptr[r], indptr[r + 1]):
            # Only values that are read by id are scattered in memory.
            if edge_ids.size:
                prefetch(values, np.int64(edge_ids[min(e + _AHEAD, edge_ids.size - 1)]) * heads)
            at = (np.int64(edge_ids[e]) if edge_ids.size else e) * heads
            for h in range(heads):
                out[own + h] += values[at + h]
