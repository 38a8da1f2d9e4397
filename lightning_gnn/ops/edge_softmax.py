"""Attention over a whole graph: softmax over the in-edges of every target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.ops.aggregate_backends import bounds, chunk_tensors, operators, plan_of

if TYPE_CHECKING:
    from lightning_gnn.ops.aggregate import ShardedGraph


def edge_softmax(
    graph: CompressedGraph | ShardedGraph,
    source_scores: Tensor,
    target_scores: Tensor,
    negative_slope: float = 0.2,
    backend: str | None = None,
) -> Tensor:
    """Turn scores of both ends into attention weights, a softmax of ``leaky_relu(source + target)`` over the in-edges.

    As in PyG the largest score of a target is subtracted first and 1e-16 is added to the sum. Differentiable once, with
    respect to both scores; on the CPU the result does not depend on the number of workers, to the last bit.

    Args:
        graph: The graph, on the device of the scores, or what stands for it.
        source_scores: Floating ``[num_sources, H]``.
        target_scores: Floating ``[num_targets, H]``, of the same dtype.
        negative_slope: Of the leaky ReLU.
        backend: ``"numba"``, ``"triton"``, ``"reference"``, ``"ascend_twin"`` (the NPU's kernels, simulated), or None
            for what belongs to the device.

    Returns:
        Weights ``[E, H]`` in the graph's forward order, as :func:`~lightning_gnn.ops.aggregate` takes them.

    Raises:
        TypeError: The scores are not floating, or of two dtypes.
        ValueError: A shape or a device does not fit the graph, or ``backend`` is unknown.
    """
    if not isinstance(graph, CompressedGraph):
        if backend is not None:
            raise ValueError(f"backend={backend!r} cannot be chosen for a {type(graph).__name__}; leave it out")
        return graph.edge_softmax(source_scores, target_scores, negative_slope)
    functions = operators(backend, graph.forward.indptr.device)
    _check_scores(graph, source_scores, target_scores)
    return _EdgeSoftmax.apply(source_scores, target_scores, float(negative_slope), graph, functions)


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, target: Tensor, slope: float, graph: CompressedGraph, functions: Any):
        ranges = _ranges(graph, "forward")
        out = functions.edge_softmax(chunk_tensors(graph.forward), target, source, slope, ranges)
        ctx.save_for_backward(source, target, out)
        ctx.slope, ctx.graph, ctx.functions = slope, graph, functions
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        source, target, attention = ctx.saved_tensors
        graph, functions = ctx.graph, ctx.functions
        forward, backward = chunk_tensors(graph.forward), chunk_tensors(graph.backward)
        ranges = _ranges(graph, "forward")
        scores = functions.edge_softmax_backward(
            forward, target, source, ctx.slope, attention, grad.contiguous(), ranges
        )
        grad_source = grad_target = None
        if ctx.needs_input_grad[0]:
            ids = graph.backward.edge_ids
            grad_source = functions.edge_sums(backward, graph.num_sources, ids, scores, _ranges(graph, "backward"))
        if ctx.needs_input_grad[1]:
            grad_target = functions.edge_sums(forward, graph.num_targets, None, scores, ranges)
        return grad_source, grad_target, None, None, None


def _ranges(graph: CompressedGraph, direction: str) -> list[int]:
    return bounds(plan_of(graph, direction, 1, one_group=True).chunk_ranges)


def _check_scores(graph: CompressedGraph, source: Tensor, target: Tensor) -> None:
    device = graph.forward.indptr.device
    for name, scores, count, ends in (
        ("source_scores", source, graph.num_sources, "source"),
        ("target_scores", target, graph.num_targets, "target"),
    ):
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            kind = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(f"{name} must be a floating tensor, but is {kind}")
        if scores.device != device:
            raise ValueError(f"{name} is on {scores.device}, but the graph on {device}; move one of them with .to()")
        if scores.dim() != 2 or scores.size(0) != count:
            raise ValueError(f"{name} must be [{count}, H], one row per {ends}, but is {list(scores.shape)}")
    if source.dtype != target.dtype:
        raise TypeError(f"the scores must be of one dtype, but are {source.dtype} and {target.dtype}")
    if source.size(1) != target.size(1):
        raise ValueError(f"sources have {source.size(1)} heads, but targets {target.size(1)}")
