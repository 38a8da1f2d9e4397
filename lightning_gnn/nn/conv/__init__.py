"""PyG's GCN, GraphSAGE, GIN, GAT and transformer layers, which take an ``edge_index`` or a compressed graph."""

from lightning_gnn.nn.conv.gat import GATConv
from lightning_gnn.nn.conv.gatv2 import GATv2Conv
from lightning_gnn.nn.conv.gcn import GCNConv
from lightning_gnn.nn.conv.gin import GINConv
from lightning_gnn.nn.conv.sage import SAGEConv
from lightning_gnn.nn.conv.table import unfused_layers
from lightning_gnn.nn.conv.transformer import TransformerConv

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "SAGEConv",
    "TransformerConv",
    "unfused_layers",
]
