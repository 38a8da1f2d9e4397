"""GCN, GraphSAGE, GIN and GAT layers that take PyG's ``edge_index`` or a compressed graph, with the same parameters."""

from lightning_gnn.nn.conv.gat import GATConv
from lightning_gnn.nn.conv.gatv2 import GATv2Conv
from lightning_gnn.nn.conv.gcn import GCNConv
from lightning_gnn.nn.conv.gin import GINConv
from lightning_gnn.nn.conv.graph import check_takes_graph, is_graph, layers_without_graph
from lightning_gnn.nn.conv.sage import SAGEConv
from lightning_gnn.nn.conv.table import fused_layers, unfused_layers

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "SAGEConv",
    "check_takes_graph",
    "fused_layers",
    "is_graph",
    "layers_without_graph",
    "unfused_layers",
]
