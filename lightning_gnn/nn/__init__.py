"""Models, layers and LightningModules: GCN, GraphSAGE, GIN, GAT, NodeClassifier, LinkPredictor; exact inference.

Reading order: ``nn/conv`` (layers on an ``edge_index`` or a compressed graph), ``nn/models.py`` (PyG's models,
trimmed exactly), ``nn/classifier.py`` (training), ``nn/link.py``, ``nn/full_batch.py`` (the whole graph as one batch),
``nn/inference.py`` (outputs for all nodes), ``nn/layer_files.py`` (outputs that do not fit into memory).
"""

from lightning_gnn.nn.classifier import GNNModule, NodeClassifier
from lightning_gnn.nn.conv import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, unfused_layers
from lightning_gnn.nn.dropout import Dropout
from lightning_gnn.nn.inference import FullInference, infer
from lightning_gnn.nn.link import LinkPredictor
from lightning_gnn.nn.models import GAT, GCN, GIN, GraphSAGE

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "Dropout",
    "FullInference",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GNNModule",
    "GraphSAGE",
    "LinkPredictor",
    "NodeClassifier",
    "SAGEConv",
    "infer",
    "unfused_layers",
]
