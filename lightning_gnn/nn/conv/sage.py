"""GraphSAGE layer for PyG's ``edge_index`` or a compressed graph."""

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.typing import OptPairTensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn.conv import graph as graphs
from lightning_gnn.nn.conv.fused import FusedSpec, can_fuse, is_prefix, multiply
from lightning_gnn.nn.conv.graph import REDUCE, aggregate_input, is_constant, is_graph
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.aggregate_update.definition import aggregate_update
from lightning_gnn.ops.aggregate_update.edge_order import target_edges
from lightning_gnn.ops.aggregate_update.reference import ReluDropout, activated
from lightning_gnn.ops.aggregate_update.rows import aggregate_rows


class SAGEConv(pyg.SAGEConv):  # type: ignore[misc]
    """PyG's ``SAGEConv`` (arXiv:1706.02216), whose ``edge_index`` may also be a compressed graph, bipartite or not.

    With a graph, and with an ``edge_index`` on a CPU or GPU unless :func:`~lightning_gnn.nn.unfused_layers` lists the
    layer, it multiplies before or after the aggregation, whichever costs less. Constructor, parameters and results are
    those of PyG.

    Raises:
        ValueError: Same as :class:`GCNConv`.
    """

    takes_graph = True
    propagate_type = {"x": OptPairTensor}  # noqa: RUF012
    fused = FusedSpec(
        pyg.SAGEConv,
        "aggregation (sum, mean) and both products, with ReLU and dropout in a model; aggregation (max)",
        ("sum", "mean", "max"),
        lambda sage: {"lin_l": sage.lin_l, **({"lin_r": sage.lin_r} if sage.root_weight else {})},
        "aggregate",
    )

    def forward(
        self, x: Tensor | OptPairTensor, edge_index: Tensor | CompressedGraph, size: tuple[int, int] | None = None
    ) -> Tensor:
        """Return ``[num_targets, out_channels]`` for ``x`` ``[N, in_channels]``, or a pair (sources, targets)."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        if not is_graph(edge_index):
            if size is None and can_fuse(self, source, target, edge_index):
                return self.run_fused(source, target, edge_index)
            out: Tensor = super().forward(x, edge_index, size)
            return out
        reduce = graphs.check_inputs(self, edge_index, source, target=target)
        if self.project and hasattr(self, "lin"):
            source = self.lin(source).relu()
        constant = is_constant(edge_index, source)
        if graphs.aggregates_first(edge_index, self.lin_l, source, reduce, default=True, constant=constant):
            out = self.lin_l(aggregate_input(edge_index if constant else None, edge_index, source, None, reduce))
        else:
            out = aggregate(edge_index, F.linear(source, self.lin_l.weight), None, reduce)
            out = out if self.lin_l.bias is None else out + self.lin_l.bias
        if self.root_weight and target is not None:
            out = out + self.lin_r(target)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def run_fused(
        self,
        source: Tensor,
        target: Tensor,
        edge_index: Tensor,
        then: ReluDropout | None = None,
        is_first: bool = False,
    ) -> Tensor:
        """Compute :meth:`forward` with fused operators, followed by ``then``; ``is_first``: targets begin source."""
        if self.project and hasattr(self, "lin"):
            source, is_first = multiply(self.lin, source).relu(), False
        reduce, lin, num_targets = REDUCE[self.aggr], self.lin_l, target.size(0)
        fuses_root = self.root_weight and reduce != "max" and (is_first or is_prefix(target, source))
        is_complete = fuses_root or not self.root_weight  # no product is left to add
        if reduce == "max":
            edges = target_edges(edge_index, source.size(0), num_targets)
            out = multiply(lin, aggregate_rows(source, edges, reduce))
        else:
            root = self.lin_r.weight if fuses_root else None
            tail = then if is_complete and not self.normalize else None
            out = aggregate_update(source, edge_index, lin.weight, root, lin.bias, num_targets, reduce, then=tail)
            if tail is not None:
                return out
        if self.root_weight and not fuses_root:
            out = out + multiply(self.lin_r, target)
        return activated(F.normalize(out, p=2.0, dim=-1) if self.normalize else out, then)
