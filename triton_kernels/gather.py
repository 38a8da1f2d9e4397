"""Gathers feature rows on a GPU from device memory, tables sharded across GPUs, pinned host memory or a feature cache.

A pinned host tensor is read in place over the bus (unified virtual addressing, UVA), so one kernel serves all cases.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gnn.triton_kernels.hops import place_of

_VALUES_PER_TILE = 2048
_TILE_WIDTHS = (256, 128, 64)
_MAX_TILE_ROWS = 128
_NUM_WARPS = 4
# A bus of 64 GB/s with a latency of 2 us is saturated by 128 KiB in flight. More programs would only occupy
# multiprocessors that train meanwhile. Rows of a cache are in device memory, where more bytes are in flight.
BUS_BYTES = 1 << 18
CACHED_BUS_BYTES = 1 << 20
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["num_out", "num_rows"])
def gather_kernel(
    out: tl.tensor,  # *float32 or *float16, or if COPY the table's type [num_out, num_columns], contiguous
    index: tl.tensor,  # *int64 or *int32 [num_out]
    table: tl.tensor,  # *float32, *float16, *int8, or if COPY any integer [num_rows, num_columns]
    scales: tl.tensor,  # *float32 [num_rows]; read if QUANTISED
    slot: tl.tensor,  # *int32 [num_rows], row of the cache or -1; read if CACHED
    cache: tl.tensor,  # the table's type [cache_rows, num_columns], contiguous; read if CACHED. If SHARDS > 1: *int64
    # [SHARDS], addresses of the table's shards
    num_out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.constexpr,  # a constant, so that e.g. 100 columns are read in vectors of four
    row_stride: tl.constexpr,  # values from one row of the table to the next
    COPY: tl.constexpr,
    BAD: tl.constexpr,
    QUANTISED: tl.constexpr,
    CACHED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARDS: tl.constexpr = 1,
    SHIFT: tl.constexpr = 0,
) -> None:
    """Write ``out[i] = table[index[i]] * scales[index[i]]``; an invalid index gives BAD (if COPY) or NaN.

    A program writes every n-th tile of rows, where n is the number of programs.
    """
    tile = tl.program_id(0)
    while tile < tl.cdiv(num_out, ROWS):
        _write_tile(
            tile, out, index, table, scales, slot, cache, num_out, num_rows, num_columns, row_stride, COPY, BAD,
            QUANTISED, CACHED, ROWS, COLUMNS, SHARDS, SHIFT,
        )  # fmt: skip
        tile += tl.num_programs(0)


@triton.jit
def _write_tile(
    tile: tl.tensor, out: tl.tensor, index: tl.tensor, table: tl.tensor, scales: tl.tensor, slot: tl.tensor,
    cache: tl.tensor, num_out: tl.tensor, num_rows: tl.tensor, num_columns: tl.constexpr, row_stride: tl.constexpr,
    COPY: tl.constexpr, BAD: tl.constexpr, QUANTISED: tl.constexpr, CACHED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SHARDS: tl.constexpr, SHIFT: tl.constexpr,
) -> None:  # fmt: skip
    """Write one tile of rows."""
    # 64-bit offsets: a table exceeds 2^31 values long before it exceeds 2^31 rows.
    at = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = at < num_out
    in_row = column < num_columns
    row = tl.load(index + at, mask=wanted, other=0).to(tl.int64)
    valid = wanted & (row >= 0) & (row < num_rows)
    # The address of an invalid index is outside the table; the mask prevents the read.
    start = table + row * row_stride
    if SHARDS > 1:
        shard, place = place_of(tl.where(valid, row, 0), SHARDS, SHIFT)
        # Shards start at aligned allocations; the hint lets rows be read in vectors as wide as those of a single table.
        start = tl.multiple_of(tl.load(cache + shard).to(table.dtype), 16) + place * row_stride
    if CACHED:
        place = tl.load(slot + row, mask=valid, other=-1).to(tl.int64)
        # Selecting the address needs one load per value; two masked loads would take twice the registers.
        start = tl.where(place >= 0, cache + place * num_columns, start)
    values = tl.load(start[:, None] + column[None, :], mask=valid[:, None] & in_row[None, :], other=BAD)
    if not COPY:
        # Compute in float32 for every table type: int8 times its scale, float16 unchanged.
        values = values.to(tl.float32)
        if QUANTISED:
            values = values * tl.load(scales + row, mask=valid, other=0.0)[:, None]
        values = tl.where(valid[:, None], values, float("nan")).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * num_columns + column[None, :], values, mask=wanted[:, None] & in_row[None, :])


def gather(
    table: Tensor,  # any dtype [num_rows, num_columns], columns adjacent, in device memory or pinned host memory
    index: Tensor,  # int64 or int32 [num_out], contiguous; on the device, as all others
    out: Tensor,  # [num_out, num_columns], contiguous, of the table's dtype, float32 or float16
    scales: Tensor | None = None,  # float32 [num_rows], scale of each int8 row
    slot: Tensor | None = None,  # int32 [num_rows], index of each row in the cache, or -1
    cache: Tensor | None = None,  # hot rows, of the table's dtype [cache_rows, num_columns], contiguous
    shards: tuple[Tensor, int, int] | None = None,
    # of a sharded table without a cache: shard addresses int64 [n], total rows, log2 of the rows per round-robin block
    bus_bytes: int | None = None,  # most bytes that are read at a time; None: as many as the device can
) -> Tensor:
    """Gather rows into ``out``; a row outside the table gives NaN, -1 (integers) or False (bools)."""
    if out.numel() == 0:
        return out
    copy = scales is None and table.dtype == out.dtype
    bad = -1 if copy and table.dtype != torch.bool else 0
    target = out
    if copy:  # as integers: this preserves every bit pattern, and one kernel serves all dtypes
        integer = _INTEGER_OF_SIZE[min(table.element_size(), 8)]
        table, target = table.view(integer), out.view(integer)
        cache = None if cache is None else cache.view(integer)
    num_columns = target.size(1)
    addresses, num_rows, shift = (None, table.size(0), 0) if shards is None else shards
    columns, rows = block_shape(num_columns)
    tiles, across = triton.cdiv(index.numel(), rows), triton.cdiv(num_columns, columns)
    if bus_bytes is not None:
        tiles = min(tiles, max(1, bus_bytes // (rows * columns * table.element_size() * across)))
    gather_kernel[tiles, across](
        target,
        index,
        table,
        table if scales is None else scales,
        index if slot is None else slot,
        addresses if addresses is not None else table if cache is None else cache,
        index.numel(),
        num_rows,
        num_columns,
        table.stride(0),
        COPY=copy,
        BAD=bad,
        QUANTISED=scales is not None,
        CACHED=slot is not None,
        ROWS=rows,
        COLUMNS=columns,
        SHARDS=1 if addresses is None else addresses.numel(),
        SHIFT=shift,
        num_warps=_NUM_WARPS,
    )
    return out


def block_shape(num_columns: int) -> tuple[int, int]:
    """Choose the columns (least padding; at least 64 of a wider table) and the rows of a program's tile."""
    if num_columns <= _TILE_WIDTHS[-1]:
        columns = triton.next_power_of_2(num_columns)
    else:
        columns = min(_TILE_WIDTHS, key=lambda width: triton.cdiv(num_columns, width) * width)
    return columns, min(_VALUES_PER_TILE // columns, _MAX_TILE_ROWS)
