"""Aggregate and update on the CPU: tiles of rows that stay in the cache between the aggregation and the product.

A worker takes a range of targets (or sources), tile by tile: compiled loops add up the rows of the tile's edges, and
torch's BLAS multiplies the tile. In backward the gradient's rows, too, are read once, for all products they are in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate import numba_kernels as kernels
from lightning_gnn.ops.aggregate.numba_rows import flat, huge_pages, loadable, wide
from lightning_gnn.ops.aggregate_update import reference as aggregate_update_reference  # noqa: F401  defines the operators
from lightning_gnn.ops.aggregate_update.products import Products
from lightning_gnn.ops.dropout import drawn, relu_drop_rows
from lightning_gnn.ops.intrinsics import MAX_WIDTHS, WIDTHS
from lightning_gnn.ops.library import library
from lightning_gnn.ops.worker_threads import run_all

SMALL = 1 << 19
"""Numbers read per pass up to which threads would take longer to wake up than one takes to finish."""
TILE_BYTES = 1 << 19
"""A quarter of a level-2 cache of 2 MB: the tile, what it is multiplied with and what comes out stay in it."""
_NO_DEGREES = np.empty(0, np.int64)
_EDGES_PER_ROW = 16
"""How many edges take as long to aggregate as the products of a row, about: for shares of equal work."""
_thread = threading.local()
_becoming_alone = threading.Lock()


@torch.library.impl(library, "aggregate_update", "CPU")
def aggregate_update(
    edges: list[Tensor],
    x: Tensor,
    weight: Tensor,
    self_weight: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    aggregate_first: bool,
    keep: bool,
    p: float | None = None,
    key: int = 0,
) -> tuple[Tensor, Tensor]:
    """Do what the function of this name in ``reference.py`` does."""
    dtype, multiply = x.dtype, Products(x.dtype)
    x, weight = loadable(x), wide(weight)
    by_self = None if self_weight is None else wide(self_weight)
    plus = None if bias is None else wide(bias)
    rows = _SortedEdges(edges, weight.dtype, mean)
    out = huge_pages(weight.new_empty((rows.count, weight.size(0))))
    kept = huge_pages(weight.new_empty((rows.count, x.size(1)))) if keep else weight.new_empty(0)
    if aggregate_first:

        def update(first: int, last: int) -> None:
            buffer = _buffer(x, weight.dtype)
            for start, stop in _tiles(first, last, x):
                tile = kept[start:stop] if keep else buffer[: stop - start]
                rows.sums(x, start, stop, tile)
                _product(multiply, tile, weight, plus, out[start:stop])
                if by_self is not None:
                    multiply.add(x[start:stop], by_self.t(), out[start:stop])
                _activate(out[start:stop], start, p, key)

    else:
        products = huge_pages(_new(multiply, x, weight).new_empty((x.size(0), weight.size(0))))

        def multiply_all(first: int, last: int) -> None:
            for start, stop in _tiles(first, last, x):
                multiply.write(x[start:stop], weight.t(), products[start:stop])

        def update(first: int, last: int) -> None:
            for start, stop in _tiles(first, last, x):
                tile = out[start:stop]
                rows.sums(products, start, stop, tile)
                if by_self is not None:
                    multiply.add(x[start:stop], by_self.t(), tile)
                if plus is not None:
                    tile.add_(plus)
                _activate(tile, start, p, key)

        _share_out(multiply_all, np.arange(x.size(0) + 1), x)
    _share_out(update, rows.work, x)
    return out.to(dtype), kept


@torch.library.impl(library, "aggregate_update_backward", "CPU")
def aggregate_update_backward(
    edges: list[Tensor],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    self_weight: Tensor | None,
    aggregated: Tensor | None,
    mean: bool,
    aggregate_first: bool,
    wanted: list[bool],
    activated: Tensor | None = None,
    p: float = 0.0,
) -> list[Tensor]:
    """Do what the function of this name in ``reference.py`` does."""
    dtype, multiply = x.dtype, Products(x.dtype)
    wants_x, wants_weight, wants_self, wants_bias = wanted
    grad, x, weight = wide(grad), loadable(x), wide(weight)
    by_self = None if self_weight is None else wide(self_weight)
    num_targets, num_sources = grad.size(0), x.size(0)
    received = wants_x or (wants_weight and not aggregate_first)  # whether the gradient goes back along the edges
    own = aggregate_first and by_self is not None
    degrees = edges[0].diff().clamp_(min=1).to(weight.dtype).unsqueeze(1) if mean else None
    # What goes back along the edges; below it, if x was aggregated, what each target sends to its own row.
    table = grad
    if received and aggregate_first:
        table = huge_pages(_new(multiply, x, weight).new_empty(((1 + own) * num_targets, x.size(1))))
    elif received and mean:
        table = huge_pages(torch.empty_like(grad))
    sent = _Parts(weight, {"weight": wants_weight and aggregate_first, "self": wants_self, "bias": wants_bias})
    got = _Parts(weight, {"weight": wants_weight and not aggregate_first})

    activated = None if activated is None else wide(activated)
    # The gradient before ReLU and dropout: tile by tile, whole only where it is read again after.
    whole = torch.empty_like(grad) if activated is not None and received and not aggregate_first else None

    def send(first: int, last: int) -> None:
        part = sent.of(first)
        buffer = None if activated is None or whole is not None else grad.new_empty((_tile_rows(x), grad.size(1)))
        for start, stop in _tiles(first, last, x):
            tile, to = grad[start:stop], table[start:stop]
            if activated is not None:
                before = whole[start:stop] if whole is not None else buffer[: stop - start]  # type: ignore[index]
                tile = _deactivate(tile, activated[start:stop], p, before)
            if received and aggregate_first:
                multiply.write(tile, weight, to)
                if own and by_self is not None:
                    multiply.write(tile, by_self, table[num_targets + start : num_targets + stop])
            if received and degrees is not None:
                torch.div(to if aggregate_first else tile, degrees[start:stop], out=to)
            if wants_weight and aggregated is not None:
                multiply.add(tile.t(), aggregated[start:stop], part["weight"])
            if wants_self:
                multiply.add(tile.t(), x[start:stop], part["self"])
            if wants_bias:
                part["bias"].add_(tile.sum(0))

    if received or any(sent.wanted.values()):
        _share_out(send, np.arange(num_targets + 1) * _EDGES_PER_ROW, x)
    if whole is not None:
        grad, table = whole, table if mean else whole
    grad_x = huge_pages(weight.new_empty((num_sources, x.size(1)))) if wants_x else weight.new_empty(0)
    if received:
        rows = _SortedEdges(
            torch.ops.lightning_gnn.edges_by_source(_wide_edges(edges), num_sources, own), weight.dtype, False
        )

        def receive(first: int, last: int) -> None:
            buffer, part = _buffer(table, weight.dtype), got.of(first)
            for start, stop in _tiles(first, last, x):
                tile = grad_x[start:stop] if aggregate_first else buffer[: stop - start]
                rows.sums(table, start, stop, tile)
                if aggregate_first:
                    continue
                if wants_weight:
                    multiply.add(tile.t(), x[start:stop], part["weight"])
                if wants_x:
                    multiply.write(tile, weight, grad_x[start:stop])
                    if by_self is not None and start < num_targets:
                        stop = min(stop, num_targets)
                        multiply.add(grad[start:stop], by_self, grad_x[start:stop])

        _share_out(receive, rows.work, x)
    grad_weight = (sent if aggregate_first else got).sum("weight")
    return [gradient.to(dtype) for gradient in (grad_x, grad_weight, sent.sum("self"), sent.sum("bias"))]


class _SortedEdges:
    """Sorted edges, as the compiled loops read them.

    Args:
        edges: ``indptr``, ``indices`` and, if there are any, weights, as ``edge_order.py`` sorts them.
        mean: Whether sums are divided by the number of edges.
    """

    def __init__(self, edges: list[Tensor], dtype: torch.dtype, mean: bool) -> None:
        self.indptr, self.indices = edges[0].numpy(), edges[1].numpy()
        self.weight = edges[2].to(dtype).numpy() if len(edges) > 2 else None
        self.count = self.indptr.size - 1
        self.degrees = np.maximum(np.diff(self.indptr), 1) if mean else _NO_DEGREES
        self.work = self.indptr + np.arange(self.count + 1) * _EDGES_PER_ROW

    def sums(self, x: Tensor, start: int, stop: int, out: Tensor) -> None:
        """Write the sums of rows ``[start, stop)``; ``x`` and ``out`` are contiguous."""
        num_columns, blocks = x.size(1), self._blocks(x, WIDTHS)
        indptr, degrees = self.indptr[start : stop + 1], self.degrees[start:stop]
        source, target = flat(x), out.view(-1).numpy()
        weight, stride = (source, 0) if self.weight is None else (self.weight, 1)
        kernels.sum_rows(
            source, blocks, indptr, self.indices, weight, stride, degrees, 0, stop - start, target, num_columns, 0
        )

    def maxima(self, x: Tensor, start: int, stop: int, out: Tensor, ties: Tensor) -> None:
        """Write the maxima of rows ``[start, stop)``, -inf without edges, and how many edges attain each."""
        source = flat(x)
        kernels.max_rows(
            source, self._blocks(x, MAX_WIDTHS), self.indptr[start : stop + 1], self.indices, source, 0, 0,
            stop - start, out.view(-1).numpy(), ties.view(-1).numpy(), x.size(1),
        )  # fmt: skip

    def routed(self, grad: Tensor, best: Tensor, x: Tensor, start: int, stop: int, out: Tensor) -> None:
        """Write the sums of the gradients of those maxima that rows ``[start, stop)`` of ``x`` attain."""
        own = x[start:stop].view(-1).numpy()
        kernels.route_rows(
            grad.view(-1).numpy(), best.view(-1).numpy(), self._blocks(x, MAX_WIDTHS), self.indptr[start : stop + 1],
            self.indices, own, 0, 0, stop - start, own, out.view(-1).numpy(), x.size(1),
        )  # fmt: skip

    def _blocks(self, x: Tensor, widths: tuple[int, ...]) -> np.ndarray:
        heads = 0 if self.weight is None else 1
        return kernels.blocks_of(x.size(1), x.size(1), heads, widths, True, 0)[0]


class _Parts:
    """Gradients of parameters: a part per worker, added up in the order of the workers.

    Args:
        weight: ``[out, in]``.
        wanted: Which of ``weight``, ``self`` and ``bias``.
    """

    def __init__(self, weight: Tensor, wanted: dict[str, bool]) -> None:
        self.weight, self.wanted = weight, wanted
        self.parts: dict[int, dict[str, Tensor]] = {}

    def of(self, first: int) -> dict[str, Tensor]:
        """Return zeros for the worker whose rows begin there."""
        part = self.parts[first] = {
            name: self.weight.new_zeros(self.weight.shape[: 1 if name == "bias" else 2])
            for name, want in self.wanted.items()
            if want
        }
        return part

    def sum(self, name: str) -> Tensor:
        """Return the gradient of that name, empty where it is not wanted."""
        if not self.wanted[name]:
            return self.weight.new_empty(0)
        parts = [part[name] for _, part in sorted(self.parts.items())]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _product(multiply: Products, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None or multiply.low:
        multiply.write(x, weight.t(), out)
        if bias is not None:
            out.add_(bias)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _new(multiply: Products, x: Tensor, weight: Tensor) -> Tensor:
    """Return of whose dtype a table is that products are written to and rows are read from."""
    return x if multiply.low else weight


def _activate(tile: Tensor, first_row: int, p: float | None, key: int) -> None:
    """Apply ReLU and dropout to rows of the result, if wanted."""
    if p == 0.0:
        tile.relu_()
    elif p is not None:
        rows = tile.numpy()
        relu_drop_rows(first_row, *drawn(p, key), rows, rows.dtype.type(1.0 / (1.0 - p)))


def _deactivate(grad: Tensor, activated: Tensor, p: float, out: Tensor) -> Tensor:
    """Write the gradient before ReLU and dropout."""
    torch.ops.aten.threshold_backward.grad_input(grad, activated, 0, grad_input=out)
    return out.mul_(1.0 / (1.0 - p)) if p else out


def _tile_rows(x: Tensor) -> int:
    return min(max(TILE_BYTES // (x.size(1) * max(x.element_size(), 4)), 64), 1024)


def _tiles(first: int, last: int, x: Tensor) -> Iterator[tuple[int, int]]:
    size = _tile_rows(x)
    for start in range(first, last, size):
        yield start, min(start + size, last)


def _buffer(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((_tile_rows(x), x.size(1)), dtype=dtype)


def _share_out(share: Callable[[int, int], None], work: np.ndarray, x: Tensor) -> None:
    """Call ``share(first row, one past the last)`` for as many ranges of rows as torch has threads here.

    Args:
        work: Work of the rows before each, ``[num_rows + 1]``.
    """
    num_rows, workers = work.size - 1, torch.get_num_threads()
    if workers == 1 or int(work[-1]) * x.size(1) <= SMALL * _EDGES_PER_ROW:
        share(0, num_rows)
        return
    bounds = np.searchsorted(work, np.linspace(work[0], work[-1], workers + 1))
    bounds[0], bounds[-1] = 0, num_rows
    ranges = [(int(first), int(last)) for first, last in pairwise(bounds) if last > first]
    # The caller only waits: its own products would take all of torch's threads, those of a worker take one.
    run_all([_nothing, *(lambda first=first, last=last: _alone(share, first, last) for first, last in ranges)])


def _alone(share: Callable[[int, int], None], first: int, last: int) -> None:
    if not getattr(_thread, "is_alone", False):
        # One worker at a time: the next would take the 1 for what everybody has, and put that back.
        with _becoming_alone:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            # That is also what threads begin with that come later; only a thread that ends at once can put it back.
            other = threading.Thread(target=torch.set_num_threads, args=(threads,))
            other.start()
            other.join()
        _thread.is_alone = True
    with torch.inference_mode():  # modes are those of a thread, and what a caller in this mode made is written here
        share(first, last)


def _nothing() -> None:
    pass


def _wide_edges(edges: list[Tensor]) -> list[Tensor]:
    return [*edges[:2], *(wide(weight) for weight in edges[2:])]
