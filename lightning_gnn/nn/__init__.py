"""Layers, homogeneous and heterogeneous GNN models, LightningModules that train them, full inference and export.

Reading order: ``nn/conv`` (layers), ``nn/models.py`` (PyG's models, trimmed exactly), ``nn/type_modules.py``,
``nn/hetero`` (heterogeneous graphs), ``nn/module.py`` and its subclasses (training), ``nn/inference.py``,
``nn/layer_files.py`` (layer outputs larger than memory), ``nn/export.py`` (``torch.export`` and ONNX).
"""

from lightning_gnn.nn.classifier import NodeClassifier
from lightning_gnn.nn.conv import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, TransformerConv, unfused_layers
from lightning_gnn.nn.dropout import Dropout
from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.export import export_onnx, export_program
from lightning_gnn.nn.hetero import HGT, RGAT, RGCN, HeteroGraphSAGE
from lightning_gnn.nn.inference import FullInference, infer
from lightning_gnn.nn.layers import LayerBlock, activate, check_layered, run_layers
from lightning_gnn.nn.link import LinkPredictor
from lightning_gnn.nn.models import GAT, GCN, GIN, GraphSAGE, GraphTransformer
from lightning_gnn.nn.module import GNNModule
from lightning_gnn.nn.regressor import NodeRegressor
from lightning_gnn.nn.run_model import Runner, run_model

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "HGT",
    "RGAT",
    "RGCN",
    "Dropout",
    "FullInference",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GNNModule",
    "GraphSAGE",
    "GraphTransformer",
    "HeteroGraphSAGE",
    "LayerBlock",
    "LinkPredictor",
    "NodeClassifier",
    "NodeRegressor",
    "Runner",
    "SAGEConv",
    "TransformerConv",
    "TypeEmbeddings",
    "activate",
    "check_layered",
    "export_onnx",
    "export_program",
    "infer",
    "run_layers",
    "run_model",
    "unfused_layers",
]
