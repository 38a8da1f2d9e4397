"""Attention on a GPU: softmax over the entries of each row, its gradient, and dot products of an entry's endpoints.

A program of one warp takes a part of a row, and completes a row of one part. The parts of a split row write their
statistics to slots, which are combined in order; a second launch over these parts completes them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gnn.triton_kernels.aggregate import MAX_ENTRIES, Block, accumulator, load_weight, same
from lightning_gnn.triton_kernels.row_parts import RowParts

_SCORES_PER_PROGRAM = 256
_MAX_SCORE_ENTRIES = 64


@triton.jit
def softmax_kernel(
    out: tl.tensor,  # the scores' type [E, HEADS]
    stats: tl.tensor,  # *ACC [num_slots, 2, HEADS]: maximum, sum of exponentials
    source: tl.tensor,  # [num_columns, HEADS]
    target: tl.tensor,  # [num_rows, HEADS]
    indices: tl.tensor,  # *int32 [E]
    starts: tl.tensor,  # *int64 [P]
    stops: tl.tensor,  # *int64 [P]
    vertices: tl.tensor,  # *int32 [P]
    places: tl.tensor,  # *int32 [P]: vertex, or -1 - slot
    shared: tl.tensor,  # *int32 [programs]: the parts, if FINISH
    NEGATIVE_SLOPE: tl.constexpr,  # as an argument it would be rounded to float32
    HEADS: tl.constexpr,
    FINISH: tl.constexpr,
    ACC: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
) -> None:
    """Write ``softmax(leaky_relu(source[column] + target[row]))`` of a whole row, or the statistics of a part."""
    part = tl.program_id(0)
    if FINISH:
        part = tl.load(shared + part)
    start = tl.load(starts + part)
    stop = tl.load(stops + part)
    place = tl.load(places + part).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    inside = head < HEADS
    row_score = tl.load(target + tl.load(vertices + part).to(tl.int64) * HEADS + head, mask=inside, other=0.0).to(ACC)
    slot = stats + (-1 - place) * (2 * HEADS) + head
    # First the maximum and the sum of exponentials; if FINISH, the slots contain them.
    if FINISH:
        highest = tl.load(slot, mask=inside, other=0.0)
        total = tl.load(slot + HEADS, mask=inside, other=1.0)
    else:
        # Both in one pass ("online softmax"): a new maximum rescales the sum so far. One maximum and one sum for each
        # of the ENTRIES read together, combined after the loop.
        top = tl.full([ENTRIES, HEAD_TILE], float("-inf"), ACC)
        sums = tl.zeros([ENTRIES, HEAD_TILE], ACC)
        for first in range(start, stop, ENTRIES):
            entry = first + tl.arange(0, ENTRIES)
            wanted = (entry < stop)[:, None] & inside[None, :]
            score = _score(source, row_score, indices, entry, stop, head, wanted, NEGATIVE_SLOPE, HEADS, ACC)
            score = tl.where(wanted, score, float("-inf"))
            higher = tl.maximum(top, score)
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # avoids inf - inf in a lane without entries
            sums = sums * tl.exp(top - shift) + tl.exp(score - shift)
            top = higher
        highest = tl.max(top, axis=0)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(sums * tl.exp(top - shift[None, :]), axis=0)
    # Then the weights. The scores are recomputed instead of stored: a row may not fit into registers.
    if FINISH or place >= 0:
        for first in range(start, stop, ENTRIES):
            entry = first + tl.arange(0, ENTRIES)
            wanted = (entry < stop)[:, None] & inside[None, :]
            score = _score(source, row_score, indices, entry, stop, head, wanted, NEGATIVE_SLOPE, HEADS, ACC)
            # The same 1e-16 as in torch_geometric.utils.softmax.
            value = tl.exp(score - highest[None, :]) / (total[None, :] + 1e-16)
            at = (entry.to(tl.int64) * HEADS)[:, None] + head[None, :]
            tl.store(out + at, value.to(out.dtype.element_ty), mask=wanted)
    else:
        tl.store(slot, highest, mask=inside)
        tl.store(slot + HEADS, total, mask=inside)


@triton.jit
def _score(
    source: tl.tensor,  # [num_columns, HEADS]
    row_score: tl.tensor,  # ACC [HEAD_TILE], the score of the row
    indices: tl.tensor,  # *int32 [E]
    entry: tl.tensor,  # [ENTRIES]
    stop: tl.tensor,
    head: tl.tensor,  # int32 [HEAD_TILE]
    wanted: tl.tensor,  # mask [ENTRIES, HEAD_TILE]
    NEGATIVE_SLOPE: tl.constexpr,
    HEADS: tl.constexpr,
    ACC: tl.constexpr,
) -> tl.tensor:
    column = tl.load(indices + entry, mask=entry < stop, other=0).to(tl.int64)
    score = tl.load(source + (column * HEADS)[:, None] + head[None, :], mask=wanted, other=0.0).to(ACC)
    score = score + row_score[None, :]
    return tl.where(score > 0, score, score * NEGATIVE_SLOPE)


@triton.jit
def combine_kernel(
    stats: tl.tensor,  # *ACC [num_slots, 2, HEADS], or if not SOFTMAX [num_slots, HEADS]
    slot_ptr: tl.tensor,  # *int64 [S + 1]
    HEADS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    ACC: tl.constexpr,
    HEAD_TILE: tl.constexpr,
) -> None:
    """Combine the statistics of the parts of one row, and write the result to all of its slots."""
    start = tl.load(slot_ptr + tl.program_id(0))
    stop = tl.load(slot_ptr + tl.program_id(0) + 1)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    inside = head < HEADS
    stride: tl.constexpr = 2 * HEADS if SOFTMAX else HEADS
    top = tl.full([HEAD_TILE], float("-inf"), ACC)
    total = tl.zeros([HEAD_TILE], ACC)
    # One program per row, in the order of the slots, without atomics: the same bits each time.
    for slot in range(start, stop):
        at = stats + slot * stride + head
        if SOFTMAX:
            score = tl.load(at, mask=inside, other=0.0)
            higher = tl.maximum(top, score)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            part = tl.load(at + HEADS, mask=inside, other=0.0)
            total = total * tl.exp(top - shift) + part * tl.exp(score - shift)
            top = higher
        else:
            total += tl.load(at, mask=inside, other=0.0)
    # All slots get the result, so each part reads its own slot.
    for slot in range(start, stop):
        at = stats + slot * stride + head
        if SOFTMAX:
            tl.store(at, top, mask=inside)
            tl.store(at + HEADS, total, mask=inside)
        else:
            tl.store(at, total, mask=inside)


@triton.jit
def softmax_backward_kernel(
    out: tl.tensor,  # the scores' type [E, HEADS]
    stats: tl.tensor,  # *ACC [num_slots, HEADS]: sum of weight * grad
    weight: tl.tensor,  # the scores' type [E, HEADS]
    grad: tl.tensor,  # any float [E, HEADS]
    source: tl.tensor,  # [num_columns, HEADS]
    target: tl.tensor,  # [num_rows, HEADS]
    indices: tl.tensor,  # *int32 [E]
    starts: tl.tensor,  # *int64 [P]
    stops: tl.tensor,  # *int64 [P]
    vertices: tl.tensor,  # *int32 [P]
    places: tl.tensor,  # *int32 [P]
    shared: tl.tensor,  # *int32 [programs]: the parts, if FINISH
    NEGATIVE_SLOPE: tl.constexpr,
    HEADS: tl.constexpr,
    FINISH: tl.constexpr,
    ACC: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
) -> None:
    """Write the gradient of ``source[column] + target[row]`` per entry of a whole row, or the statistics of a part."""
    part = tl.program_id(0)
    if FINISH:
        part = tl.load(shared + part)
    start = tl.load(starts + part)
    stop = tl.load(stops + part)
    place = tl.load(places + part).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    inside = head < HEADS
    slot = stats + (-1 - place) * HEADS + head
    # The gradient of softmax is weight * (grad - sum of weight * grad over the row); compute that sum first.
    if FINISH:
        total = tl.load(slot, mask=inside, other=0.0)
    else:
        sums = tl.zeros([ENTRIES, HEAD_TILE], ACC)
        for first in range(start, stop, ENTRIES):
            entry = first + tl.arange(0, ENTRIES)
            wanted = (entry < stop)[:, None] & inside[None, :]
            at = (entry.to(tl.int64) * HEADS)[:, None] + head[None, :]
            value = tl.load(weight + at, mask=wanted, other=0.0).to(ACC)
            sums += value * tl.load(grad + at, mask=wanted, other=0.0).to(ACC)
        total = tl.sum(sums, axis=0)
    if FINISH or place >= 0:
        row = tl.load(vertices + part).to(tl.int64)
        row_score = tl.load(target + row * HEADS + head, mask=inside, other=0.0).to(ACC)
        for first in range(start, stop, ENTRIES):
            entry = first + tl.arange(0, ENTRIES)
            wanted = (entry < stop)[:, None] & inside[None, :]
            at = (entry.to(tl.int64) * HEADS)[:, None] + head[None, :]
            value = tl.load(weight + at, mask=wanted, other=0.0).to(ACC)
            value = value * (tl.load(grad + at, mask=wanted, other=0.0).to(ACC) - total[None, :])
            column = tl.load(indices + entry, mask=entry < stop, other=0).to(tl.int64)
            score = tl.load(source + (column * HEADS)[:, None] + head[None, :], mask=wanted, other=0.0).to(ACC)
            # Through the leaky ReLU, which depends on the sign of the score before it.
            value = tl.where(score + row_score[None, :] > 0, value, value * NEGATIVE_SLOPE)
            tl.store(out + at, value.to(out.dtype.element_ty), mask=wanted)
    else:
        tl.store(slot, total, mask=inside)


@triton.jit
def products_kernel(
    out: tl.tensor,  # any float [E, HEADS]
    row_values: tl.tensor,  # [num_rows, HEADS * CHANNELS], rows row_stride apart
    column_values: tl.tensor,  # [num_columns, HEADS * CHANNELS], rows column_stride apart
    indices: tl.tensor,  # *int32 [E]
    best: tl.tensor,  # [num_rows, HEADS * CHANNELS]: maximum that each row received; read if MATCH
    weight: tl.tensor,  # [E, HEADS]; read if MATCH
    starts: tl.tensor,  # *int64 [P]
    stops: tl.tensor,  # *int64 [P]
    vertices: tl.tensor,  # *int32 [P]
    row_stride: tl.constexpr,
    column_stride: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    MATCH: tl.constexpr,
    ACC: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write the endpoints' dot product per entry and head; if MATCH, over the channels that attained the maximum."""
    part = tl.program_id(0)
    start = tl.load(starts + part)
    stop = tl.load(stops + part)
    row = tl.load(vertices + part).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    for first in range(start, stop, ENTRIES):
        entry = first + tl.arange(0, ENTRIES).to(tl.int64)
        valid = entry < stop
        column = tl.load(indices + entry, mask=valid, other=0).to(tl.int64)
        # The columns of a head, block by block; after the first entries, the row's own values come from a cache.
        total = tl.zeros([ENTRIES, HEAD_TILE, WIDTH], ACC)
        for block in range(0, CHANNELS, WIDTH):
            channel = block + tl.arange(0, WIDTH)
            inside = (head < HEADS)[:, None] & (channel < CHANNELS)[None, :]
            offset = head[:, None] * CHANNELS + channel[None, :]
            left = tl.load(row_values + row * row_stride + offset, mask=inside, other=0.0).to(ACC)
            at = (column * column_stride)[:, None, None] + offset[None, :, :]
            right = tl.load(column_values + at, mask=valid[:, None, None] & inside[None, :, :], other=0.0).to(ACC)
            product = left[None, :, :] * right
            if MATCH:
                most = tl.load(best + row * (HEADS * CHANNELS) + offset, mask=inside, other=0.0).to(ACC)
                factor = load_weight(weight, entry, valid, head, HEADS).to(ACC)
                product = tl.where(same(right * factor[:, :, None], most[None, :, :]), product, 0.0)
            total += product
        at = (entry * HEADS)[:, None] + head[None, :]
        wanted = valid[:, None] & (head < HEADS)[None, :]
        tl.store(out + at, tl.sum(total, axis=2).to(out.dtype.element_ty), mask=wanted)


def score_block(heads: int) -> Block:
    """Choose the entries and heads that a softmax program takes at a time."""
    together = min(triton.next_power_of_2(heads), 32)
    return Block(min(_MAX_SCORE_ENTRIES, _SCORES_PER_PROGRAM // together), together, 1)


def product_block(heads: int, channels: int, dtype: torch.dtype) -> Block:
    """Choose the entries, heads and feature columns that a program of the dot products takes at a time."""
    tile = 1024 if dtype.itemsize <= 4 else 256  # values in flight; float64 needs twice the registers
    width = min(triton.next_power_of_2(channels), 128)
    together = min(triton.next_power_of_2(heads), max(1, 128 // width))
    return Block(max(1, min(MAX_ENTRIES, tile // (width * together))), together, width)


def edge_softmax(source: Tensor, target: Tensor, negative_slope: float, rows: RowParts, out: Tensor) -> None:
    """Write ``softmax(leaky_relu(source[column] + target[row]))`` over each row; scores are contiguous ``[n, H]``."""
    _launch_passes(softmax_kernel, True, (source, target), negative_slope, rows, out)


def edge_softmax_backward(
    grad: Tensor,  # gradient of the weights, float [E, H], contiguous
    weight: Tensor,  # weights from edge_softmax, [E, H], contiguous
    source: Tensor,  # scores of the columns [num_columns, H], contiguous
    target: Tensor,  # scores of the rows [num_rows, H], contiguous
    negative_slope: float,
    rows: RowParts,
    out: Tensor,  # [E, H], of the dtype of the scores, contiguous
) -> None:
    """Write the gradient of the sum of both scores, per entry; the gradient of a score is the sum over its entries."""
    _launch_passes(softmax_backward_kernel, False, (weight, grad, source, target), negative_slope, rows, out)


def _launch_passes(
    kernel: Any, softmax: bool, arrays: tuple[Tensor, ...], negative_slope: float, rows: RowParts, out: Tensor
) -> None:
    """Launch a kernel over all parts, combine the statistics of split rows, and launch it over their parts again."""
    heads = out.size(1)
    if rows.num_parts == 0 or out.numel() == 0:
        return
    # Statistics of split rows are accumulated in float64 or float32.
    acc = torch.float64 if out.dtype == torch.float64 else torch.float32
    stats = torch.empty((rows.num_slots, 2 if softmax else 1, heads), dtype=acc, device=out.device)
    block = score_block(heads)
    groups = triton.cdiv(heads, block.heads)
    acc_type = accumulator(acc)

    # Both passes take the same arguments; a program handles one part and one tile of heads.
    def launch(programs: int, finish: bool) -> None:
        kernel[programs, groups](
            out,
            stats,
            *arrays,
            rows.indices,
            rows.starts,
            rows.stops,
            rows.vertices,
            rows.places,
            rows.shared,
            NEGATIVE_SLOPE=negative_slope,
            HEADS=heads,
            FINISH=finish,
            ACC=acc_type,
            ENTRIES=block.entries,
            HEAD_TILE=block.heads,
            num_warps=1,
        )

    # The first pass completes rows of one part, and writes the statistics of all other parts.
    launch(rows.num_parts, False)
    # Combine the statistics of split rows, then complete their parts.
    if rows.num_slots:
        combine_kernel[rows.slot_vertices.numel(), groups](
            stats, rows.slot_ptr, HEADS=heads, SOFTMAX=softmax, ACC=acc_type, HEAD_TILE=block.heads, num_warps=1
        )
        launch(rows.num_slots, True)


def edge_products(
    row_values: Tensor,  # float [num_rows, H, C], the last two dimensions adjacent
    column_values: Tensor,  # float [num_columns, H, C], the last two dimensions adjacent
    rows: RowParts,
    out: Tensor,  # float [E, H], contiguous
    match: tuple[Tensor, Tensor] | None = None,  # maximum of each row and edge weights: sum only channels equal to it
) -> None:
    """Write ``out[e, h] = dot(row_values[row, h], column_values[column, h])`` for each entry."""
    # Empty products need no launch.
    heads, channels = row_values.shape[1:]
    if out.numel() == 0:
        return
    if channels == 0:
        out.zero_()
        return
    # Accumulate in float64 if either factor is float64.
    double = torch.float64 in (row_values.dtype, column_values.dtype)
    block = product_block(heads, channels, torch.float64 if double else torch.float32)
    # Any valid tensor replaces an absent match, which is not read.
    best, weight = (row_values, row_values) if match is None else match
    products_kernel[rows.num_parts, triton.cdiv(heads, block.heads)](
        out,
        row_values,
        column_values,
        rows.indices,
        best,
        weight,
        rows.starts,
        rows.stops,
        rows.vertices,
        row_stride=row_values.stride(0),
        column_stride=column_values.stride(0),
        HEADS=heads,
        CHANNELS=channels,
        MATCH=match is not None,
        ACC=accumulator(torch.float64 if double else torch.float32),
        ENTRIES=block.entries,
        HEAD_TILE=block.heads,
        WIDTH=block.width,
        num_warps=1,
    )
