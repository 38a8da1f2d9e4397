"""Public edge softmax of a whole graph: attention weights over the in-edges of every target."""

from torch import Tensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.ops.aggregate.definition import ShardedGraph
from lightning_gnn.ops.aggregate.derivatives import Graph, softmax_over_edges
from lightning_gnn.ops.library import check_floating, check_shapes


def edge_softmax(
    graph: CompressedGraph | ShardedGraph,
    source_scores: Tensor,
    target_scores: Tensor,
    negative_slope: float = 0.2,
    backend: str | None = None,
) -> Tensor:
    """Compute attention weights, the softmax of ``leaky_relu(source + target)`` over the in-edges of each target.

    As in PyG, the largest score of a target is subtracted first, and 1e-16 is added to the sum. Differentiable once
    with respect to both scores. On the CPU, the result is bitwise identical for any number of workers.

    Args:
        graph: The graph, on the device of the scores, or a shard of it, as for :func:`~lightning_gnn.ops.aggregate`.
        source_scores: Scores of the sources, floating ``[num_sources, H]``.
        target_scores: Scores of the targets, floating ``[num_targets, H]``, of the same dtype.
        negative_slope: Negative slope of the leaky ReLU.
        backend: As for :func:`~lightning_gnn.ops.aggregate`.

    Returns:
        Weights ``[E, H]`` in the graph's forward order, as :func:`~lightning_gnn.ops.aggregate` takes them.

    Raises:
        TypeError: The scores are not floating, or their dtypes differ.
        ValueError: A shape or device does not match the graph, or ``backend`` is unknown.

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
    arguments = Graph.of(graph, backend)
    _check_scores(graph, source_scores, target_scores)
    return softmax_over_edges(source_scores, target_scores, float(negative_slope), arguments)


def _check_scores(graph: CompressedGraph, source: Tensor, target: Tensor) -> None:
    check_floating("the graph", graph.device, source_scores=source, target_scores=target)
    of_sources, of_targets = ([count, source.size(-1)] for count in (graph.num_sources, graph.num_targets))
    check_shapes({"source_scores": (source, of_sources), "target_scores": (target, of_targets)})
    if source.dtype != target.dtype:
        raise TypeError(f"the scores must have the same dtype, but are {source.dtype} and {target.dtype}")
