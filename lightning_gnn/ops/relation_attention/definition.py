"""What RGAT and HGT layers compute on the edges of all relations of a mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_gnn.ops.aggregate_update import edge_order  # noqa: F401  defines the operators that sort edges
from lightning_gnn.ops.relation_attention import numba, reference
from lightning_gnn.ops.relation_attention.reference import Layout

_DTYPES = (torch.float32, torch.float64)


def attend_relations(
    edges: list[Tensor],
    values: Tensor,
    side: Tensor,
    shift: Tensor,
    weight: Tensor,
    layout: Layout,
    factor: Tensor | None = None,
    negative_slope: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sum up, for each target and head, the values of its sources in all relations, weighted by attention.

    A row is a target and a relation that reaches it. The score of an edge is ``leaky_relu(side · value + shift)`` with
    the side and shift of its row; the attention of a head is their softmax over the edges of the row, as in GAT by
    relation (arXiv:1710.10903), or over all edges of the target, as in the heterogeneous graph transformer
    (arXiv:2003.01332). All heads attend to the same values; the sums are multiplied with the relation's weight and
    added up by target: targets are few, so that costs less than to multiply the values, once per relation.
    Differentiable with respect to all but ``factor``, any number of times; a second derivative is computed by torch's
    own operators.

    Args:
        edges: ``indptr`` int64 ``[num_rows + 1]`` and ``indices`` int32 ``[E]``, by target and relation
            (:func:`~lightning_gnn.ops.relation_update.definition.sort_relations`).
        values: float32 or float64 ``[num_sources, channels]``.
        side: ``[R, heads, channels]``, of each relation, or, with ``layout.across``, ``[num_rows, heads, channels]``.
        shift: ``[num_rows, heads]``.
        weight: Of each relation, ``[R, heads, out, channels]``.
        layout: How rows lie, and over which of them a softmax goes.
        factor: What attention is multiplied with before the sums, as dropout does, ``[E, heads]``, or None.
        negative_slope: Of the leaky ReLU; 1: none.

    Returns:
        ``[num_targets, heads * out]``, and the sum of attention of each row, ``[num_rows, heads]``.
    """
    _check(edges, values, side, shift, weight, layout, factor)
    given = values, side, shift, weight
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if transformed or not values.is_cpu or edges[1].numel() == 0 or side.numel() == 0 or weight.numel() == 0:
        return reference.attend(edges, *given, factor, layout, negative_slope)
    return _with_autograd(*given, factor, edges, layout, negative_slope)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        side: Tensor,
        shift: Tensor,
        weight: Tensor,
        factor: Tensor | None,
        edges: list[Tensor],
        layout: Layout,
        slope: float,
    ) -> tuple[Tensor, Tensor]:
        out, mass, *kept = numba.attend(edges, values, side, shift, weight, factor, layout, slope)
        ctx.layout, ctx.slope = layout, slope
        ctx.save_for_backward(values, side, shift, weight, factor, *kept, *edges)
        return out, mass

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_mass: Tensor) -> tuple[Tensor | None, ...]:
        values, side, shift, weight, factor, sums, attention, signed, *edges = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:4])
        if torch.is_grad_enabled():  # create_graph=True
            # Views, so that a tensor that is two of the inputs gets the gradient of each of them apart.
            given = [tensor.view_as(tensor) for tensor in (values, side, shift, weight)]
            outs = reference.attend(edges, given[0], given[1], given[2], given[3], factor, ctx.layout, ctx.slope)
            some = [tensor for tensor, want in zip(given, wanted, strict=True) if want]
            found = torch.autograd.grad(outs, some, (grad, grad_mass), create_graph=True, materialize_grads=True)
            rest = iter(found)
            grads: list[Tensor | None] = [next(rest) if want else None for want in wanted]
        else:
            kept, given_back = (sums, attention, signed), (grad.contiguous(), grad_mass.contiguous())
            grads = numba.attend_backward(
                edges, *given_back, values, side, weight, kept, ctx.layout, ctx.slope, wanted
            )  # fmt: skip
        return *grads, None, None, None, None


_with_autograd: Callable[..., tuple[Tensor, Tensor]] = _Attend.apply


def _check(
    edges: list[Tensor],
    values: Tensor,
    side: Tensor,
    shift: Tensor,
    weight: Tensor,
    layout: Layout,
    factor: Tensor | None,
) -> None:
    if values.dtype not in _DTYPES:
        raise TypeError(f"values must be float32 or float64, but are {values.dtype}")
    if side.dim() != 3 or weight.dim() != 4:
        raise ValueError(
            f"side must be [sides, heads, channels] and weight [relations, heads, out, channels], but they are "
            f"{list(side.shape)} and {list(weight.shape)}"
        )
    num_rows, num_relations, heads, channels = layout.num_rows, sum(layout.relations), side.size(1), side.size(2)
    shapes: dict[str, tuple[Tensor | None, list[int]]] = {
        "indptr": (edges[0], [num_rows + 1]),
        "values": (values, [values.size(0), channels]),
        "side": (side, [num_rows if layout.across else num_relations, heads, channels]),
        "shift": (shift, [num_rows, heads]),
        "weight": (weight, [num_relations, heads, weight.size(2), channels]),
        "factor": (factor, [edges[1].numel(), heads]),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, but is {list(tensor.shape)}")
        if name != "indptr" and tensor.dtype != values.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, but values {values.dtype}; convert one of them")
