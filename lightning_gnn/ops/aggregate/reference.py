"""Aggregation over chunks with torch's own operators: for the tests, and for devices that have no kernel of their own.

Edges are taken in blocks, so that the rows gathered for them never exceed ``BLOCK`` numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gnn.ops.library import define

BLOCK = 1 << 26


def entry_rows(chunks: list[Tensor]) -> Tensor:
    """Return the vertex of the row of each entry, int64 ``[num_edges]``."""
    rows, _, indptr = chunks[:3]
    return torch.repeat_interleave(rows.to(torch.int64), indptr.diff(), output_size=chunks[3].numel())


def entry_columns(chunks: list[Tensor]) -> Tensor:
    """Return the vertex of the column of each entry, int64 ``[num_edges]``."""
    _, row_ptr, indptr, local, columns, column_ptr = chunks
    offsets = torch.repeat_interleave(column_ptr[:-1], indptr[row_ptr].diff(), output_size=local.numel())
    return columns.to(torch.int64)[offsets + local]


def aggregate_chunks(
    chunks: list[Tensor],
    num_rows: int,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    slices: list[int],
    chunk_ranges: list[int],
) -> tuple[Tensor, Tensor]:
    """Reduce the weighted rows of ``x`` over the entries of each vertex.

    Args:
        num_rows: Vertices on the row side.
        x: ``[num_columns, H, C]``.
        weight: Of each entry, ``[num_edges, H]``, or None; for maxima, of the dtype in which numbers are added up.
        slices: Bounds of the columns of each group of the plan; unused, as torch's own operators need no plan.

    Returns:
        ``[num_rows, H, C]`` of the dtype to which ``x`` and ``weight`` promote; for maxima, which are not rounded, also
        how many entries attain each (else empty).
    """
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    wide = accumulator(dtype)
    shape = (num_rows, *x.shape[1:])
    row, column = entry_rows(chunks), entry_columns(chunks)
    out = torch.zeros(shape, dtype=wide, device=x.device)
    if reduce != "max":
        for part in _blocks(row.numel(), x):
            out.index_add_(0, row[part], _messages(x, weight, column, part))
        if reduce == "mean":
            degree = _count(row, num_rows, wide).clamp_(min=1)
            out /= degree.view(-1, 1, 1)
        return out.to(dtype), x.new_empty(0)
    ties = torch.zeros_like(out)
    out.fill_(-torch.inf)
    for part in _blocks(row.numel(), x):
        message = _messages(x, weight, column, part)
        out.scatter_reduce_(0, row[part].view(-1, 1, 1).expand_as(message), message, "amax")
    for part in _blocks(row.numel(), x):
        ties.index_add_(0, row[part], _same(_messages(x, weight, column, part), out[row[part]]).to(wide))
    out.masked_fill_((_count(row, num_rows, wide) == 0).view(-1, 1, 1), 0)
    return out, ties


def aggregate_max_backward(
    chunks: list[Tensor],
    num_rows: int,
    grad: Tensor,
    best: Tensor,
    x: Tensor,
    weight: Tensor | None,
    slices: list[int],
    chunk_ranges: list[int],
) -> Tensor:
    """Send the gradient of a maximum to the rows of ``x`` that attain it; ``grad`` and ``best`` are not rounded."""
    wide = accumulator(x.dtype)
    row, column = entry_rows(chunks), entry_columns(chunks)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for part in _blocks(row.numel(), x):
        factor = 1 if weight is None else weight[part].to(wide).unsqueeze(-1)
        message = x[row[part]].to(wide) * factor
        hit = _same(message, best[column[part]])
        out.index_add_(0, row[part], (grad[column[part]].to(wide) * factor).masked_fill_(~hit, 0))
    return out.to(x.dtype)


def edge_products(
    chunks: list[Tensor],
    row_side: Tensor,
    column_side: Tensor,
    best: Tensor | None,
    weight: Tensor | None,
    slices: list[int],
    chunk_ranges: list[int],
) -> Tensor:
    """Take the dot product of both ends of each entry, per head; with ``best`` only over what attains the maximum."""
    dtype = torch.promote_types(row_side.dtype, column_side.dtype)
    wide = accumulator(dtype)
    row, column = entry_rows(chunks), entry_columns(chunks)
    out = torch.empty((row.numel(), row_side.size(1)), dtype=wide, device=row_side.device)
    for part in _blocks(row.numel(), column_side):
        source = column_side[column[part]].to(wide)
        product = row_side[row[part]].to(wide) * source
        if best is not None and weight is not None:
            message = source * weight[part].to(wide).unsqueeze(-1)
            product.masked_fill_(~_same(message, best[row[part]]), 0)
        out[part] = product.sum(-1)
    return out.to(dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return in which dtype numbers of this one are added up: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _count(row: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    ones = torch.ones(row.numel(), dtype=dtype, device=row.device)
    return torch.zeros(num_rows, dtype=dtype, device=row.device).index_add_(0, row, ones)


def _blocks(num_edges: int, x: Tensor) -> Iterator[slice]:
    step = max(1, BLOCK // max(1, x[:1].numel()))
    return (slice(start, start + step) for start in range(0, num_edges, step))


def _messages(x: Tensor, weight: Tensor | None, column: Tensor, part: slice) -> Tensor:
    message = x[column[part]].to(accumulator(x.dtype))
    return message if weight is None else message * weight[part].to(accumulator(weight.dtype)).unsqueeze(-1)


def _same(message: Tensor, best: Tensor) -> Tensor:
    return (message == best) | (message.isnan() & best.isnan())


define(
    "aggregate_chunks(Tensor[] chunks, int num_rows, Tensor x, Tensor? weight, str reduce, int[] slices,"
    " int[] chunk_ranges) -> (Tensor, Tensor)",
    aggregate_chunks,
)
# The same sums and means by another kernel, where a device has two; the plan says which (chip_plan.py).
define(
    "aggregate_vector(Tensor[] chunks, int num_rows, Tensor x, Tensor? weight, str reduce, int[] slices,"
    " int[] chunk_ranges) -> (Tensor, Tensor)",
    aggregate_chunks,
)
define(
    "aggregate_max_backward(Tensor[] chunks, int num_rows, Tensor grad, Tensor best, Tensor x, Tensor? weight,"
    " int[] slices, int[] chunk_ranges) -> Tensor",
    aggregate_max_backward,
)
define(
    "edge_products(Tensor[] chunks, Tensor row_side, Tensor column_side, Tensor? best, Tensor? weight, int[] slices,"
    " int[] chunk_ranges) -> Tensor",
    edge_products,
)
