"""Aggregation, over blocks of at most ``BLOCK_ELEMENTS`` elements, and edge softmax with torch's own operators."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.matrix import Match, Matrix, Scores

BLOCK_ELEMENTS = 1 << 26


def aggregate(matrix: Matrix, x: Tensor, weight: Tensor | None, reduce: str) -> tuple[Tensor, Tensor]:
    """Reduce the weighted rows of ``x`` ``[num_columns, H, C]`` by row; also return the ties of unrounded maxima."""
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    wide = accumulation_dtype(dtype)
    row, column = _entry_rows(matrix), matrix.indices
    out = torch.zeros((matrix.num_rows, *x.shape[1:]), dtype=wide, device=x.device)
    degree = matrix.indptr.diff().view(-1, 1, 1)
    if reduce != "max":
        for block in _iterate_blocks(row.numel(), x):
            out.index_add_(0, row[block], _compute_messages(x, weight, column, block))
        if reduce == "mean":
            out /= degree.clamp(min=1).to(wide)
        return out.to(dtype), x.new_empty(0)
    ties = torch.zeros_like(out)
    out.fill_(-torch.inf)
    for block in _iterate_blocks(row.numel(), x):
        message = _compute_messages(x, weight, column, block)
        out.scatter_reduce_(0, row[block].view(-1, 1, 1).expand_as(message), message, "amax")
    for block in _iterate_blocks(row.numel(), x):
        ties.index_add_(0, row[block], _matches(_compute_messages(x, weight, column, block), out[row[block]]).to(wide))
    out.masked_fill_(degree == 0, 0)
    return out, ties


def aggregate_max_backward(matrix: Matrix, grad: Tensor, best: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    """Return the gradient of ``x``: that of each maximum, for the rows that attain it; the matrix is the transpose."""
    wide = accumulation_dtype(x.dtype)
    row, column = _entry_rows(matrix), matrix.indices
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for block in _iterate_blocks(row.numel(), x):
        factor = 1 if weight is None else weight[block].to(wide).unsqueeze(-1)
        message = x[row[block]].to(wide) * factor
        attains = _matches(message, best[column[block]])
        out.index_add_(0, row[block], (grad[column[block]].to(wide) * factor).masked_fill_(~attains, 0))
    return out.to(x.dtype)


def edge_products(matrix: Matrix, row_side: Tensor, column_side: Tensor, match: Match | None = None) -> Tensor:
    """Compute the dot product of both ends of each entry, per head; ``match`` restricts it to attained maxima."""
    dtype = torch.promote_types(row_side.dtype, column_side.dtype)
    wide = accumulation_dtype(dtype)
    row, column = _entry_rows(matrix), matrix.indices
    out = torch.empty((row.numel(), row_side.size(1)), dtype=wide, device=row_side.device)
    for block in _iterate_blocks(row.numel(), column_side):
        source = column_side[column[block]].to(wide)
        product = row_side[row[block]].to(wide) * source
        if match is not None:
            best, weight = match
            message = source * weight[block].to(wide).unsqueeze(-1)
            product.masked_fill_(~_matches(message, best[row[block]]), 0)
        out[block] = product.sum(-1)
    return out.to(dtype)


def edge_softmax(matrix: Matrix, scores: Scores) -> Tensor:
    """Normalize ``exp(leaky_relu(row + column))`` over the entries of each row, ``[num_edges, H]``."""
    dtype, wide, row = scores.row.dtype, accumulation_dtype(scores.row.dtype), _entry_rows(matrix)
    score = torch.nn.functional.leaky_relu(_add_scores(matrix, row, scores), scores.slope)
    largest = torch.full(scores.row.shape, -torch.inf, dtype=wide, device=row.device)
    largest.scatter_reduce_(0, row.view(-1, 1).expand_as(score), score, "amax")
    score = (score - largest[row]).exp()
    total = torch.zeros_like(largest).index_add_(0, row, score)
    return (score / (total + 1e-16)[row]).to(dtype)


def edge_softmax_backward(matrix: Matrix, scores: Scores, attention: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of ``row + column`` of each entry from that of its normalized weight."""
    dtype, wide, row = scores.row.dtype, accumulation_dtype(scores.row.dtype), _entry_rows(matrix)
    product = attention.to(wide) * grad.to(wide)
    total = torch.zeros(scores.row.shape, dtype=wide, device=row.device).index_add_(0, row, product)
    out = product - attention.to(wide) * total[row]
    return torch.where(_add_scores(matrix, row, scores) > 0, out, out * scores.slope).to(dtype)


def edge_sums(matrix: Matrix, edge_ids: Tensor | None, values: Tensor) -> Tensor:
    """Sum edge values ``[num_edges, H]``, permuted by ``edge_ids`` if given, over the entries of each row."""
    wide = accumulation_dtype(values.dtype)
    out = torch.zeros((matrix.num_rows, values.size(1)), dtype=wide, device=values.device)
    ordered = values if edge_ids is None else values[edge_ids]
    return out.index_add_(0, _entry_rows(matrix), ordered.to(wide)).to(values.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are accumulated: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _iterate_blocks(num_edges: int, x: Tensor) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, x[:1].numel()))
    return (slice(start, start + step) for start in range(0, num_edges, step))


def _compute_messages(x: Tensor, weight: Tensor | None, column: Tensor, block: slice) -> Tensor:
    message = x[column[block]].to(accumulation_dtype(x.dtype))
    return message if weight is None else message * weight[block].to(accumulation_dtype(weight.dtype)).unsqueeze(-1)


def _matches(message: Tensor, best: Tensor) -> Tensor:
    return (message == best) | (message.isnan() & best.isnan())


def _add_scores(matrix: Matrix, row: Tensor, scores: Scores) -> Tensor:
    wide = accumulation_dtype(scores.row.dtype)
    return scores.row[row].to(wide) + scores.column[matrix.indices].to(wide)


def _entry_rows(matrix: Matrix) -> Tensor:
    """Return the row of each entry in the dtype that all operators take as an index, int64 ``[num_edges]``."""
    return matrix.entry_rows().to(torch.int64)
