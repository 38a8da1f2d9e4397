"""What GAT and GATv2 layers compute on a mini-batch's edges, without a number per edge and channel in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_gnn.ops.aggregate_update import edge_order  # noqa: F401  defines the operators that sort edges
from lightning_gnn.ops.attention import numba, reference

_DTYPES = (torch.float32, torch.float64)


def attend(
    edges: list[Tensor],
    values: Tensor,
    side: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    factor: Tensor | None = None,
    negative_slope: float = 0.2,
    dynamic: bool = False,
) -> Tensor:
    """Sum up, for each target and head, the values of its sources, weighted by attention.

    The score of an edge is ``leaky_relu(side · value + target)``, as in GAT (arXiv:1710.10903), or, if ``dynamic``,
    ``side · leaky_relu(value + target)``, as in GATv2 (arXiv:2105.14491); the attention of a head is their softmax over
    the in-edges of a target. With a ``weight`` all heads attend to the same values, and the sums are multiplied: as
    targets are few, that costs less than to multiply the values. Differentiable with respect to all but ``factor``, any
    number of times; a second derivative is computed by torch's own operators. On the CPU the sums do not depend on the
    number of threads, to the last bit.

    Args:
        edges: ``indptr`` int64 ``[num_targets + 1]`` and ``indices`` int32 ``[E]``, sorted by target
            (``ops/aggregate_update/edge_order.py``, :func:`with_self_loops`).
        values: float32 or float64 ``[num_sources, heads * channels]``, with ``weight`` ``[num_sources, channels]``.
        side: ``[heads, channels]``.
        target: ``[num_targets, heads]``, or, if ``dynamic``, ``[num_targets, heads * channels]``.
        weight: ``[heads * out_channels, channels]``, or None.
        factor: What attention is multiplied with before the sums, as dropout does, ``[E, heads]``, or None.
        dynamic: Whether the leaky ReLU comes before the product; not with ``weight``.

    Returns:
        ``[num_targets, heads * channels]``, with ``weight`` ``[num_targets, heads * out_channels]``.
    """
    _check(edges, values, side, target, weight, factor, dynamic)
    arguments = values, side, target, weight, factor
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if transformed or not values.is_cpu or edges[1].numel() == 0 or side.numel() == 0 or values.numel() == 0:
        return reference.attend(edges, *arguments, negative_slope, dynamic)
    return _with_autograd(*arguments, edges, negative_slope, dynamic)


def with_self_loops(edges: list[Tensor], num_sources: int) -> list[Tensor]:
    """Return edges of the CPU sorted by target with one self-loop, the last, of each target that is a source."""
    return numba.with_self_loops(edges, min(num_sources, edges[0].numel() - 1))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        side: Tensor,
        target: Tensor,
        weight: Tensor | None,
        factor: Tensor | None,
        edges: list[Tensor],
        slope: float,
        dynamic: bool,
    ) -> Tensor:
        keep = ctx.needs_input_grad[3]
        out, *kept = numba.attend(edges, values, side, target, weight, factor, slope, dynamic, keep)
        ctx.slope, ctx.dynamic = slope, dynamic
        ctx.save_for_backward(values, side, target, weight, factor, *kept, *edges)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, side, target, weight, factor, aggregated, attention, signed, *edges = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:4])
        if torch.is_grad_enabled():  # create_graph=True
            given = values, side, target, weight
            grads = _differentiable(edges, grad, given, factor, ctx.slope, ctx.dynamic, wanted)
        else:
            kept = aggregated, attention, signed
            grads = numba.attend_backward(
                edges, grad.contiguous(), values, side, target, weight, kept, ctx.slope, ctx.dynamic, wanted
            )
        return *grads, None, None, None, None


_with_autograd: Callable[..., Tensor] = _Attend.apply


def _differentiable(
    edges: list[Tensor],
    grad: Tensor,
    given: tuple[Tensor | None, ...],
    factor: Tensor | None,
    slope: float,
    dynamic: bool,
    wanted: list[bool],
) -> list[Tensor | None]:
    # Views, so that a tensor that is two of the inputs gets the gradient of each of them apart.
    inputs: list[Any] = [None if tensor is None else tensor.view_as(tensor) for tensor in given]
    values, side, target, weight = inputs
    out = reference.attend(edges, values, side, target, weight, factor, slope, dynamic)
    some = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
    grads = iter(torch.autograd.grad(out, some, grad, create_graph=True))
    return [next(grads) if want else None for want in wanted]


def _check(
    edges: list[Tensor],
    values: Tensor,
    side: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factor: Tensor | None,
    dynamic: bool,
) -> None:
    if dynamic and weight is not None:
        raise ValueError("dynamic attention scores what is multiplied already: weight must be None")
    if values.dtype not in _DTYPES:
        raise TypeError(f"values must be float32 or float64, but are {values.dtype}")
    if side.dim() != 2:
        raise ValueError(f"side must be [heads, channels], but is {list(side.shape)}")
    heads, channels = side.shape
    num_targets, num_edges = edges[0].numel() - 1, edges[1].numel()
    shapes: dict[str, tuple[Tensor | None, list[int]]] = {
        "values": (values, [values.size(0), channels if weight is not None else heads * channels]),
        "side": (side, [heads, channels]),
        "target": (target, [num_targets, heads * channels if dynamic else heads]),
        "weight": (weight, [] if weight is None else [weight.size(0), channels]),
        "factor": (factor, [num_edges, heads]),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, but is {list(tensor.shape)}")
        if tensor.dtype != values.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, but values {values.dtype}; convert one of them")
    if weight is not None and weight.size(0) % max(heads, 1):
        raise ValueError(f"weight has {weight.size(0)} rows, which {heads} heads cannot share")
