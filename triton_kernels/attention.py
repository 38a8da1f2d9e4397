"""Attention over the sorted edges of a mini-batch on a GPU: scores, softmax and sums in one pass, and its gradients.

A program takes ROWS rows and HEAD_TILE heads of all channels; each step of its loop adds one entry of each row, in
order. The softmax is computed online (arXiv:1805.02867), and only the logarithm of its denominator is stored: the
backward pass recomputes the weights from it. There are no atomics, so the same call gives the same bits.

Common arguments; ``head`` reads columns ``head * STEP`` to ``head * STEP + CHANNELS`` of values and keys:

- ``values`` ``[num_sources, COLUMNS]``; ``keys``: like ``values``, the vectors that are scored, read if KEYED;
- ``side`` ``[num_sides, HEADS * CHANNELS]``; ``sides`` int32 ``[num_rows]``: side of each row, read unless ONE_SIDE;
- ``shift`` ``[num_rows, HEADS]``, if DYNAMIC ``[num_rows, HEADS * CHANNELS]``;
- ``factor``: any float ``[E, HEADS]``, read if FACTORED;
- ``lse``: *ACC ``[num_rows, HEADS]``, logarithm of the sum of the exponentials of the softmax of each row;
- ``SLOPE``: the negative slope of the leaky ReLU, a constant because an argument would be rounded to float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gnn.triton_kernels.aggregate import accumulator

_PROGRAMS = 1056  # programs that sum the gradient of a single side, at least 8 for each multiprocessor of an H100
_VALUES = 256  # elements that a warp holds of each operand


@triton.jit
def score_entries(
    read: tl.tensor, side: tl.tensor, shift: tl.tensor, SLOPE: tl.constexpr, DYNAMIC: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return scores ``[rows, heads]``, and the argument of their leaky ReLU."""
    if DYNAMIC:
        z = read + shift
        score = tl.sum(tl.where(z > 0, z, z * SLOPE) * side, 2)
    else:
        z = tl.sum(read * side, 2) + shift
        score = tl.where(z > 0, z, z * SLOPE)
    return score, z


@triton.jit(do_not_specialize=["num_rows"])
def attend_kernel(
    out: tl.tensor,  # values' type [num_rows, HEADS * CHANNELS]
    mass: tl.tensor,  # values' type [num_rows, HEADS]: sum of the weights; written if MASS
    lse: tl.tensor,  # of the row itself; -inf without entries
    values: tl.tensor,
    keys: tl.tensor,
    side: tl.tensor,
    sides: tl.tensor,
    shift: tl.tensor,
    factor: tl.tensor,
    indptr: tl.tensor,  # *int64 [num_rows + 1]
    indices: tl.tensor,  # *int32 [E]
    num_rows: tl.tensor,
    SLOPE: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYED: tl.constexpr,
    ONE_SIDE: tl.constexpr,
    DYNAMIC: tl.constexpr,
    FACTORED: tl.constexpr,
    MASS: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Sum the values of each row's entries, weighted by the softmax of their scores over the row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    channel = tl.arange(0, WIDTH)
    on = row < num_rows
    inside = ((head < HEADS)[:, None] & (channel < CHANNELS)[None, :])[None, :, :]
    offset = (head[:, None] * CHANNELS + channel[None, :])[None, :, :]
    column = (head[:, None] * STEP + channel[None, :])[None, :, :]
    own = (row * (HEADS * CHANNELS))[:, None, None] + offset
    own_head = (row * HEADS)[:, None] + head[None, :]
    here, here_head = on[:, None, None] & inside, on[:, None] & (head < HEADS)[None, :]
    start = tl.load(indptr + row, mask=on, other=0)
    stop = tl.load(indptr + row + 1, mask=on, other=0)
    most = tl.max(stop - start, 0)
    if ONE_SIDE:
        a = tl.load(side + offset, mask=inside, other=0.0).to(ACC)
    else:
        number = tl.load(sides + row, mask=on, other=0).to(tl.int64)
        a = tl.load(side + (number * (HEADS * CHANNELS))[:, None, None] + offset, mask=here, other=0.0).to(ACC)
    if DYNAMIC:
        moved = tl.load(shift + own, mask=here, other=0.0).to(ACC)
    else:
        moved = tl.load(shift + own_head, mask=here_head, other=0.0).to(ACC)
    top = tl.full([ROWS, HEAD_TILE], float("-inf"), ACC)
    total = tl.zeros([ROWS, HEAD_TILE], ACC)
    kept = tl.zeros([ROWS, HEAD_TILE], ACC)
    sums = tl.zeros([ROWS, HEAD_TILE, WIDTH], ACC)
    step = 0
    while step < most:
        entry = start + step
        valid = entry < stop
        source = tl.load(indices + entry, mask=valid, other=0).to(tl.int64)
        there = valid[:, None, None] & inside
        at = (source * COLUMNS)[:, None, None] + column
        read = tl.load(values + at, mask=there, other=0.0).to(ACC)
        key = read
        if KEYED:
            key = tl.load(keys + at, mask=there, other=0.0).to(ACC)
        score, _ = score_entries(key, a, moved, SLOPE, DYNAMIC)
        score = tl.where(valid[:, None], score, float("-inf"))
        # A new maximum rescales the sums so far; NaN never becomes the maximum, but enters the sums.
        higher = tl.maximum(top, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        old = tl.exp(top - base)
        share = tl.exp(score - base)
        total = total * old + share
        if FACTORED:
            there_head = valid[:, None] & (head < HEADS)[None, :]
            share *= tl.load(factor + (entry * HEADS)[:, None] + head[None, :], mask=there_head, other=0.0).to(ACC)
        if MASS:
            kept = kept * old + share
        sums = sums * old[:, :, None] + share[:, :, None] * read
        top = higher
        step += 1
    # The largest share of a softmax is 1, so that its total is at least 1 or, without entries, 0.
    divisor = tl.where(total == 0, 1.0, total)
    tl.store(out + own, (sums / divisor[:, :, None]).to(out.dtype.element_ty), mask=here)
    tl.store(lse + own_head, top + tl.log(divisor), mask=here_head)
    if MASS:
        tl.store(mass + own_head, (kept / divisor).to(mass.dtype.element_ty), mask=here_head)


@triton.jit(do_not_specialize=["num_sources"])
def source_gradients_kernel(
    grad_values: tl.tensor,  # values' type [num_sources, COLUMNS]; if STEP is 0, a table for each tile of heads
    grad_keys: tl.tensor,  # keys' type [num_sources, COLUMNS]; written if KEYED
    grad_scores: tl.tensor,  # *ACC [E, HEADS]: gradient of each score, unless DYNAMIC before the leaky ReLU
    partial: tl.tensor,  # *ACC [programs, HEADS * CHANNELS]: parts of the gradient of side; written if ONE_SIDE
    grad: tl.tensor,  # values' type [num_rows, HEADS * CHANNELS]: gradient of the sums
    grad_mass: tl.tensor,  # values' type [num_rows, HEADS]; read if MASS
    delta: tl.tensor,  # *ACC [num_rows, HEADS]: sum over each row's softmax of weight times its gradient
    lse: tl.tensor,
    values: tl.tensor,
    keys: tl.tensor,
    side: tl.tensor,
    sides: tl.tensor,
    shift: tl.tensor,
    factor: tl.tensor,
    indptr: tl.tensor,  # *int64 [num_sources + 1]
    rows: tl.tensor,  # *int64 [E]: row that each entry belongs to
    edges: tl.tensor,  # *int64 [E]: number of each entry's edge
    num_sources: tl.tensor,
    SLOPE: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYED: tl.constexpr,
    ONE_SIDE: tl.constexpr,
    DYNAMIC: tl.constexpr,
    FACTORED: tl.constexpr,
    MASS: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute all gradients that need a source's values, which are read once."""
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    channel = tl.arange(0, WIDTH)
    inside = ((head < HEADS)[:, None] & (channel < CHANNELS)[None, :])[None, :, :]
    offset = (head[:, None] * CHANNELS + channel[None, :])[None, :, :]
    column = (head[:, None] * STEP + channel[None, :])[None, :, :]
    if ONE_SIDE:
        a = tl.load(side + offset, mask=inside, other=0.0).to(ACC)
    grad_side = tl.zeros([ROWS, HEAD_TILE, WIDTH], ACC)
    block = tl.program_id(0)
    while block * ROWS < num_sources:
        source = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        on = source < num_sources
        here = on[:, None, None] & inside
        own = (source * COLUMNS)[:, None, None] + column
        v = tl.load(values + own, mask=here, other=0.0).to(ACC)
        k = v
        if KEYED:
            k = tl.load(keys + own, mask=here, other=0.0).to(ACC)
        if ONE_SIDE and not DYNAMIC:
            product = tl.sum(k * a, 2)
        start = tl.load(indptr + source, mask=on, other=0)
        stop = tl.load(indptr + source + 1, mask=on, other=0)
        most = tl.max(stop - start, 0)
        total = tl.zeros([ROWS, HEAD_TILE, WIDTH], ACC)
        key_total = tl.zeros([ROWS, HEAD_TILE, WIDTH], ACC)
        scores = tl.zeros([ROWS, HEAD_TILE], ACC)
        step = 0
        while step < most:
            entry = start + step
            valid = entry < stop
            row = tl.load(rows + entry, mask=valid, other=0)
            edge = tl.load(edges + entry, mask=valid, other=0)
            there = valid[:, None, None] & inside
            there_head = valid[:, None] & (head < HEADS)[None, :]
            at = (row * (HEADS * CHANNELS))[:, None, None] + offset
            at_head = (row * HEADS)[:, None] + head[None, :]
            at_edge = (edge * HEADS)[:, None] + head[None, :]
            g = tl.load(grad + at, mask=there, other=0.0).to(ACC)
            if not ONE_SIDE:
                number = tl.load(sides + row, mask=valid, other=0).to(tl.int64)
                a = tl.load(side + (number * (HEADS * CHANNELS))[:, None, None] + offset, mask=there, other=0.0).to(ACC)
            # Recompute the weight.
            if DYNAMIC:
                moved = tl.load(shift + at, mask=there, other=0.0).to(ACC)
                score, z = score_entries(k, a, moved, SLOPE, DYNAMIC)
            else:
                moved = tl.load(shift + at_head, mask=there_head, other=0.0).to(ACC)
                if ONE_SIDE:
                    z = product + moved
                    score = tl.where(z > 0, z, z * SLOPE)
                else:
                    score, z = score_entries(k, a, moved, SLOPE, DYNAMIC)
            share = tl.exp(score - tl.load(lse + at_head, mask=there_head, other=0.0))
            share = tl.where(there_head, share, 0.0)
            # The gradient of the softmax is weight * (gradient of the weight - weighted mean of these gradients).
            change = tl.sum(g * v, 2)
            if MASS:
                change += tl.load(grad_mass + at_head, mask=there_head, other=0.0).to(ACC)
            kept = share
            if FACTORED:
                scale = tl.load(factor + at_edge, mask=there_head, other=0.0).to(ACC)
                change *= scale
                kept *= scale
            change = share * (change - tl.load(delta + at_head, mask=there_head, other=0.0))
            total += kept[:, :, None] * g
            if DYNAMIC:
                slopes = tl.where(z > 0, change[:, :, None], change[:, :, None] * SLOPE)
                total += slopes * a
                grad_side += slopes * z  # leaky_relu(z) is z times its slope
            else:
                change = tl.where(z > 0, change, change * SLOPE)
                if ONE_SIDE:
                    scores += change
                elif KEYED:
                    key_total += change[:, :, None] * a
                else:
                    total += change[:, :, None] * a
            tl.store(grad_scores + at_edge, change, mask=there_head)
            step += 1
        if ONE_SIDE and not DYNAMIC:
            total += scores[:, :, None] * a
            grad_side += scores[:, :, None] * v
        if STEP == 0:
            # Heads that read the same columns add to the same gradient, a table for each tile of them.
            place = ((tl.program_id(1) * num_sources + source) * CHANNELS)[:, None] + channel[None, :]
            wanted = on[:, None] & (channel < CHANNELS)[None, :]
            tl.store(grad_values + place, tl.sum(total, 1).to(grad_values.dtype.element_ty), mask=wanted)
        else:
            tl.store(grad_values + own, total.to(grad_values.dtype.element_ty), mask=here)
        if KEYED:
            tl.store(grad_keys + own, key_total.to(grad_keys.dtype.element_ty), mask=here)
        block += tl.num_programs(0)
    if ONE_SIDE:
        at_side = tl.program_id(0).to(tl.int64) * (HEADS * CHANNELS) + offset
        tl.store(partial + at_side, tl.sum(grad_side, 0)[None, :, :], mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def row_gradients_kernel(
    grad_shift: tl.tensor,  # shift's type and shape
    grad_side: tl.tensor,  # *ACC [num_rows, HEADS * CHANNELS]; written unless ONE_SIDE
    grad_scores: tl.tensor,  # *ACC [E, HEADS]
    keys: tl.tensor,  # the values without keys; read if DYNAMIC or unless ONE_SIDE
    side: tl.tensor,  # read if DYNAMIC
    shift: tl.tensor,  # read if DYNAMIC
    indptr: tl.tensor,  # *int64 [num_rows + 1]
    indices: tl.tensor,  # *int32 [E]
    num_rows: tl.tensor,
    SLOPE: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_SIDE: tl.constexpr,
    DYNAMIC: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Sum the gradients of the scores of each row's entries to those of shift, and of the row's own side."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    channel = tl.arange(0, WIDTH)
    on = row < num_rows
    inside = ((head < HEADS)[:, None] & (channel < CHANNELS)[None, :])[None, :, :]
    offset = (head[:, None] * CHANNELS + channel[None, :])[None, :, :]
    column = (head[:, None] * STEP + channel[None, :])[None, :, :]
    own = (row * (HEADS * CHANNELS))[:, None, None] + offset
    own_head = (row * HEADS)[:, None] + head[None, :]
    here, here_head = on[:, None, None] & inside, on[:, None] & (head < HEADS)[None, :]
    start = tl.load(indptr + row, mask=on, other=0)
    stop = tl.load(indptr + row + 1, mask=on, other=0)
    most = tl.max(stop - start, 0)
    if DYNAMIC:
        a = tl.load(side + offset, mask=inside, other=0.0).to(ACC)
        moved = tl.load(shift + own, mask=here, other=0.0).to(ACC)
    scores = tl.zeros([ROWS, HEAD_TILE], ACC)
    total = tl.zeros([ROWS, HEAD_TILE, WIDTH], ACC)
    step = 0
    while step < most:
        entry = start + step
        valid = entry < stop
        there_head = valid[:, None] & (head < HEADS)[None, :]
        change = tl.load(grad_scores + (entry * HEADS)[:, None] + head[None, :], mask=there_head, other=0.0)
        if DYNAMIC or not ONE_SIDE:
            source = tl.load(indices + entry, mask=valid, other=0).to(tl.int64)
            there = valid[:, None, None] & inside
            read = tl.load(keys + (source * COLUMNS)[:, None, None] + column, mask=there, other=0.0).to(ACC)
        if DYNAMIC:
            z = read + moved
            total += tl.where(z > 0, change[:, :, None], change[:, :, None] * SLOPE) * a
        else:
            scores += change
            if not ONE_SIDE:
                total += change[:, :, None] * read
        step += 1
    if DYNAMIC:
        tl.store(grad_shift + own, total.to(grad_shift.dtype.element_ty), mask=here)
    else:
        tl.store(grad_shift + own_head, scores.to(grad_shift.dtype.element_ty), mask=here_head)
        if not ONE_SIDE:
            tl.store(grad_side + own, total, mask=here)


class Inputs(NamedTuple):
    """The inputs of a call, contiguous; see the module for their shapes."""

    values: Tensor
    keys: Tensor | None  # only with several sides
    side: Tensor  # [num_sides, heads, channels]
    sides: Tensor | None  # None for a single side
    shift: Tensor
    factor: Tensor | None
    shared: bool  # all heads read the same columns
    slope: float
    dynamic: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the kernels' arguments; any valid tensor replaces an absent one."""
        given = self.values, self.keys, self.side, self.sides, self.shift, self.factor
        return tuple(self.values if tensor is None else tensor for tensor in given)

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that all kernels have."""
        _, heads, channels = self.side.shape
        return {
            "SLOPE": self.slope,
            "HEADS": heads,
            "CHANNELS": channels,
            "STEP": 0 if self.shared else channels,
            "COLUMNS": self.values.size(1),
            "ONE_SIDE": self.sides is None,
            "DYNAMIC": self.dynamic,
            "ACC": accumulator(self.values.dtype),
        }

    def block(self) -> dict[str, Any]:
        """Return the shape of a program's block."""
        return block_shape(*self.side.shape[1:])


def block_shape(heads: int, channels: int) -> dict[str, Any]:
    """Return rows, heads and columns of a program: one warp up to 256 channels, so that no sum needs a barrier."""
    width = max(2, triton.next_power_of_2(channels))
    tile = min(triton.next_power_of_2(heads), max(1, 2 * _VALUES // width))
    warps = min(8, max(1, width // _VALUES))
    rows = max(1, _VALUES // (width * tile))
    # A product that is fused into a sum across threads would give the threads different last bits, and which of them is
    # stored is not defined.
    return {"ROWS": rows, "HEAD_TILE": tile, "WIDTH": width, "num_warps": warps, "enable_fp_fusion": False}


def attend(inputs: Inputs, edges: list[Tensor], out: Tensor, mass: Tensor, lse: Tensor) -> None:
    """Write the sums, the sum of the weights unless ``mass`` is empty, and the logarithms of the denominators."""
    num_rows, heads, block = lse.size(0), lse.size(1), inputs.block()
    attend_kernel[triton.cdiv(num_rows, block["ROWS"]), triton.cdiv(heads, block["HEAD_TILE"])](
        out,
        mass,
        lse,
        *inputs.tensors,
        *edges,
        num_rows,
        KEYED=inputs.keys is not None,
        FACTORED=inputs.factor is not None,
        MASS=mass.numel() > 0,
        **inputs.constants,
        **block,
    )


def source_gradients(
    inputs: Inputs,
    by_source: list[Tensor],  # indptr, rows and edges
    grads: tuple[Tensor, Tensor, Tensor, Tensor],  # grad, grad_mass, delta and lse
    grad_scores: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Write the gradients of the scores; return those of values, keys, and a single side."""
    values, (_, heads, channels), block = inputs.values, inputs.side.shape, inputs.block()
    tiles = triton.cdiv(heads, block["HEAD_TILE"])
    programs = min(_PROGRAMS, triton.cdiv(values.size(0), block["ROWS"]))
    separate = inputs.shared and tiles > 1
    shape = (tiles, *values.shape) if separate else values.shape
    grad_values = values.new_empty(shape, dtype=grad_scores.dtype if separate else values.dtype)
    grad_keys = None if inputs.keys is None else torch.empty_like(inputs.keys)
    partial = grad_scores.new_empty(programs, heads, channels) if inputs.sides is None else grad_scores
    source_gradients_kernel[programs, tiles](
        grad_values,
        grad_values if grad_keys is None else grad_keys,
        grad_scores,
        partial,
        *grads,
        *inputs.tensors,
        *by_source,
        values.size(0),
        KEYED=inputs.keys is not None,
        FACTORED=inputs.factor is not None,
        MASS=grads[1].numel() > 0,
        **inputs.constants,
        **block,
    )
    if separate:
        grad_values = grad_values.sum(0).to(values.dtype)
    return grad_values, grad_keys, partial.sum(0, keepdim=True) if inputs.sides is None else None


def row_gradients(inputs: Inputs, edges: list[Tensor], grad_scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of shift, and of each row's side ``[num_rows, heads, channels]`` if there are several."""
    (_, heads, channels), block, num_rows = inputs.side.shape, inputs.block(), edges[0].numel() - 1
    grad_shift, grad_side = torch.empty_like(inputs.shift), None
    if inputs.sides is not None:
        grad_side = grad_scores.new_empty(num_rows, heads, channels)
    elif not inputs.dynamic:  # reads no values
        block |= {"ROWS": max(1, 2 * _VALUES // block["HEAD_TILE"]), "WIDTH": 2, "num_warps": 4}
    row_gradients_kernel[triton.cdiv(num_rows, block["ROWS"]), triton.cdiv(heads, block["HEAD_TILE"])](
        grad_shift,
        grad_shift if grad_side is None else grad_side,
        grad_scores,
        inputs.values if inputs.keys is None else inputs.keys,
        inputs.side,
        inputs.shift,
        *edges,
        num_rows,
        **inputs.constants,
        **block,
    )
    return grad_shift, grad_side
