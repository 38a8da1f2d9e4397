"""Graph attention layer for PyG's ``edge_index`` or a compressed graph."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.typing import OptPairTensor, OptTensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn.conv.attention import add_bias, run_attention
from lightning_gnn.nn.conv.fused import FusedSpec, can_fuse
from lightning_gnn.nn.conv.graph import TENSOR, check_inputs, is_graph, with_self_loops
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.aggregate.edge_softmax import edge_softmax
from lightning_gnn.ops.dropout import edge_dropout


class GATConv(pyg.GATConv):  # type: ignore[misc]
    """PyG's ``GATConv`` (arXiv:1710.10903), whose ``edge_index`` may also be a compressed graph.

    For an ``edge_index`` on the CPU or a GPU, scores, softmax and sums take one pass over the edges, unless
    :func:`~lightning_gnn.nn.unfused_layers` lists the layer; dropout then draws one key from torch's CPU generator and
    derives its mask from the key. Constructor, parameters and results are those of PyG. With a graph,
    ``return_attention_weights`` returns the graph (with self-loops) and weights ``[E, heads]`` in its edge order.

    Raises:
        ValueError: With a graph: ``edge_dim`` is set, features have a wrong shape, ``aggr`` is not sum, ``flow`` is
            ``"target_to_source"``, or an explainer is active.
    """

    propagate_type = {"x": OptPairTensor, "alpha": Tensor}  # noqa: RUF012
    edge_updater_type = {"alpha": OptPairTensor, "edge_attr": OptTensor}  # noqa: RUF012
    fused = FusedSpec(
        pyg.GATConv,
        "scores, softmax, sums and product",
        ("sum",),
        lambda gat: {"lin": gat.lin} if gat.lin is not None else {"lin_src": gat.lin_src, "lin_dst": gat.lin_dst},
        "attention",
        node_dim=0,
    )

    @property
    def takes_graph(self) -> bool:
        """Whether ``edge_index`` may be a graph (False with edge features)."""
        return self.edge_dim is None

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Tensor | CompressedGraph,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Return ``[num_targets, heads * out_channels]``, or without ``concat`` ``[num_targets, out_channels]``."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        # Edge tensors use the fused operator if its results are the same, otherwise PyG's layer.
        if not is_graph(edge_index):
            plain = edge_attr is None and size is None and return_attention_weights is None
            if plain and can_fuse(self, source, target, edge_index):
                return add_bias(self, run_attention(self, source, target, edge_index))
            return super().forward(x, edge_index, edge_attr, size, return_attention_weights)
        # A compressed graph supports attention with sum aggregation and without edge features.
        if self.edge_dim is not None:
            raise ValueError(
                f"GATConv(edge_dim={self.edge_dim}) reads edge features, which a compressed graph does not carry; "
                f"leave edge_dim out, or use {TENSOR}"
            )
        if check_inputs(self, edge_index, source, target=target) != "sum":
            raise ValueError(f"GATConv(aggr={self.aggr!r}) is not supported on a graph; use aggr='add'")
        # Multiply the features by the weights; sources and targets may have separate weights.
        residual = self.res(target) if self.res is not None and target is not None else None
        shape = (-1, self.heads, self.out_channels)
        if self.lin is not None:
            values = self.lin(source).view(shape)
            target_values = values if target is source else None if target is None else self.lin(target).view(shape)
        else:
            values = self.lin_src(source).view(shape)
            target_values = None if target is None else self.lin_dst(target).view(shape)
        # Score each edge from its endpoints, and normalize the scores over the in-edges of a target.
        graph = with_self_loops(edge_index) if self.add_self_loops else edge_index
        source_scores = (values * self.att_src).sum(dim=-1)
        target_scores = (
            source_scores.new_zeros(graph.num_targets, self.heads)
            if target_values is None
            else (target_values * self.att_dst).sum(dim=-1)
        )
        weight = edge_softmax(graph, source_scores, target_scores, self.negative_slope)
        weight = edge_dropout(graph, weight, self.dropout, self.training)
        # Sum the values weighted by attention, merge the heads, and add residual and bias.
        out = aggregate(graph, values, weight.to(values.dtype))
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if residual is not None:
            out = out + residual
        if self.bias is not None:
            out = out + self.bias
        return out if return_attention_weights is None else (out, (graph, weight))
