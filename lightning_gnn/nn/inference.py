"""Exact outputs of a trained model for all nodes, in memory or out-of-core in blocks of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.features.arrays import read_in_order
from lightning_gnn.graph.csr import CSR
from lightning_gnn.nn.conv import GATConv, GCNConv, SAGEConv, TransformerConv
from lightning_gnn.nn.conv.graph import REDUCE, is_plain, layers_without_graph
from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.layer_files import layer_outputs
from lightning_gnn.nn.layers import activate, widen_features
from lightning_gnn.nn.models import LayeredGNN
from lightning_gnn.nn.run_model import edge_arguments
from lightning_gnn.ops.aggregate.definition import Reduce, aggregate
from lightning_gnn.ops.aggregate.edge_softmax import edge_softmax
from lightning_gnn.ops.aggregate.source_order import aggregate_in_source_order, iter_target_ranges
from lightning_gnn.runtime.lightning import rank_zero_info
from lightning_gnn.runtime.memory_info import available_bytes

_LAYERS = (GCNConv, SAGEConv, GATConv, TransformerConv)
MIN_BLOCK_VERTICES = 2048  # minimum limit of vertices (targets and sources) per block
_ROWS_AT_ONCE = 1 << 16  # maximum number of aggregated targets on which a layer runs at once
_AUTO_SHARE = 0.5  # fraction of the free memory for memory_limit="auto"


@dataclass(frozen=True)
class FullInference:
    """Settings of inference for all nodes.

    Args:
        folder: Folder for layer outputs that do not fit into memory, as ``.npy`` files; the last one is not removed. By
            default a temporary folder in the user's cache directory.
        memory_limit: Maximum bytes of features and layer outputs in memory, on the device and on the host each;
            ``"auto"``: half of the free memory.
        progress: Log each tenth of the progress of a layer while outputs are written to files.

    Raises:
        ValueError: ``memory_limit`` is not a number of bytes or ``"auto"``.

    Examples:
        >>> import torch
        >>> from lightning_gnn import CompressedGraph, FullInference
        >>> from lightning_gnn.nn import GCN, infer
        >>> model = GCN(in_channels=4, hidden_channels=8, num_layers=2, out_channels=3).eval()
        >>> x, ring = torch.rand(3, 4), CompressedGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> outputs = infer(model, x, ring, settings=FullInference("layers", memory_limit=0))  # out-of-core
        >>> outputs.shape
        torch.Size([3, 3])
        >>> torch.allclose(outputs, model(x, ring), atol=1e-6)
        True
    """

    folder: str | Path | None = None
    memory_limit: int | float | str = "auto"
    progress: bool = True

    trains: ClassVar[bool] = False
    """A whole graph is trained on as usual; see :class:`~lightning_gnn.nn.run_model.Runner`."""

    def __post_init__(self) -> None:
        limit = self.memory_limit
        if limit != "auto" and (isinstance(limit, str) or not limit >= 0):
            raise ValueError(f"memory_limit must be a number of bytes, or 'auto', but is {limit!r}")

    def limit_on(self, device: torch.device) -> float:
        """Return the memory limit on a device, in bytes."""
        return (available_bytes(device) or 0) * _AUTO_SHARE if self.memory_limit == "auto" else float(self.memory_limit)

    def run(self, model: nn.Module, batch: Any, embeddings: TypeEmbeddings | None = None) -> Any:
        """Return the model's outputs for a whole graph by :func:`infer`; it is the batch's ``runner`` in evaluation."""
        return infer(model, batch.x, batch.edge_index, **edge_arguments(model, batch), settings=self)


class Elsewhere:
    """Placeholder for ``edge_index`` of a partitioned graph; the batch's ``inference`` accesses the edges."""

    def __init__(self, num_edges: int) -> None:
        self.num_edges = num_edges

    def __repr__(self) -> str:
        return f"{self.num_edges} edges, partitioned across ranks"


@torch.no_grad()
def infer(
    model: nn.Module,
    x: Tensor,
    graph: CompressedGraph,
    edge_weight: Tensor | None = None,
    edge_attr: Tensor | None = None,
    settings: FullInference | None = None,
    stop: Callable[[], None] | None = None,
) -> Tensor:
    """Return the model's outputs for all nodes, identical to ``model(x, graph)``.

    If layer outputs exceed ``settings.memory_limit``, GCN, GraphSAGE, GAT and GraphTransformer (with ``jk`` None or
    ``"last"``) are computed out-of-core, layer by layer in blocks of targets. Any other model runs on the whole graph
    at once, with an ``edge_index`` tensor if its layers need one.

    Args:
        model: The model, in evaluation mode.
        x: Features ``[N, F]``, in memory or memory-mapped.
        edge_weight: Weights ``[E]`` in the order of the user's ``edge_index``, for models that take them.
        edge_attr: Edge features ``[E, …]`` in the same order, for models that take them.
        settings: By default ``FullInference()``.
        stop: Called after each block of rows that is read or written; may raise to interrupt the run.

    Returns:
        ``[N, out_channels]``, on the model's device or memory-mapped.

    Raises:
        ValueError: The model is in training mode, or it normalizes over all nodes and its outputs do not fit in memory.
        RuntimeError: Another process writes to the same folder.
    """
    settings = settings or FullInference()
    model = getattr(model, "_orig_mod", model)
    if model.training:
        raise ValueError("full inference needs evaluation mode; call model.eval() first")
    device = next((parameter.device for parameter in model.parameters()), x.device)
    layers = layers_of(model)
    if layers is None or _whole_graph_bytes(layers, x, graph, device) <= settings.limit_on(device):
        optional = {"edge_weight": edge_weight, "edge_attr": edge_attr}
        extra = {name: value.to(device) for name, value in optional.items() if value is not None}
        return _run_whole(model, widen_features(x.to(device), model), graph.to(device), extra)
    if whole_norms := [layer.whole_norm for layer in layers if layer.whole_norm is not None]:
        raise ValueError(
            f"{whole_norms[0]} averages over all nodes, so layer outputs must fit in memory, which takes "
            f"{_whole_graph_bytes(layers, x, graph, device) / 1e9:.3g} GB; raise memory_limit (now "
            f"{settings.limit_on(device) / 1e9:.3g} GB), or train with norm=batch"
        )
    return _stream(layers, x, graph, edge_weight, device, settings, stop)


@dataclass(frozen=True)
class Layer:
    """One layer of a model."""

    conv: nn.Module  # a layer of lightning_gnn.nn.conv
    after: Callable[[Tensor], Tensor]  # row by row: normalization, activation, a last linear layer
    width: int  # columns of the result
    widest: int  # columns of the widest intermediate tensor
    whole_norm: str | None = None  # class name of a normalization in `after` that reads all rows, or None


def layers_of(model: nn.Module) -> list[Layer] | None:
    """Split a model into layers that can run one after another, or return None if that is not possible."""
    if not isinstance(model, BasicGNN) or type(model).forward not in (BasicGNN.forward, LayeredGNN.forward):
        return None
    if model.jk_mode not in (None, "last") or not all(type(c) in _LAYERS for c in model.convs):
        return None
    if layers_without_graph(model) or any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        return None
    layers = []
    for i, (conv, norm) in enumerate(zip(model.convs, model.norms, strict=True)):
        last = i == model.num_layers - 1
        width = int(conv.out_channels) * (conv.heads if getattr(conv, "concat", False) else 1)
        widest = int(conv.out_channels) * getattr(conv, "heads", 1)
        whole_norm = None
        if not last or model.jk_mode is not None:
            whole_norm = None if _is_row_wise(norm) else type(norm).__name__
        if last and model.jk_mode is not None:
            width = model.out_channels
        layers.append(Layer(conv, partial(_finish, model, i), width, max(widest, width), whole_norm))
    return layers


def _finish(model: BasicGNN, layer: int, x: Tensor) -> Tensor:
    """Apply what follows a layer in evaluation mode."""
    x = activate(model, layer, x)
    return model.lin(x) if layer == model.num_layers - 1 and model.jk_mode is not None else x


def _run_whole(model: nn.Module, x: Tensor, graph: CompressedGraph, extra: dict[str, Tensor]) -> Tensor:
    ours = any(getattr(module, "takes_graph", False) for module in model.modules())
    out: Tensor = model(x, graph if ours and not layers_without_graph(model) else graph.to_edge_index(), **extra)
    return out


def _output_bytes(layers: list[Layer], x: Tensor) -> int:
    """Return the bytes of the largest pair of layer outputs, one read and one written."""
    widths = [0, *(layer.widest for layer in layers)]
    return x.size(0) * _dtype_of(layers).itemsize * max(a + b for a, b in pairwise(widths))


def _dtype_of(layers: list[Layer]) -> torch.dtype:
    """Return the dtype of the parameters, in which layers are computed."""
    return next(parameter.dtype for layer in layers for parameter in layer.conv.parameters())


def _whole_graph_bytes(layers: list[Layer], x: Tensor, graph: CompressedGraph, device: torch.device) -> int:
    """Return the additional bytes of a whole-graph run: outputs, attention, and tensors to transfer."""
    heads = max(int(getattr(layer.conv, "heads", 1)) for layer in layers)
    moved = 0 if x.device == device else x.nbytes + graph.num_bytes
    dtype = _dtype_of(layers)
    widened = 0 if x.dtype == dtype else x.numel() * dtype.itemsize
    return _output_bytes(layers, x) + 2 * graph.num_edges * heads * dtype.itemsize + moved + widened


def _is_row_wise(norm: nn.Module) -> bool:
    """Return whether a normalization, in evaluation mode, processes each row independently."""
    if type(norm).__name__ == "LayerNorm":
        return getattr(norm, "mode", "node") == "node"
    if type(norm).__name__ in ("BatchNorm", "BatchNorm1d"):
        norm = getattr(norm, "module", norm)
        return norm.running_mean is not None
    return isinstance(norm, nn.Identity)


class GraphBlock:
    """Targets ``[first, last)`` of a graph, with its self-loops, as a bipartite graph for our layers."""

    def __init__(
        self, graph: CompressedGraph, user_graph: CompressedGraph, first: int, last: int, memo: dict[str, Tensor]
    ) -> None:
        rows = graph.forward
        self._edges = slice(int(rows.indptr[first]), int(rows.indptr[last]))
        self.sources, columns = torch.unique(rows.indices[self._edges], return_inverse=True)
        self.targets = slice(first, last)
        self.num_sources, self.num_targets = self.sources.numel(), last - first
        self.num_edges = self._edges.stop - self._edges.start
        indptr = rows.indptr[first : last + 1] - self._edges.start
        self._graph = CompressedGraph(CSR(indptr, columns.to(torch.int32), self.num_sources), settings=graph.settings)
        self._user_graph, self._memo = user_graph, memo

    def to(self, device: torch.device) -> GraphBlock:
        """Move the topology of the block to a device."""
        self._graph = self._graph.to(device)
        return self

    @property
    def forward(self) -> CSR:
        """Rows are targets, columns are sources."""
        return self._graph.forward

    def with_self_loops(self) -> GraphBlock:
        """Return the block itself, which was extracted from a graph with self-loops."""
        return self

    def gcn_weight(self, *options: Any, **named: Any) -> Tensor:
        """Return the normalization by the degrees in the whole graph, as :meth:`CompressedGraph.gcn_weight`."""
        if "gcn" not in self._memo:
            self._memo["gcn"] = self._user_graph.gcn_weight(*options, **named)
        return self._select_edges(self._memo["gcn"])

    def edge_order(self, values: Tensor) -> Tensor:
        """Return the values of this block's edges in its order, from values in the user's order."""
        if "order" not in self._memo:
            self._memo["order"] = self._user_graph.edge_order(values)
        return self._select_edges(self._memo["order"])

    def aggregate(self, x: Tensor, weight: Tensor | None = None, reduce: Reduce = "sum") -> Tensor:
        """Aggregate ``x`` ``[num_sources, …]`` at the targets."""
        return aggregate(self._graph, x, weight, reduce)

    def edge_softmax(self, source: Tensor, target: Tensor, negative_slope: float = 0.2) -> Tensor:
        """Return the attention of each edge."""
        return edge_softmax(self._graph, source, target, negative_slope)

    def _select_edges(self, values: Tensor) -> Tensor:
        return values[self._edges].to(self._graph.device)


class _AggregatedTargets(GraphBlock):
    """Targets whose inputs are aggregated already, as a block with one edge per target."""

    def __init__(self, num_targets: int) -> None:
        self.num_sources = self.num_targets = self.num_edges = num_targets

    def gcn_weight(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        """Return None: the inputs are multiplied by the edge weights already."""

    edge_order = gcn_weight  # type: ignore[assignment]

    def aggregate(self, x: Tensor, weight: Tensor | None = None, reduce: Reduce = "sum") -> Tensor:
        """Return ``x``."""
        return x


def _stream(
    layers: list[Layer],
    x: Tensor,
    graph: CompressedGraph,
    edge_weight: Tensor | None,
    device: torch.device,
    settings: FullInference,
    stop: Callable[[], None] | None,
) -> Tensor:
    """Return the output of the last layer for all nodes ``[N, D]``, in host memory or memory-mapped."""
    in_memory = _output_bytes(layers, x) <= settings.limit_on(torch.device("cpu"))
    x, graph, edge_weight = x.cpu(), graph.to("cpu"), None if edge_weight is None else edge_weight.cpu()
    dtype, num_nodes = _dtype_of(layers), x.size(0)
    run = _Streamed(graph, edge_weight, device, dtype, settings.limit_on(device), stop or (lambda: None))
    with read_in_order(x), layer_outputs(settings.folder, in_memory) as files:
        files.prepare([(num_nodes, layer.width) for layer in layers], dtype)
        source = x
        for i, layer in enumerate(layers):
            target = files.create_output(i, (num_nodes, layer.width), dtype)
            for rows, out in run.iter_outputs(layer, source):
                target[rows] = layer.after(out).to("cpu", target.dtype)
                if settings.progress and 10 * rows.stop // num_nodes > 10 * rows.start // num_nodes:
                    done = 100 * rows.stop // num_nodes
                    rank_zero_info(f"layer {i + 1} of {len(layers)}: {done} % of the nodes are done")
                run.stop()
            source = files.finish(i, target)
        return source


@dataclass(frozen=True)
class _Streamed:
    """Runs layers in blocks of targets."""

    graph: CompressedGraph
    edge_weight: Tensor | None
    device: torch.device
    dtype: torch.dtype
    limit: float  # approximate maximum bytes of a block on the device
    stop: Callable[[], None]

    def iter_outputs(self, layer: Layer, source: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the outputs of a layer's convolution with the range of their nodes."""
        looped = getattr(layer.conv, "add_self_loops", False)
        graph = self.graph.with_self_loops() if looped else self.graph
        widest = (source.size(1) + layer.widest) * self.dtype.itemsize
        max_vertices = max(MIN_BLOCK_VERTICES, int(self.limit // max(widest, 1)))
        if self.device.type == "cpu" and _is_linear(layer.conv):
            yield from self._iter_in_source_order(layer.conv, source, graph, min(max_vertices, _ROWS_AT_ONCE))
            return
        memo: dict[str, Tensor] = {}
        rows = graph.forward
        bounds = _cut_rows(rows.indptr.numpy(), rows.indices.numpy(), rows.num_columns, max_vertices)
        for first, last in pairwise(bounds.tolist()):
            block = GraphBlock(graph, self.graph, first, last, memo).to(self.device)
            inputs = source[block.sources].to(self.device, self.dtype)
            if isinstance(layer.conv, GCNConv):
                out = layer.conv(inputs, block, self.edge_weight)
            else:
                out = layer.conv((inputs, source[block.targets].to(self.device, self.dtype)), block)
            yield block.targets, out

    def _iter_in_source_order(
        self, conv: nn.Module, source: Tensor, graph: CompressedGraph, rows_at_once: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Aggregate as many targets as the memory holds while the sources are read once, then run the layer on them."""
        dtype, weight = torch.promote_types(self.dtype, torch.float32), None
        if isinstance(conv, GCNConv) and conv.normalize:
            weight = self.graph.gcn_weight(self.edge_weight, conv.improved, conv.add_self_loops, dtype=self.dtype)
        elif isinstance(conv, GCNConv) and self.edge_weight is not None:
            weight = self.graph.edge_order(self.edge_weight)
        weight = None if weight is None else weight.to(dtype)
        limit = max(self.limit, MIN_BLOCK_VERTICES * source.size(1) * dtype.itemsize)
        rows, reduce = graph.forward, REDUCE[str(conv.aggr)]
        for block in iter_target_ranges(rows, source.size(1), dtype, weight is not None, limit):
            sums = aggregate_in_source_order(rows, block, source, weight, reduce, dtype, self.stop)
            for first in range(block.start, block.stop, rows_at_once):
                targets = slice(first, min(first + rows_at_once, block.stop))
                inputs = sums[first - block.start : targets.stop - block.start].to(self.dtype)
                with_root = (inputs, source[targets].to(self.dtype)) if isinstance(conv, SAGEConv) else inputs
                yield targets, conv(with_root, _AggregatedTargets(targets.stop - first))


def _is_linear(conv: nn.Module) -> bool:
    """Return whether a layer is linear in its sources up to the aggregation, also if users have changed it."""
    if not isinstance(conv, GCNConv | SAGEConv) or conv._forward_pre_hooks:
        return False
    is_sum = REDUCE.get(str(conv.aggr)) in ("sum", "mean")
    # GraphSAGE multiplies the sums, GCN the sources.
    return is_sum and (not conv.project if isinstance(conv, SAGEConv) else is_plain(conv.lin) and conv.lin.bias is None)


@numba.njit(nogil=True, cache=True)
def _cut_rows(indptr: np.ndarray, indices: np.ndarray, num_columns: int, max_vertices: int) -> np.ndarray:
    """Return bounds of row ranges with at most ``max_vertices`` (rows and distinct columns), or of a single row."""
    stamps = np.full(num_columns, -1, np.int64)  # first row of the last range that has the column
    bounds, row, vertices = [0], 0, 0
    while row + 1 < indptr.size:
        first, added = bounds[-1], 1
        for e in range(indptr[row], indptr[row + 1]):
            if stamps[indices[e]] != first:
                stamps[indices[e]] = first
                added += 1
        if row > first and vertices + added > max_vertices:
            bounds.append(row)
            vertices = 0
        else:
            vertices += added
            row += 1
    if row:
        bounds.append(row)
    return np.array(bounds)
