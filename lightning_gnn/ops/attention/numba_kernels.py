"""Compiled loops of attention over a mini-batch's edges: one call is one tile of targets, or of sources.

A row is a target and a relation that reaches it; without types there is one relation. Arguments that all have in
common, flat arrays of one floating dtype if nothing else is said:

- ``values`` ``[num_sources * num_columns]``: what is attended to; head h reads columns ``h * step`` to
  ``h * step + channels``: ``step`` is 0 where all heads read the same columns, else ``channels``;
- ``side`` ``[num_sides * heads * channels]``: what a head's columns are multiplied with to make a score;
- ``shift``: of each row, ``[num_rows * heads]`` to be added to the scores, or, if ``dynamic``,
  ``[num_rows * heads * channels]`` to be added to the values before the leaky ReLU and the product, of one side;
- ``slope``: of the leaky ReLU;
- ``indptr`` int64 ``[num_rows + 1]``, ``indices`` int32 ``[E]``: entries of each row, and the column of each entry;
- ``attention`` ``[E * heads]``: the weights of the sums; ``signed``: the same before dropout, negative where the leaky
  ReLU's slope counts;
- ``first``, ``last``: the tile's rows, one past the last; ``each``: how many of them a softmax goes over;
- ``first_side``, ``num_sides``: the sides of the tile's rows, in turn.

Numba's cache on disk follows changes of this file only: after a change in ``head_loops.py``, change (or touch) it.
"""

import numba
import numpy as np

from lightning_gnn.ops.attention.head_loops import (
    APART,
    LINES,
    SHARED,
    add_heads,
    add_leaky,
    dot_heads,
    dot_leaky_heads,
)
from lightning_gnn.ops.edge_softmax.numba import exp_all
from lightning_gnn.ops.intrinsics import LINE


@numba.njit(inline="always", cache=True)
def _group(heads: int) -> int:
    """Return how many of these heads a loop takes together."""
    return 4 if heads >= 4 else 2 if heads >= 2 else 1


@numba.njit(nogil=True, cache=True)
def _write_dots(
    x: np.ndarray, num_columns: int, step: int, indices: np.ndarray, own: np.ndarray, own_at: int, slope: float,
    dynamic: bool, side: np.ndarray, side_at: int, begin: int, end: int, heads: int, channels: int, out: np.ndarray,
) -> None:  # fmt: skip
    """Write products with ``side[side_at:]`` of each entry's row, or of ``leaky_relu(own + row)``, ``[E * heads]``."""
    last, kind = indices.size - 1, APART if step else SHARED
    h = 0
    while h < heads:
        group, at = _group(heads - h), side_at + h * channels
        if dynamic:
            dot_leaky_heads(
                x, h * step, num_columns, step, indices, own, own_at + h * step, slope, side, at, begin, end, last,
                step, out, heads, h, APART, group,
            )  # fmt: skip
        else:
            dot_heads(
                x, h * step, num_columns, step, indices, side, at, begin, end, last, channels, out, heads, h, kind,
                group,
            )  # fmt: skip
        h += group


@numba.njit(nogil=True, cache=True)
def _add_sums(
    x: np.ndarray, num_columns: int, step: int, indices: np.ndarray, weight: np.ndarray, begin: int, end: int,
    heads: int, channels: int, out: np.ndarray, out_at: int,
) -> None:  # fmt: skip
    """Add the sums of the entries' rows times their weights ``[E * heads]`` to ``out[out_at:]``, heads side by side."""
    last, lanes = indices.size - 1, LINE // x.itemsize
    column = 0
    while column < channels:
        count = min(LINES * lanes, channels - column)
        lines = (count + lanes - 1) // lanes
        h = 0
        while h < heads:
            group = 1 if step else _group(heads - h)
            add_heads(
                x, h * step + column, num_columns, indices, weight, heads, h, begin, end, last, count, out,
                out_at + h * channels + column, channels, lines, group,
            )  # fmt: skip
            h += group
        column += count


@numba.njit(nogil=True, cache=True)
def attend_rows(
    values: np.ndarray, num_columns: int, step: int, heads: int, channels: int, side: np.ndarray, shift: np.ndarray,
    dynamic: bool, slope: float, indptr: np.ndarray, indices: np.ndarray, first: int, last: int, each: int,
    first_side: int, num_sides: int, factor: np.ndarray, out: np.ndarray, mass: np.ndarray, attention: np.ndarray,
    signed: np.ndarray,
) -> None:  # fmt: skip
    """Write the entries' weights, and per row the weighted sum of values and that of weights, if ``mass`` has room."""
    largest, total = np.empty(heads, values.dtype), np.empty(heads, values.dtype)
    zero, tiny = values.dtype.type(0), values.dtype.type(1e-16)
    width = heads * channels
    out[:] = zero
    for row0 in range(first, last, each):
        largest[:] = -np.inf
        total[:] = zero
        for row in range(row0, row0 + each):
            begin, end = indptr[row], indptr[row + 1]
            # 1. Products, for which the rows of values come into the cache.
            at = (first_side + (row - first) % num_sides) * width
            _write_dots(
                values, num_columns, step, indices, shift, row * width, slope, dynamic, side, at, begin, end, heads,
                channels, signed,
            )  # fmt: skip
            # 2. Scores and the largest per head. "Not less or equal", so that a NaN, once met, is the largest.
            for e in range(begin, end):
                for h in range(heads):
                    i = e * heads + h
                    score = signed[i]
                    if not dynamic:
                        score += shift[row * heads + h]
                        signed[i] = score
                        score = score if score > zero else score * slope
                    attention[i] = score
                    if not score <= largest[h]:
                        largest[h] = score
        # 3. The softmax, with PyG's guard against a sum of 0.
        begin, end = indptr[row0], indptr[row0 + each]
        for e in range(begin, end):
            for h in range(heads):
                attention[e * heads + h] -= largest[h]
        exp_all(attention, begin * heads, end * heads)
        for e in range(begin, end):
            for h in range(heads):
                total[h] += attention[e * heads + h]
        for h in range(heads):
            total[h] += tiny
        for e in range(begin, end):
            for h in range(heads):
                i = e * heads + h
                weight = attention[i] / total[h]
                signed[i] = weight if dynamic or signed[i] > zero else -weight
                attention[i] = weight * factor[i] if factor.size else weight
        # 4. The sums.
        for row in range(row0, row0 + each):
            begin, end = indptr[row], indptr[row + 1]
            at = (row - first) * width
            _add_sums(values, num_columns, step, indices, attention, begin, end, heads, channels, out, at)
            if mass.size:
                mass[row * heads : (row + 1) * heads] = zero
                for e in range(begin, end):
                    for h in range(heads):
                        mass[row * heads + h] += attention[e * heads + h]


@numba.njit(nogil=True, cache=True)
def scores_backward(
    values: np.ndarray, num_columns: int, step: int, heads: int, channels: int, side: np.ndarray, shift: np.ndarray,
    dynamic: bool, slope: float, indptr: np.ndarray, indices: np.ndarray, first: int, last: int, each: int,
    first_side: int, num_sides: int, grad: np.ndarray, grad_mass: np.ndarray, attention: np.ndarray,
    signed: np.ndarray, grad_scores: np.ndarray, grad_shift: np.ndarray, grad_side: np.ndarray,
) -> None:  # fmt: skip
    """Write the gradients of scores (after the leaky ReLU if ``dynamic``) and shifts, and add to that of ``side``."""
    total, whole = np.empty(heads, values.dtype), np.empty(heads, values.dtype)
    zero, width, lanes = values.dtype.type(0), heads * channels, LINE // values.itemsize
    for row0 in range(first, last, each):
        total[:] = zero
        # 1. The gradient of a weight is the product of its value with that of the sum.
        for row in range(row0, row0 + each):
            begin, end = indptr[row], indptr[row + 1]
            at = (row - first) * width
            _write_dots(
                values, num_columns, step, indices, shift, 0, slope, False, grad, at, begin, end, heads, channels,
                grad_scores,
            )  # fmt: skip
            if grad_mass.size:
                for e in range(begin, end):
                    for h in range(heads):
                        grad_scores[e * heads + h] += grad_mass[row * heads + h]
            for e in range(begin, end):
                for h in range(heads):
                    total[h] += attention[e * heads + h] * grad_scores[e * heads + h]
        for row in range(row0, row0 + each):
            begin, end = indptr[row], indptr[row + 1]
            # 2. The softmax's is weight * (that - their weighted mean).
            whole[:] = zero
            for e in range(begin, end):
                for h in range(heads):
                    i = e * heads + h
                    change = attention[i] * grad_scores[i] - abs(signed[i]) * total[h]
                    change = change * slope if signed[i] < zero else change
                    grad_scores[i] = change
                    whole[h] += change
            # 3. What comes before.
            if not dynamic:
                for h in range(heads):
                    grad_shift[row * heads + h] = whole[h]
                at = (first_side + (row - first) % num_sides) * width
                _add_sums(
                    values, num_columns, step, indices, grad_scores, begin, end, heads, channels, grad_side, at
                )  # fmt: skip
                continue
            grad_shift[row * width : (row + 1) * width] = zero
            for h in range(heads):
                column = 0
                while column < channels:
                    count = min(LINES * lanes, channels - column)
                    at = row * width + h * channels + column
                    add_leaky(
                        values, h * channels + column, num_columns, indices, shift, at, slope, grad_scores, heads, h,
                        side, h * channels + column, begin, end, indices.size - 1, count, grad_shift, at, grad_side,
                        h * channels + column, (count + lanes - 1) // lanes, 2,
                    )  # fmt: skip
                    column += count


@numba.njit(nogil=True, cache=True)
def values_backward(
    values: np.ndarray, num_columns: int, step: int, heads: int, channels: int, side: np.ndarray, shift: np.ndarray,
    dynamic: bool, slope: float, indptr: np.ndarray, indices: np.ndarray, sides: np.ndarray, first: int, last: int,
    grad: np.ndarray, attention: np.ndarray, grad_scores: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the values' gradient for a tile of sources: rows are sources, ``indices`` the rows that read them."""
    zero, width, lanes = values.dtype.type(0), heads * channels, LINE // values.itemsize
    end_entry, numbers, whole = indices.size - 1, np.arange(heads).astype(np.int32), np.empty(heads, values.dtype)
    for s in range(first, last):
        begin, end = indptr[s], indptr[s + 1]
        out[s * num_columns : (s + 1) * num_columns] = zero
        if begin == end:
            continue
        whole[:] = zero
        for e in range(begin, end):
            for h in range(heads):
                whole[h] += grad_scores[e * heads + h]
        for h in range(heads):
            column = 0
            while column < channels:
                count = min(LINES * lanes, channels - column)
                lines, at = (count + lanes - 1) // lanes, s * num_columns + h * step + column
                base = h * channels + column
                # By the sums ...
                add_heads(
                    grad, base, width, indices, attention, heads, h, begin, end, end_entry, count, out, at, 0, lines, 1
                )  # fmt: skip
                # ... and by the scores.
                if dynamic:
                    add_leaky(
                        shift, base, width, indices, values, at, slope, grad_scores, heads, h, side, base, begin, end,
                        end_entry, count, out, at, out, at, lines, 1,
                    )  # fmt: skip
                elif sides.size:
                    add_heads(
                        side, base, width, sides, grad_scores, heads, h, begin, end, end_entry, count, out, at, 0,
                        lines, 1,
                    )  # fmt: skip
                else:
                    add_heads(
                        side, column, channels, numbers, whole, 1, 0, h, h + 1, h, count, out, at, 0, lines, 1
                    )  # fmt: skip
                column += count


@numba.njit(nogil=True, cache=True)
def add_self_loops(indptr: np.ndarray, indices: np.ndarray, num_loops: int, pointers: np.ndarray) -> np.ndarray:
    """Return entries without self-loops but one, the last, of each of the first ``num_loops`` rows."""
    out = np.empty(indices.size + num_loops, np.int32)
    at = 0
    for t in range(indptr.size - 1):
        pointers[t] = at
        for e in range(indptr[t], indptr[t + 1]):
            if indices[e] != t:
                out[at] = indices[e]
                at += 1
        if t < num_loops:
            out[at] = t
            at += 1
    pointers[indptr.size - 1] = at
    return out[:at]
