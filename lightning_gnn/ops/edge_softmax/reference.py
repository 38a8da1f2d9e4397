"""Edge softmax with torch's own operators, for tests and for devices without a kernel."""

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.matrix import Matrix, Scores
from lightning_gnn.ops.aggregate.reference import accumulation_dtype


def edge_softmax(matrix: Matrix, scores: Scores) -> Tensor:
    """Normalize ``exp(leaky_relu(row + column))`` over the entries of each row, ``[num_edges, H]``."""
    dtype, wide, row = scores.row.dtype, accumulation_dtype(scores.row.dtype), matrix.entry_rows()
    score = torch.nn.functional.leaky_relu(_add_scores(matrix, row, scores), scores.slope)
    largest = torch.full(scores.row.shape, -torch.inf, dtype=wide, device=row.device)
    largest.scatter_reduce_(0, row.view(-1, 1).expand_as(score), score, "amax")
    score = (score - largest[row]).exp()
    total = torch.zeros_like(largest).index_add_(0, row, score)
    return (score / (total + 1e-16)[row]).to(dtype)


def edge_softmax_backward(matrix: Matrix, scores: Scores, attention: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of ``row + column`` of each entry from that of its normalized weight."""
    dtype, wide, row = scores.row.dtype, accumulation_dtype(scores.row.dtype), matrix.entry_rows()
    product = attention.to(wide) * grad.to(wide)
    total = torch.zeros(scores.row.shape, dtype=wide, device=row.device).index_add_(0, row, product)
    out = product - attention.to(wide) * total[row]
    return torch.where(_add_scores(matrix, row, scores) > 0, out, out * scores.slope).to(dtype)


def _add_scores(matrix: Matrix, row: Tensor, scores: Scores) -> Tensor:
    wide = accumulation_dtype(scores.row.dtype)
    return scores.row[row].to(wide) + scores.column[matrix.indices].to(wide)


def edge_sums(matrix: Matrix, edge_ids: Tensor | None, values: Tensor) -> Tensor:
    """Sum edge values ``[num_edges, H]``, permuted by ``edge_ids`` if given, over the entries of each row."""
    wide = accumulation_dtype(values.dtype)
    out = torch.zeros((matrix.num_rows, values.size(1)), dtype=wide, device=values.device)
    ordered = values if edge_ids is None else values[edge_ids]
    return out.index_add_(0, matrix.entry_rows(), ordered.to(wide)).to(values.dtype)
