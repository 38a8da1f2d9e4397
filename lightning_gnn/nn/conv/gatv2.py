"""The GATv2 layer, whose attention depends on both ends of an edge together."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.typing import OptTensor, PairTensor

from lightning_gnn.nn.conv.attention import fused_gatv2, fuses_attention
from lightning_gnn.nn.conv.fused import Fused


def _products(layer: Any) -> dict[str, Any]:
    return {"lin_l": layer.lin_l, "lin_r": layer.lin_r}


class GATv2Conv(pyg.GATv2Conv):  # type: ignore[misc]
    """PyG's ``GATv2Conv`` (arXiv:2105.14491), faster on the CPU.

    On an ``edge_index`` there, such as a mini-batch's, it computes scores, softmax and sums in one pass over the edges,
    unless something about the layer is out of the ordinary. Constructor, parameters and results are PyG's; dropout
    draws one number from torch's generator, and its mask from that. It does not take a compressed graph.
    """

    propagate_type = {"x": PairTensor, "alpha": Tensor}  # noqa: RUF012
    edge_updater_type = {"x": PairTensor, "edge_attr": OptTensor}  # noqa: RUF012
    fused = Fused(pyg.GATv2Conv, "scores, softmax and sums", ("sum",), _products, node_dim=0)

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Tensor | None = None, return_attention_weights: bool | None = None
    ) -> Any:
        """Return ``[num_targets, heads * out_channels]``, without ``concat`` ``[num_targets, out_channels]``."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        plain = edge_attr is None and return_attention_weights is None
        if plain and fuses_attention(self, source, target, edge_index):
            return fused_gatv2(self, source, target, edge_index)
        return super().forward(x, edge_index, edge_attr, return_attention_weights)
