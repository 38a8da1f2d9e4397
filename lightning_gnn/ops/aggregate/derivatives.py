"""The operators under ``aggregate``.

A sum over the in-edges, the same along the transpose, and the dot products of both ends of every edge are each other's
derivatives, with respect to features and to weights: they can be differentiated any number of times. A maximum has a
first derivative only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.graph_operators import (
    NO_GRAPH,
    Direction,
    GraphOperator,
    keep,
    kept,
    num_edges,
    num_rows,
    register,
)
from lightning_gnn.ops.aggregate.reference import accumulator


@register("graph_sum(Tensor x, Tensor? weight, Tensor? permuted, Tensor? degrees, bool transposed) -> Tensor")
class GraphSum(GraphOperator):
    """``y[i] = sum of weight[e] * x[j] over e = (j, i)``, or with ``transposed`` over ``e = (i, j)``.

    Args:
        x: ``[num_sources, H, C]``, transposed ``[num_targets, H, C]``.
        weight: ``[E, H]`` of the dtype of ``x``, or None; on the CPU float32 beside bfloat16 too, which makes float32.
        permuted: The same in the order of the backward direction, if they are constants that somebody keeps.
        degrees: What the sums are divided by, int64 ``[num_targets]``: makes means; None if transposed.
    """

    by_head = 3

    @staticmethod
    def compute(
        x: Tensor, weight: Tensor | None, permuted: Tensor | None, degrees: Tensor | None, transposed: bool, *graph: Any
    ) -> Tensor:
        """Compute without autograd."""
        side = Direction(graph, transposed)
        if x.numel() == 0 or side.num_rows == 0 or num_edges(graph) == 0:
            return x.new_zeros(side.num_rows, *x.shape[1:], dtype=_product_type(x, weight))
        reduce = "sum" if degrees is None else "mean"
        weight = side.ordered(weight, permuted)
        # Without weights nothing tells the heads apart.
        table = x.reshape(x.size(0), 1, -1) if weight is None else x
        return side.reduced(table, weight, reduce).view(side.num_rows, *x.shape[1:])

    @staticmethod
    def fake(x: Tensor, weight: Any, permuted: Any, degrees: Any, transposed: bool, *graph: Any) -> Tensor:
        """Return the shape."""
        return x.new_empty(num_rows(graph, transposed), *x.shape[1:], dtype=_product_type(x, weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what derivatives need."""
        x, weight, permuted, degrees, ctx.transposed, *graph = inputs
        # It forgets x, the largest tensor, unless the weights want a gradient.
        keeps_x = weight is not None and ctx.needs_input_grad[1]
        others = weight, permuted, degrees
        keep(ctx, (x, *others), graph, backward=(x if keeps_x else None, *others))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Sum along the other direction; multiply both ends."""
        (x, weight, permuted, degrees), graph = kept(ctx)
        if degrees is not None:
            dtype = grad.dtype
            grad = _divided(grad, degrees)
            # Of float16, whose small numbers end early, it stays wide where nothing forbids it.
            grad = grad if weight is None and dtype == torch.float16 else grad.to(dtype)
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = GraphSum.call(grad, weight, permuted, None, not ctx.transposed, *graph)
        if weight is not None and ctx.needs_input_grad[1]:
            ends = (x, grad) if ctx.transposed else (grad, x)
            grad_weight = GraphProducts.call(*ends, *graph)
        return grad_x, grad_weight, None, None, None, *NO_GRAPH

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, weight_tangent: Tensor | None, *_: Any) -> Tensor:
        """Sum the tangents, which enter linearly."""
        (x, weight, permuted, degrees), graph = kept(ctx)
        rest = (degrees, ctx.transposed, *graph)
        parts: list[Tensor] = []
        if x_tangent is not None:
            parts.append(GraphSum.call(x_tangent.contiguous(), weight, permuted, *rest))
        if weight_tangent is not None:
            parts.append(GraphSum.call(x, weight_tangent.contiguous(), None, *rest))
        return sum(parts[1:], parts[0])


@register("graph_products(Tensor row_side, Tensor column_side) -> Tensor")
class GraphProducts(GraphOperator):
    """``p[e] = row_side[i] · column_side[j] for e = (j, i)``, per head.

    Args:
        row_side: ``[num_targets, H, C]``.
        column_side: ``[num_sources, H, C]``, of the same dtype; on the CPU also float32 beside bfloat16.
    """

    by_head = 2

    @staticmethod
    def compute(row_side: Tensor, column_side: Tensor, *graph: Any) -> Tensor:
        """Compute without autograd."""
        if row_side.size(1) * row_side.size(2) == 0 or num_edges(graph) == 0:
            return row_side.new_zeros(num_edges(graph), row_side.size(1), dtype=_product_type(row_side, column_side))
        side = Direction(graph)
        plan = side.plan(row_side.size(1) * row_side.size(2), one_group=True)
        products: Tensor = side.functions.edge_products(side.chunks, row_side, column_side, None, None, *plan)
        return products

    @staticmethod
    def fake(row_side: Tensor, column_side: Tensor, *graph: Any) -> Tensor:
        """Return the shape."""
        return column_side.new_empty(num_edges(graph), row_side.size(1), dtype=_product_type(row_side, column_side))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what derivatives need."""
        keep(ctx, inputs[:2], inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Sum the other end, weighted by the gradient."""
        (row_side, column_side), graph = kept(ctx)
        row_grad = column_grad = None
        if ctx.needs_input_grad[0]:
            row_grad = GraphSum.call(column_side, grad.contiguous(), None, None, False, *graph)
        if ctx.needs_input_grad[1]:
            column_grad = GraphSum.call(row_side, grad.contiguous(), None, None, True, *graph)
        return row_grad, column_grad, *NO_GRAPH

    @staticmethod
    def jvp(ctx: Any, row_tangent: Tensor | None, column_tangent: Tensor | None, *_: Any) -> Tensor:
        """Multiply each tangent with the other end."""
        (row_side, column_side), graph = kept(ctx)
        parts: list[Tensor] = []
        if row_tangent is not None:
            parts.append(GraphProducts.call(row_tangent.contiguous(), column_side, *graph))
        if column_tangent is not None:
            parts.append(GraphProducts.call(row_side, column_tangent.contiguous(), *graph))
        return sum(parts[1:], parts[0])


@register("graph_max(Tensor x, Tensor? weight) -> (Tensor, Tensor)")
class GraphMax(GraphOperator):
    """``y[i] = max of weight[e] * x[j] over e = (j, i)``, not rounded, and how many edges attain it.

    Args:
        x: ``[num_sources, H, C]``, float32 or float64, on the CPU also bfloat16.
        weight: ``[E, H]`` of the same dtype, float32 for bfloat16, or None.
    """

    by_head = 2

    @staticmethod
    def compute(x: Tensor, weight: Tensor | None, *graph: Any) -> tuple[Tensor, Tensor]:
        """Compute without autograd."""
        side = Direction(graph)
        if x.numel() == 0 or side.num_rows == 0 or num_edges(graph) == 0:
            nothing = x.new_zeros(side.num_rows, *x.shape[1:], dtype=accumulator(x.dtype))
            return nothing, nothing.clone()
        chunks, *plan = side.by_vertex(x.size(1) * x.size(2), x.size(1))
        best, ties = side.functions.aggregate_chunks(chunks, side.num_rows, x, weight, "max", *plan)
        return best, ties

    @staticmethod
    def fake(x: Tensor, weight: Tensor | None, *graph: Any) -> tuple[Tensor, Tensor]:
        """Return the shapes."""
        out = x.new_empty(num_rows(graph), *x.shape[1:], dtype=accumulator(x.dtype))
        return out, torch.empty_like(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the derivative needs."""
        best, ties = output
        ctx.mark_non_differentiable(ties)
        ctx.set_materialize_grads(False)
        keep(ctx, (best, ties, *inputs[:2]), inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        """Share the gradient out to the edges that attain the maximum."""
        if grad is None:
            return None, None, *NO_GRAPH
        (best, ties, x, weight), graph = kept(ctx)
        shares = (grad / ties.clamp(min=1)).to(best.dtype)
        wants_x, wants_weight = ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1]
        grad_x, grad_weight = GraphMaxBackward.call(shares, best, x, weight, wants_x, wants_weight, *graph)
        return grad_x if wants_x else None, grad_weight if wants_weight else None, *NO_GRAPH

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        raise NotImplementedError(
            "aggregate(reduce='max') has no forward-mode derivative; take the gradient by reverse mode "
            "(torch.autograd.grad, torch.func.grad), or use 'sum' or 'mean'"
        )


@register(
    "graph_max_backward(Tensor shares, Tensor best, Tensor x, Tensor? weight, bool wants_x, bool wants_weight)"
    " -> (Tensor, Tensor)"
)
class GraphMaxBackward(GraphOperator):
    """Gradients of a maximum, empty where not wanted.

    Args:
        shares: Gradient of each maximum by the edges that attain it, ``[num_targets, H, C]``.
        best: The maxima, ``[num_targets, H, C]``.
        x: ``[num_sources, H, C]``, float32 or float64, on the CPU also bfloat16.
        weight: ``[E, H]`` of the same dtype, float32 for bfloat16, or None.
        wants_x: Whether to compute that of ``x``.
        wants_weight: Whether to compute that of ``weight``.
    """

    by_head = 4

    @staticmethod
    def compute(
        shares: Tensor, best: Tensor, x: Tensor, weight: Tensor | None, wants_x: bool, wants_weight: bool, *graph: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute without autograd."""
        results = GraphMaxBackward.fake(shares, best, x, weight, wants_x, wants_weight, *graph)
        if x.numel() == 0 or shares.numel() == 0 or num_edges(graph) == 0:
            return results[0].zero_(), results[1].zero_()
        grad_x, grad_weight = results
        shares, num_columns = shares.contiguous(), x.size(1) * x.size(2)
        if wants_x:
            side = Direction(graph, transposed=True)
            ordered, (chunks, *plan) = side.ordered(weight, None), side.by_vertex(num_columns, x.size(1))
            grad_x = side.functions.aggregate_max_backward(chunks, side.num_rows, shares, best, x, ordered, *plan)
        if wants_weight:
            side = Direction(graph)
            grad_weight = side.functions.edge_products(
                side.chunks, shares, x, best, weight, *side.plan(num_columns, one_group=True)
            )
        return grad_x, grad_weight

    @staticmethod
    def fake(
        shares: Tensor, best: Tensor, x: Tensor, weight: Tensor | None, wants_x: bool, wants_weight: bool, *graph: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the shapes."""
        edges = best.new_empty(num_edges(graph), x.size(1)) if wants_weight else best.new_empty(0)
        return x.new_empty(x.shape) if wants_x else x.new_empty(0), edges

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        raise NotImplementedError(
            "aggregate(reduce='max') has a first derivative only, but a second one was asked for, such as that of a "
            "gradient penalty; use reduce='sum' or 'mean', or detach the gradient"
        )

    jvp = GraphMax.jvp


def _product_type(x: Tensor, other: Tensor | None) -> torch.dtype:
    return x.dtype if other is None else torch.promote_types(x.dtype, other.dtype)


def _divided(rows: Tensor, degrees: Tensor) -> Tensor:
    divisors = degrees.clamp(min=1).view(-1, 1, 1)
    return rows / divisors.to(torch.promote_types(rows.dtype, torch.float32))
