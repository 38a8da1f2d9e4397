"""Fused GAT and GATv2 layers on an ``edge_index``."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from lightning_gnn.ops.attention.definition import attend, with_self_loops
from lightning_gnn.ops.dropout import dropout

_GATHER = 16  # cost of an edge reading one element of a row, in multiply-adds of a dense product
_SCORE = 3  # cost of a head processing one element, in multiply-adds
_TILED = 1.5  # cost of a product per head and tile, relative to one of all heads and rows


@contextmanager
def as_float32(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield float32 features with autocast disabled; PyG's path also sums in float32 under autocast."""
    device = source.device.type
    if not torch.is_autocast_enabled(device):
        yield source, target
        return
    wide = source.float()
    with torch.autocast(device, enabled=False):
        yield wide, wide if target is source else target.float()


def run_gat(layer: MessagePassing, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
    """Compute ``GATConv`` for features of sources and targets, ``[n, in]``, and edges ``[2, E]``."""
    edges, factor = _sort_edges(layer, source, target, edge_index)
    heads, slope = layer.heads, layer.negative_slope
    weight, *others = (lin.weight for lin in layer.fused.products(layer).values())
    by_target = others[0] if others else weight
    # A score only needs the product of a node's features with a vector, not with the weight matrix.
    scores = target @ fold_weight(layer.att_dst, by_target).t()
    if aggregates_first(source, edges, weight, heads):
        out = attend(edges, source, fold_weight(layer.att_src, weight), scores, weight, factor, slope)
    else:
        out = attend(edges, F.linear(source, weight), layer.att_src.squeeze(0), scores, None, factor, slope)
    return _finish(layer, out, target)


def run_gatv2(layer: MessagePassing, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
    """Compute ``GATv2Conv`` for features of sources and targets, ``[n, in]``, and edges ``[2, E]``."""
    edges, factor = _sort_edges(layer, source, target, edge_index)
    left = F.linear(source, layer.lin_l.weight, layer.lin_l.bias)
    is_shared = target is source and layer.lin_r is layer.lin_l
    right = left if is_shared else F.linear(target, layer.lin_r.weight, layer.lin_r.bias)
    out = attend(edges, left, layer.att.squeeze(0), right, None, factor, layer.negative_slope, dynamic=True)
    return _finish(layer, out, target)


def aggregates_first(source: Tensor, edges: list[Tensor], weight: Tensor, heads: int) -> bool:
    """Return whether aggregating features per head before the product costs less than the reverse order."""
    before, after = costs(source, edges[1].numel(), edges[0].numel() - 1, weight, heads)
    return before < after


def costs(source: Tensor, num_edges: int, num_targets: int, weight: Tensor, heads: int) -> tuple[float, float]:
    """Return the costs of aggregating features per head before the product, and of the reverse order."""
    wide, narrow = weight.size(1), weight.size(0)
    grad = torch.is_grad_enabled()
    wants_x, wants = grad and source.requires_grad, grad and (source.requires_grad or weight.requires_grad)
    # Reads along the edges, by targets and (backward) by sources; then the products.
    before: float = num_edges * wide * ((1 + wants) * (_GATHER + heads * _SCORE) + wants_x * heads * _GATHER)
    before += _TILED * num_targets * wide * narrow * (1 + 2 * wants)
    after = num_edges * narrow * ((1 + wants) * (_GATHER + _SCORE) + wants * _GATHER)
    after += source.size(0) * wide * narrow * (1 + wants + wants_x)
    return before, after


def fold_weight(att: Tensor, weight: Tensor) -> Tensor:
    """Return a vector per head, ``[heads, in]``, whose product with x is ``att · (weight x)``."""
    by_head = weight.reshape(att.size(1), -1, weight.size(1))
    return (by_head * att.squeeze(0).unsqueeze(2)).sum(1)


def _sort_edges(
    layer: MessagePassing, source: Tensor, target: Tensor, edge_index: Tensor
) -> tuple[list[Tensor], Tensor | None]:
    edges = torch.ops.lightning_gnn.edges_by_target(edge_index, source.size(0), target.size(0), None)
    if layer.add_self_loops:
        edges = with_self_loops(edges, source.size(0))
    if not layer.training or layer.dropout == 0.0:
        return edges, None
    return edges, dropout(source.new_ones(edges[1].numel(), layer.heads), layer.dropout)


def _finish(layer: MessagePassing, out: Tensor, target: Tensor) -> Tensor:
    if not layer.concat:
        out = out.view(out.size(0), layer.heads, layer.out_channels).mean(1)
    if layer.res is not None:
        out = out + layer.res(target)
    return out if layer.bias is None else out + layer.bias
