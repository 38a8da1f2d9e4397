"""A model's layers one by one, each on its own edges: for mini-batches, histories, and inference in blocks of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch_geometric.nn.models.basic_gnn import BasicGNN


@dataclass
class LayerBlock:
    """The edges of one layer, from its source rows to its targets, which are the first of them.

    Args:
        num_targets: Number of targets.
        edge_index: int64 ``[2, E]``, sources and targets as numbers of source rows.
        edge_weight: Weights ``[E]``, already normalized for a GCN, or None.
        edge_attr: Edge features ``[E, …]``, or None.
        sorted_edges: The weighted edges by target, for a fused GCN layer, or None.
    """

    num_targets: int
    edge_index: Tensor
    edge_weight: Tensor | None = None
    edge_attr: Tensor | None = None
    sorted_edges: list[Tensor] | None = None


def run_layers(
    model: BasicGNN,
    x: Tensor,
    blocks: Sequence[LayerBlock],
    between: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor:
    """Run a model layer by layer, each on its own edges.

    Args:
        model: GCN, GraphSAGE, GIN or GAT of :mod:`lightning_gnn.nn`, with ``jk`` None or ``"last"``.
        x: The source rows of the first layer ``[num_sources, F]``.
        blocks: The edges of each layer, the outermost first. The targets of a layer are the sources of the next one.
        between: Maps the number of a layer and the outputs of its targets ``[num_targets, D]``, before dropout, to the
            source rows of the next layer: reads others from a history, or exchanges them between ranks.

    Returns:
        The rows of the last layer's targets ``[num_targets, out_channels]``.

    Raises:
        TypeError: The model cannot run layer by layer.
        ValueError: It has jumping knowledge, or the number of blocks is not that of its layers.
    """
    model = check_layered(model)
    if len(blocks) != model.num_layers:
        raise ValueError(f"the model has {model.num_layers} layers, but there are {len(blocks)} blocks of edges")
    x = model.input_dropout(widen_features(x, model))
    for layer, block in enumerate(blocks):
        is_output = layer == model.num_layers - 1 and model.jk_mode is None
        x, is_complete = model.apply_layer(layer, x, block, fuse=between is None and not is_output)
        if is_complete:
            continue
        x = activate(model, layer, x)
        if between is not None and layer < model.num_layers - 1:
            x = between(layer, x)
        x = x if is_output else model.dropout(x)
    return x if model.jk_mode is None else model.lin(x)


def activate(model: BasicGNN, layer: int, x: Tensor) -> Tensor:
    """Apply the normalization and the activation after a layer of PyG's or our models, if it has any.

    Args:
        model: A model without jumping knowledge, or with ``jk="last"``.
        layer: Number of the layer, from 0.
        x: Its outputs ``[N, D]``.
    """
    if layer == model.num_layers - 1 and model.jk_mode is None:
        return x
    act: Callable[[Tensor], Tensor] = model.act or nn.Identity()
    norm: Callable[[Tensor], Tensor] = model.norms[layer]
    return norm(act(x)) if model.act_first else act(norm(x))


def check_layered(model: nn.Module) -> BasicGNN:
    """Return a model whose layers can run one by one, without the wrapper of ``torch.compile``.

    Raises:
        TypeError: The model is not a GCN, GraphSAGE, GIN or GAT of :mod:`lightning_gnn.nn`.
        ValueError: It has jumping knowledge other than ``"last"``, which combines the outputs of all layers.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, BasicGNN) or not hasattr(model, "apply_layer"):
        raise TypeError(
            f"layers run one by one in GCN, GraphSAGE, GIN and GAT of lightning_gnn.nn, but the model is "
            f"{type(model).__module__}.{type(model).__name__}"
        )
    if model.jk_mode not in (None, "last"):
        raise ValueError(f"jk={model.jk_mode!r} combines the outputs of all layers; use jk=None or jk='last'")
    return model


def widen_features(x: Tensor, model: nn.Module) -> Tensor:
    """Convert 16-bit features to the dtype of float32 weights, except under autocast."""
    if x.dtype not in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(x.device.type):
        return x
    weights = {value.dtype for value in model.parameters() if value.is_floating_point()}
    return x.to(torch.float32) if weights == {torch.float32} else x
