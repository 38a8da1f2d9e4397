"""The features of all nodes' in-neighbours, aggregated once: one pass over the edges, kept on disk where it is long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn.graph.arrays import create_array, expect_scattered_reads, load_array, read_in_order
from lightning_gnn.graph.csc import INT32_MAX, CSCGraph
from lightning_gnn.nn.first_layer import StaticAggregation
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.ops.aggregate import numba_kernels as kernels
from lightning_gnn.ops.aggregate.numba_rows import huge_pages
from lightning_gnn.ops.intrinsics import MAX_WIDTHS, WIDTHS
from lightning_gnn.ops.worker_threads import run_all
from lightning_gnn.runtime.store import checksum, kept

KEPT_FROM = 1 << 30
"""Results for which so many bytes of features are read are kept on disk."""
_FORMAT = 1
_BLOCK_EDGES, _BLOCK_ROWS = 1 << 18, 1 << 14
_SMALL = 1 << 14
"""Edges of a block up to which threads would take longer to wake up than one takes to finish."""
_Array = npt.NDArray[Any]


def aggregated_features(
    graph: CSCGraph,
    x: Tensor,
    how: StaticAggregation,
    edge_weight: Tensor | None = None,
    memory_limit: int | float | str = "auto",
    cache_dir: str | Path | None = None,
) -> Tensor:
    """Aggregate the features of every node's in-neighbours, all of them.

    Each number is added up in the order of the edges, so that it is the same for any number of threads. Where features
    and results exceed ``memory_limit``, they are read in order and worked on some columns at a time. Results that take
    long are kept on disk by the content of graph, features and weights, and mapped from there.

    Args:
        graph: The graph; in memory, or memory-mapped.
        x: Features, floating ``[N, …]``, in host memory or memory-mapped.
        how: How.
        edge_weight: Weights ``[E]`` in the order of the user's ``edge_index``, which ``how`` may ask for.
        memory_limit: Bytes of features and results to work on at a time; ``"auto"``: half of the memory that is free.
        cache_dir: Where results are kept; by default the user's cache directory.

    Returns:
        ``[N, …]`` of the dtype of ``x``; float16 and bfloat16 are accumulated in float32.

    Raises:
        TypeError: Features or weights are not floating.
        ValueError: A shape does not fit the graph, features or weights are trained, or there are 2^31 nodes or more.
    """
    edge_weight = edge_weight if how.weighted else None
    _check(graph, x, edge_weight)
    rows = x.detach().reshape(x.size(0), -1)
    limit = FullInference(memory_limit=memory_limit).limit_on(torch.device("cpu"))
    if graph.num_edges * rows.size(1) * rows.element_size() >= KEPT_FROM:
        found = _kept(graph, rows, how, edge_weight, limit, cache_dir)
        if found is not None:
            return found.view(x.shape)
    out = huge_pages(torch.empty_like(rows, memory_format=torch.contiguous_format))
    _aggregate(graph, rows, how, edge_weight, limit, out)
    return out.view(x.shape)


def _check(graph: CSCGraph, x: Any, edge_weight: Any) -> None:
    for name, value in (("x", x), ("edge_weight", edge_weight)):
        if value is None and name == "edge_weight":
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"data.{name} must be a dense floating tensor, but is {got}")
        if value.requires_grad:
            raise ValueError(f"data.{name} is trained, so that the sums of its rows change in each step")
        if not value.is_cpu:
            raise ValueError(f"data.{name} is on {value.device}; leave it in host memory")
    if x.dim() < 2 or x.size(0) != graph.num_nodes:
        raise ValueError(f"data.x must be [{graph.num_nodes}, F], but is {list(x.shape)}")
    if edge_weight is not None and list(edge_weight.shape) != [graph.num_edges]:
        raise ValueError(f"data.edge_weight must be [{graph.num_edges}], but is {list(edge_weight.shape)}")
    if graph.num_nodes > INT32_MAX:
        raise ValueError(f"the graph has {graph.num_nodes} nodes, but they are counted with 31 bits here")


def _kept(
    graph: CSCGraph,
    x: Tensor,
    how: StaticAggregation,
    edge_weight: Tensor | None,
    limit: float,
    cache_dir: str | Path | None,
) -> Tensor | None:
    """Return what lies in the cache, made first where it is not there; None where nothing can be kept."""
    edge_ids = None if edge_weight is None else graph.edge_ids
    made = []

    def make(folder: Path) -> None:
        stored = create_array(folder / "rows.npy", str(_stored(x.dtype)).split(".")[1], tuple(x.shape))
        _aggregate(graph, x, how, edge_weight, limit, torch.from_numpy(stored).view(x.dtype))
        stored.flush()
        made.append(True)

    def read(folder: Path, check: bool) -> Tensor:
        rows = load_array(folder / "rows.npy")
        if rows.dtype != _stored(x.dtype) or rows.shape != x.shape:
            raise ValueError(f"it holds {rows.dtype} {list(rows.shape)}")
        return expect_scattered_reads(rows.view(x.dtype))

    key = checksum(_FORMAT, how, graph.indptr, graph.indices, edge_ids, edge_weight, x)
    title = f"{how} of {graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {x.size(1)} features"
    found = kept("first_layer", key, make, read, title=title, given=cache_dir)
    if found is not None:
        rank_zero_info(f"{title}: {'computed, and kept in' if made else 'read from'} the cache")
    return found


def _stored(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype == torch.bfloat16 else dtype  # NumPy has no bfloat16


def _aggregate(
    graph: CSCGraph, x: Tensor, how: StaticAggregation, edge_weight: Tensor | None, limit: float, target: Tensor
) -> None:
    """Write the aggregated features to ``target`` ``[N, F]``, some columns at a time."""
    if not x.numel():
        return
    dtype = torch.promote_types(x.dtype, torch.float32)
    entries = _Entries(graph, how, edge_weight, dtype)
    fits = limit / (2 * x.size(0) * dtype.itemsize)
    width = x.size(1) if fits >= x.size(1) else max(int(fits) // 16, 1) * 16
    for start in range(0, x.size(1), width):
        columns = slice(start, min(start + width, x.size(1)))
        with read_in_order(x):
            part = x[:, columns].to(dtype).contiguous()
        buffer = np.empty((min(_BLOCK_ROWS, x.size(0)), part.size(1)), entries.dtype)
        for first, last in _blocks(entries.indptr):
            rows = buffer[: last - first]
            entries.reduce(part, first, last, rows)
            target[first:last, columns] = torch.from_numpy(rows)


def _blocks(indptr: _Array) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that have so many edges at most, or are one row."""
    first, num_rows = 0, indptr.size - 1
    while first < num_rows:
        last = int(np.searchsorted(indptr, indptr[first] + _BLOCK_EDGES, side="right")) - 1
        last = min(max(last, first + 1), first + _BLOCK_ROWS, num_rows)
        yield first, last
        first = last


class _Entries:
    """The edges of a graph with their weights, block by block of targets.

    Args:
        graph: The graph.
        how: How they are aggregated.
        edge_weight: ``[E]`` in the user's order, or None.
        dtype: In which is added up.
    """

    def __init__(self, graph: CSCGraph, how: StaticAggregation, edge_weight: Tensor | None, dtype: torch.dtype) -> None:
        self.indptr, self._indices = graph.indptr.numpy(), graph.indices.numpy()
        self._edge_ids = None if graph.edge_ids is None else graph.edge_ids.numpy()
        self._given = None if edge_weight is None else edge_weight.to(torch.promote_types(edge_weight.dtype, dtype))
        self._how, self.dtype = how, np.dtype(str(dtype).split(".")[1])
        self._scale: _Array | None = None
        self._loops: _Array | None = None
        if how.normalize:
            self._normalize()

    def reduce(self, x: Tensor, first: int, last: int, out: _Array) -> None:
        """Write the aggregated rows ``[last - first, F]`` of some targets."""
        begin, end = int(self.indptr[first]), int(self.indptr[last])
        indices = np.ascontiguousarray(self._indices[begin:end], np.int32)
        offsets = self.indptr[first : last + 1] - begin
        weight = self._weights(first, last, indices, offsets)
        if indices.size:
            self._run(x, indices, offsets, weight, out)
        else:
            out[:] = 0
        if self._scale is not None and self._loops is not None:
            own = self._scale[first:last] ** 2 * self._loops[first:last]
            out += own.astype(self.dtype)[:, None] * x[first:last].numpy()

    def _run(self, x: Tensor, indices: _Array, offsets: _Array, weight: _Array | None, out: _Array) -> None:
        is_max, wide = self._how.reduce == "max", x.size(1)
        widths = MAX_WIDTHS if is_max else WIDTHS
        blocks = kernels.blocks_of((0, wide), wide, 0 if weight is None else 1, widths, True, 0)[0][0]
        source, target = x.view(-1).numpy(), out.reshape(-1)
        by, stride = (source, 0) if weight is None else (weight, 1)
        degrees = np.diff(offsets)
        places = np.arange(degrees.size)
        divisors = np.maximum(degrees, 1) if self._how.reduce == "mean" else degrees[:0]
        ties = np.empty_like(target) if is_max else target

        def share(first: int, last: int) -> None:
            if is_max:
                kernels.max_rows(
                    source, blocks, offsets, indices, by, stride, places, first, last, target, ties, wide
                )  # fmt: skip
            else:
                kernels.sum_rows(
                    source, blocks, offsets, indices, by, stride, places, divisors, first, last, target, wide
                )  # fmt: skip

        run_all(_shares(share, offsets))
        if is_max:
            out[degrees == 0] = 0

    def _normalize(self) -> None:
        """Find the degrees of all nodes, and the weights of their self-loops."""
        num_nodes = self.indptr.size - 1
        degrees = np.zeros(num_nodes)
        if self._how.add_self_loops:
            fill = 2.0 if self._how.improved and self._given is not None else 1.0
            self._loops = np.full(num_nodes, fill)
        for first, last in _blocks(self.indptr):
            begin, end = int(self.indptr[first]), int(self.indptr[last])
            targets = np.repeat(np.arange(first, last), np.diff(self.indptr[first : last + 1]))
            values = self._values(begin, end)
            if self._loops is not None:
                loops = self._indices[begin:end] == targets
                if self._given is not None:
                    self._loops[targets[loops]] = values[loops]  # of several the last one
                values = np.where(loops, 0.0, values)
            degrees[first:last] = np.bincount(targets - first, values, last - first)
        if self._loops is not None:
            degrees += self._loops
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = degrees**-0.5
        scale[np.isinf(scale)] = 0.0
        self._scale = scale

    def _values(self, begin: int, end: int) -> _Array:
        """Return the user's weights of some edges, or ones."""
        if self._given is None:
            return np.ones(end - begin)
        ids = slice(begin, end) if self._edge_ids is None else self._edge_ids[begin:end]
        values: _Array = self._given.numpy()[ids].astype(np.float64)
        return values

    def _weights(self, first: int, last: int, indices: _Array, offsets: _Array) -> _Array | None:
        if self._scale is None and self._given is None:
            return None
        begin = int(self.indptr[first])
        values = self._values(begin, begin + indices.size)
        if self._scale is not None:
            targets = np.repeat(np.arange(first, last), np.diff(offsets))
            values = values * self._scale[indices] * self._scale[targets]
            if self._loops is not None:
                values[indices == targets] = 0.0
        return values.astype(self.dtype)


def _shares(share: Callable[[int, int], None], offsets: _Array) -> list[Callable[[], None]]:
    """Cut a block of rows into as many shares of equal work as torch has threads here."""
    workers = torch.get_num_threads() if offsets[-1] > _SMALL else 1
    work = offsets + np.arange(offsets.size)
    bounds = np.searchsorted(work, np.linspace(0, work[-1], workers + 1))
    bounds[0], bounds[-1] = 0, offsets.size - 1
    return [partial(share, int(first), int(last)) for first, last in pairwise(bounds) if last > first]
