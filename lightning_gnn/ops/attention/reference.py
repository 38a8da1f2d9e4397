"""Attention over a mini-batch's edges with torch's own operators: for the tests, and for second derivatives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    edges: list[Tensor],
    values: Tensor,
    side: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factor: Tensor | None,
    slope: float,
    dynamic: bool,
) -> Tensor:
    """Do what the function of this name in ``definition.py`` does; differentiable any number of times."""
    indptr, indices = edges
    heads, channels = side.shape
    num_targets = indptr.numel() - 1
    rows = torch.repeat_interleave(indptr.diff(), output_size=indices.numel())
    # [E, heads, channels], or, where heads read the same columns, [E, 1, channels].
    read = values.index_select(0, indices)
    read = read.view(indices.numel(), 1 if weight is not None else heads, channels)
    if dynamic:
        score = (F.leaky_relu(read + target.reshape(num_targets, heads, channels)[rows], slope) * side).sum(2)
    else:
        score = F.leaky_relu((read * side).sum(2) + target[rows], slope)
    largest = score.new_full((num_targets, heads), -torch.inf)
    largest.scatter_reduce_(0, rows.unsqueeze(1).expand_as(score), score.detach(), "amax")
    score = (score - largest[rows]).exp()
    total = score.new_zeros(num_targets, heads).index_add(0, rows, score)
    attention = score / (total + 1e-16)[rows]
    if factor is not None:
        attention = attention * factor
    sums = read.new_zeros(num_targets, heads, channels).index_add(0, rows, attention.unsqueeze(2) * read)
    if weight is not None:
        sums = torch.einsum("thd,hcd->thc", sums, weight.reshape(heads, weight.size(0) // heads, channels))
    out: Tensor = sums.flatten(1)
    return out
