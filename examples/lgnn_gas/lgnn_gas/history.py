"""Tables of layer outputs of earlier steps, and the pass of a model's layers that reads and writes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from lightning_gnn import CompressedGraph
from lightning_gnn.nn import GCNConv, LayerBlock, check_layered, run_layers


class History:
    """Outputs of each layer but the last for all nodes, as of the last step that computed them.

    A table ``[num_nodes, width]`` on the CPU is created when a layer first writes to it; rows that no step has written
    are zeros. It is the ``runner`` of the mini-batches of :class:`ClusterDataModule`.

    Args:
        graph: The whole graph, whose degrees normalize the edges of a GCN.
        edge_weight: Weights ``[num_edges]`` in the order of the user's ``edge_index``, or None.
    """

    trains = True
    """It also runs the model in training mode; see :class:`lightning_gnn.nn.Runner`."""

    def __init__(self, graph: CompressedGraph, edge_weight: Tensor | None = None) -> None:
        self.graph, self.edge_weight = graph, edge_weight
        self.tables: dict[int, Tensor] = {}
        self._gcn_weights: dict[tuple[bool, bool], tuple[Tensor, Tensor | None]] = {}

    def push(self, layer: int, nodes: Tensor, rows: Tensor) -> None:
        """Write the outputs ``[n, width]`` of a layer for some nodes.

        Raises:
            ValueError: The table has another width.
        """
        if layer not in self.tables:
            self.tables[layer] = torch.zeros(self.graph.num_targets, rows.size(1), dtype=rows.dtype)
        table = self.tables[layer]
        if table.size(1) != rows.size(1):
            raise ValueError(
                f"layer {layer} has {rows.size(1)} outputs, but its history has {table.size(1)}: a DataModule keeps "
                "the history of one model; create another DataModule for another model"
            )
        table[nodes.cpu()] = rows.detach().to("cpu", table.dtype)

    def pull(self, layer: int, nodes: Tensor, like: Tensor) -> Tensor:
        """Return the latest outputs of a layer for some nodes, ``[n, width]``, with device and dtype of ``like``."""
        if layer not in self.tables:
            return like.new_zeros(nodes.numel(), like.size(1))
        return self.tables[layer][nodes.cpu()].to(like.device, like.dtype)

    def run(self, model: nn.Module, batch: Data, embeddings: object = None) -> Tensor:
        """Return the model's outputs for the clusters' nodes ``[n, out_channels]``, training nodes first.

        In training mode, each layer but the last writes its outputs to the history.

        Raises:
            TypeError: The model is none of GCN, GraphSAGE, GIN and GAT of :mod:`lightning_gnn.nn`.
            ValueError: The model has jumping knowledge other than ``"last"``.
        """
        model = check_layered(model)
        num_own = batch.num_sampled_nodes[0]
        own, others = batch.n_id[:num_own], batch.n_id[num_own:]

        def exchange(layer: int, rows: Tensor) -> Tensor:
            if model.training:
                self.push(layer, own, rows)
            return torch.cat([rows, self.pull(layer, others, rows)])

        return run_layers(model, batch.x, [self._block(conv, batch) for conv in model.convs], exchange)

    def _block(self, conv: nn.Module, batch: Data) -> LayerBlock:
        """Return the edges of a layer, with those weights that the layer has on the whole graph."""
        num_own, edge_index = batch.num_sampled_nodes[0], batch.edge_index
        if not isinstance(conv, GCNConv):
            return LayerBlock(num_own, edge_index, edge_attr=batch.get("edge_attr"))
        if not conv.normalize:
            return LayerBlock(num_own, edge_index, batch.get("edge_weight"))
        by_edge, by_loop = self._normalize(conv)
        weight = by_edge[batch.e_id.cpu()]
        if by_loop is not None:
            loops = torch.arange(num_own, device=edge_index.device).expand(2, -1)
            edge_index = torch.cat([edge_index, loops], 1)
            weight = torch.cat([weight, by_loop[batch.n_id[:num_own].cpu()]])
        return LayerBlock(num_own, edge_index, weight.to(edge_index.device, conv.lin.weight.dtype))

    def _normalize(self, conv: GCNConv) -> tuple[Tensor, Tensor | None]:
        """Return the normalized weights of edges, in the user's order, and of self-loops, in the whole graph."""
        key = (conv.improved, conv.add_self_loops)
        if key not in self._gcn_weights:
            # Autograd cannot save tensors that an evaluation creates in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                edge_index, num_nodes = self.graph.to_edge_index(), self.graph.num_targets
                _, weight = gcn_norm(edge_index, self.edge_weight, num_nodes, *key, dtype=torch.float32)
                by_edge, by_loop = weight, None
                if conv.add_self_loops:
                    # gcn_norm moves the user's self-loops to the end.
                    by_edge = weight.new_zeros(edge_index.size(1))
                    by_edge[edge_index[0] != edge_index[1]], by_loop = weight[:-num_nodes], weight[-num_nodes:]
            self._gcn_weights[key] = by_edge, by_loop
        return self._gcn_weights[key]

    def state_dict(self) -> dict[str, Any]:
        """Return the tables."""
        return {"tables": self.tables}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the tables."""
        self.tables = {layer: table.clone() for layer, table in state["tables"].items()}
