"""Lists the fused layers, and finds the layers of a model that are not fused."""

from typing import Any

from torch import nn
from torch_geometric.nn.conv import MessagePassing

from lightning_gnn.nn.conv.fused import find_obstacle
from lightning_gnn.nn.conv.gat import GATConv
from lightning_gnn.nn.conv.gatv2 import GATv2Conv
from lightning_gnn.nn.conv.gcn import GCNConv
from lightning_gnn.nn.conv.gin import GINConv
from lightning_gnn.nn.conv.sage import SAGEConv
from lightning_gnn.nn.conv.transformer import TransformerConv

OURS: list[Any] = [GCNConv, SAGEConv, GINConv, GATConv, GATv2Conv, TransformerConv]


def unfused_layers(model: nn.Module) -> dict[str, str]:
    """Return the layers of a model that run as PyG's operators on mini-batches of any device: name -> reason.

    Args:
        model: A module.

    Examples:
        >>> import torch
        >>> from torch_geometric.nn import ChebConv
        >>> from lightning_gnn.nn import SAGEConv, unfused_layers
        >>> unfused_layers(torch.nn.ModuleList([SAGEConv(4, 4), SAGEConv(4, 4, aggr="lstm"), ChebConv(4, 4, 2)]))
        {'1': "aggr='lstm' is not one of sum, mean, max", '2': 'no fused operator for ChebConv'}
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MessagePassing)}
    reasons = {name or type(layer).__name__: _explain(layer) for name, layer in layers.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _explain(layer: MessagePassing) -> str | None:
    ours = next((layer_class for layer_class in OURS if type(layer) is layer_class.fused.base), None)
    if ours is not None:
        return f"it is PyG's class; lightning_gnn.nn.{ours.__name__} takes the same arguments and parameters"
    return find_obstacle(layer)
