"""What a layer needs to run on a graph of this package in place of PyG's ``edge_index``: checks, order of products."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear

from lightning_gnn.ops.aggregate.definition import Reduce, aggregate

REDUCE: dict[str, Reduce] = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max"}
"""PyG's names of reductions that run on a graph, and ours."""
TENSOR = (
    "FullGraphDataModule(compress=False) (datamodule.compress=false) with another strategy than 'ascend_hybrid', which "
    "needs the compressed graph"
)
_MACS_PER_ELEMENT = 16
"""Multiply-adds of a dense product in the time in which an aggregation reads and adds one element, about."""


class Graph(Protocol):
    """What the layers ask of a graph; :class:`~lightning_gnn.compressed.graph.CompressedGraph` is one.

    Weights are in the graph's own order of edges (its forward order).
    """

    @property
    def num_sources(self) -> int:
        """Rows of ``x`` that it aggregates."""

    @property
    def num_targets(self) -> int:
        """Rows of the result."""

    @property
    def num_edges(self) -> int:
        """Number of edges."""

    def with_self_loops(self) -> Graph:
        """Return the graph with exactly one self-loop per vertex."""

    def gcn_weight(
        self,
        edge_weight: Tensor | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the symmetric normalisation of each edge of :meth:`with_self_loops`, or of the graph as it is."""

    def edge_order(self, values: Tensor) -> Tensor:
        """Bring values ``[E, …]`` from the order of the user's ``edge_index`` into the graph's own."""


def is_graph(edge_index: Any) -> bool:
    """Say whether this is a graph for our layers, and no ``edge_index`` of PyG."""
    return not isinstance(edge_index, Tensor) and hasattr(edge_index, "with_self_loops")


def layers_without_graph(model: nn.Module) -> list[str]:
    """Return the names of the message-passing layers of ``model`` that need an ``edge_index`` tensor."""
    return [
        f"{name or 'model'} ({type(layer).__module__}.{type(layer).__name__})"
        for name, layer in model.named_modules()
        if isinstance(layer, MessagePassing) and not getattr(layer, "takes_graph", False)
    ]


def check_takes_graph(model: nn.Module) -> None:
    """Refuse a model with layers that need an ``edge_index`` tensor.

    Raises:
        TypeError: Names them.
    """
    if layers := layers_without_graph(model):
        raise TypeError(
            f"the batch holds a compressed graph, but {', '.join(layers)} of the model can read an edge_index tensor "
            f"only; use GCN, GraphSAGE and GAT (or their layers) of lightning_gnn.nn, or {TENSOR}"
        )


def check_inputs(
    layer: Any, graph: Graph, x: Any, edge_weight: Tensor | None = None, target: Tensor | None = None
) -> Reduce:
    """Check what a layer got with a graph, and return how to reduce."""
    name = type(layer).__name__
    if not isinstance(x, Tensor) or x.dim() != 2 or x.size(0) != graph.num_sources:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: x must be [{graph.num_sources}, {layer.in_channels}] for this graph, but is {got}")
    if target is not None and target.size(0) != graph.num_targets:
        raise ValueError(f"{name}: the graph has {graph.num_targets} targets, but their x has {target.size(0)} rows")
    if edge_weight is not None and edge_weight.dim() != 1:
        raise ValueError(f"{name}: edge_weight must have one number per edge, but is {list(edge_weight.shape)}")
    if layer.flow != "source_to_target":
        raise ValueError(f"{name}(flow={layer.flow!r}): a graph passes messages from source to target only")
    if layer.explain:
        raise ValueError(f"{name}: explainers mask single messages; give the layer an edge_index tensor for them")
    if not isinstance(layer.aggr, str) or layer.aggr not in REDUCE:
        raise ValueError(f"{name}(aggr={layer.aggr!r}) is not supported on a graph; use one of {', '.join(REDUCE)}")
    return REDUCE[layer.aggr]


def with_self_loops(graph: Graph) -> Any:
    """Return the graph with self-loops, which it keeps: made in a validation loop, it must be good for training too."""
    with torch.inference_mode(False):
        return graph.with_self_loops()


def aggregates_first(graph: Graph, lin: Any, x: Tensor, reduce: str, default: bool, constant: bool = False) -> bool:
    """Say whether ``(A X) W`` costs less than ``A (X W)``; both are the same, but for a maximum.

    An aggregation of d columns costs d per edge, and the same again backward where its input needs a gradient; the
    dense product costs by its rows, which are those of the sources or those of the targets. Where both sides have the
    same rows, the answer does not depend on the graph, so that it is the same on each device of a sharded one. Constant
    features are aggregated first, and once for all epochs.
    """
    # A layer of the user's own in place of the product, or with hooks, is called as PyG calls it.
    if type(lin) is not Linear or lin._forward_hooks or lin._forward_pre_hooks:
        return default
    if isinstance(lin.weight, nn.UninitializedParameter):
        return default
    if reduce == "max":
        return default
    if constant:
        return True
    wide, narrow = lin.in_channels, lin.out_channels
    grad = torch.is_grad_enabled()
    before = wide * (2 if grad and x.requires_grad else 1)
    after = narrow * (2 if grad and (x.requires_grad or lin.weight.requires_grad) else 1)
    if graph.num_sources != graph.num_targets:
        edges, product = _MACS_PER_ELEMENT * graph.num_edges, wide * narrow
        before, after = edges * before + graph.num_targets * product, edges * after + graph.num_sources * product
    return default if before == after else before < after


_CONSTANT, _AGGREGATED = "constant features", "aggregated constant features"


def keep_constant(graph: Graph, x: Any) -> None:
    """Let :func:`aggregate_input` keep what features come to on a graph that keeps what it is asked for.

    Args:
        x: Features that are the same tensor in each epoch, or anything else, which is not kept.
    """
    if isinstance(x, Tensor) and x.is_floating_point() and not x.requires_grad:
        graph.cache[_CONSTANT] = x  # type: ignore[attr-defined]


def is_constant(graph: Graph, x: Tensor) -> bool:
    """Say whether these are the features of :func:`keep_constant`, the same object."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return getattr(graph, "cache", {}).get(_CONSTANT) is x and not x.requires_grad


def aggregate_input(
    keeper: Graph | None, graph: Graph, x: Tensor, weight: Tensor | None = None, reduce: Reduce = "sum"
) -> Tensor:
    """Aggregate the input of a layer, constant features once for all epochs; nobody may write to the result.

    Args:
        keeper: The graph that knows that the features are constant, or None where they are not.
        weight: Weights of the edges, which are constant if they are the same object and nobody wrote to it.
    """
    if keeper is None or (weight is not None and (weight.requires_grad or weight.is_inference())):
        return aggregate(graph, x, weight, reduce)  # type: ignore[arg-type]
    cache: dict[Any, Any] = keeper.cache  # type: ignore[attr-defined]
    autocast = torch.is_autocast_enabled(x.device.type)
    state = (graph is keeper, reduce, _version(x), None if weight is None else weight._version, autocast)
    known = cache.get(_AGGREGATED)
    if known is None or known[0] is not weight or known[1] != state or known[3] != _version(known[2]):
        with torch.inference_mode(False), torch.no_grad():  # made in a validation loop, it must be good for training
            out = aggregate(graph, x, weight, reduce)  # type: ignore[arg-type]
        known = cache[_AGGREGATED] = (weight, state, out, _version(out))
    kept: Tensor = known[2]
    return kept


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
