"""Neighbor sums and maxima on a GPU: each row of a sparse matrix times a table of features.

A program of one warp takes a part of a row and a block of columns. Column blocks are the second axis of the grid, so
all rows read one slice of the features, which fits into the L2 cache, before the next slice. There are no atomics: the
partial results of a split row go to a scratch table and are added up in order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gnn.triton_kernels.row_parts import RowParts

MAX_ENTRIES = 32
_DEFAULT_L2_BYTES = 32 * 2**20  # if the device does not report the size of its L2 cache
_L2_FRACTION = 1.5  # size of a slice of the features, of the L2 cache, up to which narrow slices are faster


@triton.jit
def rows_kernel(
    out: tl.tensor,  # x's type [num_rows, HEADS * CHANNELS]
    scratch: tl.tensor,  # *ACC [num_slots, HEADS * CHANNELS]
    x: tl.tensor,  # [num_columns, HEADS * CHANNELS], rows x_stride apart
    indices: tl.tensor,  # *int32 [E]; read if GATHER, otherwise entry e reads row e of x
    weight: tl.tensor,  # any float [E, HEADS]; read if WEIGHTED
    starts: tl.tensor,  # *int64 [P]
    stops: tl.tensor,  # *int64 [P]
    places: tl.tensor,  # *int32 [P]: vertex, or -1 - slot
    degrees: tl.tensor,  # *int32 [num_rows]; read if MEAN
    vertices: tl.tensor,  # *int32 [P]: vertex; read if MATCH
    own: tl.tensor,  # x's type [num_rows, HEADS * CHANNELS]: values that the rows send; read if MATCH
    best: tl.tensor,  # x's type [num_columns, HEADS * CHANNELS]: maximum that each column received; read if MATCH
    x_stride: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    MATCH: tl.constexpr,
    ACC: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Sum a block of columns of ``weight[e] * x[indices[e]]`` over a part; if MATCH, only values equal to a maximum."""
    part = tl.program_id(0)
    head, offset, inside = head_block(HEADS, CHANNELS, HEAD_TILE, WIDTH)
    start = tl.load(starts + part)
    stop = tl.load(stops + part)
    place = tl.load(places + part).to(tl.int64)
    if MATCH:
        row = tl.load(vertices + part).to(tl.int64)
        sent = tl.load(own + row * (HEADS * CHANNELS) + offset, mask=inside, other=0.0).to(ACC)[None, :, :]
    # One sum for each of the ENTRIES that are read together, combined after the loop: the loads of an iteration are
    # independent, and so are its additions. The order is fixed, so the same call gives the same bits.
    total = tl.zeros([ENTRIES, HEAD_TILE, WIDTH], ACC)
    for first in range(start, stop, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        valid = entry < stop
        # Random access: `indices` decides which row of x comes next, so loading ENTRIES rows at a time hides the
        # latency. Offsets have 64 bits: a table exceeds 2^31 values long before it exceeds 2^31 rows.
        column = entry
        if GATHER:
            column = tl.load(indices + entry, mask=valid, other=0).to(tl.int64)
        at = (column * x_stride)[:, None, None] + offset[None, :, :]
        values = tl.load(x + at, mask=valid[:, None, None] & inside[None, :, :], other=0.0).to(ACC)
        if WEIGHTED:
            factor = load_weight(weight, entry, valid, head, HEADS).to(ACC)[:, :, None]
            values = values * factor
        if MATCH:
            # Computed bit for bit as in the forward pass, so equality means that this entry attained the maximum.
            at = (column * (HEADS * CHANNELS))[:, None, None] + offset[None, :, :]
            most = tl.load(best + at, mask=valid[:, None, None] & inside[None, :, :], other=0.0).to(ACC)
            if WEIGHTED:
                values = tl.where(same(sent * factor, most), values, 0.0)
            else:
                values = tl.where(same(sent, most), values, 0.0)
        total += values
    result = tl.sum(total, axis=0)
    # A row of one part is complete. Partial sums of a split row keep the accumulator's type: only the total is rounded.
    if place >= 0:
        if MEAN:
            # The sum of a vertex without entries is 0; avoid 0 / 0.
            result = result / tl.maximum(tl.load(degrees + place), 1).to(ACC)
        tl.store(out + place * (HEADS * CHANNELS) + offset, result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(scratch + (-1 - place) * (HEADS * CHANNELS) + offset, result, mask=inside)


@triton.jit
def max_kernel(
    out: tl.tensor,  # x's type [num_rows, HEADS * CHANNELS]
    ties: tl.tensor,  # x's type [num_rows, HEADS * CHANNELS]
    scratch: tl.tensor,  # x's type [num_slots, HEADS * CHANNELS]
    scratch_ties: tl.tensor,  # x's type [num_slots, HEADS * CHANNELS]
    x: tl.tensor,  # *float32 or *float64 [num_columns, HEADS * CHANNELS], rows x_stride apart; scratch unless GATHER
    indices: tl.tensor,  # *int32 [E]; read if GATHER
    weight: tl.tensor,  # x's type [E, HEADS]; read if WEIGHTED
    starts: tl.tensor,  # *int64 [P]
    stops: tl.tensor,  # *int64 [P]
    places: tl.tensor,  # *int32 [P]: vertex, or -1 - slot
    x_stride: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute the maximum of ``weight[e] * x[indices[e]]`` over a part, NaN ranking highest, and the number of ties."""
    part = tl.program_id(0)
    head, offset, inside = head_block(HEADS, CHANNELS, HEAD_TILE, WIDTH)
    start = tl.load(starts + part)
    stop = tl.load(stops + part)
    place = tl.load(places + part).to(tl.int64)
    # One maximum and tie count for each of the ENTRIES read together, as in the sum. The second pass over a split row
    # reads the maxima of its parts (GATHER is off); their tie counts are in `scratch_ties`.
    best = tl.full([ENTRIES, HEAD_TILE, WIDTH], float("-inf"), x.dtype.element_ty)
    count = tl.zeros([ENTRIES, HEAD_TILE, WIDTH], x.dtype.element_ty)
    for first in range(start, stop, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        valid = entry < stop
        wanted = valid[:, None, None] & inside[None, :, :]
        column = entry
        if GATHER:
            column = tl.load(indices + entry, mask=valid, other=0).to(tl.int64)
        at = (column * x_stride)[:, None, None] + offset[None, :, :]
        values = tl.load(x + at, mask=wanted, other=0.0)
        if WEIGHTED:
            values = values * load_weight(weight, entry, valid, head, HEADS)[:, :, None]
        found = wanted.to(count.dtype) if GATHER else tl.load(scratch_ties + at, mask=wanted, other=0.0)
        values = tl.where(wanted, values, float("-inf"))
        # NaN compares false with everything: the first one replaces the maximum, further ones are ties (`same`).
        higher = (values > best) | ((values != values) & (best == best))
        count = tl.where(higher, found, tl.where(same(values, best), count + found, count))
        best = tl.where(higher, values, best)
    # The result of tl.max with NaN is undefined: replace NaN first and restore it afterwards.
    some_nan = tl.max((best != best).to(tl.int32), axis=0) > 0
    result = tl.max(tl.where(best == best, best, float("-inf")), axis=0)
    result = tl.where(some_nan, float("nan"), result)
    number = tl.sum(tl.where(same(best, result[None, :, :]), count, 0.0), axis=0)
    if place >= 0:
        at = place * (HEADS * CHANNELS) + offset
        result = tl.where(number > 0, result, 0.0)  # a vertex without entries
        tl.store(out + at, result, mask=inside)
        tl.store(ties + at, number, mask=inside)
    else:
        at = (-1 - place) * (HEADS * CHANNELS) + offset
        tl.store(scratch + at, result, mask=inside)
        tl.store(scratch_ties + at, number, mask=inside)


@triton.jit
def head_block(
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, HEAD_TILE: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return this program's heads ``[HEAD_TILE]``, offsets in a row ``[HEAD_TILE, WIDTH]``, and their mask."""
    # Column blocks are the second axis of the grid, which varies slowest: all rows of one slice of the features come
    # before the next slice.
    blocks: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    block = tl.program_id(1)
    head = (block // blocks) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    channel = (block % blocks) * WIDTH + tl.arange(0, WIDTH)
    inside = (head < HEADS)[:, None] & (channel < CHANNELS)[None, :]
    return head, head[:, None] * CHANNELS + channel[None, :], inside


@triton.jit
def load_weight(
    weight: tl.tensor, entry: tl.tensor, valid: tl.tensor, head: tl.tensor, HEADS: tl.constexpr
) -> tl.tensor:
    """Load the weights ``[entries, heads]``, 0 outside the mask."""
    at = (entry.to(tl.int64) * HEADS)[:, None] + head[None, :]
    return tl.load(weight + at, mask=valid[:, None] & (head < HEADS)[None, :], other=0.0)


@triton.jit
def same(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """Return where two values are equal or both NaN."""
    return (left == right) | ((left != left) & (right != right))


class Block(NamedTuple):
    """Number of entries, heads and feature columns per head that one program takes at a time, and its warps."""

    entries: int
    heads: int
    width: int
    warps: int = 1

    def grid(self, heads: int, channels: int) -> int:
        """Count the blocks of a row."""
        return int(triton.cdiv(heads, self.heads) * triton.cdiv(channels, self.width))


def block_shape(num_columns: int, heads: int, channels: int, dtype: torch.dtype, cache_bytes: int) -> Block:
    """Choose the block of a program: a slice of the features that stays in the L2 cache, and few entries of it."""
    # Chosen among 14 blocks on an H100 for 32 to 256 columns (benchmarks.gpu.aggregate_blocks). Rows that are not
    # aligned are loaded value by value, so a second warp does not help there.
    fast = dtype.itemsize == 4 and channels % 4 == 0
    narrow = fast and channels % 64 == 0 and num_columns * 64 * dtype.itemsize <= _L2_FRACTION * cache_bytes
    width = reduce_padding(min(64 if narrow else 128, triton.next_power_of_2(channels)), channels)
    together = 1 if heads == 1 else min(triton.next_power_of_2(heads), max(1, 128 // width))
    tile, warps = (512, 2) if fast and width * together > 32 else (256, 1)
    return Block(max(1, min(MAX_ENTRIES, tile // (width * together))), together, width, warps)


def reduce_padding(width: int, channels: int) -> int:
    """Halve a width, down to 64, while that pads less: 130 columns are three blocks of 64 rather than two of 128."""
    while width > 64 and triton.cdiv(channels, width // 2) * (width // 2) < triton.cdiv(channels, width) * width:
        width //= 2
    return width


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return the accumulator type of a dtype: float64 for float64, float32 for all others."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def aggregate_sum(
    x: Tensor,
    weight: Tensor | None,
    rows: RowParts,
    mean: bool,
    out: Tensor,
    match: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the (weighted) sums over each row of ``x`` float ``[num_columns, H, C]``, ``weight`` ``[E, H]``."""
    block = block_shape(x.size(0), x.size(1), x.size(2), x.dtype, cache_bytes(x.device))
    if match is not None:
        block = block._replace(entries=max(1, block.entries // 2))  # as rows of two tables are gathered
    _sum_parts(x, rows.indices, weight, rows, mean, out, block, match)


def edge_sums(values: Tensor, edge_ids: Tensor | None, rows: RowParts, out: Tensor) -> None:
    """Write the sums over each row of ``values[edge_ids[e]]``, or ``values[e]``, float ``[E, H]``."""
    block = block_shape(0, 1, values.size(1), values.dtype, cache_bytes(values.device))
    _sum_parts(values.unsqueeze(1), edge_ids, None, rows, False, out, block)


def _sum_parts(
    x: Tensor,
    indices: Tensor | None,
    weight: Tensor | None,
    rows: RowParts,
    mean: bool,
    out: Tensor,
    block: Block,
    match: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Sum over the parts, then over the slots of each split row, in order."""
    heads, channels = x.shape[1:]
    if rows.num_parts == 0 or heads * channels == 0:
        return
    dtype = torch.promote_types(x.dtype, torch.float32)
    scratch = torch.empty((rows.num_slots, 1, heads * channels), dtype=dtype, device=x.device)
    parts = rows.starts, rows.stops, rows.places, rows.vertices
    degrees = rows.degrees if mean else None
    launch_rows(out, scratch, x, indices, weight, parts, degrees, block, match)
    if rows.num_slots:
        narrow = block_shape(0, 1, heads * channels, dtype, cache_bytes(out.device))
        launch_rows(out, scratch, scratch, None, None, slot_parts(rows), degrees, narrow)


def launch_rows(
    out: Tensor,
    scratch: Tensor,
    x: Tensor,  # [num_columns, H, C]
    indices: Tensor | None,
    weight: Tensor | None,
    parts: tuple[Tensor, Tensor, Tensor, Tensor],  # starts, stops, places and vertices
    degrees: Tensor | None,  # for means
    block: Block,
    match: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch :func:`rows_kernel` over parts; any valid tensor replaces an absent input, which is not read."""
    heads, channels = x.shape[1:]
    starts, stops, places, vertices = parts
    own, best = (x, x) if match is None else match
    rows_kernel[starts.numel(), block.grid(heads, channels)](
        out,
        scratch,
        x,
        starts if indices is None else indices,
        x if weight is None else weight,
        starts,
        stops,
        places,
        vertices if degrees is None else degrees,
        vertices,
        own,
        best,
        x_stride=x.stride(0),
        HEADS=heads,
        CHANNELS=channels,
        GATHER=indices is not None,
        WEIGHTED=weight is not None,
        MEAN=degrees is not None,
        MATCH=match is not None,
        ACC=accumulator(x.dtype),
        ENTRIES=block.entries,
        HEAD_TILE=block.heads,
        WIDTH=block.width,
        num_warps=block.warps,
    )


def aggregate_max(x: Tensor, weight: Tensor | None, rows: RowParts, out: Tensor, ties: Tensor) -> None:
    """Write the maximum over each row, 0 without entries, and its number of ties, ``[num_rows, H, C]`` each."""
    heads, channels = x.shape[1:]
    if rows.num_parts == 0 or heads * channels == 0:
        return
    block = block_shape(x.size(0), heads, channels, x.dtype, cache_bytes(x.device))
    block = block._replace(entries=max(1, block.entries // 2))  # a maximum and a tie count take twice the registers
    scratch = torch.empty((2, rows.num_slots, heads, channels), dtype=x.dtype, device=x.device)

    def launch(
        x: Tensor, indices: Tensor | None, weight: Tensor | None, starts: Tensor, stops: Tensor, places: Tensor
    ) -> None:
        max_kernel[starts.numel(), block.grid(heads, channels)](
            out,
            ties,
            scratch[0],
            scratch[1],
            x,
            starts if indices is None else indices,
            x if weight is None else weight,
            starts,
            stops,
            places,
            x_stride=x.stride(0),
            HEADS=heads,
            CHANNELS=channels,
            GATHER=indices is not None,
            WEIGHTED=weight is not None,
            ENTRIES=block.entries,
            HEAD_TILE=block.heads,
            WIDTH=block.width,
            num_warps=block.warps,
        )

    launch(x, rows.indices, weight, rows.starts, rows.stops, rows.places)
    if rows.num_slots:
        launch(scratch[0], None, None, *slot_parts(rows)[:3])


def slot_parts(rows: RowParts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """View the slots of each split row as one part: first and last row of the scratch table, output row, and row."""
    return rows.slot_ptr[:-1], rows.slot_ptr[1:], rows.slot_vertices, rows.slot_vertices


@functools.cache
def cache_bytes(device: torch.device) -> int:
    """Return the size of a device's L2 cache."""
    if device.type != "cuda":
        return _DEFAULT_L2_BYTES
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", _DEFAULT_L2_BYTES) or _DEFAULT_L2_BYTES
