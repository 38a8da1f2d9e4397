"""Attention over chunks with torch's own operators: for the tests, and for devices that have no kernel of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.reference import accumulator, entry_columns, entry_rows
from lightning_gnn.ops.library import define


def edge_softmax(
    chunks: list[Tensor],
    row_scores: Tensor,
    column_scores: Tensor,
    negative_slope: float,
    chunk_ranges: list[int],
) -> Tensor:
    """Normalise ``exp(leaky_relu(row + column))`` over the entries of each vertex."""
    wide = accumulator(row_scores.dtype)
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
    wide = accumulator(row_scores.dtype)
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
    wide = accumulator(values.dtype)
    out = torch.zeros((num_rows, values.size(1)), dtype=wide, device=values.device)
    ordered = values if edge_ids is None else values[edge_ids]
    return out.index_add_(0, entry_rows(chunks), ordered.to(wide)).to(values.dtype)


define(
    "edge_softmax(Tensor[] chunks, Tensor row_scores, Tensor column_scores, float negative_slope, int[] chunk_ranges)"
    " -> Tensor",
    edge_softmax,
)
define(
    "edge_softmax_backward(Tensor[] chunks, Tensor row_scores, Tensor column_scores, float negative_slope,"
    " Tensor attention, Tensor grad, int[] chunk_ranges) -> Tensor",
    edge_softmax_backward,
)
define(
    "edge_sums(Tensor[] chunks, int num_rows, Tensor? edge_ids, Tensor values, int[] chunk_ranges) -> Tensor",
    edge_sums,
)
