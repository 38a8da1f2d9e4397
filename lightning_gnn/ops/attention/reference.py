"""Attention over a mini-batch's edges with torch's own operators: for the tests, and for second derivatives."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnn.ops.aggregate_update.reference import Group, groups


class Layout(NamedTuple):
    """How the rows of sorted edges lie, and over which of them a softmax goes."""

    targets: list[int]  # how many targets of each type
    relations: list[int]  # how many relations reach each type
    across: bool  # a softmax goes over all rows of a target, each with its own side; else over one, with its relation's

    @property
    def groups(self) -> list[Group]:
        """The targets of each type."""
        return list(groups(self.targets, self.relations, [-1] * len(self.targets)))

    @property
    def num_rows(self) -> int:
        """Rows of sorted edges."""
        return sum(count * rows for count, rows in zip(self.targets, self.relations, strict=True))

    def sides(self) -> np.ndarray:
        """Return which side belongs to each row, int32 ``[num_rows]``."""
        if self.across:
            return np.arange(self.num_rows, dtype=np.int32)
        parts = [np.tile(np.arange(*group.relations.indices(2**31)), group.num_targets) for group in self.groups]
        return np.concatenate([np.empty(0), *parts]).astype(np.int32)

    def softmaxes(self) -> np.ndarray:
        """Return the number of the softmax that each row belongs to, int64 ``[num_rows]``."""
        if not self.across:
            return np.arange(self.num_rows)
        each = np.concatenate([np.full(group.num_targets, group.num_relations) for group in self.groups])
        return np.repeat(np.arange(each.size), each)


class Attend(NamedTuple):
    """What the operator is given; attention without types is one relation with one side."""

    edges: list[Tensor]  # indptr and indices, sorted by target and relation
    values: Tensor  # [num_sources, channels], without weight [num_sources, heads * channels]
    side: Tensor  # [sides, heads, channels]
    shift: Tensor  # [num_rows, heads], if dynamic [num_rows, heads * channels]
    weight: Tensor | None  # [R, heads, out, channels], or None: the sums are the result, of one relation
    factor: Tensor | None  # [E, heads], or None
    layout: Layout  # how rows lie
    slope: float  # of the leaky ReLU
    dynamic: bool = False  # whether it comes before the product with the side


def attend(call: Attend) -> tuple[Tensor, Tensor]:
    """Return sums by target, and the sum of attention of each row; differentiable any number of times."""
    indptr, indices = call.edges
    device, (_, heads, channels), layout = call.values.device, call.side.shape, call.layout
    num_rows = layout.num_rows
    rows = torch.repeat_interleave(indptr.diff(), output_size=indices.numel())
    own = torch.from_numpy(layout.softmaxes()).to(device)[rows]
    side = call.side if call.side.size(0) == 1 else call.side[torch.from_numpy(layout.sides()).to(device)[rows]]
    # [E, heads, channels], or, where heads read the same columns, [E, 1, channels].
    read = call.values.index_select(0, indices)
    read = read.view(indices.numel(), 1 if call.weight is not None else heads, channels)
    if call.dynamic:
        score = (F.leaky_relu(read + call.shift.reshape(num_rows, heads, channels)[rows], call.slope) * side).sum(2)
    else:
        score = F.leaky_relu((read * side).sum(2) + call.shift[rows], call.slope)
    largest = score.new_full((num_rows, heads), -torch.inf)  # no more softmaxes than rows
    largest.scatter_reduce_(0, own.unsqueeze(1).expand_as(score), score.detach(), "amax")
    score = (score - largest[own]).exp()
    total = score.new_zeros(num_rows, heads).index_add(0, own, score)
    attention = score / (total + 1e-16)[own]
    if call.factor is not None:
        attention = attention * call.factor
    mass = score.new_zeros(num_rows, heads).index_add(0, rows, attention)
    sums = read.new_zeros(num_rows, heads, channels).index_add(0, rows, attention.unsqueeze(2) * read)
    if call.weight is None:
        return sums.flatten(1), mass
    parts = []
    for group in layout.groups:
        part = sums[group.rows(group.targets)].view(group.num_targets, group.num_relations, heads, channels)
        parts.append(torch.einsum("nrhc,rhoc->nho", part, call.weight[group.relations]).flatten(1))
    return torch.cat(parts), mass
