"""Edge softmax on the CPU: a worker normalizes whole rows in a fixed order: the same bits for any number of workers."""

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.matrix import Matrix, Scores
from lightning_gnn.ops.aggregate.numba_rows import Rows, execute, flat, huge_pages, rows_of, wide
from lightning_gnn.ops.intrinsics import exp_span, prefetch

_AHEAD = 24  # how many entries ahead the scores of columns are asked for
_WORK = 8  # a score takes about as long as so many features that are added up


def edge_softmax(matrix: Matrix, scores: Scores) -> Tensor:
    """Do what the function of this name in ``reference.py`` does."""
    rows, heads, out, (source, target, slope) = _prepared(matrix, scores)
    result = flat(out)

    def share(_: int, first: int, last: int) -> None:
        _softmax_rows(source, target, slope, rows.indptr, rows.indices, first, last, heads, result)

    execute(matrix, _WORK * result.size, share)
    return out.to(scores.row.dtype)


def edge_softmax_backward(matrix: Matrix, scores: Scores, attention: Tensor, grad: Tensor) -> Tensor:
    """Do what the function of this name in ``reference.py`` does."""
    rows, heads, out, (source, target, slope) = _prepared(matrix, scores)
    weights, grads, result = flat(wide(attention)), flat(wide(grad)), flat(out)

    def share(_: int, first: int, last: int) -> None:
        _softmax_backward_rows(
            source, target, slope, weights, grads, rows.indptr, rows.indices, first, last, heads, result
        )

    execute(matrix, _WORK * result.size, share)
    return out.to(scores.row.dtype)


def edge_sums(matrix: Matrix, edge_ids: Tensor | None, values: Tensor) -> Tensor:
    """Do what the function of this name in ``reference.py`` does."""
    dtype, values = values.dtype, wide(values)
    heads, indptr = values.size(1), matrix.indptr.numpy()
    out = torch.zeros((matrix.num_rows, heads), dtype=values.dtype)
    ids = np.empty(0, np.int32) if edge_ids is None else edge_ids.numpy()
    given, result = flat(values), flat(out)

    def share(_: int, first: int, last: int) -> None:
        _sum_edges(given, ids, indptr, first, last, heads, result)

    execute(matrix, _WORK * given.size, share)
    return out.to(dtype)


def _prepared(matrix: Matrix, scores: Scores) -> tuple[Rows, int, Tensor, tuple[np.ndarray, np.ndarray, float]]:
    """Return rows, heads, room for the result, and scores of columns as entries index them, of rows, and slope."""
    row, column, rows = wide(scores.row), wide(scores.column), rows_of(matrix)
    out = huge_pages(torch.empty((matrix.num_edges, row.size(1)), dtype=row.dtype))
    target = flat(row)
    source = flat(column if rows.order is None else column[torch.from_numpy(rows.order)])
    return rows, row.size(1), out, (source, target, target.dtype.type(scores.slope))


@numba.njit(nogil=True, cache=True)
def _softmax_rows(
    source: np.ndarray, target: np.ndarray, slope: float, indptr: np.ndarray, indices: np.ndarray, first: int,
    last: int, heads: int, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the attention weights ``[num_edges * heads]`` of the entries of some rows."""
    largest, total = np.empty(heads, source.dtype), np.empty(heads, source.dtype)
    zero, tiny = source.dtype.type(0), source.dtype.type(1e-16)
    for r in range(first, last):
        begin, end, own = indptr[r], indptr[r + 1], r * heads
        largest[:] = -np.inf
        total[:] = 0
        # 1. Scores and the largest per head. "Not less or equal", so that a NaN, once met, is the largest, as in torch.
        for e in range(begin, end):
            prefetch(source, np.int64(indices[min(e + _AHEAD, indices.size - 1)]) * heads)
            column = np.int64(indices[e]) * heads
            for h in range(heads):
                score = source[column + h] + target[own + h]
                score = score if score > zero else score * slope
                out[e * heads + h] = score
                if not score <= largest[h]:
                    largest[h] = score
        # 2. Less the largest, so that exp cannot overflow.
        for e in range(begin, end):
            for h in range(heads):
                out[e * heads + h] -= largest[h]
        # 3. All heads' exp in one go: it needs no entry's bounds.
        exp_all(out, begin * heads, end * heads)
        # 4. Divide by the sums, which PyG, too, keeps from being 0.
        for e in range(begin, end):
            for h in range(heads):
                total[h] += out[e * heads + h]
        for h in range(heads):
            total[h] += tiny
        for e in range(begin, end):
            for h in range(heads):
                out[e * heads + h] /= total[h]


@numba.njit(nogil=True, cache=True)
def exp_all(values: np.ndarray, begin: int, end: int) -> None:
    """Replace ``values[begin:end]``, none of them above 0, by their exp."""
    if values.itemsize == 4:
        # The view is for the compiler, which types this branch for float64 too.
        exp_span(values.view(np.float32), begin, end)
    else:
        for i in range(begin, end):
            values[i] = np.exp(values[i])


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
        # ... and the leaky ReLU's slope at the score, which is computed again: it costs less than keeping it.
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
    """Add ``values[edge_ids[e]]``, or ``values[e]`` where there are no ids, of each row's entries into ``out``."""
    for r in range(first, last):
        own = r * heads
        for e in range(indptr[r], indptr[r + 1]):
            # Only where there are ids do values lie far apart.
            if edge_ids.size:
                prefetch(values, np.int64(edge_ids[min(e + _AHEAD, edge_ids.size - 1)]) * heads)
            at = (np.int64(edge_ids[e]) if edge_ids.size else e) * heads
            for h in range(heads):
                out[own + h] += values[at + h]
