"""Fused GAT and GATv2 layers on an ``edge_index``."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import GATv2Conv, MessagePassing

from lightning_gnn.nn.conv.fused import is_prefix
from lightning_gnn.ops.aggregate.numba_rows import convert
from lightning_gnn.ops.aggregate_update.edge_order import target_edges
from lightning_gnn.ops.attention.definition import attend, with_self_loops
from lightning_gnn.ops.dropout import draw_key, draws_by_key, dropout, row_dropout
from lightning_gnn.ops.products import multiplies_bfloat16

_GATHER = 16  # cost of an edge reading one element of a row, in multiply-adds of a dense product
_SCORE = 3  # cost of a head processing one element, in multiply-adds
_TILED = 1.5  # cost of a product per head and tile, relative to one of all heads and rows


@contextmanager
def without_autocast(source: Tensor, target: Tensor, narrow: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features with autocast disabled, in its dtype; on a CPU in float32, or if ``narrow`` the faster of both."""
    device = source.device.type
    if not torch.is_autocast_enabled(device):
        yield source, target
        return
    is_wide = source.is_cpu and not (narrow and multiplies_bfloat16())
    dtype = torch.float32 if is_wide else torch.get_autocast_dtype(device)
    cast = convert(source, dtype)
    # run_gatv2 recognizes shared features by identity.
    if target is source:
        target = cast
    elif is_prefix(target, source):
        target = cast[: target.size(0)]
    else:
        target = convert(target, dtype)
    with torch.autocast(device, enabled=False):
        yield cast, target


def run_attention(layer: MessagePassing, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
    """Compute ``GATConv`` or ``GATv2Conv`` without bias, for features ``[n, in]`` and edges ``[2, E]``."""
    run = run_gatv2 if layer.fused.base is GATv2Conv else run_gat
    with without_autocast(source, target, narrow=True) as rows:
        return run(layer, *rows, edge_index)


def add_bias(layer: MessagePassing, out: Tensor) -> Tensor:
    """Add the bias of a layer, if it has one."""
    return out if layer.bias is None else out + layer.bias


def run_gat(layer: MessagePassing, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
    """Compute ``GATConv`` for features of sources and targets, ``[n, in]``, and edges ``[2, E]``."""
    edges, factor = _sort_edges(layer, source, target, edge_index)
    heads, slope = layer.heads, layer.negative_slope
    weight, *others = (lin.weight for lin in layer.fused.products(layer).values())
    by_target = others[0] if others else weight
    # A score only needs the product of a node's features with a vector, not with the weight matrix.
    scores = multiply(target, fold_weight(layer.att_dst, by_target))
    if aggregates_first(source, edges, weight, heads):
        side, weight = fold_weight(layer.att_src, weight), _match(weight, source)
        out = attend(edges, source, _match(side, source), scores, weight, factor, slope)
    else:
        side = _match(layer.att_src.squeeze(0), source)
        out = attend(edges, multiply(source, weight), side, scores, None, factor, slope)
    return _finish(layer, out, target)


def run_gatv2(layer: MessagePassing, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
    """Compute ``GATv2Conv`` for features of sources and targets, ``[n, in]``, and edges ``[2, E]``."""
    edges, factor = _sort_edges(layer, source, target, edge_index)
    left = multiply(source, layer.lin_l.weight, layer.lin_l.bias)
    is_shared = target is source and layer.lin_r is layer.lin_l
    right = left if is_shared else multiply(target, layer.lin_r.weight, layer.lin_r.bias)
    side = _match(layer.att.squeeze(0), source)
    out = attend(edges, left, side, right, None, factor, layer.negative_slope, dynamic=True)
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
    edges = target_edges(edge_index, source.size(0), target.size(0))
    if layer.add_self_loops:
        edges = with_self_loops(edges, source.size(0))
    return edges, draw_factor(source, edges, layer.heads, layer.dropout if layer.training else 0.0)


def draw_factor(x: Tensor, edges: list[Tensor], heads: int, p: float) -> Tensor | None:
    """Return the factors of the dropout of attention, ``[E, heads]``, the same on a CPU and a GPU; None for p = 0."""
    if p == 0.0:
        return None
    ones = x.new_ones(edges[1].numel(), heads, dtype=torch.promote_types(x.dtype, torch.float32))
    # A mode that intercepts torch's dropout must see the call.
    return row_dropout(ones, p, draw_key()) if draws_by_key(torch.ones(1)) else dropout(ones, p)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b`` in the dtype of x."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _match(parameter: Tensor, source: Tensor) -> Tensor:
    """Round a parameter to the dtype of the features; a CPU's operator does so itself, with gradients in float32."""
    return parameter if source.is_cpu else parameter.to(source.dtype)


def _finish(layer: MessagePassing, out: Tensor, target: Tensor) -> Tensor:
    dtype = next(iter(layer.fused.products(layer).values())).weight.dtype  # not that of autocast
    out = out if out.is_cpu else out.to(dtype)  # on a CPU, bias and activation read bfloat16
    if not layer.concat:
        out = out.view(out.size(0), layer.heads, layer.out_channels).mean(1)
    if layer.res is not None:
        out = out + layer.res(target.to(dtype))
    return out
