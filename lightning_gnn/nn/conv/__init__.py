"""GCN, GraphSAGE, GIN and GAT layers that take PyG's ``edge_index`` or a compressed graph, with the same parameters."""

from lightning_gnn.nn.conv.gat import GATConv
from lightning_gnn.nn.conv.gatv2 import GATv2Conv
from lightning_gnn.nn.conv.gcn import GCNConv
from lightning_gnn.nn.conv.gin import GINConv
from lightning_gnn.nn.conv.sage import SAGEConv
from lightning_gnn.nn.conv.table import unfused_layers

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "SAGEConv",
    "unfused_layers",
]
