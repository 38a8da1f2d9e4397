"""Compiled loops of the aggregation on the CPU: one call is one worker's share, outside the GIL.

A share is a range of rows and a table of column blocks, int64 ``[num_blocks, 7]``: first column, width, where its
elements begin in the gathered array, elements from one row to the next there, first weight of an entry, weights per
entry (0: none), and whether results per entry are added to what an earlier block wrote. Widths are powers of two up to
64; the last block of a slice may overlap the one before, which then writes the same numbers twice.

Numba's cache on disk follows changes of this file only: after a change in ``vectors.py``, change (or touch) this one.
"""

import numba
import numpy as np

from lightning_gnn.ops.vectors import add_entries, copy_block, dot_entries, max_entries, route_entries

COLUMN, WIDTH, BASE, STRIDE, WEIGHT, HEADS, ADD = range(7)


@numba.njit(nogil=True, cache=True)
def pack_rows(x, num_columns, order, first, last, blocks, packed):
    """Copy rows ``order[first:last]`` of ``x`` ``[V * D]`` into the blocks, each of which is contiguous."""
    for k in range(first, last):
        row = order[k] * num_columns
        for b in range(blocks.shape[0]):
            source = row + blocks[b, COLUMN]
            at = blocks[b, BASE] + k * blocks[b, STRIDE]
            width = blocks[b, WIDTH]
            if width == 64:
                copy_block(x, source, packed, at, 64)
            elif width == 32:
                copy_block(x, source, packed, at, 32)
            elif width == 16:
                copy_block(x, source, packed, at, 16)
            elif width == 8:
                copy_block(x, source, packed, at, 8)
            else:
                for d in range(width):
                    packed[at + d] = x[source + d]


@numba.njit(nogil=True, cache=True)
def sum_rows(x, blocks, indptr, indices, places, degrees, first, last, out, num_columns):
    """Sum of the gathered rows; divided by ``degrees`` of the row where that is not empty."""
    end = indices.size - 1
    one = x.dtype.type(1)
    for b in range(blocks.shape[0]):
        column, width, base, stride = blocks[b, COLUMN], blocks[b, WIDTH], blocks[b, BASE], blocks[b, STRIDE]
        for r in range(first, last):
            p, q, at = indptr[r], indptr[r + 1], places[r] * num_columns + column
            by = x.dtype.type(degrees[r]) if degrees.size else one
            if width == 64:
                add_entries(x, base, stride, indices, x, 0, 0, p, q, end, by, out, at, 64, 0)
            elif width == 32:
                add_entries(x, base, stride, indices, x, 0, 0, p, q, end, by, out, at, 32, 0)
            elif width == 16:
                add_entries(x, base, stride, indices, x, 0, 0, p, q, end, by, out, at, 16, 0)
            elif width == 8:
                add_entries(x, base, stride, indices, x, 0, 0, p, q, end, by, out, at, 8, 0)
            elif width == 4:
                add_entries(x, base, stride, indices, x, 0, 0, p, q, end, by, out, at, 4, 0)
            elif width == 2:
                add_entries(x, base, stride, indices, x, 0, 0, p, q, end, by, out, at, 2, 0)
            else:
                add_entries(x, base, stride, indices, x, 0, 0, p, q, end, by, out, at, 1, 0)


@numba.njit(nogil=True, cache=True)
def weighted_sum_rows(x, blocks, indptr, indices, weight, ws, places, degrees, first, last, out, num_columns):
    """Sum of the gathered rows times the entry's weight for the block."""
    end = indices.size - 1
    one = x.dtype.type(1)
    for b in range(blocks.shape[0]):
        column, width, base, stride = blocks[b, COLUMN], blocks[b, WIDTH], blocks[b, BASE], blocks[b, STRIDE]
        wa = blocks[b, WEIGHT]
        for r in range(first, last):
            p, q, at = indptr[r], indptr[r + 1], places[r] * num_columns + column
            by = x.dtype.type(degrees[r]) if degrees.size else one
            if width == 64:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 64, 1)
            elif width == 32:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 32, 1)
            elif width == 16:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 16, 1)
            elif width == 8:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 8, 1)
            elif width == 4:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 4, 1)
            elif width == 2:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 2, 1)
            else:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 1, 1)


@numba.njit(nogil=True, cache=True)
def heads_sum_rows(x, blocks, indptr, indices, weight, ws, places, degrees, first, last, out, num_columns):
    """The same for blocks of 64 columns, or fewer, that hold several heads."""
    end = indices.size - 1
    one = x.dtype.type(1)
    for b in range(blocks.shape[0]):
        column, base, stride, wa = blocks[b, COLUMN], blocks[b, BASE], blocks[b, STRIDE], blocks[b, WEIGHT]
        kind = blocks[b, WIDTH] * 100 + blocks[b, HEADS]
        for r in range(first, last):
            p, q, at = indptr[r], indptr[r + 1], places[r] * num_columns + column
            by = x.dtype.type(degrees[r]) if degrees.size else one
            if kind == 6402:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 64, 2)
            elif kind == 6404:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 64, 4)
            elif kind == 6408:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 64, 8)
            elif kind == 3202:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 32, 2)
            elif kind == 3204:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 32, 4)
            else:
                add_entries(x, base, stride, indices, weight, ws, wa, p, q, end, by, out, at, 16, 2)


@numba.njit(nogil=True, cache=True)
def max_rows(x, blocks, indptr, indices, weight, ws, places, first, last, out, ties, num_columns):
    """Largest message and how many attain it."""
    end = indices.size - 1
    for b in range(blocks.shape[0]):
        column, width, base, stride = blocks[b, COLUMN], blocks[b, WIDTH], blocks[b, BASE], blocks[b, STRIDE]
        wa = blocks[b, WEIGHT]
        kind = width * 10 + blocks[b, HEADS]
        for r in range(first, last):
            p, q, at = indptr[r], indptr[r + 1], places[r] * num_columns + column
            if kind == 640:
                max_entries(x, base, stride, indices, x, 0, 0, p, q, end, out, ties, at, 64, 0)
            elif kind == 641:
                max_entries(x, base, stride, indices, weight, ws, wa, p, q, end, out, ties, at, 64, 1)
            elif kind == 160:
                max_entries(x, base, stride, indices, x, 0, 0, p, q, end, out, ties, at, 16, 0)
            elif kind == 161:
                max_entries(x, base, stride, indices, weight, ws, wa, p, q, end, out, ties, at, 16, 1)
            elif kind == 40:
                max_entries(x, base, stride, indices, x, 0, 0, p, q, end, out, ties, at, 4, 0)
            elif kind == 41:
                max_entries(x, base, stride, indices, weight, ws, wa, p, q, end, out, ties, at, 4, 1)
            elif kind == 10:
                max_entries(x, base, stride, indices, x, 0, 0, p, q, end, out, ties, at, 1, 0)
            else:
                max_entries(x, base, stride, indices, weight, ws, wa, p, q, end, out, ties, at, 1, 1)


@numba.njit(nogil=True, cache=True)
def route_rows(grad, best, blocks, indptr, indices, weight, ws, rows, places, first, last, x, out, num_columns):
    """Gradient of the maxima, for the rows that were gathered."""
    end = indices.size - 1
    for b in range(blocks.shape[0]):
        column, width, base, stride = blocks[b, COLUMN], blocks[b, WIDTH], blocks[b, BASE], blocks[b, STRIDE]
        wa = blocks[b, WEIGHT]
        kind = width * 10 + blocks[b, HEADS]
        for r in range(first, last):
            p, q, at, own = indptr[r], indptr[r + 1], places[r] * num_columns + column, rows[r] * num_columns + column
            if kind == 640:
                route_entries(grad, best, base, stride, indices, x, 0, 0, p, q, end, x, own, out, at, 64, 0)
            elif kind == 641:
                route_entries(grad, best, base, stride, indices, weight, ws, wa, p, q, end, x, own, out, at, 64, 1)
            elif kind == 160:
                route_entries(grad, best, base, stride, indices, x, 0, 0, p, q, end, x, own, out, at, 16, 0)
            elif kind == 161:
                route_entries(grad, best, base, stride, indices, weight, ws, wa, p, q, end, x, own, out, at, 16, 1)
            elif kind == 40:
                route_entries(grad, best, base, stride, indices, x, 0, 0, p, q, end, x, own, out, at, 4, 0)
            elif kind == 41:
                route_entries(grad, best, base, stride, indices, weight, ws, wa, p, q, end, x, own, out, at, 4, 1)
            elif kind == 10:
                route_entries(grad, best, base, stride, indices, x, 0, 0, p, q, end, x, own, out, at, 1, 0)
            else:
                route_entries(grad, best, base, stride, indices, weight, ws, wa, p, q, end, x, own, out, at, 1, 1)


@numba.njit(nogil=True, cache=True)
def dot_rows(x, blocks, indptr, indices, rows, first, last, side, out, num_heads, num_columns):
    """Dot products of each row's own features and the gathered ones, into ``out`` ``[E * num_heads]``."""
    end = indices.size - 1
    for b in range(blocks.shape[0]):
        column, base, stride, head = blocks[b, COLUMN], blocks[b, BASE], blocks[b, STRIDE], blocks[b, WEIGHT]
        kind = blocks[b, WIDTH] * 100 + blocks[b, HEADS]
        add = blocks[b, ADD] != 0
        for r in range(first, last):
            p, q, own = indptr[r], indptr[r + 1], rows[r] * num_columns + column
            if kind == 6401:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 64, 1)
            elif kind == 6402:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 64, 2)
            elif kind == 6404:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 64, 4)
            elif kind == 6408:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 64, 8)
            elif kind == 3202:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 32, 2)
            elif kind == 3204:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 32, 4)
            elif kind == 1602:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 16, 2)
            elif kind == 3201:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 32, 1)
            elif kind == 1601:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 16, 1)
            elif kind == 801:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 8, 1)
            elif kind == 401:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 4, 1)
            elif kind == 201:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 2, 1)
            else:
                dot_entries(x, base, stride, indices, side, own, p, q, end, out, num_heads, head, add, 1, 1)


@numba.njit(nogil=True, cache=True)
def join_rows(rows, places, split, num_columns, degrees, out):
    """Add up the pieces of each split row, in order, from the end of ``out`` into its row."""
    for i in range(split.size):
        r = split[i]
        target, source = np.int64(rows[r]) * num_columns, places[r] * num_columns
        fresh = i == 0 or rows[split[i - 1]] != rows[r]
        final = i + 1 == split.size or rows[split[i + 1]] != rows[r]
        for d in range(num_columns):
            value = out[source + d] if fresh else out[target + d] + out[source + d]
            out[target + d] = value / degrees[r] if final and degrees.size else value


@numba.njit(nogil=True, cache=True)
def join_max_rows(rows, places, split, num_columns, out, ties):
    """The same for maxima and how many entries attain them."""
    for i in range(split.size):
        r = split[i]
        target, source = np.int64(rows[r]) * num_columns, places[r] * num_columns
        fresh = i == 0 or rows[split[i - 1]] != rows[r]
        for d in range(num_columns):
            value, count = out[source + d], ties[source + d]
            if not fresh:
                best, known = out[target + d], ties[target + d]
                if value == best or (np.isnan(value) and np.isnan(best)):
                    count += known
                elif not (value > best or np.isnan(value)) or np.isnan(best):
                    value, count = best, known
            out[target + d] = value
            ties[target + d] = count


@numba.njit(nogil=True, cache=True)
def clear_rows(rows, num_columns, out):
    """Write zeros into some rows."""
    for r in rows:
        for d in range(num_columns):
            out[r * num_columns + d] = 0
