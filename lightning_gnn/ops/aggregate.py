"""Aggregation over a whole graph: every vertex reduces the weighted features of its in-neighbours."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.ops.aggregate_backends import bounds, chunk_tensors, operators, plan_of
from lightning_gnn.ops.edge_softmax import edge_softmax
from lightning_gnn.planning.plan import HybridPlan

__all__ = ["ShardedGraph", "aggregate", "edge_softmax", "hybrid_plan"]

Reduce = Literal["sum", "mean", "max"]
REDUCES = ("sum", "mean", "max")


@runtime_checkable
class ShardedGraph(Protocol):
    """A part of a graph, whose aggregations involve other processes: :func:`aggregate` leaves them to it."""

    def aggregate(self, x: Tensor, weight: Tensor | None, reduce: Reduce) -> Tensor:
        """Aggregate as :func:`aggregate` does, with autograd."""
        ...

    def edge_softmax(self, source_scores: Tensor, target_scores: Tensor, negative_slope: float) -> Tensor:
        """Normalise as :func:`~lightning_gnn.ops.edge_softmax` does, with autograd."""
        ...


def aggregate(
    graph: CompressedGraph | ShardedGraph,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: Reduce = "sum",
    backend: str | None = None,
) -> Tensor:
    """Reduce the features of the in-neighbours of every target, ``y[i] = reduce of weight[e] * x[j] over e = (j, i)``.

    Executed by the hybrid plan of NeutronAscend (section 5): groups of workers share out the columns, the members of a
    group share out the chunks. Each number of the result is added up in one fixed order, so that on the CPU it is the
    same to the last bit for any number of workers and groups. Differentiable once, with respect to ``x`` and
    ``weight``.

    Args:
        graph: The graph, on the device of ``x``, or what stands for it (:class:`ShardedGraph`).
        x: Features of the sources, floating ``[num_sources, D]`` or ``[num_sources, H, C]``.
        weight: One number per edge, ``[E]``, or one per edge and head, ``[E, H]``, in the graph's forward order.
        reduce: ``"sum"``; ``"mean"``, the sum divided by the number of edges; or ``"max"``, for each column apart,
            whose gradient is shared evenly by the edges that attain it. A NaN that is aggregated comes out as NaN.
        backend: ``"numba"``, ``"triton"``, ``"reference"``, ``"ascend_twin"`` (the NPU's kernels, simulated), or None
            for what belongs to the device.

    Returns:
        ``[num_targets, D]`` or ``[num_targets, H, C]`` of the dtype to which ``x`` and ``weight`` promote; zeros where
        a target has no edge. float16 and bfloat16 are accumulated in float32.

    Raises:
        TypeError: ``x`` or ``weight`` is not floating, or ``graph`` is no graph.
        ValueError: A shape or a device does not fit the graph, or ``reduce`` or ``backend`` is unknown.
    """
    if reduce not in REDUCES:
        raise ValueError(f"reduce={reduce!r} is unknown; use one of {', '.join(REDUCES)}")
    if not isinstance(graph, CompressedGraph):
        if backend is not None:
            raise ValueError(f"backend={backend!r} cannot be chosen for a {type(graph).__name__}; leave it out")
        if not isinstance(graph, ShardedGraph):
            raise TypeError(f"graph must be a CompressedGraph, or aggregate itself, but is {type(graph).__name__}")
        return graph.aggregate(x, weight, reduce)
    functions = operators(backend, graph.forward.indptr.device)
    check_features(graph, x, weight)
    shape = (graph.num_targets, *x.shape[1:])
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    if x.numel() == 0 or graph.num_targets == 0:
        # There is nothing to compute; the sum keeps the gradients connected.
        return x.to(dtype).sum() + x.new_zeros(shape, dtype=dtype)
    # The edges that attain a maximum are found again in backward, which needs it unrounded.
    wide = torch.promote_types(dtype, torch.float32) if reduce == "max" else dtype
    heads = weight.size(1) if weight is not None and weight.dim() == 2 else 1
    by_edge = None if weight is None else weight.to(wide).reshape(graph.num_edges, heads).contiguous()
    x = x.to(wide).reshape(x.size(0), heads, -1)
    return _Aggregate.apply(x, by_edge, weight, graph, reduce, functions).view(shape).to(dtype)


def hybrid_plan(graph: CompressedGraph, num_columns: int) -> HybridPlan:
    """Return the plan by which :func:`aggregate` executes a forward aggregation; it prints as a table.

    Args:
        graph: The graph.
        num_columns: D, columns of the features, heads times channels.
    """
    return plan_of(graph, "forward", num_columns)


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        given: Tensor | None,
        graph: CompressedGraph,
        reduce: str,
        functions: Any,
    ):
        slices, ranges = _plan(graph, "forward", x)
        out, ties = functions.aggregate_chunks(
            chunk_tensors(graph.forward), graph.num_targets, x, weight, reduce, slices, ranges
        )
        ctx.graph, ctx.reduce, ctx.functions = graph, reduce, functions
        ctx.given = given  # known by identity; its values are not read
        is_max = reduce == "max"
        # A linear aggregation forgets x, the largest tensor, unless the weights want a gradient.
        keep_x = is_max or (weight is not None and ctx.needs_input_grad[1])
        ctx.save_for_backward(x if keep_x else None, weight, out if is_max else None, ties if is_max else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        x, weight, best, ties = ctx.saved_tensors
        graph, functions = ctx.graph, ctx.functions
        if ctx.reduce == "max":
            grad = grad / ties.clamp(min=1)
        elif ctx.reduce == "mean":
            degree = graph.in_degrees.clamp(min=1).view(-1, 1, 1)
            grad = grad / degree.to(torch.promote_types(grad.dtype, torch.float32))
            grad = grad if weight is None else grad.to(weight.dtype)
        grad = grad.to(best.dtype if best is not None else grad.dtype).contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            chunks = chunk_tensors(graph.backward)
            permuted = None if weight is None else _backward_order(graph, weight, ctx.given)
            slices, ranges = _plan(graph, "backward", grad)
            if best is not None:
                grad_x = functions.aggregate_max_backward(
                    chunks, graph.num_sources, grad, best, x, permuted, slices, ranges
                )
            else:
                grad_x, _ = functions.aggregate_chunks(chunks, graph.num_sources, grad, permuted, "sum", slices, ranges)
        if weight is not None and ctx.needs_input_grad[1]:
            slices, ranges = _plan(graph, "forward", grad, one_group=True)
            grad_weight = functions.edge_products(
                chunk_tensors(graph.forward), grad, x, best, weight if best is not None else None, slices, ranges
            )
        return grad_x, grad_weight, None, None, None, None


def _plan(graph: CompressedGraph, direction: str, x: Tensor, one_group: bool = False) -> tuple[list[int], list[int]]:
    plan = plan_of(graph, direction, x.size(1) * x.size(2), one_group)
    return bounds(plan.slices), bounds(plan.chunk_ranges)


def _backward_order(graph: CompressedGraph, weight: Tensor, given: Tensor) -> Tensor:
    """Return the weights in the order of the backward direction; constant ones, such as GCN's, are permuted once.

    Args:
        graph: The graph.
        weight: ``[E, H]``.
        given: The tensor that the caller of :func:`aggregate` gave, of which ``weight`` is a view or a conversion.
    """
    edge_ids = graph.backward.edge_ids
    if edge_ids is None:
        return weight
    if given.requires_grad or given.is_inference():
        return _permuted(weight, edge_ids)
    # Known by the object itself, which is held weakly: a new tensor at the address of an old one is another object.
    # Every change in place counts up the version, except one through .data, which autograd does not see either.
    owner = given if given._base is None else given._base
    key = (given.storage_offset(), given.stride(), weight.shape, weight.dtype, given._version)
    known = graph.cache.get("backward_weight")
    if known is not None and known[0]() is owner and known[1] == key:
        return known[2]
    permuted = _permuted(weight, edge_ids)
    graph.cache["backward_weight"] = (ref(owner), key, permuted)
    return permuted


def _permuted(weight: Tensor, edge_ids: Tensor) -> Tensor:
    # Single numbers are taken several times faster than rows of one number.
    if weight.size(1) == 1:
        return weight.view(-1).index_select(0, edge_ids).view(-1, 1)
    return weight.index_select(0, edge_ids)


def check_features(graph: CompressedGraph, x: Tensor, weight: Tensor | None) -> None:
    """Check features and weights as :func:`aggregate` describes them; no value is read.

    Raises:
        TypeError: A wrong dtype.
        ValueError: A wrong shape or device.
    """
    device = graph.forward.indptr.device
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, but is {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating, but is {tensor.dtype}; convert it with .float()")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but the graph on {device}; move one of them with .to()")
    if x.dim() not in (2, 3):
        raise ValueError(f"x must be [num_sources, D] or [num_sources, H, C], but is {list(x.shape)}")
    if x.size(0) != graph.num_sources:
        raise ValueError(f"x must have one row per source, {graph.num_sources}, but has {x.size(0)}")
    if weight is None:
        return
    if weight.dim() not in (1, 2) or weight.size(0) != graph.num_edges:
        raise ValueError(f"weight must have one row per edge, {graph.num_edges}, but is {list(weight.shape)}")
    if weight.dim() == 2 and (x.dim() != 3 or weight.size(1) != x.size(1)):
        raise ValueError(
            f"weight {list(weight.shape)} has one number per edge and head, so x must be "
            f"[num_sources, {weight.size(1)}, C], but is {list(x.shape)}"
        )
