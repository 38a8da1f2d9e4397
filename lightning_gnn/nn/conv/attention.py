"""When a GAT or GATv2 layer on an ``edge_index`` runs as one operator of this package instead of PyG's several."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from lightning_gnn.nn.conv.fused import AUTOCAST_DTYPES, obstacle, runs_here
from lightning_gnn.ops.attention.definition import attend, with_self_loops
from lightning_gnn.ops.dropout import dropout

UNFUSED_UP_TO = 1 << 17  # edges times columns of all heads up to which PyG's path is faster
FUSED_DTYPES = (torch.float32, torch.float64)
_GATHER = 16  # multiply-adds of a dense product in the time in which an edge reads one number of a row
_SCORE = 3  # the same for what a head does with a number that was read
_TILED = 1.5  # what a product of a head and a tile costs, of one of all heads and rows at once


def fuses_attention(layer: MessagePassing, source: Tensor, target: Tensor, edge_index: Tensor) -> bool:
    """Say whether the fused layers give what PyG's own path would, also to hooks and transforms, and give it sooner."""
    tensors = (source, target, edge_index)
    if not runs_here(tensors) or obstacle(layer) is not None:
        return False
    # Shapes and dtypes that do not fit are PyG's to complain about.
    weights = [lin.weight for lin in layer.fused.products(layer).values()]
    autocast = torch.is_autocast_enabled(source.device.type)
    dtypes = AUTOCAST_DTYPES if autocast else (source.dtype,)
    computed_in = torch.float32 if autocast else source.dtype
    if any(nn.parameter.is_lazy(weight) for weight in weights) or computed_in not in FUSED_DTYPES:
        return False
    fits = all(tensor.dim() == 2 and tensor.device == source.device for tensor in (*tensors, *weights))
    fits = fits and source.dtype in dtypes and target.dtype in dtypes
    fits = fits and all(weight.dtype == computed_in for weight in weights)
    fits = fits and source.size(1) == weights[0].size(1) and target.size(1) == weights[-1].size(1)
    fits = fits and edge_index.dtype == torch.int64 and edge_index.size(0) == 2
    return fits and edge_index.size(1) * weights[0].size(0) > UNFUSED_UP_TO


@contextmanager
def in_float32(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features in float32 also under autocast, where PyG's path, too, sums in it and returns it."""
    device = source.device.type
    if not torch.is_autocast_enabled(device):
        yield source, target
        return
    wide = source.float()
    with torch.autocast(device, enabled=False):
        yield wide, wide if target is source else target.float()


def fused_gat(layer: MessagePassing, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
    """Return what ``GATConv`` returns for features of sources and targets, ``[n, in]``, and edges ``[2, E]``."""
    edges, factor = _edges(layer, source, target, edge_index)
    heads, slope = layer.heads, layer.negative_slope
    weight, *others = (lin.weight for lin in layer.fused.products(layer).values())
    by_target = others[0] if others else weight
    # A score needs the product of a node's features with a vector, not that with the weight.
    scores = target @ through(layer.att_dst, by_target).t()
    if aggregates_first(source, edges, weight, heads):
        out = attend(edges, source, through(layer.att_src, weight), scores, weight, factor, slope)
    else:
        out = attend(edges, F.linear(source, weight), layer.att_src.squeeze(0), scores, None, factor, slope)
    return _finish(layer, out, target)


def fused_gatv2(layer: MessagePassing, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
    """Return what ``GATv2Conv`` returns for features of sources and targets, ``[n, in]``, and edges ``[2, E]``."""
    edges, factor = _edges(layer, source, target, edge_index)
    left = F.linear(source, layer.lin_l.weight, layer.lin_l.bias)
    same = target is source and layer.lin_r is layer.lin_l
    right = left if same else F.linear(target, layer.lin_r.weight, layer.lin_r.bias)
    out = attend(edges, left, layer.att.squeeze(0), right, None, factor, layer.negative_slope, dynamic=True)
    return _finish(layer, out, target)


def aggregates_first(source: Tensor, edges: list[Tensor], weight: Tensor, heads: int) -> bool:
    """Say whether it costs less to aggregate the features for each head and multiply than the other way round."""
    before, after = costs(source, edges[1].numel(), edges[0].numel() - 1, weight, heads)
    return before < after


def costs(source: Tensor, num_edges: int, num_targets: int, weight: Tensor, heads: int) -> tuple[float, float]:
    """Return what it costs to aggregate the features for each head and then multiply, and the other way round."""
    wide, narrow = weight.size(1), weight.size(0)
    grad = torch.is_grad_enabled()
    wants_x, wants = grad and source.requires_grad, grad and (source.requires_grad or weight.requires_grad)
    # What is read along the edges, by targets and, backward, by sources; then the products.
    before: float = num_edges * wide * ((1 + wants) * (_GATHER + heads * _SCORE) + wants_x * heads * _GATHER)
    before += _TILED * num_targets * wide * narrow * (1 + 2 * wants)
    after = num_edges * narrow * ((1 + wants) * (_GATHER + _SCORE) + wants * _GATHER)
    after += source.size(0) * wide * narrow * (1 + wants + wants_x)
    return before, after


def through(att: Tensor, weight: Tensor) -> Tensor:
    """Return the vector of each head that gives ``att · (weight x)`` as its product with x, ``[heads, in]``."""
    by_head = weight.reshape(att.size(1), -1, weight.size(1))
    return (by_head * att.squeeze(0).unsqueeze(2)).sum(1)


def _edges(
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
