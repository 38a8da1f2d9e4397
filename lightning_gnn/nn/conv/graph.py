"""Support for layers on a compressed graph in place of PyG's ``edge_index``: checks, order of products, caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from typing_extensions import TypeIs

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.ops.aggregate.definition import Reduce, aggregate

REDUCE: dict[str, Reduce] = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max"}  # PyG's names -> ours
TENSOR = (
    "FullGraphDataModule(compress=False) (datamodule.compress=false) with another strategy than 'ascend_hybrid', which "
    "needs the compressed graph"
)
_MACS_PER_ELEMENT = 16  # cost of an aggregation reading and adding one element, in multiply-adds of a product


def is_graph(edge_index: object) -> TypeIs[CompressedGraph]:
    """Return whether this is a graph (compressed, or with the same methods) and not an ``edge_index``."""
    return not isinstance(edge_index, Tensor) and hasattr(edge_index, "with_self_loops")


def layers_without_graph(model: nn.Module) -> list[str]:
    """Return the names of the message-passing layers of ``model`` that need an ``edge_index`` tensor."""
    return [
        f"{name or 'model'} ({type(layer).__module__}.{type(layer).__name__})"
        for name, layer in model.named_modules()
        if isinstance(layer, MessagePassing) and not getattr(layer, "takes_graph", False)
    ]


def check_takes_graph(model: nn.Module) -> None:
    """Raise a TypeError that names the layers of a model that need an ``edge_index`` tensor."""
    if layers := layers_without_graph(model):
        raise TypeError(
            f"the batch holds a compressed graph, but {', '.join(layers)} of the model need an edge_index tensor; "
            f"use GCN, GraphSAGE and GAT (or their layers) of lightning_gnn.nn, or {TENSOR}"
        )


def check_inputs(
    layer: MessagePassing,
    graph: CompressedGraph,
    x: object,
    edge_weight: Tensor | None = None,
    target: Tensor | None = None,
) -> Reduce:
    """Check the inputs of a layer on a graph, and return the reduction."""
    name = type(layer).__name__
    if not isinstance(x, Tensor) or x.dim() != 2 or x.size(0) != graph.num_sources:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: x must be [{graph.num_sources}, {layer.in_channels}] for this graph, but is {got}")
    if target is not None and target.size(0) != graph.num_targets:
        raise ValueError(f"{name}: the graph has {graph.num_targets} targets, but their x has {target.size(0)} rows")
    if edge_weight is not None and edge_weight.dim() != 1:
        raise ValueError(f"{name}: edge_weight must have one number per edge, but is {list(edge_weight.shape)}")
    if layer.flow != "source_to_target":
        raise ValueError(f"{name}(flow={layer.flow!r}): a graph supports messages from source to target only")
    if layer.explain:
        raise ValueError(f"{name}: explainers mask single messages, which needs an edge_index tensor")
    if not isinstance(layer.aggr, str) or layer.aggr not in REDUCE:
        raise ValueError(f"{name}(aggr={layer.aggr!r}) is not supported on a graph; use one of {', '.join(REDUCE)}")
    return REDUCE[layer.aggr]


def with_self_loops(graph: CompressedGraph) -> CompressedGraph:
    """Return the graph with self-loops; the cached result must be usable in training, even if validation creates it."""
    with torch.inference_mode(False):
        return graph.with_self_loops()


def is_plain(lin: nn.Module) -> bool:
    """Return whether a linear layer is neither replaced nor hooked, so that it may be applied to sums."""
    return type(lin) is Linear and not lin._forward_hooks and not lin._forward_pre_hooks


def aggregates_first(
    graph: CompressedGraph, lin: Linear, x: Tensor, reduce: str, default: bool, constant: bool = False
) -> bool:
    """Return whether ``(A X) W`` costs less than ``A (X W)``; results differ only for a maximum."""
    # A replaced or hooked linear layer is called in PyG's order.
    if not is_plain(lin):
        return default
    if isinstance(lin.weight, nn.UninitializedParameter) or reduce == "max":
        return default
    if constant:  # the aggregation is cached for all epochs
        return True
    # Aggregating d columns costs d per edge, and again in the backward pass if the input needs a gradient; the product
    # costs its number of rows. If sources and targets are the same nodes, the answer does not depend on the graph, so
    # that all devices of a sharded graph choose the same order.
    wide, narrow = lin.in_channels, lin.out_channels
    grad = torch.is_grad_enabled()
    before = wide * (2 if grad and x.requires_grad else 1)
    after = narrow * (2 if grad and (x.requires_grad or lin.weight.requires_grad) else 1)
    if graph.num_sources != graph.num_targets:
        edges, product = _MACS_PER_ELEMENT * graph.num_edges, wide * narrow
        before, after = edges * before + graph.num_targets * product, edges * after + graph.num_sources * product
    return default if before == after else before < after


_CONSTANT, _AGGREGATED = "constant features", "aggregated constant features"


def keep_constant(graph: Any, x: object) -> None:
    """Let :func:`aggregate_input` cache the aggregation of features that are the same tensor in each epoch."""
    if isinstance(x, Tensor) and x.is_floating_point() and not x.requires_grad:
        graph.cache[_CONSTANT] = x


def is_constant(graph: CompressedGraph, x: Tensor) -> bool:
    """Return whether this is the tensor that was passed to :func:`keep_constant`."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return getattr(graph, "cache", {}).get(_CONSTANT) is x and not x.requires_grad


def aggregate_input(
    keeper: CompressedGraph | None,
    graph: CompressedGraph,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: Reduce = "sum",
) -> Tensor:
    """Aggregate the input of a layer; with a ``keeper``, cache the result in it for all epochs."""
    if keeper is None or (weight is not None and (weight.requires_grad or weight.is_inference())):
        return aggregate(graph, x, weight, reduce)
    cache: dict[str, Any] = keeper.cache
    autocast = torch.is_autocast_enabled(x.device.type)
    state = (graph is keeper, reduce, _get_version(x), None if weight is None else weight._version, autocast)
    cached = cache.get(_AGGREGATED)
    if cached is None or cached[0] is not weight or cached[1] != state or cached[3] != _get_version(cached[2]):
        with torch.inference_mode(False), torch.no_grad():  # the cached result must be usable in training
            out = aggregate(graph, x, weight, reduce)
        cached = cache[_AGGREGATED] = (weight, state, out, _get_version(out))
    out_cached: Tensor = cached[2]
    return out_cached


def _get_version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
