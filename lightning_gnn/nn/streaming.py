"""Layers over a graph whose layer outputs do not fit into memory: block by block, from file to file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from lightning_gnn.graph.arrays import read_in_order
from lightning_gnn.graph.chunks import Chunks
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.nn.conv import GCNConv
from lightning_gnn.nn.layer_files import layer_outputs
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.edge_softmax.definition import edge_softmax


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Args:
        conv: A layer of :mod:`lightning_gnn.nn.conv`.
        after: What follows it, row by row: normalisation, activation, a last linear layer.
        width: Columns of the result.
        widest: Columns of the widest tensor on the way.
        whole_norm: The class of a normalisation in ``after`` that reads all rows, or None.
    """

    conv: nn.Module
    after: list[Callable[[Tensor], Tensor]]
    width: int
    widest: int
    whole_norm: str | None = None


class GraphBlock:
    """Some chunks of a graph as a bipartite graph of their own, for the layers of :mod:`lightning_gnn.nn.conv`.

    Args:
        graph: The whole graph, with self-loops if the layer adds them.
        user_graph: The whole graph without.
        first: The first chunk.
        last: The chunk behind the last one.
        memo: Weights that are the same for all blocks of a layer.
    """

    def __init__(
        self, graph: CompressedGraph, user_graph: CompressedGraph, first: int, last: int, memo: dict[str, Tensor]
    ) -> None:
        chunks = graph.forward
        r0, r1 = int(chunks.row_ptr[first]), int(chunks.row_ptr[last])
        c0, c1 = int(chunks.column_ptr[first]), int(chunks.column_ptr[last])
        self._edges = slice(int(chunks.indptr[r0]), int(chunks.indptr[r1]))
        self.sources, columns = torch.unique(chunks.columns[c0:c1], return_inverse=True)
        self.targets, rows = torch.unique(chunks.rows[r0:r1], return_inverse=True)
        self.num_sources, self.num_targets = self.sources.numel(), self.targets.numel()
        self.num_edges = self._edges.stop - self._edges.start
        part = Chunks(
            rows.to(chunks.rows.dtype),
            chunks.row_ptr[first : last + 1] - r0,
            chunks.indptr[r0 : r1 + 1] - self._edges.start,
            chunks.local[self._edges],
            columns.to(chunks.columns.dtype),
            chunks.column_ptr[first : last + 1] - c0,
            None,
            self.num_targets,
            self.num_sources,
        )
        # Nothing is differentiated here, so the other direction is never read.
        self._graph = replace(graph, forward=part, backward=part, edge_ids=None, cache={})
        self._user_graph, self._memo = user_graph, memo

    def to(self, device: torch.device) -> GraphBlock:
        """Move what is aggregated over to a device."""
        self._graph = self._graph.to(device)
        return self

    def with_self_loops(self) -> GraphBlock:
        """Return the block itself: it was cut from a graph that has them."""
        return self

    def gcn_weight(
        self,
        edge_weight: Tensor | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the normalisation by the degrees in the whole graph."""
        if "gcn" not in self._memo:
            self._memo["gcn"] = self._user_graph.gcn_weight(edge_weight, improved, add_self_loops, dtype=dtype)
        return self._mine(self._memo["gcn"])

    def edge_order(self, values: Tensor) -> Tensor:
        """Bring the values of this block's edges into its order."""
        if "order" not in self._memo:
            self._memo["order"] = self._user_graph.edge_order(values)
        return self._mine(self._memo["order"])

    def aggregate(self, x: Tensor, weight: Tensor | None = None, reduce: Any = "sum", **kwargs: Any) -> Tensor:
        """Aggregate ``x`` ``[num_sources, …]`` at the targets."""
        return aggregate(self._graph, x, weight, reduce, **kwargs)

    def edge_softmax(self, source: Tensor, target: Tensor, negative_slope: float = 0.2, **kwargs: Any) -> Tensor:
        """Return the attention of each edge."""
        return edge_softmax(self._graph, source, target, negative_slope, **kwargs)

    def _mine(self, values: Tensor) -> Tensor:
        return values[self._edges].to(self._graph.forward.local.device)


def stream(
    layers: list[Layer],
    x: Tensor,
    graph: CompressedGraph,
    edge_weight: Tensor | None,
    device: torch.device,
    *,
    limit: float,
    folder: str | Path | None = None,
    in_memory: bool = False,
    identity: tuple[Any, ...] | None = None,
    bar: Any = None,
    stop: Callable[[], None] | None = None,
) -> Tensor:
    """Return the output of the last layer for all nodes ``[N, D]``, in host memory or memory-mapped.

    Args:
        layers: The layers.
        x: Features ``[N, F]`` in host memory, or memory-mapped.
        graph: The graph, in host memory.
        edge_weight: Weights in the order of the user's ``edge_index``.
        device: Where to compute.
        limit: Bytes that a block may take there, about; a block has at least one chunk.
        folder: Where the files go; None: a folder in the user's cache directory, which is emptied in the end.
        in_memory: Hold the outputs of layers in host memory instead.
        identity: What tells the model from others, to resume an interrupted run; None starts anew.
        bar: A ``rich.progress.Progress`` on the screen already; None shows one, False none.
        stop: Called after each block; may raise.

    Raises:
        OSError: The disk has no room for the outputs of two layers, which are there at a time.
        RuntimeError: Another process writes to the folder.
    """
    x, graph, edge_weight = x.cpu(), graph.to("cpu"), None if edge_weight is None else edge_weight.cpu()
    dtype = next(parameter.dtype for layer in layers for parameter in layer.conv.parameters())
    looped = [getattr(layer.conv, "add_self_loops", False) for layer in layers]
    graphs = [graph.with_self_loops() if loops else graph for loops in looped]
    orders = [whole.forward for whole in graphs]
    parts = None if identity is None else (*identity, x, graph.checksum(), edge_weight)
    total = sum(order.rows.numel() for order in orders)
    with (
        read_in_order(x),
        layer_outputs(folder, in_memory, len(layers), parts) as files,
        _shown(bar, total) as show,
    ):
        source = files.resumed(x, [order.rows for order in orders])
        files.prepare([(x.size(0), layer.width) for layer in layers], dtype)
        for i, layer in enumerate(layers):
            if i < files.layer:
                show(i, orders[i].rows.numel())
                continue
            target = files.layer_output(i, (x.size(0), layer.width), dtype)
            memo: dict[str, Tensor] = {}
            show(i, files.rows)
            for first, last in _blocks(orders[i], files.rows, limit, source.size(1), layer, dtype):
                block = GraphBlock(graphs[i], graph, first, last, memo).to(device)
                read = source[block.sources].to(device, dtype)
                if isinstance(layer.conv, GCNConv):
                    out = layer.conv(read, block, edge_weight)
                else:
                    out = layer.conv((read, source[block.targets].to(device, dtype)), block)
                for function in layer.after:
                    out = function(out)
                target[block.targets] = out.to("cpu", target.dtype)
                rows = int(orders[i].row_ptr[last])
                show(i, rows - files.rows)
                files.finished(i, rows)
                if stop is not None:
                    stop()
            source = target
            files.finished(i + 1, 0)
        return files.result(source)


def _blocks(
    order: Chunks, start: int, limit: float, width: int, layer: Layer, dtype: torch.dtype
) -> Iterator[tuple[int, int]]:
    """Yield ranges of chunks that fit, from the row ``start``; all rows of a vertex are in one of them."""
    row_ptr, column_ptr = order.row_ptr.tolist(), order.column_ptr.tolist()
    num_chunks = len(row_ptr) - 1
    widest = (width + layer.widest) * dtype.itemsize
    first = row_ptr.index(start) if start < row_ptr[-1] else num_chunks
    while first < num_chunks:
        last = first + 1
        while last < num_chunks and (
            (column_ptr[last + 1] - column_ptr[first] + row_ptr[last + 1] - row_ptr[first]) * widest <= limit
            or row_ptr[last] == row_ptr[last - 1]
            or row_ptr[last] == row_ptr[last + 1]
            or order.rows[row_ptr[last]] == order.rows[row_ptr[last] - 1]
        ):
            last += 1
        yield first, last
        first = last


@contextmanager
def _shown(bar: Any, total: int) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows that so many more rows of a layer are done."""
    if bar is False:
        yield lambda layer, rows: None
        return
    console = Console(stderr=True)
    own = Progress(console=console, transient=True, disable=not console.is_terminal)
    with own if bar is None else nullcontext(bar) as progress:
        task = progress.add_task("layer 1", total=total)

        def show(layer: int, rows: int) -> None:
            progress.update(task, description=f"layer {layer + 1}", advance=rows)

        try:
            yield show
        finally:
            if bar is not None:
                progress.remove_task(task)
