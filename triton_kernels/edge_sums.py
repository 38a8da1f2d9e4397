"""Sums and maxima over the edges of a mini-batch layer, forward and backward.

A program takes ROWS rows and WIDTH columns, and in each step the next entry of each row: loads of a step are
independent, nothing is summed across threads, and rows of a hop have similar degrees. Rows of more than LONGEST
entries, such as the out-edges of a hub, are left to a second launch, whose programs take ROWS entries of one row at a
time. It finds them itself, so that the host does not wait. There are no atomics: the same call gives the same bits.
Offsets are int32, because Triton 3.7 does not compile means of some widths with int64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gnn.triton_kernels.aggregate import accumulator, same

LONGEST = 64  # entries of a row that a program may take one after the other
_LONG_PROGRAMS = 264  # per block of columns; 2 per multiprocessor of an H100
NO_OWN, OWN_ADDED, OWN_BESIDE = 0, 1, 2


@triton.jit
def entry_values(
    x: tl.tensor, indices: tl.tensor, weight: tl.tensor, over: tl.tensor, at: tl.tensor, valid: tl.tensor,
    column: tl.tensor, inside: tl.tensor, X_STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, DIVIDED: tl.constexpr,
    ACC: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the values ``[entries, columns]`` that entries add to their rows, 0 where not valid."""
    source = tl.load(indices + at, mask=valid, other=0).to(tl.int64)
    there = valid[:, None] & inside[None, :]
    values = tl.load(x + (source * X_STRIDE)[:, None] + column[None, :], mask=there, other=0.0).to(ACC)
    if WEIGHTED:
        values = values * tl.load(weight + at, mask=valid, other=0.0).to(ACC)[:, None]
    if DIVIDED:
        # A row of x that an entry leads to has at least this entry in the forward pass.
        values = values / tl.load(over + source, mask=valid, other=1).to(ACC)[:, None]
    return values


@triton.jit
def store_rows(
    out: tl.tensor, own: tl.tensor, row: tl.tensor, on: tl.tensor, num_own: tl.tensor, column: tl.tensor,
    inside: tl.tensor, total: tl.tensor, degree: tl.tensor, COLUMNS: tl.constexpr, OUT_STRIDE: tl.constexpr,
    OWN_STRIDE: tl.constexpr, MEAN: tl.constexpr, OWN: tl.constexpr, ACC: tl.constexpr,
) -> None:  # fmt: skip
    """Finish sums ``[rows, columns]`` by the mean and the own row, and store them."""
    if MEAN:
        total = total / tl.maximum(degree, 1).to(ACC)[:, None]
    wide = row.to(tl.int64)
    wanted = on[:, None] & inside[None, :]
    if OWN:
        has = on & (row < num_own)
        mine = own + (wide * OWN_STRIDE)[:, None] + column[None, :]
        mine = tl.load(mine, mask=has[:, None] & inside[None, :], other=0.0).to(ACC)
        if OWN == 1:
            total += mine
        else:
            beside = out + (wide * OUT_STRIDE + COLUMNS)[:, None] + column[None, :]
            tl.store(beside, mine.to(out.dtype.element_ty), mask=wanted)
    tl.store(out + (wide * OUT_STRIDE)[:, None] + column[None, :], total.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_rows", "num_own"])
def sum_kernel(
    out: tl.tensor,  # x's type [num_rows, COLUMNS], or 2 * COLUMNS with own rows beside; rows OUT_STRIDE apart
    x: tl.tensor,  # any float [num_sources, COLUMNS], rows X_STRIDE apart
    indptr: tl.tensor,  # *int32 [num_rows + 1]
    indices: tl.tensor,  # *int32 [E]: row of x of each entry
    weight: tl.tensor,  # any float [E]; read if WEIGHTED
    over: tl.tensor,  # *int32 [num_sources]: rows of x are divided by it; read if DIVIDED
    own: tl.tensor,  # any float [num_own, COLUMNS], rows OWN_STRIDE apart; read if OWN
    num_rows: tl.tensor,
    num_own: tl.tensor,  # rows with an own row, the first ones
    COLUMNS: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OWN_STRIDE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIVIDED: tl.constexpr,
    MEAN: tl.constexpr,
    OWN: tl.constexpr,  # 0: none; 1: added to the sum; 2: copied beside it, to columns COLUMNS to 2 * COLUMNS
    LONGEST: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Sum the entries of rows of at most LONGEST entries."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    on, inside = row < num_rows, column < COLUMNS
    start = tl.load(indptr + row, mask=on, other=0)
    stop = tl.load(indptr + row + 1, mask=on, other=0)
    on = on & (stop - start <= LONGEST)
    stop = tl.where(on, stop, start)
    most = tl.max(stop - start, 0)
    total = tl.zeros([ROWS, WIDTH], ACC)
    step = 0
    while step < most:
        # The loads of two entries come first, then their sums in order.
        for u in tl.static_range(2):
            at = start + step + u
            total += entry_values(
                x, indices, weight, over, at, at < stop, column, inside, X_STRIDE, WEIGHTED, DIVIDED, ACC
            )
        step += 2
    store_rows(
        out, own, row, on, num_own, column, inside, total, stop - start, COLUMNS, OUT_STRIDE, OWN_STRIDE, MEAN, OWN, ACC
    )


@triton.jit(do_not_specialize=["num_rows", "num_own"])
def long_sum_kernel(
    out: tl.tensor, x: tl.tensor, indptr: tl.tensor, indices: tl.tensor, weight: tl.tensor, over: tl.tensor,
    own: tl.tensor, num_rows: tl.tensor, num_own: tl.tensor, COLUMNS: tl.constexpr, OUT_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr, OWN_STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, DIVIDED: tl.constexpr,
    MEAN: tl.constexpr, OWN: tl.constexpr, LONGEST: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the entries of longer rows, ROWS of them at a time; a program looks at 32 rows per step."""
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < COLUMNS
    programs = tl.num_programs(0)
    first_row = tl.program_id(0)
    while first_row < num_rows:
        # Rows of a step are num_programs apart, because hubs have adjacent numbers.
        seen = first_row + programs * tl.arange(0, 32)
        some = seen < num_rows
        degree = tl.load(indptr + seen + 1, mask=some, other=0) - tl.load(indptr + seen, mask=some, other=0)
        if tl.max(degree, 0) > LONGEST:
            row = first_row
            while row < tl.minimum(num_rows, first_row + programs * 32):
                start = tl.load(indptr + row)
                stop = tl.load(indptr + row + 1)
                if stop - start > LONGEST:
                    total = tl.zeros([ROWS, WIDTH], ACC)
                    first = start
                    while first < stop:
                        at = first + tl.arange(0, ROWS)
                        total += entry_values(
                            x, indices, weight, over, at, at < stop, column, inside, X_STRIDE, WEIGHTED, DIVIDED, ACC
                        )
                        first += ROWS
                    one = row + tl.arange(0, 1)
                    store_rows(
                        out, own, one, one < num_rows, num_own, column, inside, tl.sum(total, 0)[None, :],
                        stop - start + tl.zeros([1], tl.int32), COLUMNS, OUT_STRIDE, OWN_STRIDE, MEAN, OWN, ACC,
                    )  # fmt: skip
                row += programs
        first_row += programs * 32


@triton.jit(do_not_specialize=["num_rows"])
def max_kernel(
    out: tl.tensor,  # x's type [num_rows, COLUMNS]
    ties: tl.tensor,  # *int32 [num_rows, COLUMNS]
    x: tl.tensor,  # any float [num_sources, COLUMNS]
    indptr: tl.tensor,  # *int32 [num_rows + 1]
    indices: tl.tensor,  # *int32 [E]
    num_rows: tl.tensor,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute the maximum of each row's entries, 0 without any, NaN ranking highest, and the number of ties."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    on, inside = row < num_rows, column < COLUMNS
    start = tl.load(indptr + row, mask=on, other=0)
    stop = tl.load(indptr + row + 1, mask=on, other=0)
    most = tl.max(stop - start, 0)
    best = tl.full([ROWS, WIDTH], float("-inf"), ACC)
    count = tl.zeros([ROWS, WIDTH], tl.int32)
    step = 0
    while step < most:
        at = start + step
        there = (at < stop)[:, None] & inside[None, :]
        source = tl.load(indices + at, mask=at < stop, other=0).to(tl.int64)
        values = tl.load(x + (source * COLUMNS)[:, None] + column[None, :], mask=there, other=0.0).to(ACC)
        # NaN compares false with everything: the first one replaces the maximum, further ones are ties (`same`).
        higher = there & ((values > best) | ((values != values) & (best == best)))
        count = tl.where(higher, 1, tl.where(there & same(values, best), count + 1, count))
        best = tl.where(higher, values, best)
        step += 1
    place = (row.to(tl.int64) * COLUMNS)[:, None] + column[None, :]
    wanted = on[:, None] & inside[None, :]
    tl.store(out + place, tl.where(count > 0, best, 0.0).to(out.dtype.element_ty), mask=wanted)
    tl.store(ties + place, count, mask=wanted)


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    grad_x: tl.tensor,  # x's type [num_rows, COLUMNS]
    x: tl.tensor,  # any float [num_rows, COLUMNS]
    best: tl.tensor,  # x's type [num_targets, COLUMNS]
    ties: tl.tensor,  # *int32 [num_targets, COLUMNS]
    grad: tl.tensor,  # x's type [num_targets, COLUMNS]
    indptr: tl.tensor,  # *int32 [num_rows + 1]
    indices: tl.tensor,  # *int32 [E]: target of each entry
    num_rows: tl.tensor,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Give each source its share of the gradients of the targets whose maximum it attains."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    on, inside = row < num_rows, column < COLUMNS
    start = tl.load(indptr + row, mask=on, other=0)
    stop = tl.load(indptr + row + 1, mask=on, other=0)
    most = tl.max(stop - start, 0)
    place = (row.to(tl.int64) * COLUMNS)[:, None] + column[None, :]
    wanted = on[:, None] & inside[None, :]
    sent = tl.load(x + place, mask=wanted, other=0.0).to(ACC)
    total = tl.zeros([ROWS, WIDTH], ACC)
    step = 0
    while step < most:
        at = start + step
        there = (at < stop)[:, None] & inside[None, :]
        target = tl.load(indices + at, mask=at < stop, other=0).to(tl.int64)
        received = (target * COLUMNS)[:, None] + column[None, :]
        most_of_target = tl.load(best + received, mask=there, other=0.0).to(ACC)
        share = tl.load(grad + received, mask=there, other=0.0).to(ACC)
        share = share / tl.load(ties + received, mask=there, other=1).to(ACC)
        total += tl.where(there & same(sent, most_of_target), share, 0.0)
        step += 1
    tl.store(grad_x + place, total.to(grad_x.dtype.element_ty), mask=wanted)


def block_shape(columns: int) -> dict[str, int]:
    """Return the rows and columns of a program of 4 warps: about 8 sums per thread."""
    width = min(256, max(8, int(triton.next_power_of_2(columns))))
    return {"ROWS": max(1, min(64, 1024 // width)), "WIDTH": width}


def long_block_shape(columns: int) -> dict[str, int]:
    """Return the entries and columns of a program of 8 warps: 16 sums per thread."""
    width = block_shape(columns)["WIDTH"]
    return {"ROWS": min(128, 4096 // width), "WIDTH": width, "num_warps": 8}


def sum_rows(
    edges: list[Tensor],
    x: Tensor,
    out: Tensor,
    *,
    mean: bool = False,
    over: Tensor | None = None,
    own: Tensor | None = None,
    beside: bool = False,
) -> None:
    """Write the (weighted) sums over the edges of each row of ``x`` ``[N, C]``, whose columns are adjacent.

    Args:
        edges: ``indptr``, ``indices`` and perhaps weights, sorted by row.
        x: Rows to sum.
        out: ``[rows, C]``, or ``[rows, 2 C]`` with own rows beside the sums.
        mean: Divide by the number of edges.
        over: Divide row i of x by the difference ``over[i + 1] - over[i]``, which is not 0 where an edge leads to it.
        own: Rows that are added to the first sums, or copied beside them; ``[C]`` is the row of all.
        beside: Whether own rows are copied.
    """
    indptr, (indices, *weight) = edges[0].to(torch.int32), edges[1:]
    num_rows, columns = indptr.numel() - 1, x.size(1)
    if num_rows == 0 or columns == 0:
        return
    own_stride, num_own = 0, num_rows
    if own is not None and own.dim() == 2:
        own_stride, num_own = own.stride(0), min(num_rows, own.size(0))
    degrees = indptr  # unused
    if over is not None:
        degrees = torch.sub(over[1:], over[:-1], out=over.new_empty(over.numel() - 1, dtype=torch.int32))
    arguments = (
        out, x, indptr, indices, weight[0] if weight else x, degrees, x if own is None else own, num_rows, num_own
    )  # fmt: skip
    options = {
        "COLUMNS": columns,
        "OUT_STRIDE": out.stride(0),
        "X_STRIDE": x.stride(0),
        "OWN_STRIDE": own_stride,
        "WEIGHTED": bool(weight),
        "DIVIDED": over is not None,
        "MEAN": mean,
        "OWN": NO_OWN if own is None else OWN_BESIDE if beside else OWN_ADDED,
        "LONGEST": LONGEST,
        "ACC": accumulator(x.dtype),
    }
    block = block_shape(columns)
    tiles = triton.cdiv(columns, block["WIDTH"])
    sum_kernel[triton.cdiv(num_rows, block["ROWS"]), tiles](*arguments, **options, **block)
    if indices.numel() > LONGEST:
        long_sum_kernel[min(_LONG_PROGRAMS, num_rows), tiles](*arguments, **options, **long_block_shape(columns))


def max_rows(edges: list[Tensor], x: Tensor, out: Tensor, ties: Tensor) -> None:
    """Write the maxima over the edges of each row of ``x`` ``[N, C]``, and the number of ties; all are contiguous."""
    _run_rows(max_kernel, (out, ties, x), edges, x)


def route_rows(by_source: list[Tensor], grad: Tensor, x: Tensor, best: Tensor, ties: Tensor, grad_x: Tensor) -> None:
    """Write the gradient of ``x`` from that of its maxima; all tensors are contiguous."""
    _run_rows(route_kernel, (grad_x, x, best, ties, grad), by_source, x)


def _run_rows(kernel: Any, arguments: tuple[Tensor, ...], edges: list[Tensor], x: Tensor) -> None:
    indptr, indices, columns = edges[0].to(torch.int32), edges[1], x.size(1)
    num_rows = indptr.numel() - 1
    if num_rows == 0 or columns == 0:
        return
    block = block_shape(columns)
    grid = triton.cdiv(num_rows, block["ROWS"]), triton.cdiv(columns, block["WIDTH"])
    kernel[grid](*arguments, indptr, indices, num_rows, COLUMNS=columns, ACC=accumulator(x.dtype), **block)
