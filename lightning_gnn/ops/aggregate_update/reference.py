"""Aggregate and update with torch's own operators: for the tests, and for devices that have no kernel of their own.

Parts that a backend replaces are arguments: how it sums up rows. ``edges`` are those of ``edge_order.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate_update import edge_order  # noqa: F401  defines the operators that sort edges
from lightning_gnn.ops.dropout import row_dropout, row_dropout_torch
from lightning_gnn.ops.library import define

Sums = Callable[[list[Tensor], Tensor, bool], Tensor]
"""Edges, x and whether to divide by the number of edges, to the aggregated rows of x."""


class ReluDropout(NamedTuple):
    """ReLU, then dropout by row and column (:func:`lightning_gnn.ops.dropout.row_dropout`).

    Args:
        p: Probability in [0, 1).
        key: 64-bit integer.
    """

    p: float = 0.0
    key: int = 0


def activated(out: Tensor, then: ReluDropout | None) -> Tensor:
    """Apply what comes then, if anything; differentiable."""
    return out if then is None else row_dropout(out.relu(), then.p, then.key)


def sums(edges: list[Tensor], x: Tensor, mean: bool) -> Tensor:
    """Add up ``weight[e] * x[indices[e]]`` over the edges of each row; differentiable.

    Args:
        edges: Sorted by row.
        x: ``[num_columns, D]``.

    Returns:
        ``[num_rows, D]`` of the dtype of ``x``, accumulated in float32 at least.
    """
    indptr, indices, *weight = edges
    wide = torch.promote_types(x.dtype, torch.float32)
    degrees = indptr.diff()
    rows = torch.repeat_interleave(degrees, output_size=indices.numel())
    messages = x.to(wide).index_select(0, indices)
    if weight:
        messages = messages * weight[0].to(wide).unsqueeze(1)
    out = messages.new_zeros(degrees.numel(), x.size(1)).index_add(0, rows, messages)
    return (out / _divisors(edges, wide) if mean else out).to(x.dtype)


def update(
    sums: Sums,
    edges: list[Tensor],
    x: Tensor,
    weight: Tensor,
    self_weight: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    aggregate_first: bool,
    keep: bool = False,
    p: float | None = None,
    key: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the result and, if ``keep``, the aggregated rows of x, for the gradient of ``weight``, else nothing.

    Args:
        sums: Adds up rows; all is differentiable as far as this is.
        x: ``[num_sources, in]``; the others are of its dtype and device.
        weight: ``[out, in]``.
        self_weight: ``[out, in]``, or None.
        bias: ``[out]``, or None.
        aggregate_first: Aggregate x, and not the products.
        keep: Only if ``aggregate_first``.
        p: Probability of dropping a number of the result after a ReLU, or None: neither.
    """
    aggregated = sums(edges, x, mean) if aggregate_first else None
    out = sums(edges, x @ weight.t(), mean) if aggregated is None else aggregated @ weight.t()
    if self_weight is not None:
        out = out + x[: out.size(0)] @ self_weight.t()
    out = out if bias is None else out + bias
    if p is not None:
        out = row_dropout_torch(out.relu(), p, key, None)
    return out, aggregated if keep and aggregated is not None else x.new_empty(0)


def update_backward(
    sums: Sums,
    edges: list[Tensor],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    self_weight: Tensor | None,
    aggregated: Tensor | None,
    mean: bool,
    aggregate_first: bool,
    wanted: list[bool],
    activated: Tensor | None = None,
    p: float = 0.0,
) -> list[Tensor]:
    """Return the gradients of x, weight, self_weight and bias, empty where not wanted.

    Args:
        sums: Adds up rows.
        grad: Of the result, ``[num_targets, out]``, contiguous.
        x: ``[num_sources, in]``.
        weight: ``[out, in]``.
        self_weight: ``[out, in]``, or None.
        aggregated: What :func:`update` kept, or None.
        aggregate_first: Whether x was aggregated, and not the products.
        activated: The result, if ReLU and dropout came after: positive where it lets the gradient through.
    """
    if activated is not None:
        grad = through_relu_dropout(grad, activated, p)
    wants_x, wants_weight, wants_self, wants_bias = wanted
    none = x.new_empty(0)
    grad_x, grad_weight = none, none
    num_targets = grad.size(0)
    own = self_weight is not None
    if aggregate_first:
        if wants_weight:
            assert aggregated is not None
            grad_weight = grad.t() @ aggregated
        if wants_x:
            table = divided(edges, grad @ weight, mean)
            if self_weight is not None:
                table = torch.cat([table, grad @ self_weight])
            grad_x = sums(_by_source(edges, x.size(0), own), table, False)
    elif wants_x or wants_weight:
        received = sums(_by_source(edges, x.size(0), False), divided(edges, grad, mean), False)
        if wants_weight:
            grad_weight = received.t() @ x
        if wants_x:
            grad_x = received @ weight
            if self_weight is not None:
                grad_x[:num_targets] += grad @ self_weight
    grad_self = grad.t() @ x[:num_targets] if wants_self else none
    return [grad_x, grad_weight, grad_self, grad.sum(0) if wants_bias else none]


def through_relu_dropout(grad: Tensor, activated: Tensor, p: float) -> Tensor:
    """Return the gradient before ReLU and dropout."""
    return torch.where(activated <= 0, 0, grad * (1.0 / (1.0 - p))).to(grad.dtype)


def divided(edges: list[Tensor], rows: Tensor, mean: bool) -> Tensor:
    """Divide a row per target by the number of its edges, if ``mean``."""
    return rows / _divisors(edges, rows.dtype) if mean else rows


def _divisors(edges: list[Tensor], dtype: torch.dtype) -> Tensor:
    return edges[0].diff().clamp(min=1).to(dtype).unsqueeze(1)


def _by_source(edges: list[Tensor], num_sources: int, own: bool) -> list[Tensor]:
    by_source: list[Tensor] = torch.ops.lightning_gnn.edges_by_source(edges, num_sources, own)
    return by_source


aggregate_update = partial(update, sums)
aggregate_update_backward = partial(update_backward, sums)
define(
    "aggregate_update(Tensor[] edges, Tensor x, Tensor weight, Tensor? self_weight, Tensor? bias, bool mean,"
    " bool aggregate_first, bool keep, float? p=None, int key=0) -> (Tensor, Tensor)",
    aggregate_update,
)
define(
    "aggregate_update_backward(Tensor[] edges, Tensor grad, Tensor x, Tensor weight, Tensor? self_weight,"
    " Tensor? aggregated, bool mean, bool aggregate_first, bool[] wanted, Tensor? activated=None, float p=0.0)"
    " -> Tensor[]",
    aggregate_update_backward,
)
