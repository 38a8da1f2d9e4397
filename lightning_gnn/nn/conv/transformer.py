"""Dot-product attention layer for PyG's ``edge_index`` or a compressed graph."""

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.typing import OptTensor, PairTensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn.conv.attention import draw_factor, multiply, without_autocast
from lightning_gnn.nn.conv.fused import FusedSpec, can_fuse
from lightning_gnn.nn.conv.graph import check_inputs, is_graph
from lightning_gnn.ops.aggregate_update.edge_order import target_edges
from lightning_gnn.ops.attention.definition import attend_keys


class TransformerConv(pyg.TransformerConv):  # type: ignore[misc]
    """PyG's ``TransformerConv`` (arXiv:2009.03509), whose ``edge_index`` may also be a compressed graph.

    Fused like :class:`GATConv`, without edge features. Constructor, parameters and results are those of PyG.

    Raises:
        ValueError: With a graph: same as :class:`GATConv`, or its edges are distributed over ranks.
    """

    propagate_type = {"query": Tensor, "key": Tensor, "value": Tensor, "edge_attr": OptTensor}  # noqa: RUF012
    fused = FusedSpec(
        pyg.TransformerConv,
        "scores, softmax and sums",
        ("sum",),
        lambda layer: {"lin_key": layer.lin_key, "lin_value": layer.lin_value, "lin_query": layer.lin_query},
        "attention",
        node_dim=0,
    )

    @property
    def takes_graph(self) -> bool:
        """Whether ``edge_index`` may be a graph (False with edge features)."""
        return self.edge_dim is None

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: Tensor | CompressedGraph,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Return ``[num_targets, heads * out_channels]``, or without ``concat`` ``[num_targets, out_channels]``."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        if not is_graph(edge_index):
            plain = edge_attr is None and return_attention_weights is None
            if not plain or not can_fuse(self, source, target, edge_index):
                return super().forward(x, edge_index, edge_attr, return_attention_weights)
            edges = target_edges(edge_index, source.size(0), target.size(0))
            return self._attend(source, target, edges)
        if self.edge_dim is not None or return_attention_weights is not None or not hasattr(edge_index, "forward"):
            raise ValueError(
                "TransformerConv supports neither edge features, nor return_attention_weights, nor edges distributed "
                "over ranks on a graph; use an edge_index"
            )
        if check_inputs(self, edge_index, source, target=target) != "sum":
            raise ValueError(f"TransformerConv(aggr={self.aggr!r}) is not supported on a graph; use aggr='add'")
        return self._attend(source, target, [edge_index.forward.indptr, edge_index.forward.indices])

    def _attend(self, source: Tensor, target: Tensor, edges: list[Tensor]) -> Tensor:
        device, heads, width = source.device.type, self.heads, self.out_channels
        with without_autocast(source, target) as (left, right):
            keys = multiply(left, self.lin_key.weight, self.lin_key.bias)
            values = multiply(left, self.lin_value.weight, self.lin_value.bias)
            query = multiply(right, self.lin_query.weight, self.lin_query.bias).view(-1, heads, width)
            factor = draw_factor(left, edges, heads, self.dropout if self.training else 0.0)
            out = attend_keys(edges, query / math.sqrt(width), keys, values, factor).to(self.lin_key.weight.dtype)
            out = out if self.concat else out.view(-1, heads, width).mean(1)
            if self.root_weight:
                own = self.lin_skip(right.to(out.dtype))
                mixed = None if self.lin_beta is None else self.lin_beta(torch.cat([out, own, out - own], 1)).sigmoid()
                out = out + own if mixed is None else torch.lerp(out, own, mixed)
        return out.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else out
