"""Aggregation over a whole graph: every vertex reduces the weighted features of its in-neighbors."""

from typing import Literal, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import HybridPlan
from lightning_gnn.ops.aggregate.backends import DEVICE, backend_name, functions_of, runs_on_chip
from lightning_gnn.ops.aggregate.derivatives import Graph, in_order, max_over_edges, sum_over_edges
from lightning_gnn.ops.aggregate.matrix import Matrix
from lightning_gnn.ops.aggregate.reference import accumulator
from lightning_gnn.ops.library import check_floating

Reduce = Literal["sum", "mean", "max"]
REDUCES = ("sum", "mean", "max")


@runtime_checkable
class ShardedGraph(Protocol):
    """A part of a graph, whose aggregations involve other processes: :func:`aggregate` leaves them to it."""

    def aggregate(self, x: Tensor, weight: Tensor | None, reduce: Reduce) -> Tensor:
        """Aggregate as :func:`aggregate` does, with autograd."""
        ...

    def edge_softmax(self, source_scores: Tensor, target_scores: Tensor, negative_slope: float) -> Tensor:
        """Normalize as :func:`~lightning_gnn.ops.edge_softmax` does, with autograd."""
        ...


def aggregate(
    graph: CompressedGraph | ShardedGraph,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: Reduce = "sum",
    backend: str | None = None,
) -> Tensor:
    """Reduce the features of the in-neighbors of every target, ``y[i] = reduce of weight[e] * x[j] over e = (j, i)``.

    On an NPU cores share out columns and chunks by the hybrid plan of NeutronAscend (section 5). On a CPU the result is
    the same to the last bit for any number of workers. Differentiable with respect to ``x`` and ``weight`` in reverse
    mode: sums and means any number of times, a maximum once.

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
        a target has no edge. float16 and bfloat16 are accumulated in float32, and on the CPU bfloat16 is read as it is.

    Raises:
        TypeError: ``x`` or ``weight`` is not floating, or ``graph`` is no graph.
        ValueError: A shape or a device does not fit the graph, or ``reduce`` or ``backend`` is unknown.

    Examples:
        >>> import torch
        >>> from lightning_gnn import CompressedGraph, aggregate
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 2]])  # from source to target
        >>> graph = CompressedGraph.from_edge_index(edge_index, num_nodes=3)
        >>> x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
        >>> aggregate(graph, x, reduce="mean")
        tensor([[ 0.0000,  0.0000],
                [ 1.0000, 10.0000],
                [ 2.5000, 25.0000]])
        >>> weight = graph.edge_order(torch.tensor([2.0, 1.0, 0.5]))  # given in the order of edge_index
        >>> aggregate(graph, x, weight)
        tensor([[ 0.0000,  0.0000],
                [ 2.0000, 20.0000],
                [ 3.5000, 35.0000]])
    """
    if reduce not in REDUCES:
        raise ValueError(f"reduce={reduce!r} is unknown; use one of {', '.join(REDUCES)}")
    if not isinstance(graph, CompressedGraph):
        if backend is not None:
            raise ValueError(f"backend={backend!r} cannot be chosen for a {type(graph).__name__}; leave it out")
        if not isinstance(graph, ShardedGraph):
            raise TypeError(f"graph must be a CompressedGraph, or aggregate itself, but is {type(graph).__name__}")
        return graph.aggregate(x, weight, reduce)
    arguments = Graph.of(graph, backend)
    check_features(graph, x, weight)
    shape = (graph.num_targets, *x.shape[1:])
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    # The edges that attain a maximum are found again in backward, which needs it unrounded.
    wide = accumulator(dtype) if reduce == "max" else dtype
    heads = weight.size(1) if weight is not None and weight.dim() == 2 else 1
    by_edge = None if weight is None else weight.to(wide).reshape(graph.num_edges, heads).contiguous()
    narrow = x if x.dtype == torch.bfloat16 and wide == torch.float32 and _reads_bfloat16(x, backend) else x.to(wide)
    by_head = narrow.reshape(x.size(0), heads, x.shape[1:].numel() // heads)
    if reduce == "max":
        out = max_over_edges(by_head, by_edge, arguments)
    else:
        permuted = None if weight is None or by_edge is None else _kept_in_order(graph, x, weight, by_edge)
        out = sum_over_edges(by_head, by_edge, permuted, reduce == "mean", False, arguments)
    return out.view(shape).to(dtype)


def _reads_bfloat16(x: Tensor, backend: str | None) -> bool:
    """Say whether bfloat16 is widened as it is read, and so may be multiplied with float32."""
    return x.device.type == "cpu" and backend_name(backend) in (DEVICE, "numba", "reference")


def hybrid_plan(graph: CompressedGraph, num_columns: int) -> HybridPlan:
    """Return the plan by which an NPU, or its twin, executes a forward aggregation; it prints as a table.

    ``num_columns`` are those of the features, heads times channels. On a CPU or a GPU, without a plan, a ValueError.
    """
    backend, forward = backend_name(None), graph.forward
    if not runs_on_chip(graph.device, backend):
        raise ValueError(
            f"on {graph.device.type} workers share out the rows, without a plan; inside "
            "default_backend('ascend_twin') the plan is that of an NPU"
        )
    matrix = Matrix(forward.indptr, forward.indices, forward.num_columns, graph.settings)
    plan: HybridPlan = functions_of(backend, graph.device).plan(matrix, num_columns)[1]
    return plan


def _kept_in_order(graph: CompressedGraph, x: Tensor, weight: Tensor, by_edge: Tensor) -> Tensor | None:
    """Return constant weights in the order of the backward direction, permuted once; None if not needed."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return None
    # Inside a compiler a tensor stands for others.
    if torch.compiler.is_compiling() or type(weight) not in (Tensor, torch.nn.Parameter):
        return None
    if weight.requires_grad or weight.is_inference():
        return None
    # Known by the object itself, which is held weakly: a new tensor at the address of an old one is another object.
    # Every change in place counts up the version, except one through .data, which autograd does not see either.
    owner = weight if weight._base is None else weight._base
    key = (weight.storage_offset(), weight.stride(), by_edge.shape, by_edge.dtype, weight._version)
    known = graph.cache.get("backward_weight")
    if known is not None and known[0]() is owner and known[1] == key:
        kept: Tensor | None = known[2]
        return kept
    edge_ids = graph.backward.edge_ids
    assert edge_ids is not None
    permuted = in_order(by_edge, edge_ids)
    graph.cache["backward_weight"] = (ref(owner), key, permuted)
    return permuted


def check_features(graph: CompressedGraph, x: Tensor, weight: Tensor | None) -> None:
    """Check features and weights as :func:`aggregate` describes them; no value is read."""
    check_floating("the graph", graph.device, x=x, weight=weight)
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
