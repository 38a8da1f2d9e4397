"""Graph convolutional layer for PyG's ``edge_index`` or a compressed graph."""

from weakref import ref

import torch
from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.typing import OptTensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn.conv import graph as graphs
from lightning_gnn.nn.conv.fused import FusedSpec, can_fuse
from lightning_gnn.nn.conv.graph import aggregate_input, is_constant, is_graph, with_self_loops
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.aggregate_update.definition import update_by_edges
from lightning_gnn.ops.aggregate_update.reference import ReluDropout
from lightning_gnn.ops.aggregate_update.sums_ahead import Norm, sort_edges


class GCNConv(pyg.GCNConv):  # type: ignore[misc]
    """PyG's ``GCNConv`` (arXiv:1609.02907), whose ``edge_index`` may also be a compressed graph.

    With a graph, and with an ``edge_index`` on a CPU or GPU unless :func:`~lightning_gnn.nn.unfused_layers` lists the
    layer, it computes ``(A X) W`` or ``A (X W)``, whichever costs less. With a graph, ``edge_weight`` ``[E]`` is in the
    order of the ``edge_index`` that the graph was created from. Constructor, parameters and results are those of PyG.

    Raises:
        ValueError: With a graph: features have a wrong shape, ``aggr`` is not sum, mean or max, ``flow`` is
            ``"target_to_source"``, or an explainer is active.
    """

    takes_graph = True
    # PyG parses these from the source of a class that it finds by its bare name; here it would find this subclass.
    propagate_type = {"x": Tensor, "edge_weight": OptTensor}  # noqa: RUF012
    fused = FusedSpec(
        pyg.GCNConv,
        "normalization, once for all layers of a mini-batch; aggregation and product, with ReLU and dropout in a model",
        ("sum",),
        lambda layer: {"lin": layer.lin},
        "aggregate",
    )
    _cached_weight: tuple[CompressedGraph, Tensor] | None = None

    def reset_parameters(self) -> None:
        """Reinitialize the parameters, and clear the normalization cached by ``cached=True``."""
        super().reset_parameters()
        self._cached_weight = None

    def forward(self, x: Tensor, edge_index: Tensor | CompressedGraph, edge_weight: Tensor | None = None) -> Tensor:
        """Return ``[N, out_channels]`` for ``x`` ``[N, in_channels]``."""
        if not is_graph(edge_index):
            if can_fuse(self, x, x, edge_index, edge_weight):
                return self.run_fused(x, self.sorted_edges(edge_index, edge_weight, x, x.size(0)))
            out: Tensor = super().forward(x, edge_index, edge_weight)
            return out
        reduce = graphs.check_inputs(self, edge_index, x, edge_weight)
        graph, weight = self._normalize(edge_index, edge_weight, x)
        constant = is_constant(edge_index, x) and (self.normalize or edge_weight is None)
        weight = weight if weight is None else weight.to(x.dtype)
        # A bias, which users may add, must be summed as well.
        sums_outputs = getattr(self.lin, "bias", None) is not None
        if sums_outputs or not graphs.aggregates_first(graph, self.lin, x, reduce, default=False, constant=constant):
            x = aggregate(graph, self.lin(x), weight, reduce)
        else:
            x = self.lin(aggregate_input(edge_index if constant else None, graph, x, weight, reduce))
        return x if self.bias is None else x + self.bias

    def run_fused(self, x: Tensor, edges: list[Tensor], then: ReluDropout | None = None) -> Tensor:
        """Return ``[num_targets, out]`` for ``x`` and the edges of :meth:`sorted_edges`, followed by ``then``."""
        return update_by_edges(x, edges, self.lin.weight, None, self.bias, False, then)

    def sorted_edges(self, edge_index: Tensor, edge_weight: Tensor | None, x: Tensor, num_targets: int) -> list[Tensor]:
        """Sort edges by target; normalize them by the degrees of all nodes of x if the layer normalizes.

        Behind the entries of the targets, those of other nodes may follow.
        """
        order, num_nodes = torch.ops.lightning_gnn, x.size(0)
        if not self.normalize:
            edges: list[Tensor] = order.edges_by_target(edge_index, num_nodes, num_nodes, edge_weight)
            return [edges[0][: num_targets + 1], *edges[1:]]
        dtype = torch.promote_types(x.dtype, torch.float32)  # multiply bfloat16 in float32
        norm = Norm(2.0 if self.improved else 1.0, self.add_self_loops, dtype)
        if edge_weight is None:
            return sort_edges(x, edge_index, num_targets, norm)
        edges = order.gcn_edges(edge_index, num_nodes, num_targets, edge_weight, *norm)
        return edges

    def _normalize(
        self, graph: CompressedGraph, edge_weight: Tensor | None, x: Tensor
    ) -> tuple[CompressedGraph, Tensor | None]:
        if not self.normalize:
            return graph, None if edge_weight is None else graph.edge_order(edge_weight)
        looped = with_self_loops(graph) if self.add_self_loops else graph
        if self._cached_weight is not None and self._cached_weight[0] is graph:
            return looped, self._cached_weight[1]
        weight = _get_gcn_weight(graph, edge_weight, self.improved, self.add_self_loops, x.dtype)
        if self.cached and edge_weight is not None:  # without edge_weight the graph caches them
            self._cached_weight = (graph, weight)
        return looped, weight


def _get_gcn_weight(
    graph: CompressedGraph, edge_weight: Tensor | None, improved: bool, add_self_loops: bool, dtype: torch.dtype
) -> Tensor:
    """Return the normalization; it is cached for all layers and epochs while the weights are constant."""
    if edge_weight is not None and (edge_weight.requires_grad or edge_weight.is_inference()):
        return graph.gcn_weight(edge_weight, improved, add_self_loops, dtype=dtype)
    with torch.inference_mode(False):  # cached tensors must be usable in training
        if edge_weight is None:
            return graph.gcn_weight(None, improved, add_self_loops, dtype=dtype)
        cache = getattr(graph, "cache", {})
        key = f"gcn_weight of edge_weight, improved={improved}, add_self_loops={add_self_loops}"
        owner, version, weight = cache.get(key, (lambda: None, None, None))
        if owner() is not edge_weight or version != edge_weight._version:
            weight = graph.gcn_weight(edge_weight, improved, add_self_loops, dtype=dtype)
            cache[key] = (ref(edge_weight), edge_weight._version, weight)
        cached: Tensor = weight
        return cached
