"""Checks of a user's data at the boundary: each says what is wrong, where, and what to do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.graph.features import check_finite_rows


def check_node_data(data: Data, check_features: bool = False) -> None:
    """Check the attributes that training on nodes rests on; the topology is checked when it is converted.

    Args:
        data: A homogeneous graph.
        check_features: Look for NaN and infinity in ``x``.

    Raises:
        TypeError: The graph is not homogeneous.
        ValueError: ``x``, ``y`` or a mask does not have one row per node, or ``x`` holds NaN.
    """
    if not isinstance(data, Data):
        raise TypeError(f"expected a homogeneous torch_geometric.data.Data, got {type(data).__name__}")
    num_nodes = data.num_nodes
    for key in ("x", "y", "train_mask", "val_mask", "test_mask"):
        value = data.get(key)
        if isinstance(value, Tensor) and (value.dim() == 0 or value.size(0) != num_nodes):
            raise ValueError(f"data.{key} has the shape {list(value.shape)}, but the graph has {num_nodes} nodes")
    if check_features and isinstance(data.get("x"), Tensor):
        check_finite_rows(data.x)


def check_nodes(nodes: Tensor, num_nodes: int, name: str) -> Tensor:
    """Check a choice of nodes.

    Args:
        nodes: A bool mask ``[num_nodes]``, or ids, int32 or int64 ``[n]``.
        num_nodes: How many nodes there are.
        name: What to call it in the message.

    Returns:
        The mask, or the ids as int64.

    Raises:
        TypeError: Neither bool nor integers.
        ValueError: A mask of the wrong length, or an id out of range.
    """
    nodes = nodes if isinstance(nodes, Tensor) else torch.as_tensor(nodes)
    if nodes.dim() != 1:
        raise ValueError(f"{name} must have one dimension, but has the shape {list(nodes.shape)}")
    if nodes.dtype == torch.bool:
        if nodes.numel() != num_nodes:
            raise ValueError(f"{name} is a mask of {nodes.numel()} entries, but the graph has {num_nodes} nodes")
        return nodes
    if nodes.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be a bool mask or int64 ids, but is {nodes.dtype}")
    if nodes.numel():
        low, high = (int(value) for value in torch.aminmax(nodes))
        if low < 0 or high >= num_nodes:
            raise ValueError(f"{name} holds node {low if low < 0 else high}, but the graph has {num_nodes} nodes")
    return nodes.to(torch.int64)
