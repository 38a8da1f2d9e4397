"""Attention over the edges of all relations with torch's own operators: for the tests, and for second derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnn.ops.relation_update.reference import Group, groups


class Layout(NamedTuple):
    """How the rows of sorted edges lie, and over which of them a softmax goes.

    Args:
        targets: How many targets of each type.
        relations: How many relations reach each type.
        across: Whether a softmax goes over all rows of a target, each with a side of its own, or over one row, with the
            side of its relation.
    """

    targets: list[int]
    relations: list[int]
    across: bool

    def groups(self) -> Iterator[Group]:
        """Yield a group per type that has targets."""
        return groups(self.targets, self.relations, [-1] * len(self.targets))

    @property
    def num_rows(self) -> int:
        """Rows of sorted edges."""
        return sum(count * rows for count, rows in zip(self.targets, self.relations, strict=True))

    def sides(self) -> np.ndarray:
        """Return which side belongs to each row, int32 ``[num_rows]``."""
        if self.across:
            return np.arange(self.num_rows, dtype=np.int32)
        relations = [np.arange(group.num_relations, dtype=np.int32) + group.first_relation for group in self.groups()]
        parts = [np.tile(of, group.num_targets) for of, group in zip(relations, self.groups(), strict=True)]
        return np.concatenate([np.empty(0, np.int32), *parts])

    def softmaxes(self) -> np.ndarray:
        """Return the first row of each softmax, and the end, int64 ``[num_softmaxes + 1]``."""
        if not self.across:
            return np.arange(self.num_rows + 1)
        reached = [group for group in self.groups() if group.num_relations]
        starts = [group.first_row + np.arange(group.num_targets) * group.num_relations for group in reached]
        return np.concatenate([*starts, [self.num_rows]])


def attend(
    edges: list[Tensor],
    values: Tensor,
    side: Tensor,
    shift: Tensor,
    weight: Tensor,
    factor: Tensor | None,
    layout: Layout,
    slope: float,
) -> tuple[Tensor, Tensor]:
    """Do what ``attend_relations`` in ``definition.py`` does; differentiable any number of times."""
    indptr, indices = edges
    device, heads, channels = values.device, side.size(1), side.size(2)
    starts = torch.from_numpy(layout.softmaxes()).to(device)
    softmax_of = torch.repeat_interleave(starts.diff(), output_size=layout.num_rows)
    rows = torch.repeat_interleave(indptr.diff(), output_size=indices.numel())
    side_of = torch.from_numpy(layout.sides()).to(device)[rows]
    read = values.index_select(0, indices).unsqueeze(1)
    score = F.leaky_relu((read * side.index_select(0, side_of)).sum(2) + shift[rows], slope)
    own = softmax_of[rows]
    largest = score.new_full((starts.numel() - 1, heads), -torch.inf)
    largest.scatter_reduce_(0, own.unsqueeze(1).expand_as(score), score.detach(), "amax")
    score = (score - largest[own]).exp()
    total = score.new_zeros(starts.numel() - 1, heads).index_add(0, own, score)
    attention = score / (total + 1e-16)[own]
    if factor is not None:
        attention = attention * factor
    mass = score.new_zeros(layout.num_rows, heads).index_add(0, rows, attention)
    sums = read.new_zeros(layout.num_rows, heads, channels).index_add(0, rows, attention.unsqueeze(2) * read)
    parts = []
    for group in layout.groups():
        span = group.rows(group.first_target, group.first_target + group.num_targets)
        part = sums[span].view(group.num_targets, group.num_relations, heads, channels)
        by = weight[group.first_relation : group.first_relation + group.num_relations]
        parts.append(torch.einsum("nrhc,rhoc->nho", part, by).flatten(1))
    return torch.cat(parts) if parts else values.new_zeros(0, heads * weight.size(2)), mass
