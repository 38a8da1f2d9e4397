"""Public aggregation over a whole graph: every vertex reduces the weighted features of its in-neighbors."""

from typing import Literal, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import HybridPlan
from lightning_gnn.ops.aggregate.backends import DEVICE, backend_name, chip_executor, functions_of
from lightning_gnn.ops.aggregate.derivatives import Graph, max_over_edges, permute_rows, sum_over_edges
from lightning_gnn.ops.aggregate.matrix import Matrix
from lightning_gnn.ops.aggregate.reference import accumulation_dtype
from lightning_gnn.ops.library import check_floating

Reduce = Literal["sum", "mean", "max"]
REDUCES = ("sum", "mean", "max")


@runtime_checkable
class ShardedGraph(Protocol):
    """A shard of a graph that implements its own aggregation across processes; :func:`aggregate` delegates to it."""

    def aggregate(self, x: Tensor, weight: Tensor | None, reduce: Reduce) -> Tensor:
        """Compute :func:`aggregate` over the shard, with autograd. All ranks must call this."""
        ...

    def edge_softmax(self, source_scores: Tensor, target_scores: Tensor, negative_slope: float) -> Tensor:
        """Compute :func:`~lightning_gnn.ops.edge_softmax`, with autograd. All ranks must call this."""
        ...


def aggregate(
    graph: CompressedGraph | ShardedGraph,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: Reduce = "sum",
    backend: str | None = None,
) -> Tensor:
    """Reduce the features of the in-neighbors of every target, ``y[i] = reduce of weight[e] * x[j] over e = (j, i)``.

    On an NPU, columns and chunks are distributed over cores by the hybrid plan of NeutronAscend (section 5). On a CPU,
    the result is bitwise identical for any number of workers. Differentiable with respect to ``x`` and ``weight`` in
    reverse mode: sums and means any number of times, a maximum once.

    Args:
        graph: The graph, on the device of ``x``, or a shard with its own aggregation (:class:`ShardedGraph`).
        x: Features of the sources, floating ``[num_sources, D]`` or ``[num_sources, H, C]``.
        weight: One number per edge, ``[E]``, or one per edge and head, ``[E, H]``, in the graph's forward order.
        reduce: ``"sum"``; ``"mean"``, the sum divided by the number of edges; or ``"max"``, per column, with the
            gradient divided evenly among the edges that attain it. NaN inputs give NaN.
        backend: ``"numba"``, ``"triton"``, ``"reference"``, ``"ascend_twin"`` (simulated NPU kernels), or None for the
            backend of the device.

    Returns:
        ``[num_targets, D]`` or ``[num_targets, H, C]`` in the promoted dtype of ``x`` and ``weight``, zeros for targets
        without edges. float16 and bfloat16 are accumulated in float32. On the CPU bfloat16 is read without a copy.

    Raises:
        TypeError: ``x`` or ``weight`` is not floating, or ``graph`` is not a graph.
        ValueError: A shape or device does not match the graph, or ``reduce`` or ``backend`` is unknown.

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
        >>> weight = graph.edge_order(torch.tensor([2.0, 1.0, 0.5]))  # from the order of edge_index
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
            raise TypeError(f"graph must be a CompressedGraph or a ShardedGraph, but is {type(graph).__name__}")
        return graph.aggregate(x, weight, reduce)
    arguments = Graph.of(graph, backend)
    check_features(graph, x, weight)
    shape = (graph.num_targets, *x.shape[1:])
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    # The backward pass compares messages with the maximum again, which must therefore not be rounded.
    wide = accumulation_dtype(dtype) if reduce == "max" else dtype
    heads = weight.size(1) if weight is not None and weight.dim() == 2 else 1
    by_edge = None if weight is None else weight.to(wide).reshape(graph.num_edges, heads).contiguous()
    narrow = x if x.dtype == torch.bfloat16 and wide == torch.float32 and _reads_bfloat16(x, backend) else x.to(wide)
    by_head = narrow.reshape(x.size(0), heads, x.shape[1:].numel() // heads)
    if reduce == "max":
        out = max_over_edges(by_head, by_edge, arguments)
    else:
        permuted = None if weight is None or by_edge is None else _permute_weight(graph, x, weight, by_edge)
        out = sum_over_edges(by_head, by_edge, permuted, reduce == "mean", False, arguments)
    return out.view(shape).to(dtype)


def _reads_bfloat16(x: Tensor, backend: str | None) -> bool:
    """Return whether the backend widens bfloat16 when reading it, so that it can be multiplied by float32."""
    return x.device.type == "cpu" and backend_name(backend) in (DEVICE, "numba", "reference")


def hybrid_plan(graph: CompressedGraph, num_columns: int) -> HybridPlan:
    """Return the plan of a forward aggregation on an NPU or its simulation; printing it shows a table.

    ``num_columns`` is the number of feature columns, heads times channels. Other devices raise a ValueError.
    """
    backend, forward = backend_name(None), graph.forward
    if chip_executor(graph.device, backend) is None:
        raise ValueError(
            f"aggregations on {graph.device.type} do not use a hybrid plan; call this inside "
            "default_backend('ascend_twin') to get the plan of an NPU"
        )
    matrix = Matrix(forward.indptr, forward.indices, forward.num_columns, settings=graph.settings)
    plan: HybridPlan = functions_of(backend, graph.device).plan(matrix, num_columns)[1]
    return plan


def _permute_weight(graph: CompressedGraph, x: Tensor, weight: Tensor, by_edge: Tensor) -> Tensor | None:
    """Return constant weights in the order of the backward direction, permuted once and cached, or None."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return None
    # In a compiler a tensor represents many values, which must not be cached.
    if torch.compiler.is_compiling() or type(weight) not in (Tensor, torch.nn.Parameter):
        return None
    if weight.requires_grad or weight.is_inference():
        return None
    # The cache compares a weak reference to the object: a new tensor at the address of an old one is another object.
    # In-place changes increment the version, except through .data, which autograd does not detect either.
    owner = weight if weight._base is None else weight._base
    key = (weight.storage_offset(), weight.stride(), by_edge.shape, by_edge.dtype, weight._version)
    cached = graph.cache.get("backward_weight")
    if cached is not None and cached[0]() is owner and cached[1] == key:
        hit: Tensor | None = cached[2]
        return hit
    edge_ids = graph.backward.edge_ids
    assert edge_ids is not None
    permuted = permute_rows(by_edge, edge_ids)
    graph.cache["backward_weight"] = (ref(owner), key, permuted)
    return permuted


def check_features(graph: CompressedGraph, x: Tensor, weight: Tensor | None) -> None:
    """Check dtypes, devices and shapes of features and weights as documented in :func:`aggregate`."""
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
