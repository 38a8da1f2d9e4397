"""Attention over a whole graph: softmax over the in-edges of every target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.ops.aggregate.definition import ShardedGraph
from lightning_gnn.ops.aggregate.derivatives import GraphProducts, GraphSum
from lightning_gnn.ops.aggregate.graph_operators import (
    NO_GRAPH,
    Direction,
    Graph,
    GraphOperator,
    define_over_graph,
    differentiated,
    graph_arguments,
    keep,
    kept,
    num_edges,
    num_rows,
    register,
)


def edge_softmax(
    graph: CompressedGraph | ShardedGraph,
    source_scores: Tensor,
    target_scores: Tensor,
    negative_slope: float = 0.2,
    backend: str | None = None,
) -> Tensor:
    """Turn scores of both ends into attention weights, a softmax of ``leaky_relu(source + target)`` over the in-edges.

    As in PyG the largest score of a target is subtracted first and 1e-16 is added to the sum. Differentiable any number
    of times with respect to both scores, also by ``torch.func`` and in forward mode; on the CPU the result does not
    depend on the number of workers, to the last bit.

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

    Examples:
        >>> import torch
        >>> from lightning_gnn import CompressedGraph, aggregate, edge_softmax
        >>> graph = CompressedGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 2]]), num_nodes=3)
        >>> source_scores = torch.tensor([[0.0], [0.0], [1.0]])
        >>> attention = edge_softmax(graph, source_scores, torch.zeros(3, 1))
        >>> attention.view(-1)  # one edge into node 1, two into node 2
        tensor([1.0000, 0.2689, 0.7311])
        >>> aggregate(graph, torch.eye(3), attention.view(-1))
        tensor([[0.0000, 0.0000, 0.0000],
                [1.0000, 0.0000, 0.0000],
                [0.0000, 0.2689, 0.7311]])
    """
    if not isinstance(graph, CompressedGraph):
        if backend is not None:
            raise ValueError(f"backend={backend!r} cannot be chosen for a {type(graph).__name__}; leave it out")
        return graph.edge_softmax(source_scores, target_scores, negative_slope)
    arguments = graph_arguments(graph, backend)
    _check_scores(graph, source_scores, target_scores)
    weight: Tensor = GraphSoftmax.call(source_scores, target_scores, float(negative_slope), *arguments)
    return weight


@register("graph_softmax(Tensor source, Tensor target, float slope) -> Tensor")
class GraphSoftmax(GraphOperator):
    """What :func:`edge_softmax` returns, ``[E, H]``.

    Args:
        source: ``[num_sources, H]``.
        target: ``[num_targets, H]``.
        slope: Of the leaky ReLU.
    """

    by_head = 2

    @staticmethod
    def compute(source: Tensor, target: Tensor, slope: float, *graph: Any) -> Tensor:
        """Compute without autograd."""
        side = Direction(graph)
        _, ranges = side.plan(1, one_group=True)
        attention: Tensor = side.functions.edge_softmax(side.chunks, target, source, slope, ranges)
        return attention

    @staticmethod
    def fake(source: Tensor, target: Tensor, slope: float, *graph: Any) -> Tensor:
        """Return the shape."""
        return source.new_empty(num_edges(graph), source.size(1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what derivatives need."""
        source, target, ctx.slope, *graph = inputs
        keep(ctx, (source, target, output), graph)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Compute both gradients at once, or in steps where they are to be differentiated themselves."""
        (source, target, attention), graph = kept(ctx)
        wants = ctx.needs_input_grad[:2]
        if differentiated():
            grads = _in_steps(source, target, attention, grad, ctx.slope, graph)
        else:
            arguments = (source, target, attention, grad.contiguous(), ctx.slope, *wants)
            grads = _backward_operator(*arguments, *graph)
        return *(g if want else None for g, want in zip(grads, wants, strict=True)), None, *NO_GRAPH

    @staticmethod
    def jvp(ctx: Any, source_tangent: Tensor | None, target_tangent: Tensor | None, *_: Any) -> Tensor:
        """Weigh the tangents of the edges' scores, less their weighted mean."""
        source: Tensor
        target: Tensor
        attention: Tensor
        (source, target, attention), graph = kept(ctx)
        at_source = torch.zeros_like(source) if source_tangent is None else source_tangent
        at_target = torch.zeros_like(target) if target_tangent is None else target_tangent
        change = _slopes(source, target, ctx.slope, graph) * _at_edges(at_source, at_target, graph)
        mean = _sums(attention * change, False, graph)
        return attention * (change - _at_edges(torch.zeros_like(source), mean, graph))


def _backward(
    source: Tensor,
    target: Tensor,
    attention: Tensor,
    grad: Tensor,
    slope: float,
    wants_source: bool,
    wants_target: bool,
    *graph: Any,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both scores, empty where not wanted; not differentiable."""
    forward, backward = Direction(graph), Direction(graph, transposed=True)
    functions = forward.functions
    _, ranges = forward.plan(1, one_group=True)
    scores = functions.edge_softmax_backward(forward.chunks, target, source, slope, attention, grad, ranges)
    grad_source, grad_target = source.new_empty(0), source.new_empty(0)
    if wants_source:
        _, backward_ranges = backward.plan(1, one_group=True)
        grad_source = functions.edge_sums(
            backward.chunks, backward.num_rows, backward.edge_ids, scores, backward_ranges
        )
    if wants_target:
        grad_target = functions.edge_sums(forward.chunks, forward.num_rows, None, scores, ranges)
    return grad_source, grad_target


def _fake_backward(
    source: Tensor,
    target: Tensor,
    attention: Any,
    grad: Any,
    slope: Any,
    wants_source: bool,
    wants_target: bool,
    *_: Any,
) -> tuple[Tensor, ...]:
    pairs = ((source, wants_source), (target, wants_target))
    return tuple(scores.new_empty(scores.shape if wanted else 0) for scores, wanted in pairs)


_backward_operator = define_over_graph(
    "graph_softmax_backward(Tensor source, Tensor target, Tensor attention, Tensor grad, float slope,"
    " bool wants_source, bool wants_target) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
)


def _in_steps(
    source: Tensor, target: Tensor, attention: Tensor, grad: Tensor, slope: float, graph: Graph
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both scores, made of operators that have all derivatives."""
    product = attention * grad
    total = _at_edges(torch.zeros_like(source), _sums(product, False, graph), graph)
    scores = _slopes(source, target, slope, graph) * (product - attention * total)
    return _sums(scores, True, graph), _sums(scores, False, graph)


def _slopes(source: Tensor, target: Tensor, slope: float, graph: Graph) -> Tensor:
    """Return the derivative of the leaky ReLU at each edge, ``[E, H]``: constants."""
    scores = _at_edges(source.detach(), target.detach(), graph)
    return torch.where(scores > 0, 1.0, slope).to(scores.dtype)


def _at_edges(source: Tensor, target: Tensor, graph: Graph) -> Tensor:
    """Add numbers of both ends of each edge, ``[E, H]``."""
    source, target = source.unsqueeze(2), target.unsqueeze(2)
    of_target: Tensor = GraphProducts.call(target.contiguous(), torch.ones_like(source), *graph)
    of_source: Tensor = GraphProducts.call(torch.ones_like(target), source.contiguous(), *graph)
    return of_target + of_source


def _sums(values: Tensor, transposed: bool, graph: Graph) -> Tensor:
    """Add up numbers of the edges ``[E, H]`` into each target, or out of each source."""
    ones = values.new_ones(num_rows(graph, not transposed), values.size(1), 1)
    sums: Tensor = GraphSum.call(ones, values, None, None, transposed, *graph)
    return sums.squeeze(2)


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
