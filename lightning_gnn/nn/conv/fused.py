"""When a layer on an ``edge_index`` runs as one operator of this package instead of PyG's several, and which."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.dense.linear import Linear

from lightning_gnn.nn.conv.graph import REDUCE
from lightning_gnn.ops.aggregate_update.definition import aggregate_update

FUSED_ON = ("cpu",)
"""Devices on which aggregate-and-update is measured to be faster than PyG's path."""
UNFUSED_UP_TO = 1 << 19
"""Edges times columns up to which PyG's path is faster all the same: its operators are few."""
_FUSED_DTYPES = (torch.float32, torch.float64)
_STEPS = ("message", "message_and_aggregate", "aggregate", "update")
_MESSAGE_HOOKS = tuple(
    f"_{step}_forward{when}_hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate")
    for when in ("_pre", "")
)
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fuses(layer: Any, source: Any, target: Any, edge_index: Any) -> bool:
    """Say whether :func:`fused` gives what PyG's own path would, also to hooks and transforms, and gives it sooner.

    Args:
        layer: A ``SAGEConv``, or of a class derived from it.
        source: What it got as features of the sources.
        target: What it got as features of the targets.
        edge_index: What it got as edges.
    """
    # Exact types: subclasses of tensors (PyG's EdgeIndex, those of transforms) have ways of their own.
    tensors = (source, target, edge_index)
    if any(type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided for tensor in tensors):
        return False
    device = source.device
    if device.type not in FUSED_ON or torch.is_autocast_enabled(device.type) or _has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    if layer.project or layer.normalize or layer.explain or layer.flow != "source_to_target":
        return False
    if layer.node_dim != -2 or layer.decomposed_layers != 1:
        return False
    if not isinstance(layer.aggr, str) or REDUCE.get(layer.aggr) not in ("sum", "mean"):
        return False
    if any(getattr(type(layer), name) is not getattr(pyg.SAGEConv, name) for name in _STEPS):
        return False
    lins = [layer.lin_l, layer.lin_r] if layer.root_weight else [layer.lin_l]
    if any(type(lin) is not Linear or nn.parameter.is_lazy(lin.weight) for lin in lins):
        return False
    hooked = any(getattr(module, hooks) for module in (*lins, layer.aggr_module) for hooks in _MODULE_HOOKS)
    if hooked or any(getattr(layer, hooks) for hooks in _MESSAGE_HOOKS):
        return False
    # Shapes and dtypes that do not fit are PyG's to complain about.
    wide, dtype = layer.lin_l.weight.size(1), source.dtype
    weights = [lin.weight for lin in lins]
    fits = all(tensor.dim() == 2 and tensor.device == device for tensor in (*tensors, *weights))
    fits = fits and dtype in _FUSED_DTYPES and all(tensor.dtype == dtype for tensor in (target, *weights))
    fits = fits and source.size(1) == wide and edge_index.dtype == torch.int64 and edge_index.size(0) == 2
    return fits and edge_index.size(1) * wide > UNFUSED_UP_TO


def fused(layer: Any, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
    """Return what ``SAGEConv`` returns for a pair of features.

    Args:
        layer: A ``SAGEConv``.
        source: ``[num_sources, in]``.
        target: ``[num_targets, in of the targets]``; cheapest where these are the first rows of ``source``.
        edge_index: ``[2, E]``.
    """
    own = layer.root_weight and _is_head(target, source)
    out = aggregate_update(
        source,
        edge_index,
        layer.lin_l.weight,
        layer.lin_r.weight if own else None,
        layer.lin_l.bias,
        target.size(0),
        REDUCE[layer.aggr],  # type: ignore[arg-type]
    )
    return out + layer.lin_r(target) if layer.root_weight and not own else out


def _is_head(target: Tensor, source: Tensor) -> bool:
    """Say whether these are the first rows of ``source``, also to autograd, as the targets of a mini-batch are."""
    if target is source:
        return True
    same = target.data_ptr() == source.data_ptr() and target.stride() == source.stride()
    if not same or target.size(1) != source.size(1) or target.size(0) > source.size(0):
        return False
    if not torch.is_grad_enabled() or not (target.requires_grad or source.requires_grad):
        return True
    base = source if source._base is None else source._base
    return target.requires_grad and source.requires_grad and target._base is base
