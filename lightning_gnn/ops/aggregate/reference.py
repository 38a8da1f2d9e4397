"""Aggregation over chunks with torch's own operators: for the tests, and for devices that have no kernel of their own.

Edges are taken in blocks, so that the rows gathered for them never exceed ``BLOCK`` numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

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
    """Reduce the weighted rows of ``x`` over the entries of each vertex; the definition is in ``aggregate.py``."""
    wide = _accumulator(x.dtype)
    shape = (num_rows, *x.shape[1:])
    row, column = entry_rows(chunks), entry_columns(chunks)
    out = torch.zeros(shape, dtype=wide, device=x.device)
    if reduce != "max":
        for part in _blocks(row.numel(), x):
            out.index_add_(0, row[part], _messages(x, weight, column, part))
        if reduce == "mean":
            degree = _count(row, num_rows, wide).clamp_(min=1)
            out /= degree.view(-1, 1, 1)
        return out.to(x.dtype), x.new_empty(0)
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
    """Send the gradient of a maximum to the rows of ``x`` that attain it."""
    wide = _accumulator(x.dtype)
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
    wide = _accumulator(column_side.dtype)
    row, column = entry_rows(chunks), entry_columns(chunks)
    out = torch.empty((row.numel(), row_side.size(1)), dtype=wide, device=row_side.device)
    for part in _blocks(row.numel(), column_side):
        source = column_side[column[part]].to(wide)
        product = row_side[row[part]].to(wide) * source
        if best is not None and weight is not None:
            message = source * weight[part].to(wide).unsqueeze(-1)
            product.masked_fill_(~_same(message, best[row[part]]), 0)
        out[part] = product.sum(-1)
    return out.to(column_side.dtype)


def edge_softmax(
    chunks: list[Tensor],
    row_scores: Tensor,
    column_scores: Tensor,
    negative_slope: float,
    chunk_ranges: list[int],
) -> Tensor:
    """Normalise ``exp(leaky_relu(row + column))`` over the entries of each vertex."""
    wide = _accumulator(row_scores.dtype)
    row, column = entry_rows(chunks), entry_columns(chunks)
    score = row_scores[row].to(wide) + column_scores[column].to(wide)
    score = torch.nn.functional.leaky_relu(score, negative_slope)
    largest = torch.full(row_scores.shape, -torch.inf, dtype=wide, device=row.device)
    largest.scatter_reduce_(0, row.view(-1, 1).expand_as(score), score, "amax")
    score = (score - largest[row]).exp()
    total = torch.zeros_like(largest).index_add_(0, row, score)
    return (score / (total + 1e-16)[row]).to(row_scores.dtype)


def edge_softmax_backward(
    chunks: list[Tensor],
    row_scores: Tensor,
    column_scores: Tensor,
    negative_slope: float,
    attention: Tensor,
    grad: Tensor,
    chunk_ranges: list[int],
) -> Tensor:
    """Return the gradient of ``row + column`` of each entry from that of its normalised weight."""
    wide = _accumulator(row_scores.dtype)
    row, column = entry_rows(chunks), entry_columns(chunks)
    product = attention.to(wide) * grad.to(wide)
    total = torch.zeros(row_scores.shape, dtype=wide, device=row.device).index_add_(0, row, product)
    out = product - attention.to(wide) * total[row]
    score = row_scores[row].to(wide) + column_scores[column].to(wide)
    return torch.where(score > 0, out, out * negative_slope).to(row_scores.dtype)


def edge_sums(
    chunks: list[Tensor], num_rows: int, edge_ids: Tensor | None, values: Tensor, chunk_ranges: list[int]
) -> Tensor:
    """Add up numbers of the edges over the entries of each vertex."""
    wide = _accumulator(values.dtype)
    out = torch.zeros((num_rows, values.size(1)), dtype=wide, device=values.device)
    ordered = values if edge_ids is None else values[edge_ids]
    return out.index_add_(0, entry_rows(chunks), ordered.to(wide)).to(values.dtype)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _count(row: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    ones = torch.ones(row.numel(), dtype=dtype, device=row.device)
    return torch.zeros(num_rows, dtype=dtype, device=row.device).index_add_(0, row, ones)


def _blocks(num_edges: int, x: Tensor) -> Iterator[slice]:
    step = max(1, BLOCK // max(1, x[:1].numel()))
    return (slice(start, start + step) for start in range(0, num_edges, step))


def _messages(x: Tensor, weight: Tensor | None, column: Tensor, part: slice) -> Tensor:
    message = x[column[part]].to(_accumulator(x.dtype))
    return message if weight is None else message * weight[part].to(message.dtype).unsqueeze(-1)


def _same(message: Tensor, best: Tensor) -> Tensor:
    return (message == best) | (message.isnan() & best.isnan())
