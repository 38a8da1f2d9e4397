"""Compiled loops of attention over the edges of a mini-batch; each call processes one tile of targets or sources.

A row is a target and one of its relations; homogeneous layers have a single relation. Common arguments, flat arrays of
a single floating dtype unless stated otherwise:

- ``values`` ``[num_sources * num_columns]``: attended values; head h reads columns ``h * step`` to
  ``h * step + channels``; ``step`` is 0 if all heads read the same columns, else ``channels``. They, and the gradients
  of the sums, may be bfloat16 as uint16, where all other arrays are float32;
- ``keys``: like ``values``, or ``values`` themselves: the vectors that are scored;
- ``side`` ``[num_sides * heads * channels]``: vectors whose dot products with the keys of a head give the scores;
- ``shift``: ``[num_rows * heads]``, added to the scores, or, if ``dynamic``, ``[num_rows * heads * channels]``, added
  to the keys before the leaky ReLU and the dot product;
- ``slope``: negative slope of the leaky ReLU;
- ``indptr`` int64 ``[num_rows + 1]``, ``indices`` int32 ``[E]``: entries of each row, and the column of each entry;
- ``attention`` ``[E * heads]``: weights of the sums; ``signed``: the weights before dropout, with a negative sign where
  the leaky ReLU applied its slope;
- ``first``, ``last``: the tile's range of rows; ``each``: consecutive rows per softmax;
- ``first_side``, ``num_sides``: the rows of the tile use these sides cyclically;
- ``rounded``: results in bfloat16 as uint16, or None; ``out`` then holds a single row, which is rounded into it.

Numba's disk cache tracks changes of this file only: touch it after a change in ``head_loops.py`` or
``numba_softmax.py``.
"""

import numba
import numpy as np

from lightning_gnn.ops.aggregate.numba_softmax import exponentiate
from lightning_gnn.ops.attention.head_loops import (
    LINES,
    SEPARATE,
    SHARED,
    add_heads,
    add_leaky,
    dot_heads,
    dot_leaky_heads,
)
from lightning_gnn.ops.intrinsics import LINE, round_span


@numba.njit(inline="always", cache=True)
def _group(heads: int) -> int:
    """Return the number of heads that a loop processes together."""
    return 4 if heads >= 4 else 2 if heads >= 2 else 1


@numba.njit(nogil=True, cache=True)
def _write_dots(
    x: np.ndarray, num_columns: int, step: int, indices: np.ndarray, own: np.ndarray, own_at: int, slope: float,
    dynamic: bool, side: np.ndarray, side_at: int, begin: int, end: int, heads: int, channels: int, out: np.ndarray,
) -> None:  # fmt: skip
    """Write dot products ``[E * heads]`` of ``side[side_at:]`` and each entry's row, or ``leaky_relu(own + row)``."""
    last, columns = indices.size - 1, SEPARATE if step else SHARED
    h = 0
    while h < heads:
        group, at = _group(heads - h), side_at + h * channels
        if dynamic:
            dot_leaky_heads(
                x, h * step, num_columns, step, indices, own, own_at + h * step, slope, side, at, begin, end, last,
                step, out, heads, h, SEPARATE, group,
            )  # fmt: skip
        else:
            dot_heads(
                x, h * step, num_columns, step, indices, side, at, begin, end, last, channels, out, heads, h, columns,
                group,
            )  # fmt: skip
        h += group


@numba.njit(nogil=True, cache=True)
def _add_sums(
    x: np.ndarray, num_columns: int, step: int, indices: np.ndarray, weight: np.ndarray, begin: int, end: int,
    heads: int, channels: int, out: np.ndarray, out_at: int,
) -> None:  # fmt: skip
    """Add the sums of the entries' rows times their weights ``[E * heads]`` to ``out[out_at:]``, head by head."""
    last, lanes = indices.size - 1, LINE // out.itemsize
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
    values: np.ndarray, keys: np.ndarray, num_columns: int, step: int, heads: int, channels: int, side: np.ndarray,
    shift: np.ndarray, dynamic: bool, slope: float, indptr: np.ndarray, indices: np.ndarray, first: int, last: int,
    each: int, first_side: int, num_sides: int, factor: np.ndarray, out: np.ndarray, mass: np.ndarray,
    attention: np.ndarray, signed: np.ndarray, rounded: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Write the entries' weights and each row's weighted sum; ``mass``, unless empty, gets the sum of the weights."""
    largest, total = np.empty(heads, side.dtype), np.empty(heads, side.dtype)
    zero, width = side.dtype.type(0), heads * channels
    out[:] = zero
    for row0 in range(first, last, each):
        largest[:] = -np.inf
        total[:] = zero
        for row in range(row0, row0 + each):
            begin, end = indptr[row], indptr[row + 1]
            # 1. Dot products, which load the rows of values into the cache.
            at = (first_side + (row - first) % num_sides) * width
            _write_dots(
                keys, num_columns, step, indices, shift, row * width, slope, dynamic, side, at, begin, end, heads,
                channels, signed,
            )  # fmt: skip
            # 2. Scores and the largest per head. "Not less or equal" makes NaN the largest, and it stays the largest.
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
        # 3. The softmax.
        begin, end = indptr[row0], indptr[row0 + each]
        exponentiate(attention, begin, end, heads, largest, total)
        for e in range(begin, end):
            for h in range(heads):
                i = e * heads + h
                weight = attention[i] / total[h]
                signed[i] = weight if dynamic or signed[i] > zero else -weight
                attention[i] = weight * factor[i] if factor.size else weight
        # 4. The weighted sums.
        for row in range(row0, row0 + each):
            begin, end = indptr[row], indptr[row + 1]
            at = (row - first) * width if rounded is None else 0
            _add_sums(values, num_columns, step, indices, attention, begin, end, heads, channels, out, at)
            if rounded is not None:
                round_span(out, 0, rounded, (row - first) * width, width)
                out[:] = zero
            if mass.size:
                mass[row * heads : (row + 1) * heads] = zero
                for e in range(begin, end):
                    for h in range(heads):
                        mass[row * heads + h] += attention[e * heads + h]


@numba.njit(nogil=True, cache=True)
def scores_backward(
    values: np.ndarray, keys: np.ndarray, num_columns: int, step: int, heads: int, channels: int, side: np.ndarray,
    shift: np.ndarray, dynamic: bool, slope: float, indptr: np.ndarray, indices: np.ndarray, first: int, last: int,
    each: int, first_side: int, num_sides: int, grad: np.ndarray, grad_mass: np.ndarray, attention: np.ndarray,
    signed: np.ndarray, grad_scores: np.ndarray, grad_shift: np.ndarray, grad_side: np.ndarray,
) -> None:  # fmt: skip
    """Write the gradients of scores (after the leaky ReLU if ``dynamic``) and shifts, and add to that of ``side``."""
    total, whole = np.empty(heads, side.dtype), np.empty(heads, side.dtype)
    zero, width, lanes = side.dtype.type(0), heads * channels, LINE // side.itemsize
    for row0 in range(first, last, each):
        total[:] = zero
        # 1. The gradient of a weight is the dot product of its value and the gradient of the sum.
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
            # 2. The gradient of the softmax is weight * (gradient of the weight - weighted mean of these gradients).
            whole[:] = zero
            for e in range(begin, end):
                for h in range(heads):
                    i = e * heads + h
                    change = attention[i] * grad_scores[i] - abs(signed[i]) * total[h]
                    change = change * slope if signed[i] < zero else change
                    grad_scores[i] = change
                    whole[h] += change
            # 3. The gradients of the inputs of the scores.
            if not dynamic:
                for h in range(heads):
                    grad_shift[row * heads + h] = whole[h]
                at = (first_side + (row - first) % num_sides) * width
                _add_sums(
                    keys, num_columns, step, indices, grad_scores, begin, end, heads, channels, grad_side, at
                )  # fmt: skip
                continue
            grad_shift[row * width : (row + 1) * width] = zero
            for h in range(heads):
                column = 0
                while column < channels:
                    count = min(LINES * lanes, channels - column)
                    at = row * width + h * channels + column
                    add_leaky(
                        keys, h * channels + column, num_columns, indices, shift, at, slope, grad_scores, heads, h,
                        side, h * channels + column, begin, end, indices.size - 1, count, grad_shift, at, grad_side,
                        h * channels + column, (count + lanes - 1) // lanes, 2,
                    )  # fmt: skip
                    column += count


@numba.njit(nogil=True, cache=True)
def values_backward(
    values: np.ndarray, keys: np.ndarray, num_columns: int, step: int, heads: int, channels: int, side: np.ndarray,
    shift: np.ndarray, dynamic: bool, slope: float, indptr: np.ndarray, indices: np.ndarray, sides: np.ndarray,
    first: int, last: int, grad: np.ndarray, attention: np.ndarray, grad_scores: np.ndarray, out: np.ndarray,
    key_out: np.ndarray, rounded: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Write the gradients of values and keys for a tile of sources; ``indices`` holds the rows that read a source."""
    zero, width, lanes = side.dtype.type(0), heads * channels, LINE // side.itemsize
    end_entry, numbers, whole = indices.size - 1, np.arange(heads).astype(np.int32), np.empty(heads, side.dtype)
    for s in range(first, last):
        begin, end = indptr[s], indptr[s + 1]
        start = s * num_columns if rounded is None else 0
        out[start : start + num_columns] = zero
        key_out[start : start + num_columns] = zero
        if rounded is not None:
            rounded[s * num_columns : (s + 1) * num_columns] = np.uint16(0)
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
                lines, at = (count + lanes - 1) // lanes, start + h * step + column
                base, own = h * channels + column, s * num_columns + h * step + column
                # The gradient through the sums ...
                add_heads(
                    grad, base, width, indices, attention, heads, h, begin, end, end_entry, count, out, at, 0, lines, 1
                )  # fmt: skip
                # ... and through the scores.
                if dynamic:
                    add_leaky(
                        shift, base, width, indices, keys, own, slope, grad_scores, heads, h, side, base, begin, end,
                        end_entry, count, key_out, at, key_out, at, lines, 1,
                    )  # fmt: skip
                elif sides.size:
                    add_heads(
                        side, base, width, sides, grad_scores, heads, h, begin, end, end_entry, count, key_out, at, 0,
                        lines, 1,
                    )  # fmt: skip
                else:
                    add_heads(
                        side, column, channels, numbers, whole, 1, 0, h, h + 1, h, count, key_out, at, 0, lines, 1
                    )  # fmt: skip
                column += count
        if rounded is not None:
            round_span(out, 0, rounded, s * num_columns, num_columns)


@numba.njit(nogil=True, cache=True)
def add_self_loops(indptr: np.ndarray, indices: np.ndarray, num_loops: int, pointers: np.ndarray) -> np.ndarray:
    """Replace all self-loops by one, the last entry, for each of the first ``num_loops`` rows."""
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
