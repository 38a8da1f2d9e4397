"""The graph convolutional layer, on PyG's ``edge_index`` or a graph."""

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import OptTensor

from lightning_gnn.nn.conv.fused import Fused, fuses
from lightning_gnn.nn.conv.graph import (
    Graph,
    aggregate_input,
    aggregates_first,
    check_inputs,
    is_constant,
    is_graph,
    with_self_loops,
)
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.aggregate_update.definition import update_by_edges
from lightning_gnn.ops.aggregate_update.edge_order import first_rows
from lightning_gnn.ops.aggregate_update.reference import ReluDropout


class GCNConv(pyg.GCNConv):  # type: ignore[misc]
    """PyG's ``GCNConv`` (arXiv:1609.02907), whose ``edge_index`` may also be a graph.

    With a graph, and with an ``edge_index`` on the CPU (:func:`~lightning_gnn.ops.aggregate_update`) unless something
    about the layer is out of the ordinary (:func:`~lightning_gnn.nn.unfused_layers` says what), it computes ``(A X) W``
    or ``A (X W)``, whichever costs less. With a graph it takes ``edge_weight`` ``[E]`` in the order of the
    ``edge_index`` that the graph was made from. Constructor, parameters and results are PyG's.

    Raises:
        ValueError: With a graph: features of a wrong shape, another ``aggr`` than sum, mean and max,
            ``flow="target_to_source"``, or an explainer.
    """

    takes_graph = True
    # PyG reads these from the source of a class that it finds by its bare name, which here is ours instead of its own.
    propagate_type = {"x": Tensor, "edge_weight": OptTensor}  # noqa: RUF012
    fused = Fused(
        pyg.GCNConv,
        "normalisation, once for all layers of a mini-batch; aggregation and product, with ReLU and dropout in a model",
        ("sum",),
        lambda layer: {"lin": layer.lin},
        on_chip=("sum",),
    )
    _cached_weight: tuple[Graph, Tensor] | None = None
    _cached_edge_index: tuple[Tensor, Tensor] | None
    _cached_edges: tuple[Tensor, list[Tensor]] | None = None

    def reset_parameters(self) -> None:
        """Draw the parameters anew, and forget the normalisation that ``cached=True`` keeps."""
        super().reset_parameters()
        self._cached_weight = self._cached_edges = None

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Return ``[N, out_channels]`` for ``x`` ``[N, in_channels]``."""
        if not is_graph(edge_index):
            if fuses(self, x, x, edge_index, edge_weight) and (edges := self._sorted(x, edge_index, edge_weight)):
                return self.run_fused(x, edges)
            out: Tensor = super().forward(x, edge_index, edge_weight)
            return out
        reduce = check_inputs(self, edge_index, x, edge_weight)
        graph, weight = self._weighted(edge_index, edge_weight, x)
        constant = is_constant(edge_index, x) and (self.normalize or edge_weight is None)
        weight = _cast(weight, x)
        if not aggregates_first(graph, self.lin, x, reduce, default=False, constant=constant):
            x = aggregate(graph, self.lin(x), weight, reduce)
        else:
            x = self.lin(aggregate_input(edge_index if constant else None, graph, x, weight, reduce))
        return x if self.bias is None else x + self.bias

    def run_fused(self, x: Tensor, edges: list[Tensor], then: ReluDropout | None = None) -> Tensor:
        """Return ``[num_targets, out_channels]`` for edges that are sorted by target and weighted, and what comes then.

        Args:
            x: ``[num_sources, in_channels]``.
            edges: ``indptr``, ``indices`` and, if any, weights, as :func:`sorted_edges` returns them.
            then: ReLU and dropout to be applied.
        """
        return update_by_edges(x, edges, self.lin.weight, None, self.bias, False, then)

    def sorted_edges(
        self, edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int, num_targets: int, dtype: torch.dtype
    ) -> list[Tensor]:
        """Return edges by target, normalised by the degrees of all nodes if the layer normalises.

        Args:
            edge_index: int64 ``[2, E]``.
            edge_weight: ``[E]``, or None.
            num_nodes: How many nodes there are.
            num_targets: How many of them get a row.
            dtype: Of the features.
        """
        order = torch.ops.lightning_gnn
        if not self.normalize:
            return first_rows(order.edges_by_target(edge_index, num_nodes, num_nodes, edge_weight), num_targets)
        loop_weight = 2.0 if self.improved else 1.0
        dtype = torch.promote_types(dtype, torch.float32)  # bfloat16 is multiplied in float32
        edges: list[Tensor] = order.gcn_edges(
            edge_index, num_nodes, num_targets, edge_weight, loop_weight, self.add_self_loops, dtype
        )
        return edges

    def _sorted(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> list[Tensor] | None:
        """Return the edges by target, those that ``cached=True`` keeps; None where PyG has kept what does not fuse."""
        num_nodes = x.size(0)
        if not (self.cached and self.normalize):
            return self.sorted_edges(edge_index, edge_weight, num_nodes, num_nodes, x.dtype)
        if self._cached_edge_index is None:  # as PyG keeps them, also for what cannot be fused later
            self._cached_edge_index = gcn_norm(
                edge_index, edge_weight, num_nodes, self.improved, self.add_self_loops, self.flow, x.dtype
            )
        edge_index, edge_weight = self._cached_edge_index
        if edge_weight.requires_grad or edge_weight.dtype != x.dtype:
            return None
        known = self._cached_edges
        if known is None or known[0] is not edge_weight or known[1][0].numel() != num_nodes + 1:
            edges = torch.ops.lightning_gnn.edges_by_target(edge_index, num_nodes, num_nodes, edge_weight)
            known = self._cached_edges = (edge_weight, edges)
        return known[1]

    def _weighted(self, graph: Any, edge_weight: Tensor | None, x: Tensor) -> tuple[Any, Tensor | None]:
        if not self.normalize:
            return graph, None if edge_weight is None else graph.edge_order(edge_weight)
        looped = with_self_loops(graph) if self.add_self_loops else graph
        if self._cached_weight is not None and self._cached_weight[0] is graph:
            return looped, self._cached_weight[1]
        weight = _gcn_weight(graph, edge_weight, self.improved, self.add_self_loops, x.dtype)
        if self.cached and edge_weight is not None:  # without weights the graph keeps them itself
            self._cached_weight = (graph, weight)
        return looped, weight


def _gcn_weight(
    graph: Graph, edge_weight: Tensor | None, improved: bool, add_self_loops: bool, dtype: torch.dtype
) -> Tensor:
    """Return the normalisation, which is the same in each layer and epoch as long as the weights are constant."""
    keeps = edge_weight is None or not (edge_weight.requires_grad or edge_weight.is_inference())
    if not keeps:
        return graph.gcn_weight(edge_weight, improved, add_self_loops, dtype=dtype)
    with torch.inference_mode(False):  # what is kept must be good for training too
        if edge_weight is None:
            return graph.gcn_weight(None, improved, add_self_loops, dtype=dtype)
        cache = getattr(graph, "cache", {})
        key = f"gcn_weight of edge_weight, improved={improved}, add_self_loops={add_self_loops}"
        owner, version, weight = cache.get(key, (lambda: None, None, None))
        if owner() is not edge_weight or version != edge_weight._version:
            weight = graph.gcn_weight(edge_weight, improved, add_self_loops, dtype=dtype)
            cache[key] = (ref(edge_weight), edge_weight._version, weight)
        found: Tensor = weight
        return found


def _cast(weight: Tensor | None, x: Tensor) -> Tensor | None:
    return weight if weight is None or weight.dtype == x.dtype else weight.to(x.dtype)
