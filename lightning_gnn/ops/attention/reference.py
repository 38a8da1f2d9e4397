"""Attention over the edges of a mini-batch with torch's own operators, for tests and second derivatives."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnn.ops.aggregate_update.reference import Group, iterate_groups


class Layout(NamedTuple):
    """The layout of the rows of sorted edges, and the rows of each softmax."""

    targets: list[int]  # number of targets of each node type
    relations: list[int]  # number of relations that end in each node type
    across: bool  # a softmax covers all rows of a target, with a side per row; else one row, with a side per relation

    @property
    def groups(self) -> list[Group]:
        """The targets of each node type."""
        return list(iterate_groups(self.targets, self.relations, [-1] * len(self.targets)))

    @property
    def num_rows(self) -> int:
        """Number of rows of sorted edges."""
        return sum(count * rows for count, rows in zip(self.targets, self.relations, strict=True))

    def sides(self) -> np.ndarray:
        """Return the index of the side of each row, int32 ``[num_rows]``."""
        if self.across:
            return np.arange(self.num_rows, dtype=np.int32)
        numbers = [np.tile(np.arange(*group.relations.indices(2**31)), group.num_targets) for group in self.groups]
        return np.concatenate([np.empty(0), *numbers]).astype(np.int32)

    def softmaxes(self) -> np.ndarray:
        """Return the index of the softmax of each row, int64 ``[num_rows]``."""
        if not self.across:
            return np.arange(self.num_rows)
        sizes = np.repeat(np.array(self.relations, int), np.array(self.targets, int))
        sizes = sizes[sizes > 0]  # targets without relations have no rows, and thus no softmax
        return np.repeat(np.arange(sizes.size), sizes)


class Attend(NamedTuple):
    """Inputs of the operator; homogeneous attention is a single relation with a single side."""

    edges: list[Tensor]  # indptr and indices, sorted by target and relation
    values: Tensor  # [num_sources, channels], without weight [num_sources, heads * channels]
    side: Tensor  # [sides, heads, channels]
    shift: Tensor  # [num_rows, heads], if dynamic [num_rows, heads * channels]
    weight: Tensor | None  # [R, heads, out, channels], or None for one relation, whose sums are the result
    factor: Tensor | None  # [E, heads], or None
    layout: Layout  # order of the rows
    slope: float  # negative slope of the leaky ReLU
    dynamic: bool = False  # apply the leaky ReLU before the dot product with the side
    keys: Tensor | None = None  # the vectors that are scored, like the values without weight; None: the values


def attend(call: Attend) -> tuple[Tensor, Tensor]:
    """Return the sums of each target and the sum of attention of each row; differentiable any number of times."""
    indptr, indices = call.edges
    device, (_, heads, channels), layout = call.values.device, call.side.shape, call.layout
    num_rows = layout.num_rows
    rows = torch.repeat_interleave(indptr.diff(), output_size=indices.numel())
    softmax = torch.from_numpy(layout.softmaxes()).to(device)[rows]
    side = call.side if call.side.size(0) == 1 else call.side[torch.from_numpy(layout.sides()).to(device)[rows]]
    # [E, heads, channels], or [E, 1, channels] if heads read the same columns.
    read = call.values.index_select(0, indices)
    read = read.view(indices.numel(), 1 if call.weight is not None else heads, channels)
    key = read if call.keys is None else call.keys.index_select(0, indices).view_as(read)
    if call.dynamic:
        score = (F.leaky_relu(key + call.shift.reshape(num_rows, heads, channels)[rows], call.slope) * side).sum(2)
    else:
        score = F.leaky_relu((key * side).sum(2) + call.shift[rows], call.slope)
    largest = score.new_full((num_rows, heads), -torch.inf)  # there are at most as many softmaxes as rows
    largest.scatter_reduce_(0, softmax.unsqueeze(1).expand_as(score), score.detach(), "amax")
    score = (score - largest[softmax]).exp()
    total = score.new_zeros(num_rows, heads).index_add(0, softmax, score)
    attention = score / (total + 1e-16)[softmax]
    if call.factor is not None:
        attention = attention * call.factor
    mass = score.new_zeros(num_rows, heads).index_add(0, rows, attention)
    sums = read.new_zeros(num_rows, heads, channels).index_add(0, rows, attention.unsqueeze(2) * read)
    if call.weight is None:
        return sums.flatten(1), mass
    results = []
    for group in layout.groups:
        block = sums[group.rows(group.targets)].view(group.num_targets, group.num_relations, heads, channels)
        results.append(torch.einsum("nrhc,rhoc->nho", block, call.weight[group.relations]).flatten(1))
    return torch.cat(results), mass
