"""Dense tiles of a sparse matrix on tensor cores: the chunks of a graph whose vertices share most of their neighbours.

The adjacency tiles of a window (``HEIGHT`` rows by the distinct columns that they use) are written out as dense values
first, as the weights differ from call to call; then one program per window and block of feature columns multiplies
tile by tile with the rows of the tile's columns. A cell without an edge holds 0 and multiplies all the same: where a
feature is infinite or NaN, the other rows of a window that uses it become NaN too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gnn.triton_kernels.aggregate import accumulator, least_padding
from lightning_gnn.triton_kernels.aggregate_plan import HEIGHT, NOWHERE, TILE_COLUMNS, Base, Tiles

_NOWHERE = tl.constexpr(NOWHERE)  # a kernel reads no other globals
_CELLS = 256  # per program that writes tiles
NUM_WARPS = 4
NUM_STAGES = 5  # the feature rows of the next tile are in flight during a dot, as are the columns of the one after it


@triton.jit(do_not_specialize=["num_cells", "num_tiles"])
def densify_kernel(
    tiles: tl.tensor,  # x's type [HEADS, num_tiles, HEIGHT, TILE_COLUMNS], zeros
    weight: tl.tensor,  # any float [E, HEADS]; read if WEIGHTED
    entries: tl.tensor,  # *int32 or *int64 [n]
    cells: tl.tensor,  # *int64 [num_cells]
    cell_ptr: tl.tensor,  # *int64 [num_cells + 1]
    num_cells: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACC: tl.constexpr,
    TILE_CELLS: tl.constexpr,
    CELLS: tl.constexpr,
) -> None:
    """Write the sum of the weights of the entries of each cell, or their number."""
    # One thread per cell that is not empty; the tiles were filled with zeros before, so nobody writes a cell twice and
    # no atomic is needed.
    at = tl.program_id(0).to(tl.int64) * CELLS + tl.arange(0, CELLS)
    head = tl.program_id(1).to(tl.int64)
    wanted = at < num_cells
    cell = tl.load(cells + at, mask=wanted, other=0)
    start = tl.load(cell_ptr + at, mask=wanted, other=0)
    count = tl.load(cell_ptr + at + 1, mask=wanted, other=0) - start
    if WEIGHTED:
        value = tl.zeros([CELLS], ACC)
        for i in range(tl.max(count, axis=0)):  # once, unless edges are given twice
            valid = wanted & (i < count)
            entry = tl.load(entries + start + i, mask=valid, other=0).to(tl.int64)
            value += tl.load(weight + entry * HEADS + head, mask=valid, other=0.0).to(ACC)
    else:
        value = count.to(ACC)
    tl.store(tiles + head * num_tiles * TILE_CELLS + cell, value.to(tiles.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_tiles"])
def tiles_kernel(
    out: tl.tensor,  # x's type [num_rows, HEADS * CHANNELS]
    scratch: tl.tensor,  # *float32 [num_slots, HEADS * CHANNELS]
    x: tl.tensor,  # [num_columns, HEADS * CHANNELS], rows x_stride apart
    tiles: tl.tensor,  # x's type [HEADS, num_tiles, HEIGHT, TILE_COLUMNS]
    tile_ptr: tl.tensor,  # *int64 [num_windows + 1]
    columns: tl.tensor,  # *int32 [num_tiles * TILE_COLUMNS], -1 for padding
    places: tl.tensor,  # *int32 [num_windows * HEIGHT]: vertex, -1 - slot, or NOWHERE
    degrees: tl.tensor,  # *int32 [num_rows]; read if MEAN
    num_tiles: tl.tensor,
    x_stride: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    MEAN: tl.constexpr,
    PRECISION: tl.constexpr,
    HEIGHT: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Multiply the tiles of a window with a block of feature columns."""
    blocks: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    window = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) // blocks).to(tl.int64)
    channel = (tl.program_id(1) % blocks) * WIDTH + tl.arange(0, WIDTH)
    in_row = channel < CHANNELS
    offset = head * CHANNELS + channel
    row = tl.arange(0, HEIGHT)
    slot = tl.arange(0, TILE_COLUMNS)
    within = row[:, None] * TILE_COLUMNS + slot[None, :]
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)  # stays in registers over all tiles of the window
    first = tl.load(tile_ptr + window)
    last = tl.load(tile_ptr + window + 1)
    for tile in range(first, last):
        dense = tl.load(tiles + (head * num_tiles + tile) * (HEIGHT * TILE_COLUMNS) + within)
        # Each row of x is read once for the window, where rows_kernel reads it once per entry: that is what tiles save,
        # and what the zeros that they multiply must not cost.
        column = tl.load(columns + tile * TILE_COLUMNS + slot).to(tl.int64)
        # Padding is read as 0, not as some row: 0 times its values would be NaN if they are infinite.
        values = tl.load(
            x + column[:, None] * x_stride + offset[None, :], mask=(column >= 0)[:, None] & in_row[None, :], other=0.0
        )
        total = tl.dot(dense, values, total, input_precision=PRECISION)
    # The rows of a window are HEIGHT different vertices, each with a place of its own: two masked stores.
    place = tl.load(places + window * HEIGHT + row).to(tl.int64)
    if MEAN:
        degree = tl.load(degrees + place, mask=place >= 0, other=1)
        total = total / tl.maximum(degree, 1).to(tl.float32)[:, None]
    stride: tl.constexpr = HEADS * CHANNELS
    to_out = (place >= 0)[:, None] & in_row[None, :]
    tl.store(out + place[:, None] * stride + offset[None, :], total.to(out.dtype.element_ty), mask=to_out)
    in_slot = ((place < 0) & (place > _NOWHERE))[:, None] & in_row[None, :]
    tl.store(scratch + (-1 - place)[:, None] * stride + offset[None, :], total, mask=in_slot)


def multiply_tiles(
    x: Tensor,
    weight: Tensor | None,
    base: Base,
    tiles: Tiles,
    mean: bool,
    tf32: bool,
    out: Tensor,
    scratch: Tensor,
) -> None:
    """Write the sums of the windows of dense chunks.

    Args:
        x: float32, float16 or bfloat16 ``[num_columns, H, C]``, the last two dimensions adjacent.
        weight: float ``[E, H]``, contiguous, or None; rounded to the dtype of ``x``.
        tf32: float32 may be rounded to TF32.
        out: ``[num_rows, H, C]``, contiguous.
        scratch: float32 ``[num_slots, H, C]``, contiguous.
    """
    heads, channels = x.shape[1:] if weight is not None else (1, x.size(1) * x.size(2))
    if heads * channels == 0:
        return
    cells = HEIGHT * TILE_COLUMNS
    dense = torch.zeros(heads * tiles.num_tiles * cells, dtype=x.dtype, device=x.device)
    if tiles.cells.numel():
        densify_kernel[triton.cdiv(tiles.cells.numel(), _CELLS), heads](
            dense,
            x if weight is None else weight,
            tiles.entries,
            tiles.cells,
            tiles.cell_ptr,
            tiles.cells.numel(),
            tiles.num_tiles,
            HEADS=heads,
            WEIGHTED=weight is not None,
            ACC=accumulator(x.dtype),
            TILE_CELLS=cells,
            CELLS=_CELLS,
            num_warps=NUM_WARPS,
        )
    width = tile_width(channels)
    tiles_kernel[tiles.num_windows, heads * triton.cdiv(channels, width)](
        out,
        scratch,
        x,
        dense,
        tiles.ptr,
        tiles.columns,
        tiles.places,
        base.degrees,
        tiles.num_tiles,
        x_stride=x.stride(0),
        HEADS=heads,
        CHANNELS=channels,
        MEAN=mean,
        PRECISION="tf32" if tf32 else "ieee",
        HEIGHT=HEIGHT,
        TILE_COLUMNS=TILE_COLUMNS,
        WIDTH=width,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def tile_width(channels: int) -> int:
    """Choose the feature columns of a program: a power of 2 from 16, the least of a dot, to 128."""
    return int(least_padding(max(16, min(128, triton.next_power_of_2(channels))), channels))
