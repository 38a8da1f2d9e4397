"""Models, layers and LightningModules: GCN, GraphSAGE, GAT, NodeClassifier, LinkPredictor; exact inference."""

from lightning_gnn.nn.classifier import GNNModule, NodeClassifier
from lightning_gnn.nn.conv import GATConv, GCNConv, SAGEConv
from lightning_gnn.nn.inference import FullInference, infer
from lightning_gnn.nn.link import LinkPredictor
from lightning_gnn.nn.models import GAT, GCN, GraphSAGE

__all__ = [
    "GAT",
    "GCN",
    "FullInference",
    "GATConv",
    "GCNConv",
    "GNNModule",
    "GraphSAGE",
    "LinkPredictor",
    "NodeClassifier",
    "SAGEConv",
    "infer",
]
