"""GCN, GraphSAGE and GAT layers that take PyG's ``edge_index`` or a compressed graph, with the same parameters."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import OptPairTensor, OptTensor

from lightning_gnn.ops.aggregate.definition import Reduce, aggregate
from lightning_gnn.ops.aggregate_update.definition import aggregate_update
from lightning_gnn.ops.dropout import edge_dropout
from lightning_gnn.ops.edge_softmax.definition import edge_softmax

_REDUCE: dict[str, Reduce] = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max"}
_TENSOR = (
    "FullGraphDataModule(compress=False) (datamodule.compress=false) with another strategy than 'ascend_hybrid', which "
    "needs the compressed graph"
)
_MACS_PER_ELEMENT = 16
"""Multiply-adds of a dense product in the time in which an aggregation reads and adds one element, about."""
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


class Graph(Protocol):
    """What the layers ask of a graph; :class:`~lightning_gnn.graph.compress.CompressedGraph` is one.

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
        if isinstance(layer, pyg.MessagePassing) and not getattr(layer, "takes_graph", False)
    ]


def check_takes_graph(model: nn.Module) -> None:
    """Refuse a model with layers that need an ``edge_index`` tensor.

    Raises:
        TypeError: Names them.
    """
    if layers := layers_without_graph(model):
        raise TypeError(
            f"the batch holds a compressed graph, but {', '.join(layers)} of the model can read an edge_index tensor "
            f"only; use GCN, GraphSAGE and GAT (or their layers) of lightning_gnn.nn, or {_TENSOR}"
        )


class GCNConv(pyg.GCNConv):  # type: ignore[misc]
    """PyG's ``GCNConv`` (arXiv:1609.02907), whose ``edge_index`` may also be a graph.

    With a graph it computes ``(A X) W`` or ``A (X W)``, whichever costs less, and takes ``edge_weight`` ``[E]`` in the
    order of the ``edge_index`` that the graph was made from. Constructor, parameters and results are PyG's.

    Raises:
        ValueError: With a graph: features of a wrong shape, another ``aggr`` than sum, mean and max,
            ``flow="target_to_source"``, or an explainer.
    """

    takes_graph = True
    # PyG reads these from the source of a class that it finds by its bare name, which here is ours instead of its own.
    propagate_type = {"x": Tensor, "edge_weight": OptTensor}  # noqa: RUF012
    _cached_weight: tuple[Graph, Tensor] | None = None

    def reset_parameters(self) -> None:
        """Draw the parameters anew, and forget the normalisation that ``cached=True`` keeps."""
        super().reset_parameters()
        self._cached_weight = None

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Return ``[N, out_channels]`` for ``x`` ``[N, in_channels]``."""
        if not is_graph(edge_index):
            out: Tensor = super().forward(x, edge_index, edge_weight)
            return out
        reduce = _check(self, edge_index, x, edge_weight)
        graph, weight = self._weighted(edge_index, edge_weight, x)
        first = _aggregates_first(graph, self.lin, x, reduce, default=False)
        x = aggregate(graph, x, _cast(weight, x), reduce) if first else self.lin(x)
        x = self.lin(x) if first else aggregate(graph, x, _cast(weight, x), reduce)
        return x if self.bias is None else x + self.bias

    def _weighted(self, graph: Any, edge_weight: Tensor | None, x: Tensor) -> tuple[Any, Tensor | None]:
        if not self.normalize:
            return graph, None if edge_weight is None else graph.edge_order(edge_weight)
        looped = _with_self_loops(graph) if self.add_self_loops else graph
        if self._cached_weight is not None and self._cached_weight[0] is graph:
            return looped, self._cached_weight[1]
        weight = _gcn_weight(graph, edge_weight, self.improved, self.add_self_loops, x.dtype)
        if self.cached and edge_weight is not None:  # without weights the graph keeps them itself
            self._cached_weight = (graph, weight)
        return looped, weight


class SAGEConv(pyg.SAGEConv):  # type: ignore[misc]
    """PyG's ``SAGEConv`` (arXiv:1706.02216), whose ``edge_index`` may also be a graph, bipartite or not.

    With a graph it multiplies before or after it aggregates, whichever costs less. So it does with an ``edge_index`` on
    the CPU, such as a mini-batch's (:func:`~lightning_gnn.ops.aggregate_update`), unless something
    about the layer is out of the ordinary. Constructor, parameters and results are PyG's.

    Raises:
        ValueError: With a graph: features of a wrong shape, another ``aggr`` than sum, mean and max,
            ``flow="target_to_source"``, or an explainer.
    """

    takes_graph = True
    propagate_type = {"x": OptPairTensor}  # noqa: RUF012

    def forward(self, x: Any, edge_index: Any, size: tuple[int, int] | None = None) -> Tensor:
        """Return ``[num_targets, out_channels]`` for ``x`` ``[N, in_channels]``, or a pair (sources, targets)."""
        source, target = (x, x) if isinstance(x, Tensor) else x
        if not is_graph(edge_index):
            if size is None and _fuses(self, source, target, edge_index):
                return _fused(self, source, target, edge_index)
            out: Tensor = super().forward(x, edge_index, size)
            return out
        reduce = _check(self, edge_index, source, target=target)
        if self.project and hasattr(self, "lin"):
            source = self.lin(source).relu()
        if _aggregates_first(edge_index, self.lin_l, source, reduce, default=True):
            out = self.lin_l(aggregate(edge_index, source, None, reduce))
        else:
            out = aggregate(edge_index, F.linear(source, self.lin_l.weight), None, reduce)
            out = out if self.lin_l.bias is None else out + self.lin_l.bias
        if self.root_weight and target is not None:
            out = out + self.lin_r(target)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out


class GATConv(pyg.GATConv):  # type: ignore[misc]
    """PyG's ``GATConv`` (arXiv:1710.10903), whose ``edge_index`` may also be a graph.

    Constructor, parameters and results are PyG's. ``return_attention_weights`` with a graph returns the graph that the
    weights belong to (with self-loops) and the weights ``[E, heads]`` in its own order of edges.

    Raises:
        ValueError: With a graph: ``edge_dim``, features of a wrong shape, another ``aggr`` than sum,
            ``flow="target_to_source"``, or an explainer.
    """

    propagate_type = {"x": OptPairTensor, "alpha": Tensor}  # noqa: RUF012
    edge_updater_type = {"alpha": OptPairTensor, "edge_attr": OptTensor}  # noqa: RUF012

    @property
    def takes_graph(self) -> bool:
        """Whether ``edge_index`` may be a graph: not with features of edges."""
        return self.edge_dim is None

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Return ``[num_targets, heads * out_channels]``, without ``concat`` ``[num_targets, out_channels]``."""
        if not is_graph(edge_index):
            return super().forward(x, edge_index, edge_attr, size, return_attention_weights)
        if self.edge_dim is not None:
            raise ValueError(
                f"GATConv(edge_dim={self.edge_dim}) reads edge features, which a compressed graph does not carry; "
                f"leave edge_dim out, or use {_TENSOR}"
            )
        source, target = (x, x) if isinstance(x, Tensor) else x
        if _check(self, edge_index, source, target=target) != "sum":
            raise ValueError(f"GATConv(aggr={self.aggr!r}) is not supported on a graph, which sums by attention")
        residual = self.res(target) if self.res is not None and target is not None else None
        shape = (-1, self.heads, self.out_channels)
        if self.lin is not None:
            values = self.lin(source).view(shape)
            other = values if target is source else None if target is None else self.lin(target).view(shape)
        else:
            values = self.lin_src(source).view(shape)
            other = None if target is None else self.lin_dst(target).view(shape)
        graph = _with_self_loops(edge_index) if self.add_self_loops else edge_index
        source_scores = (values * self.att_src).sum(dim=-1)
        target_scores = (
            source_scores.new_zeros(graph.num_targets, self.heads)
            if other is None
            else (other * self.att_dst).sum(dim=-1)
        )
        weight = edge_softmax(graph, source_scores, target_scores, self.negative_slope)
        weight = edge_dropout(graph, weight, self.dropout, self.training)
        out = aggregate(graph, values, weight.to(values.dtype))
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if residual is not None:
            out = out + residual
        if self.bias is not None:
            out = out + self.bias
        return out if return_attention_weights is None else (out, (graph, weight))


def _check(layer: Any, graph: Graph, x: Any, edge_weight: Tensor | None = None, target: Tensor | None = None) -> Reduce:
    """Check what a layer got with a graph, and return how to reduce.

    Raises:
        ValueError: Says what is wrong.
    """
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
    if not isinstance(layer.aggr, str) or layer.aggr not in _REDUCE:
        raise ValueError(f"{name}(aggr={layer.aggr!r}) is not supported on a graph; use one of {', '.join(_REDUCE)}")
    return _REDUCE[layer.aggr]


def _gcn_weight(
    graph: Graph, edge_weight: Tensor | None, improved: bool, add_self_loops: bool, dtype: torch.dtype
) -> Tensor:
    """Return the normalisation, which is the same in each layer and epoch as long as the weights are constant."""
    keeps = edge_weight is None or not (edge_weight.requires_grad or edge_weight.is_inference())
    if not keeps:
        return graph.gcn_weight(edge_weight, improved, add_self_loops, dtype=dtype)
    with torch.inference_mode(False):  # what is kept must be good for training too
        if edge_weight is None:
            return graph.gcn_weight(None, improved, add_self_loops, dtype=dtype)
        cache = getattr(graph, "cache", {})
        key = f"gcn_weight of edge_weight, improved={improved}, add_self_loops={add_self_loops}"
        owner, version, weight = cache.get(key, (lambda: None, None, None))
        if owner() is not edge_weight or version != edge_weight._version:
            weight = graph.gcn_weight(edge_weight, improved, add_self_loops, dtype=dtype)
            cache[key] = (ref(edge_weight), edge_weight._version, weight)
        found: Tensor = weight
        return found


def _with_self_loops(graph: Graph) -> Any:
    """Return the graph with self-loops, which it keeps: made in a validation loop, it must be good for training too."""
    with torch.inference_mode(False):
        return graph.with_self_loops()


def _aggregates_first(graph: Graph, lin: Any, x: Tensor, reduce: str, default: bool) -> bool:
    """Say whether ``(A X) W`` costs less than ``A (X W)``; both are the same, but for a maximum.

    An aggregation of d columns costs d per edge, and the same again backward where its input needs a gradient; the
    dense product costs by its rows, which are those of the sources or those of the targets. Where both sides have the
    same rows, the answer does not depend on the graph, so that it is the same on each device of a sharded one.
    """
    # A layer of the user's own in place of the product, or with hooks, is called as PyG calls it.
    if type(lin) is not Linear or lin._forward_hooks or lin._forward_pre_hooks:
        return default
    if isinstance(lin.weight, nn.UninitializedParameter):
        return default
    if reduce == "max":
        return default
    wide, narrow = lin.in_channels, lin.out_channels
    grad = torch.is_grad_enabled()
    before = wide * (2 if grad and x.requires_grad else 1)
    after = narrow * (2 if grad and (x.requires_grad or lin.weight.requires_grad) else 1)
    if graph.num_sources != graph.num_targets:
        edges, product = _MACS_PER_ELEMENT * graph.num_edges, wide * narrow
        before, after = edges * before + graph.num_targets * product, edges * after + graph.num_sources * product
    return default if before == after else before < after


def _cast(weight: Tensor | None, x: Tensor) -> Tensor | None:
    return weight if weight is None or weight.dtype == x.dtype else weight.to(x.dtype)


def _fuses(layer: Any, source: Any, target: Any, edge_index: Any) -> bool:
    """Say whether :func:`_fused` gives what PyG's own path would, also to hooks and transforms, and gives it sooner.

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
    if not isinstance(layer.aggr, str) or _REDUCE.get(layer.aggr) not in ("sum", "mean"):
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


def _fused(layer: Any, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
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
        _REDUCE[layer.aggr],  # type: ignore[arg-type]
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
