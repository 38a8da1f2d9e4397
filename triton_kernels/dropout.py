"""Dropout whose mask is a hash of (key, row, column), with the bits of the CPU: one launch, in place if wanted."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_gnn.triton_kernels.aggregate import accumulator
from lightning_gnn.triton_kernels.hashing import GOLDEN, mix, node_key

_PAIRS = 1024  # pairs of columns per program


@triton.jit(do_not_specialize=["key", "num_rows"])
def row_dropout_kernel(
    out: tl.tensor,  # x's type [num_rows, COLUMNS]; may be x
    x: tl.tensor,  # any float [num_rows, COLUMNS]
    rows: tl.tensor,  # *int64 or *int32 [num_rows]: global numbers; read if GIVEN, otherwise 0, 1, ...
    key: tl.tensor,  # int64
    num_rows: tl.tensor,
    COLUMNS: tl.constexpr,
    GIVEN: tl.constexpr,
    RELU: tl.constexpr,
    THRESHOLD: tl.constexpr,  # minimum half of a hash that retains its element
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Drop elements of a block; if RELU, of ``relu(x)``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    number = row.to(tl.int64)
    if GIVEN:
        number = tl.load(rows + row, mask=row < num_rows, other=0).to(tl.int64)
    # Two columns share a hash: the lower half is that of the even one.
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    stream = node_key(key, number)
    word = mix(stream[:, None] + (pair + 1).to(tl.uint64)[None, :] * GOLDEN)
    half = tl.join(word & 0xFFFFFFFF, word >> 32).reshape(ROWS, 2 * PAIRS)
    column = tl.program_id(1) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
    at = (row.to(tl.int64) * COLUMNS)[:, None] + column[None, :]
    inside = (row < num_rows)[:, None] & (column < COLUMNS)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(ACC)
    kept = half.to(tl.int64) >= THRESHOLD
    if RELU:
        kept = kept & ~(value <= 0)  # NaN propagates, as in torch's ReLU
    tl.store(out + at, tl.where(kept, value * SCALE, 0.0).to(out.dtype.element_ty), mask=inside)


def row_dropout(
    x: Tensor, out: Tensor, scale: float, threshold: int, key: int, rows: Tensor | None, relu: bool = False
) -> None:
    """Write dropout of ``x`` ``[n, C]``, contiguous, to ``out``, which may be ``x``; the key is mixed."""
    num_rows, columns = x.shape
    block = block_shape(columns)
    row_dropout_kernel[triton.cdiv(num_rows, block["ROWS"]), triton.cdiv(columns, 2 * block["PAIRS"])](
        out, x, x if rows is None else rows, key, num_rows, COLUMNS=columns, GIVEN=rows is not None, RELU=relu,
        THRESHOLD=threshold, SCALE=scale, ACC=accumulator(x.dtype), **block,
    )  # fmt: skip


def block_shape(columns: int) -> dict[str, int]:
    """Return the rows and pairs of columns of a program."""
    pairs = min(128, int(triton.next_power_of_2((columns + 1) // 2)))
    return {"ROWS": _PAIRS // pairs, "PAIRS": pairs}
