"""GATv2 layer, whose attention depends jointly on both endpoints of an edge."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.typing import OptTensor, PairTensor

from lightning_gnn.nn.conv.attention import add_bias, run_attention
from lightning_gnn.nn.conv.fused import FusedSpec, can_fuse


class GATv2Conv(pyg.GATv2Conv):  # type: ignore[misc]
    """PyG's ``GATv2Conv`` (arXiv:2105.14491), fused like :class:`GATConv`; takes no compressed graph.

    Constructor, parameters and results are those of PyG.
    """

    propagate_type = {"x": PairTensor, "alpha": Tensor}  # noqa: RUF012
    edge_updater_type = {"x": PairTensor, "edge_attr": OptTensor}  # noqa: RUF012
    fused = FusedSpec(
        pyg.GATv2Conv,
        "scores, softmax and sums",
        ("sum",),
        lambda gat: {"lin_l": gat.lin_l, "lin_r": gat.lin_r},
        "attention",
        node_dim=0,
    )

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Return ``[num_targets, heads * out_channels]``, or without ``concat`` ``[num_targets, out_channels]``."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        plain = edge_attr is None and return_attention_weights is None
        if plain and can_fuse(self, source, target, edge_index):
            return add_bias(self, run_attention(self, source, target, edge_index))
        return super().forward(x, edge_index, edge_attr, return_attention_weights)
