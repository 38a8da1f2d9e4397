"""Compiled loops of attention over the edges of all relations: one call is a section of softmaxes, or of sources.

Arguments that all have in common, flat arrays of one floating dtype if nothing else is said:

- ``values`` ``[num_sources * channels]``: what is attended to, by all heads alike;
- ``side`` ``[num_sides * heads * channels]``: what values are multiplied with to make a score; ``sides`` int32
  ``[num_rows]``: which of them belongs to a row;
- ``shift`` ``[num_rows * heads]``: what is added to the scores of a row; ``slope``: of the leaky ReLU after that;
- ``indptr`` int64 ``[num_rows + 1]``, ``indices`` int32 ``[E]``: entries of each row, and the source of each entry;
- ``starts`` int64: the first row of each softmax;
- ``attention`` ``[E * heads]``: the weights of the sums; ``signed``: the same before dropout, negative where the leaky
  ReLU's slope counts;
- ``first``, ``last``: the section's softmaxes or sources, one past the last.
"""

import numba
import numpy as np

from lightning_gnn.ops.attention.head_loops import LINES, add_heads
from lightning_gnn.ops.attention.numba_kernels import _add_sums, _write_dots
from lightning_gnn.ops.edge_softmax.numba import exp_all
from lightning_gnn.ops.intrinsics import _LINE


@numba.njit(nogil=True, cache=True)
def attend_rows(
    values: np.ndarray, heads: int, channels: int, side: np.ndarray, sides: np.ndarray, shift: np.ndarray,
    slope: float, indptr: np.ndarray, indices: np.ndarray, starts: np.ndarray, factor: np.ndarray, first: int,
    last: int, sums: np.ndarray, mass: np.ndarray, attention: np.ndarray, signed: np.ndarray,
) -> None:  # fmt: skip
    """Write the weights of the section's entries, and per row their sum and that of the weighted values.

    ``factor`` is what weights are multiplied with after the softmax, ``[E * heads]``, or empty; ``sums`` is
    ``[num_rows * heads * channels]``, ``mass`` ``[num_rows * heads]``.
    """
    largest, total = np.empty(heads, values.dtype), np.empty(heads, values.dtype)
    zero, tiny = values.dtype.type(0), values.dtype.type(1e-16)
    width = heads * channels
    for g in range(first, last):
        begin, end = indptr[starts[g]], indptr[starts[g + 1]]
        largest[:] = -np.inf
        total[:] = zero
        # 1. Scores, and the largest per head. "Not less or equal", so that a NaN, once met, is the largest.
        for row in range(starts[g], starts[g + 1]):
            a, b = indptr[row], indptr[row + 1]
            if a == b:
                continue
            _write_dots(values, channels, 0, indices, side, sides[row] * width, a, b, heads, channels, signed)
            for e in range(a, b):
                for h in range(heads):
                    i = e * heads + h
                    score = signed[i] + shift[row * heads + h]
                    signed[i] = score
                    score = score if score > zero else score * slope
                    attention[i] = score
                    if not score <= largest[h]:
                        largest[h] = score
        # 2. The softmax, with PyG's guard against a sum of 0.
        for e in range(begin, end):
            for h in range(heads):
                attention[e * heads + h] -= largest[h]
        exp_all(attention, begin * heads, end * heads)
        for e in range(begin, end):
            for h in range(heads):
                total[h] += attention[e * heads + h]
        for h in range(heads):
            total[h] += tiny
        # 3. The sums.
        for row in range(starts[g], starts[g + 1]):
            a, b = indptr[row], indptr[row + 1]
            mass[row * heads : (row + 1) * heads] = zero
            sums[row * width : (row + 1) * width] = zero
            if a == b:
                continue
            for e in range(a, b):
                for h in range(heads):
                    i = e * heads + h
                    weight = attention[i] / total[h]
                    signed[i] = weight if signed[i] > zero else -weight
                    weight = weight * factor[i] if factor.size else weight
                    attention[i] = weight
                    mass[row * heads + h] += weight
            _add_sums(values, channels, 0, indices, attention, a, b, heads, channels, sums, row * width)


@numba.njit(nogil=True, cache=True)
def scores_backward(
    values: np.ndarray, heads: int, channels: int, sides: np.ndarray, slope: float, indptr: np.ndarray,
    indices: np.ndarray, starts: np.ndarray, first: int, last: int, grad: np.ndarray, grad_mass: np.ndarray,
    attention: np.ndarray, signed: np.ndarray, grad_scores: np.ndarray, grad_shift: np.ndarray, grad_side: np.ndarray,
) -> None:  # fmt: skip
    """Write the gradients of the section's scores and shifts, and add to that of ``side``.

    ``grad`` is that of the weighted sums, ``[num_rows * heads * channels]``; ``grad_mass`` that of the sums of weights,
    ``[num_rows * heads]``; ``grad_scores`` that of each entry's score before the leaky ReLU, ``[E * heads]``.
    """
    total, zero, width = np.empty(heads, values.dtype), values.dtype.type(0), heads * channels
    for g in range(first, last):
        total[:] = zero
        # 1. The gradient of a weight is the product of its value with that of the sum.
        for row in range(starts[g], starts[g + 1]):
            a, b = indptr[row], indptr[row + 1]
            if a == b:
                continue
            _write_dots(values, channels, 0, indices, grad, row * width, a, b, heads, channels, grad_scores)
            for e in range(a, b):
                for h in range(heads):
                    i = e * heads + h
                    grad_scores[i] += grad_mass[row * heads + h]
                    total[h] += attention[i] * grad_scores[i]
        # 2. The softmax's is weight * (that - their weighted mean).
        for row in range(starts[g], starts[g + 1]):
            a, b = indptr[row], indptr[row + 1]
            grad_shift[row * heads : (row + 1) * heads] = zero
            if a == b:
                continue
            for e in range(a, b):
                for h in range(heads):
                    i = e * heads + h
                    change = attention[i] * grad_scores[i] - abs(signed[i]) * total[h]
                    change = change * slope if signed[i] < zero else change
                    grad_scores[i] = change
                    grad_shift[row * heads + h] += change
            # 3. What comes before.
            _add_sums(
                values, channels, 0, indices, grad_scores, a, b, heads, channels, grad_side, sides[row] * width
            )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def values_backward(
    heads: int, channels: int, side: np.ndarray, sides: np.ndarray, indptr: np.ndarray, indices: np.ndarray,
    first: int, last: int, grad: np.ndarray, attention: np.ndarray, grad_scores: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the gradient of the values of a section of sources, ``out`` ``[num_sources * channels]``.

    Rows are sources here, ``indices`` the rows that read them, and entries and what belongs to them, ``sides`` int32
    ``[E]`` too, are in their order. ``grad`` and ``grad_scores`` are those of :func:`scores_backward`.
    """
    width, lanes, end_entry = heads * channels, _LINE // out.itemsize, indices.size - 1
    for s in range(first, last):
        begin, end = indptr[s], indptr[s + 1]
        out[s * channels : (s + 1) * channels] = out.dtype.type(0)
        if begin == end:
            continue
        column = 0
        while column < channels:
            count = min(LINES * lanes, channels - column)
            lines, at = (count + lanes - 1) // lanes, s * channels + column
            for h in range(heads):
                base = h * channels + column
                # By the sums, and by the scores.
                add_heads(
                    grad, base, width, indices, attention, heads, h, begin, end, end_entry, count, out, at, 0, lines, 1
                )  # fmt: skip
                add_heads(
                    side, base, width, sides, grad_scores, heads, h, begin, end, end_entry, count, out, at, 0, lines, 1
                )  # fmt: skip
            column += count
