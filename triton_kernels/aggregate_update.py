"""Fused aggregation and update on a GPU: a tile of targets is aggregated in registers, then multiplied by the weights.

A program gathers a slice of the features, one edge of every target of its tile at a time, and multiplies it by the
matching rows of the weights. The targets of a tile wait for the one with the most edges, bounded by the fanout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gnn.triton_kernels.aggregate import block_shape, cache_bytes, launch_rows

ROWS = 32
DEPTH = 64
MAX_WIDTH = 256
NUM_WARPS = 8
NUM_STAGES = 2


@triton.jit(do_not_specialize=["num_targets"])
def update_kernel(
    out: tl.tensor,  # x's type [num_targets, OUT]
    aggregated: tl.tensor,  # x's type [num_targets, IN]; written if KEEP
    x: tl.tensor,  # [num_sources, IN], contiguous
    indptr: tl.tensor,  # *int64 [num_targets + 1]
    indices: tl.tensor,  # *int32 [E]
    edge_weight: tl.tensor,  # any float [E]; read if WEIGHTED
    weight: tl.tensor,  # x's type [OUT, IN]
    self_weight: tl.tensor,  # x's type [OUT, IN]; read if SELF
    bias: tl.tensor,  # x's type [OUT]; read if BIAS
    num_targets: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SELF: tl.constexpr,
    BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write a block of ``reduce of x[indices[e]] @ weight.T + x[row] @ self_weight.T + bias``."""
    # 64-bit offsets: a table exceeds 2^31 values long before it exceeds 2^31 rows.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = row < num_targets
    wanted = column < OUT
    start = tl.load(indptr + row, mask=inside, other=0)
    stop = tl.load(indptr + row + 1, mask=inside, other=0)
    longest = tl.max(stop - start, axis=0)
    result = tl.zeros([ROWS, WIDTH], tl.float32)  # in registers until the end: `aggregated` is written only on request
    for first in range(0, IN, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        in_row = depth < IN
        # Aggregate DEPTH feature columns: edge i of every target of the tile at a time, ROWS gathers in flight.
        total = tl.zeros([ROWS, DEPTH], tl.float32)
        for i in range(longest):
            entry = start + i
            valid = entry < stop
            source = tl.load(indices + entry, mask=valid, other=0).to(tl.int64)
            pointers = x + source[:, None] * IN + depth[None, :]
            values = tl.load(pointers, mask=in_row[None, :], other=0.0).to(tl.float32)
            # Not masked by target, because Triton 3.7 fails on that mask here: targets without more edges read row 0,
            # and the value is discarded below.
            values = tl.where(valid[:, None], values, 0.0)
            if WEIGHTED:
                values = values * tl.load(edge_weight + entry, mask=valid, other=0.0).to(tl.float32)[:, None]
            total += values
        if MEAN:
            # The sum of a target without edges is 0; avoid 0 / 0.
            total = total / tl.maximum(stop - start, 1).to(tl.float32)[:, None]
        # Rounded to the type of x, as if written and read back: the gradient must use the values that were multiplied.
        tile = total.to(x.dtype.element_ty)
        at = row[:, None] * IN + depth[None, :]
        within = inside[:, None] & in_row[None, :]
        if KEEP and tl.program_id(1) == 0:  # programs of further output columns repeat the same aggregation
            tl.store(aggregated + at, tile, mask=within)
        # Update: the slice times the same slice of the weights, which are [OUT, IN] and therefore read transposed.
        turned = column[None, :] * IN + depth[:, None]
        there = wanted[None, :] & in_row[:, None]
        by = tl.load(weight + turned, mask=there, other=0.0)
        result = tl.dot(tile, by, result, input_precision=PRECISION)
        if SELF:
            own = tl.load(x + at, mask=within, other=0.0)
            by = tl.load(self_weight + turned, mask=there, other=0.0)
            result = tl.dot(own, by, result, input_precision=PRECISION)
    if BIAS:
        result += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * OUT + column[None, :],
        result.to(out.dtype.element_ty),
        mask=inside[:, None] & wanted[None, :],
    )


def tile_shape(wide: int, narrow: int) -> dict[str, int]:
    """Choose the tile of a program for the number of input and output columns."""
    return {
        "ROWS": ROWS,
        "DEPTH": min(DEPTH, max(16, triton.next_power_of_2(wide))),
        "WIDTH": min(MAX_WIDTH, max(16, triton.next_power_of_2(narrow))),
    }


def aggregate_update(
    edges: list[Tensor],  # grouped by target: indptr, indices and, if weighted, edge weights
    x: Tensor,  # float32, float16 or bfloat16 [num_sources, in]; all tensors are contiguous and of its dtype
    weight: Tensor,  # [out, in]
    self_weight: Tensor | None,  # [out, in]
    bias: Tensor | None,  # [out]
    mean: bool,  # divide the sums by the number of edges
    tf32: bool,  # float32 may be rounded to TF32 in the product
    out: Tensor,  # [num_targets, out]
    aggregated: Tensor | None,  # [num_targets, in]
) -> None:
    """Write the result to ``out`` and, unless None, the aggregated rows of x to ``aggregated``."""
    # Choose tiles by the widths of the layer.
    indptr, indices, *edge_weight = edges
    num_targets, narrow = out.shape
    shape = tile_shape(x.size(1), narrow)
    # Any valid tensor replaces an absent input, which is not read.
    update_kernel[triton.cdiv(num_targets, shape["ROWS"]), triton.cdiv(narrow, shape["WIDTH"])](
        out,
        out if aggregated is None else aggregated,
        x,
        indptr,
        indices,
        edge_weight[0] if edge_weight else x,
        weight,
        weight if self_weight is None else self_weight,
        weight if bias is None else bias,
        num_targets,
        IN=x.size(1),
        OUT=narrow,
        MEAN=mean,
        WEIGHTED=bool(edge_weight),
        SELF=self_weight is not None,
        BIAS=bias is not None,
        KEEP=aggregated is not None,
        PRECISION="tf32" if tf32 else "ieee",
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        **shape,
    )


def sum_rows(edges: list[Tensor], x: Tensor, mean: bool, out: Tensor) -> None:
    """Write the sums (or means) over the edges of each row, ``[num_rows, D]``; a program takes one column block."""
    indptr, indices, *weight = edges
    block = block_shape(x.size(0), 1, x.size(1), x.dtype, cache_bytes(x.device))
    rows = torch.arange(out.size(0), dtype=torch.int32, device=x.device)
    parts = indptr[:-1], indptr[1:], rows, rows
    degrees = indptr.diff().to(torch.int32) if mean else None
    # No row is split, so no scratch table is needed.
    launch_rows(out, out, x.unsqueeze(1), indices, weight[0] if weight else None, parts, degrees, block)
