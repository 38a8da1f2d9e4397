"""What layers of attention compute on a mini-batch's edges, without a number per edge and channel in memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_gnn.ops.aggregate_update import edge_order  # noqa: F401  defines the operators that sort edges
from lightning_gnn.ops.attention import numba, reference
from lightning_gnn.ops.attention.reference import Attend, Layout

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
    # Check the arguments; the shapes depend on whether attention comes before or after the product.
    if dynamic and weight is not None:
        raise ValueError("dynamic attention scores what is multiplied already: weight must be None")
    if side.dim() != 2:
        raise ValueError(f"side must be [heads, channels], but is {list(side.shape)}")
    heads, channels = side.shape
    num_targets = edges[0].numel() - 1
    shapes = {
        "values": (values, [values.size(0), channels if weight is not None else heads * channels]),
        "side": (side, [heads, channels]),
        "target": (target, [num_targets, heads * channels if dynamic else heads]),
        "weight": (weight, [] if weight is None else [weight.size(0), channels]),
        "factor": (factor, [edges[1].numel(), heads]),
    }
    _check(values, shapes)
    # Give the weight a dimension for heads.
    if weight is not None:
        if weight.size(0) % max(heads, 1):
            raise ValueError(f"weight has {weight.size(0)} rows, which {heads} heads cannot share")
        weight = weight.reshape(1, heads, weight.size(0) // max(heads, 1), channels)
    # A layer without types is one relation of one type.
    layout = Layout([num_targets], [1], False)
    call = Attend(edges, values, side.unsqueeze(0), target, weight, factor, layout, negative_slope, dynamic)
    return _run(call, with_mass=False)[0]


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
            (:func:`~lightning_gnn.ops.aggregate_update.definition.sort_relations`).
        values: float32 or float64 ``[num_sources, channels]``.
        side: ``[R, heads, channels]``, of each relation, or, with ``layout.across``, ``[num_rows, heads, channels]``.
        shift: ``[num_rows, heads]``.
        weight: Of each relation, ``[R, heads, out, channels]``.
        factor: What attention is multiplied with before the sums, as dropout does, ``[E, heads]``, or None.
        negative_slope: Of the leaky ReLU; 1: none.

    Returns:
        ``[num_targets, heads * out]``, and the sum of attention of each row, ``[num_rows, heads]``.
    """
    if side.dim() != 3 or weight.dim() != 4:
        raise ValueError(
            f"side must be [sides, heads, channels] and weight [relations, heads, out, channels], but they are "
            f"{list(side.shape)} and {list(weight.shape)}"
        )
    num_rows, num_relations, heads, channels = layout.num_rows, sum(layout.relations), side.size(1), side.size(2)
    shapes: dict[str, tuple[Tensor | None, list[int]]] = {
        "values": (values, [values.size(0), channels]),
        "side": (side, [num_rows if layout.across else num_relations, heads, channels]),
        "shift": (shift, [num_rows, heads]),
        "weight": (weight, [num_relations, heads, weight.size(2), channels]),
        "factor": (factor, [edges[1].numel(), heads]),
    }
    _check(values, shapes)
    return _run(Attend(edges, values, side, shift, weight, factor, layout, negative_slope), with_mass=True)


def with_self_loops(edges: list[Tensor], num_sources: int) -> list[Tensor]:
    """Return edges of the CPU sorted by target with one self-loop, the last, of each target that is a source."""
    return numba.with_self_loops(edges, min(num_sources, edges[0].numel() - 1))


def _run(call: Attend, with_mass: bool) -> tuple[Tensor, Tensor]:
    sizes = call.edges[1], call.values, call.side, call.side if call.weight is None else call.weight
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if transformed or not call.values.is_cpu or any(tensor.numel() == 0 for tensor in sizes):
        return reference.attend(call)
    return _with_autograd(*call[1:5], call.factor, call.edges, call[6:], with_mass)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        side: Tensor,
        shift: Tensor,
        weight: Tensor | None,
        factor: Tensor | None,
        edges: list[Tensor],
        rest: tuple[Any, ...],
        with_mass: bool,
    ) -> tuple[Tensor, Tensor]:
        call = Attend(edges, values, side, shift, weight, factor, *rest)
        out, mass, *kept = numba.attend(call, ctx.needs_input_grad[3], with_mass)
        ctx.rest = rest
        ctx.save_for_backward(*call[1:6], *kept, *edges)
        return out, mass

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_mass: Tensor) -> tuple[Tensor | None, ...]:
        values, side, shift, weight, factor, sums, attention, signed, *edges = ctx.saved_tensors
        call, wanted = Attend(edges, values, side, shift, weight, factor, *ctx.rest), list(ctx.needs_input_grad[:4])
        if torch.is_grad_enabled():  # create_graph=True
            grads = _differentiable(call, grad, grad_mass, wanted)
        else:
            given = grad.contiguous(), grad_mass.contiguous()
            grads = numba.attend_backward(call, *given, (sums, attention, signed), wanted)
        return *grads, None, None, None, None


_with_autograd: Callable[..., tuple[Tensor, Tensor]] = _Attend.apply


def _differentiable(call: Attend, grad: Tensor, grad_mass: Tensor, wanted: list[bool]) -> list[Tensor | None]:
    # Views, so that a tensor that is two of the inputs gets the gradient of each of them apart.
    inputs: list[Any] = [None if tensor is None else tensor.view_as(tensor) for tensor in call[1:5]]
    values, side, shift, weight = inputs
    out, mass = reference.attend(call._replace(values=values, side=side, shift=shift, weight=weight))
    some = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
    pairs = [(out, grad), *([(mass, grad_mass)] if grad_mass.numel() else [])]
    outs, given = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(outs, some, given, create_graph=True, materialize_grads=True))
    return [next(grads) if want else None for want in wanted]


def _check(values: Tensor, shapes: dict[str, tuple[Tensor | None, list[int]]]) -> None:
    if values.dtype not in _DTYPES:
        raise TypeError(f"values must be float32 or float64, but are {values.dtype}")
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, but is {list(tensor.shape)}")
        if tensor.dtype != values.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, but values {values.dtype}; convert one of them")
