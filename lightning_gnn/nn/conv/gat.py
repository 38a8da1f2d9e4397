"""The graph attention layer, on PyG's ``edge_index`` or a graph."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.typing import OptPairTensor, OptTensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn.conv.attention import fused_gat, fuses_attention, in_float32
from lightning_gnn.nn.conv.fused import Fused
from lightning_gnn.nn.conv.graph import TENSOR, check_inputs, is_graph, with_self_loops
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.dropout import edge_dropout
from lightning_gnn.ops.edge_softmax.definition import edge_softmax


class GATConv(pyg.GATConv):  # type: ignore[misc]
    """PyG's ``GATConv`` (arXiv:1710.10903), whose ``edge_index`` may also be a graph.

    On an ``edge_index`` on the CPU it computes scores, softmax and sums in one pass over the edges, unless something
    about the layer is out of the ordinary (:func:`~lightning_gnn.nn.unfused_layers`); dropout then draws one number
    from torch's generator, and its mask from that. Constructor, parameters and results are PyG's. With a graph,
    ``return_attention_weights`` returns it (with self-loops) and weights ``[E, heads]`` in its order of edges.

    Raises:
        ValueError: With a graph: ``edge_dim``, features of a wrong shape, another ``aggr`` than sum,
            ``flow="target_to_source"``, or an explainer.
    """

    propagate_type = {"x": OptPairTensor, "alpha": Tensor}  # noqa: RUF012
    edge_updater_type = {"alpha": OptPairTensor, "edge_attr": OptTensor}  # noqa: RUF012
    fused = Fused(
        pyg.GATConv,
        "scores, softmax, sums and product",
        ("sum",),
        lambda gat: {"lin": gat.lin} if gat.lin is not None else {"lin_src": gat.lin_src, "lin_dst": gat.lin_dst},
        node_dim=0,
    )

    @property
    def takes_graph(self) -> bool:
        """Whether ``edge_index`` may be a graph: not with features of edges."""
        return self.edge_dim is None

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Tensor | CompressedGraph,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Return ``[num_targets, heads * out_channels]``, without ``concat`` ``[num_targets, out_channels]``."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        # Edge tensors take the fused operator where it computes the same, and else PyG's own layer.
        if not is_graph(edge_index):
            plain = edge_attr is None and size is None and return_attention_weights is None
            if plain and fuses_attention(self, source, target, edge_index):
                with in_float32(source, target) as wide:
                    return fused_gat(self, *wide, edge_index)
            return super().forward(x, edge_index, edge_attr, size, return_attention_weights)
        # A compressed graph supports attention by sums, without edge features.
        if self.edge_dim is not None:
            raise ValueError(
                f"GATConv(edge_dim={self.edge_dim}) reads edge features, which a compressed graph does not carry; "
                f"leave edge_dim out, or use {TENSOR}"
            )
        if check_inputs(self, edge_index, source, target=target) != "sum":
            raise ValueError(f"GATConv(aggr={self.aggr!r}) is not supported on a graph, which sums by attention")
        # Multiply the features by the weights; sources and targets may have weights of their own.
        residual = self.res(target) if self.res is not None and target is not None else None
        shape = (-1, self.heads, self.out_channels)
        if self.lin is not None:
            values = self.lin(source).view(shape)
            other = values if target is source else None if target is None else self.lin(target).view(shape)
        else:
            values = self.lin_src(source).view(shape)
            other = None if target is None else self.lin_dst(target).view(shape)
        # Score each edge by its ends, and normalize the scores over the in-edges of a target.
        graph = with_self_loops(edge_index) if self.add_self_loops else edge_index
        source_scores = (values * self.att_src).sum(dim=-1)
        target_scores = (
            source_scores.new_zeros(graph.num_targets, self.heads)
            if other is None
            else (other * self.att_dst).sum(dim=-1)
        )
        weight = edge_softmax(graph, source_scores, target_scores, self.negative_slope)
        weight = edge_dropout(graph, weight, self.dropout, self.training)
        # Sum the values by attention, then join the heads, and add residual and bias.
        out = aggregate(graph, values, weight.to(values.dtype))
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if residual is not None:
            out = out + residual
        if self.bias is not None:
            out = out + self.bias
        return out if return_attention_weights is None else (out, (graph, weight))
