"""Aggregation by relation and products with torch's own operators: for the tests, and for devices without a kernel.

How rows are added up is an argument, which a backend replaces. ``edges`` are those of ``edge_order.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate_update.reference import Sums, divided, sums, through_relu_dropout
from lightning_gnn.ops.dropout import row_dropout_torch
from lightning_gnn.ops.library import define


class Group(NamedTuple):
    """The targets of one type.

    Args:
        kind: Which type that is.
        first_target: Row of the result that holds the first.
        num_targets: How many there are.
        first_row: Row of the edges that holds the first relation of the first.
        first_relation: The first of the relations that reach them.
        num_relations: How many relations reach them: rows per target.
        own: Row of x that holds the features of the first, or -1: they have no term of their own.
    """

    kind: int
    first_target: int
    num_targets: int
    first_row: int
    first_relation: int
    num_relations: int
    own: int

    def rows(self, start: int, stop: int) -> slice:
        """Return the rows of the edges that belong to targets ``[start, stop)``."""
        first = self.first_row - self.first_target * self.num_relations
        return slice(first + start * self.num_relations, first + stop * self.num_relations)

    def own_rows(self, start: int, stop: int) -> slice:
        """Return the rows of x that are targets ``[start, stop)`` themselves."""
        return slice(self.own + start - self.first_target, self.own + stop - self.first_target)

    def of(self, weight: Tensor) -> Tensor:
        """Return the weights of the relations that reach the targets, one below the other, ``[R * in, out]``."""
        last = self.first_relation + self.num_relations
        return weight[self.first_relation : last].reshape(-1, weight.size(2))


def groups(targets: list[int], relations: list[int], own: list[int]) -> Iterator[Group]:
    """Yield a group per type that has targets.

    Args:
        own: The row of x that holds the first target of each type, or -1.
    """
    target = row = relation = 0
    for kind, (count, rows, first) in enumerate(zip(targets, relations, own, strict=True)):
        if count:
            yield Group(kind, target, count, row, relation, rows, first)
        target, row, relation = target + count, row + count * rows, relation + rows


def update(
    sums: Sums,
    edges: list[Tensor],
    x: Tensor,
    weight: Tensor,
    self_weight: Tensor | None,
    bias: Tensor | None,
    targets: list[int],
    relations: list[int],
    own: list[int],
    mean: bool,
    keep: bool = False,
    p: float | None = None,
    key: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the result and, if ``keep``, the aggregated rows of x, for the gradient of ``weight``, else nothing.

    Args:
        sums: Adds up rows; all is differentiable as far as this is.
        x: ``[N, in]``; the others are of its dtype and device.
        weight: ``[R, in, out]``.
        self_weight: ``[types, in, out]``, or None.
        bias: ``[types, out]``, or None.
        own: The row of x that holds the first target of each type, or -1.
        keep: Whether the aggregated rows are wanted.
        p: Probability of dropping a number of the result after a ReLU, or None: neither.
    """
    aggregated = sums(edges, x, mean)
    parts = []
    for group in groups(targets, relations, own):
        span = group.first_target, group.first_target + group.num_targets
        part = aggregated[group.rows(*span)].reshape(group.num_targets, -1) @ group.of(weight)
        if self_weight is not None and group.own >= 0:
            part = part + x[group.own_rows(*span)] @ self_weight[group.kind]
        parts.append(part if bias is None else part + bias[group.kind])
    out = torch.cat(parts) if parts else x.new_zeros(0, weight.size(2))
    if p is not None:
        out = row_dropout_torch(out.relu(), p, key, None)
    return out, aggregated if keep else x.new_empty(0)


def update_backward(
    sums: Sums,
    edges: list[Tensor],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    self_weight: Tensor | None,
    aggregated: Tensor | None,
    targets: list[int],
    relations: list[int],
    own: list[int],
    mean: bool,
    wanted: list[bool],
    activated: Tensor | None = None,
    p: float = 0.0,
) -> list[Tensor]:
    """Return the gradients of x, weight, self_weight and bias, empty where not wanted.

    Args:
        sums: Adds up rows.
        grad: Of the result, ``[num_targets, out]``, contiguous.
        x: ``[N, in]``.
        weight: ``[R, in, out]``.
        self_weight: ``[types, in, out]``, or None.
        aggregated: What :func:`update` kept, or None.
        own: The row of x that holds the first target of each type, or -1.
        activated: The result, if ReLU and dropout came after: positive where it lets the gradient through.
    """
    if activated is not None:
        grad = through_relu_dropout(grad, activated, p)
    wants_x, wants_weight, wants_self, wants_bias = wanted
    none = x.new_empty(0)
    grad_weight = torch.zeros_like(weight) if wants_weight else none
    grad_self = torch.zeros_like(self_weight) if wants_self and self_weight is not None else none
    grad_bias = weight.new_zeros(len(targets), weight.size(2)) if wants_bias else none
    table = x.new_empty(edges[0].numel() - 1, x.size(1)) if wants_x else none
    parts = []
    for group in groups(targets, relations, own):
        span = group.first_target, group.first_target + group.num_targets
        part, rows = grad[slice(*span)], group.rows(*span)
        parts.append((group, part))
        if wants_x:
            table[rows] = (part @ group.of(weight).t()).view(-1, x.size(1))
        if wants_weight:
            assert aggregated is not None
            product = aggregated[rows].reshape(group.num_targets, -1).t() @ part
            last = group.first_relation + group.num_relations
            grad_weight[group.first_relation : last] = product.view(-1, *weight.shape[1:])
        if grad_self.numel() and group.own >= 0:
            grad_self[group.kind] = x[group.own_rows(*span)].t() @ part
        if wants_bias:
            grad_bias[group.kind] = part.sum(0)
    grad_x = none
    if wants_x:
        by_source = torch.ops.lightning_gnn.edges_by_source(edges, x.size(0), False)
        grad_x = sums(by_source, divided(edges, table, mean), False)
        for group, part in parts:
            if self_weight is not None and group.own >= 0:
                span = group.first_target, group.first_target + group.num_targets
                grad_x[group.own_rows(*span)] += part @ self_weight[group.kind].t()
    return [grad_x, grad_weight, grad_self, grad_bias]


relation_update = partial(update, sums)
relation_update_backward = partial(update_backward, sums)
define(
    "relation_update(Tensor[] edges, Tensor x, Tensor weight, Tensor? self_weight, Tensor? bias, int[] targets,"
    " int[] relations, int[] own, bool mean, bool keep, float? p=None, int key=0) -> (Tensor, Tensor)",
    relation_update,
)
define(
    "relation_update_backward(Tensor[] edges, Tensor grad, Tensor x, Tensor weight, Tensor? self_weight,"
    " Tensor? aggregated, int[] targets, int[] relations, int[] own, bool mean, bool[] wanted,"
    " Tensor? activated=None, float p=0.0) -> Tensor[]",
    relation_update_backward,
)
