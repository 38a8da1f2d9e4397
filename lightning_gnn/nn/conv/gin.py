"""Graph isomorphism layer for PyG's ``edge_index`` or a compressed graph."""

from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.typing import OptPairTensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn.conv.fused import FusedSpec, can_fuse, multiply
from lightning_gnn.nn.conv.graph import REDUCE, check_inputs, is_graph
from lightning_gnn.ops.aggregate.definition import REDUCES, aggregate
from lightning_gnn.ops.aggregate_update.edge_order import target_edges
from lightning_gnn.ops.aggregate_update.rows import aggregate_rows


class GINConv(pyg.GINConv):  # type: ignore[misc]
    """PyG's ``GINConv`` (arXiv:1810.00826), whose ``edge_index`` may also be a compressed graph, bipartite or not.

    On the CPU, a GPU and an NPU one operator aggregates the neighbors of an ``edge_index``, unless
    :func:`~lightning_gnn.nn.unfused_layers` lists the layer. Constructor, parameters and results are those of PyG.

    Raises:
        ValueError: Same as :class:`GCNConv`.
    """

    takes_graph = True
    propagate_type = {"x": OptPairTensor}  # noqa: RUF012
    fused = FusedSpec(pyg.GINConv, "aggregation (sum, mean, max)", REDUCES, lambda layer: {}, "aggregate")

    def forward(
        self, x: Tensor | OptPairTensor, edge_index: Tensor | CompressedGraph, size: tuple[int, int] | None = None
    ) -> Tensor:
        """Return the output of ``nn``, ``[num_targets, …]``, for ``x`` ``[N, F]`` or a pair (sources, targets)."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        if is_graph(edge_index):
            reduce = check_inputs(self, edge_index, source, target=target)
            out = aggregate(edge_index, source, None, reduce)
        elif size is None and can_fuse(self, source, target, edge_index):
            edges = target_edges(edge_index, source.size(0), target.size(0))
            out = aggregate_rows(source, edges, REDUCE[self.aggr])
        else:
            result: Tensor = super().forward(x, edge_index, size)
            return result
        out = out if target is None else out + (1 + self.eps) * target
        return multiply(self.nn, out)
