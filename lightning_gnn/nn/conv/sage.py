"""The GraphSAGE layer, on PyG's ``edge_index`` or a graph."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.typing import OptPairTensor

from lightning_gnn.nn.conv.fused import fused, fuses
from lightning_gnn.nn.conv.graph import aggregate_input, aggregates_first, check_inputs, is_constant, is_graph
from lightning_gnn.ops.aggregate.definition import aggregate


class SAGEConv(pyg.SAGEConv):  # type: ignore[misc]
    """PyG's ``SAGEConv`` (arXiv:1706.02216), whose ``edge_index`` may also be a graph, bipartite or not.

    With a graph it multiplies before or after it aggregates, whichever costs less. So it does with an ``edge_index`` on
    the CPU, such as a mini-batch's (:func:`~lightning_gnn.ops.aggregate_update`), unless something
    about the layer is out of the ordinary. Constructor, parameters and results are PyG's.

    Raises:
        ValueError: With a graph: features of a wrong shape, another ``aggr`` than sum, mean and max,
            ``flow="target_to_source"``, or an explainer.
    """

    takes_graph = True
    propagate_type = {"x": OptPairTensor}  # noqa: RUF012

    def forward(self, x: Any, edge_index: Any, size: tuple[int, int] | None = None) -> Tensor:
        """Return ``[num_targets, out_channels]`` for ``x`` ``[N, in_channels]``, or a pair (sources, targets)."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        if not is_graph(edge_index):
            if size is None and fuses(self, source, target, edge_index):
                return fused(self, source, target, edge_index)
            out: Tensor = super().forward(x, edge_index, size)
            return out
        reduce = check_inputs(self, edge_index, source, target=target)
        if self.project and hasattr(self, "lin"):
            source = self.lin(source).relu()
        constant = is_constant(edge_index, source)
        if aggregates_first(edge_index, self.lin_l, source, reduce, default=True, constant=constant):
            out = self.lin_l(aggregate_input(edge_index if constant else None, edge_index, source, None, reduce))
        else:
            out = aggregate(edge_index, F.linear(source, self.lin_l.weight), None, reduce)
            out = out if self.lin_l.bias is None else out + self.lin_l.bias
        if self.root_weight and target is not None:
            out = out + self.lin_r(target)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out
