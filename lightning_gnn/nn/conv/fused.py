"""Decides whether a layer on an ``edge_index`` runs as one fused operator instead of PyG's operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear

from lightning_gnn.nn.conv.backends import accepted_dtypes, choose
from lightning_gnn.nn.conv.graph import REDUCE
from lightning_gnn.nn.dropout import Dropout
from lightning_gnn.ops.aggregate.numba_rows import convert
from lightning_gnn.ops.aggregate_update.reference import ReluDropout
from lightning_gnn.ops.dropout import draw_key, draws_by_key
from lightning_gnn.ops.library import is_traced
from lightning_gnn.ops.products import multiplies_bfloat16

PLAIN_TENSORS: tuple[type, ...] = (Tensor, nn.Parameter)  # exact types, without subclasses
_STEPS = ("edge_update", "message", "message_and_aggregate", "aggregate", "update")
_MESSAGE_HOOKS = tuple(
    f"_{step}_forward{when}_hooks"
    for step in ("propagate", "edge_update", "message", "aggregate", "message_and_aggregate")
    for when in ("_pre", "")
)
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class FusedSpec:
    """Describes the fused part of a layer; stored as the layer class's attribute ``fused``."""

    base: type[MessagePassing]  # PyG's class, which defines the results
    what: str  # description of the fused operations
    reduces: tuple[str, ...]
    products: Callable[[MessagePassing], dict[str, Linear]]  # fused linear layers, by name
    operator: str  # a key of IMPLS
    node_dim: int = -2  # the node_dim of PyG's class


def find_obstacle(layer: MessagePassing) -> str | None:
    """Return why a layer cannot run fused for any input, as a clause, or None if it can."""
    fused: FusedSpec | None = getattr(layer, "fused", None)
    name = type(layer).__name__
    if fused is None:
        return f"no fused operator for {name}"
    for step in _STEPS:
        if getattr(type(layer), step) is not getattr(fused.base, step):
            return f"{name} overrides {step}()"
    reduce = REDUCE.get(layer.aggr) if isinstance(layer.aggr, str) else None
    if reduce not in fused.reduces:
        return f"aggr={layer.aggr!r} is not one of {', '.join(fused.reduces)}"
    if layer.explain:
        return "an explainer masks its messages"
    if getattr(layer, "cached", False):
        return "cached=True stores the normalization of PyG's operators"
    if getattr(layer, "edge_dim", None) is not None:
        return "it reads edge features"
    if layer.flow != "source_to_target" or layer.node_dim != fused.node_dim or layer.decomposed_layers != 1:
        return "flow, node_dim and decomposed_layers must have their default values"
    products = fused.products(layer)
    for name, lin in products.items():
        if type(lin) is not Linear:
            return f"its {name} is a {type(lin).__module__}.{type(lin).__name__}"
    hooked = [name for name, module in {**products, "aggr_module": layer.aggr_module}.items() if has_hooks(module)]
    if hooked or any(getattr(layer, hooks) for hooks in _MESSAGE_HOOKS):
        return f"hooks are registered for {', '.join(hooked) or 'its messages'}"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Return whether forward or backward hooks are registered on a module."""
    return any(getattr(module, hooks) for hooks in _MODULE_HOOKS)


def can_run(operator: str, tensors: Sequence[Any]) -> bool:
    """Return whether an operator supports the tensors, features first, and torch's mode; shapes are not checked."""
    # Exact types only: tensor subclasses (PyG's EdgeIndex, functorch wrappers) define their own behavior.
    if any(type(tensor) not in PLAIN_TENSORS or tensor.layout != torch.strided for tensor in tensors):
        return False
    impl = choose(operator, tensors[0])
    if impl is None or _has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    if torch.compiler.is_compiling() and not (impl.compiles and is_traced()):
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    return not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def are_usable(weights: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether weights are initialized and have one of the dtypes."""
    return not any(isinstance(weight, nn.UninitializedParameter) for weight in weights) and all(
        w.dtype in dtypes for w in weights
    )


def can_fuse(
    layer: MessagePassing, source: Tensor, target: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
) -> bool:
    """Return whether fused operators give PyG's results, also to hooks and transforms, and are faster."""
    tensors = [source, target, edge_index, *(() if edge_weight is None else (edge_weight,))]
    # can_run rejects inputs that are not tensors.
    if not can_run(layer.fused.operator, tensors) or find_obstacle(layer) is not None:
        return False
    # PyG's path raises the errors for wrong shapes and dtypes.
    if edge_weight is not None and (edge_weight.requires_grad or list(edge_weight.shape) != [edge_index.size(-1)]):
        return False
    weights = [lin.weight for lin in layer.fused.products(layer).values()]
    dtypes, attends = accepted_dtypes(source), layer.fused.operator == "attention"
    # Attention computes in the first of the dtypes.
    fits = are_usable(weights, dtypes[:1] if attends else dtypes)
    fits = fits and target.dtype in dtypes and (edge_weight is None or edge_weight.dtype in dtypes)
    fits = fits and all(tensor.device == source.device for tensor in (*tensors, *weights))
    fits = fits and source.dim() == 2 and target.dim() == 2 and (not weights or source.size(1) == weights[0].size(1))
    fits = fits and (not attends or target.size(1) == weights[-1].size(1))
    fits = fits and edge_index.dtype == torch.int64 and edge_index.dim() == 2 and edge_index.size(0) == 2
    if not fits or not (attends or edge_index.numel()):
        return False
    columns = weights[0].size(0) if attends else source.size(1)
    return choose(layer.fused.operator, source, edge_index.size(1) * columns) is not None


def multiply(module: nn.Module, x: Tensor) -> Tensor:
    """Return ``module(x)``; under CPU autocast compute in float32, unless bfloat16 is faster."""
    low = x.is_cpu and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    if not low or multiplies_bfloat16() or any(parameter.dtype != torch.float32 for parameter in module.parameters()):
        out: Tensor = module(x)
        return out
    with torch.autocast("cpu", enabled=False):
        return module(convert(x, torch.float32))  # type: ignore[no-any-return]


def fold_dropout(layer: nn.Module, norm: nn.Module, act: object, dropout: nn.Module, x: Tensor) -> ReluDropout | None:
    """Return the ReLU and dropout after a layer for fusion (draws a key), or None if they cannot be fused."""
    if type(norm) is not nn.Identity or type(act) is not nn.ReLU or type(dropout) is not Dropout:
        return None
    if dropout.p >= 1.0 or dropout.inplace or any(has_hooks(module) for module in (layer, norm, act, dropout)):
        return None
    if not dropout.training or dropout.p == 0.0:
        return ReluDropout()
    return ReluDropout(dropout.p, draw_key()) if draws_by_key(x) else None


def is_prefix(target: Tensor, source: Tensor) -> bool:
    """Return whether ``target`` is the first rows of ``source``, also for autograd, as in a mini-batch."""
    if target is source or torch.compiler.is_compiling():  # compilers do not know where tensors begin
        return target is source
    is_same = target.data_ptr() == source.data_ptr() and target.stride() == source.stride()
    if not is_same or target.size(1) != source.size(1) or target.size(0) > source.size(0):
        return False
    if not torch.is_grad_enabled() or not (target.requires_grad or source.requires_grad):
        return True
    base = source if source._base is None else source._base
    return target.requires_grad and source.requires_grad and target._base is base
