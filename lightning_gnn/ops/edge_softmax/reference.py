"""Attention with torch's own operators: for the tests, and for devices that have no kernel of their own."""

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.matrix import Matrix
from lightning_gnn.ops.aggregate.reference import accumulator


def edge_softmax(matrix: Matrix, row_scores: Tensor, column_scores: Tensor, negative_slope: float) -> Tensor:
    """Normalise ``exp(leaky_relu(row + column))`` over the entries of each row, ``[num_edges, H]``."""
    wide = accumulator(row_scores.dtype)
    row, column = matrix.entry_rows(), matrix.indices
    score = row_scores[row].to(wide) + column_scores[column].to(wide)
    score = torch.nn.functional.leaky_relu(score, negative_slope)
    largest = torch.full(row_scores.shape, -torch.inf, dtype=wide, device=row.device)
    largest.scatter_reduce_(0, row.view(-1, 1).expand_as(score), score, "amax")
    score = (score - largest[row]).exp()
    total = torch.zeros_like(largest).index_add_(0, row, score)
    return (score / (total + 1e-16)[row]).to(row_scores.dtype)


def edge_softmax_backward(
    matrix: Matrix,
    row_scores: Tensor,
    column_scores: Tensor,
    negative_slope: float,
    attention: Tensor,
    grad: Tensor,
) -> Tensor:
    """Return the gradient of ``row + column`` of each entry from that of its normalised weight."""
    wide = accumulator(row_scores.dtype)
    row, column = matrix.entry_rows(), matrix.indices
    product = attention.to(wide) * grad.to(wide)
    total = torch.zeros(row_scores.shape, dtype=wide, device=row.device).index_add_(0, row, product)
    out = product - attention.to(wide) * total[row]
    score = row_scores[row].to(wide) + column_scores[column].to(wide)
    return torch.where(score > 0, out, out * negative_slope).to(row_scores.dtype)


def edge_sums(matrix: Matrix, edge_ids: Tensor | None, values: Tensor) -> Tensor:
    """Add up numbers of the edges ``[num_edges, H]`` over the entries of each row.

    Args:
        edge_ids: Which of the numbers each entry has; None: those in order.
    """
    wide = accumulator(values.dtype)
    out = torch.zeros((matrix.num_rows, values.size(1)), dtype=wide, device=values.device)
    ordered = values if edge_ids is None else values[edge_ids]
    return out.index_add_(0, matrix.entry_rows(), ordered.to(wide)).to(values.dtype)
