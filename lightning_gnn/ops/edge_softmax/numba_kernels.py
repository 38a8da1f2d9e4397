"""Compiled loops of the edge softmax on the CPU: one call is a range of rows, outside the GIL."""

import numba
import numpy as np

from lightning_gnn.ops.memory import prefetch
from lightning_gnn.ops.vectors import exp_span

_AHEAD = 24
_VECTOR = 16


@numba.njit(nogil=True, cache=True)
def softmax_rows(source, target, slope, rows, indptr, indices, first, last, heads, out):
    """Write the attention weights of the entries of some rows.

    Args:
        source: Scores of the columns, floating ``[num_columns * heads]``.
        target: Scores of the rows' vertices, ``[num_rows * heads]``.
        slope: Of the leaky ReLU.
        rows: Vertex of each row; equal ones are adjacent, and none lies on both sides of ``first`` or ``last``.
        indptr: First entry of each row.
        indices: Column of each entry.
        first: First row.
        last: One past the last row.
        heads: H.
        out: ``[num_edges * heads]``.
    """
    largest, total = np.empty(heads, source.dtype), np.empty(heads, source.dtype)
    zero, tiny = source.dtype.type(0), source.dtype.type(1e-16)
    r = first
    while r < last:
        stop = r + 1
        while stop < last and rows[stop] == rows[r]:
            stop += 1
        begin, end, own = indptr[r], indptr[stop], np.int64(rows[r]) * heads
        largest[:] = -np.inf
        total[:] = 0
        for e in range(begin, end):
            prefetch(source, np.int64(indices[min(e + _AHEAD, indices.size - 1)]) * heads)
            column = np.int64(indices[e]) * heads
            for h in range(heads):
                score = source[column + h] + target[own + h]
                score = score if score > zero else score * slope
                out[e * heads + h] = score
                if not score <= largest[h]:
                    largest[h] = score
        for e in range(begin, end):
            for h in range(heads):
                out[e * heads + h] -= largest[h]
        _exp(out, begin * heads, end * heads)
        for e in range(begin, end):
            for h in range(heads):
                total[h] += out[e * heads + h]
        for h in range(heads):
            total[h] += tiny
        for e in range(begin, end):
            for h in range(heads):
                out[e * heads + h] /= total[h]
        r = stop


@numba.njit(nogil=True, cache=True)
def _exp(values, begin, end):
    if values.itemsize == 4:
        narrow = values.view(np.float32)
        middle = begin + (end - begin) // _VECTOR * _VECTOR
        exp_span(narrow, begin, middle, _VECTOR)
        exp_span(narrow, middle, end, 1)
    else:
        for i in range(begin, end):
            values[i] = np.exp(values[i])


@numba.njit(nogil=True, cache=True)
def softmax_backward_rows(
    source, target, slope, attention, grad, rows, indptr, indices, first, last, heads, out
):  # fmt: skip
    """Write the gradient of ``source + target`` of each entry; the arguments are those of :func:`softmax_rows`."""
    total = np.empty(heads, source.dtype)
    zero = source.dtype.type(0)
    r = first
    while r < last:
        stop = r + 1
        while stop < last and rows[stop] == rows[r]:
            stop += 1
        begin, end, own = indptr[r], indptr[stop], np.int64(rows[r]) * heads
        total[:] = 0
        for at in range(begin, end):
            for h in range(heads):
                total[h] += attention[at * heads + h] * grad[at * heads + h]
        for at in range(begin, end):
            prefetch(source, np.int64(indices[min(at + _AHEAD, indices.size - 1)]) * heads)
            column = np.int64(indices[at]) * heads
            for h in range(heads):
                i = at * heads + h
                value = attention[i] * (grad[i] - total[h])
                out[i] = value if source[column + h] + target[own + h] > zero else value * slope
        r = stop


@numba.njit(nogil=True, cache=True)
def sum_rows(values, edge_ids, rows, indptr, first, last, heads, out):
    """Add ``values[edge_ids[e]]``, or ``values[e]`` where there are no ids, of each row's entries into ``out``."""
    for r in range(first, last):
        own = np.int64(rows[r]) * heads
        for e in range(indptr[r], indptr[r + 1]):
            if edge_ids.size:
                prefetch(values, np.int64(edge_ids[min(e + _AHEAD, edge_ids.size - 1)]) * heads)
            at = (np.int64(edge_ids[e]) if edge_ids.size else e) * heads
            for h in range(heads):
                out[own + h] += values[at + h]
