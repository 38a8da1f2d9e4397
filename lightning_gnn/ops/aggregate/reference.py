"""Aggregation with torch's own operators, in blocks of edges whose gathered rows never exceed ``BLOCK`` numbers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.matrix import Match, Matrix

BLOCK = 1 << 26


def aggregate(matrix: Matrix, x: Tensor, weight: Tensor | None, reduce: str) -> tuple[Tensor, Tensor]:
    """Reduce the weighted rows of ``x`` ``[num_columns, H, C]`` by row; with maxima, not rounded, come the ties."""
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    wide = accumulator(dtype)
    row, column = matrix.entry_rows(), matrix.indices
    out = torch.zeros((matrix.num_rows, *x.shape[1:]), dtype=wide, device=x.device)
    degree = matrix.indptr.diff().view(-1, 1, 1)
    if reduce != "max":
        for part in _blocks(row.numel(), x):
            out.index_add_(0, row[part], _messages(x, weight, column, part))
        if reduce == "mean":
            out /= degree.clamp(min=1).to(wide)
        return out.to(dtype), x.new_empty(0)
    ties = torch.zeros_like(out)
    out.fill_(-torch.inf)
    for part in _blocks(row.numel(), x):
        message = _messages(x, weight, column, part)
        out.scatter_reduce_(0, row[part].view(-1, 1, 1).expand_as(message), message, "amax")
    for part in _blocks(row.numel(), x):
        ties.index_add_(0, row[part], _same(_messages(x, weight, column, part), out[row[part]]).to(wide))
    out.masked_fill_(degree == 0, 0)
    return out, ties


def aggregate_max_backward(matrix: Matrix, grad: Tensor, best: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    """Send the gradient of a maximum to the rows of ``x`` that attain it; the matrix is the transpose."""
    wide = accumulator(x.dtype)
    row, column = matrix.entry_rows(), matrix.indices
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for part in _blocks(row.numel(), x):
        factor = 1 if weight is None else weight[part].to(wide).unsqueeze(-1)
        message = x[row[part]].to(wide) * factor
        hit = _same(message, best[column[part]])
        out.index_add_(0, row[part], (grad[column[part]].to(wide) * factor).masked_fill_(~hit, 0))
    return out.to(x.dtype)


def edge_products(matrix: Matrix, row_side: Tensor, column_side: Tensor, match: Match | None = None) -> Tensor:
    """Take the dot product of both ends of each entry, per head; with ``match`` only over what attains it."""
    dtype = torch.promote_types(row_side.dtype, column_side.dtype)
    wide = accumulator(dtype)
    row, column = matrix.entry_rows(), matrix.indices
    out = torch.empty((row.numel(), row_side.size(1)), dtype=wide, device=row_side.device)
    for part in _blocks(row.numel(), column_side):
        source = column_side[column[part]].to(wide)
        product = row_side[row[part]].to(wide) * source
        if match is not None:
            best, weight = match
            message = source * weight[part].to(wide).unsqueeze(-1)
            product.masked_fill_(~_same(message, best[row[part]]), 0)
        out[part] = product.sum(-1)
    return out.to(dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return in which dtype numbers of this one are added up: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _blocks(num_edges: int, x: Tensor) -> Iterator[slice]:
    step = max(1, BLOCK // max(1, x[:1].numel()))
    return (slice(start, start + step) for start in range(0, num_edges, step))


def _messages(x: Tensor, weight: Tensor | None, column: Tensor, part: slice) -> Tensor:
    message = x[column[part]].to(accumulator(x.dtype))
    return message if weight is None else message * weight[part].to(accumulator(weight.dtype)).unsqueeze(-1)


def _same(message: Tensor, best: Tensor) -> Tensor:
    return (message == best) | (message.isnan() & best.isnan())
