"""Models and LightningModules: GCN, GraphSAGE, GAT, NodeClassifier, LinkPredictor."""

from lightning_gnn.nn.classifier import GNNModule, NodeClassifier
from lightning_gnn.nn.link import LinkPredictor
from lightning_gnn.nn.models import GAT, GCN, GraphSAGE

__all__ = ["GAT", "GCN", "GNNModule", "GraphSAGE", "LinkPredictor", "NodeClassifier"]
