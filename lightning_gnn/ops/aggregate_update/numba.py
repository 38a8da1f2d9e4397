"""Aggregate and update on the CPU: tiles of rows that stay in the cache between the aggregation and the product.

A worker takes a range of targets (or sources): compiled loops add up a tile's edges, torch's BLAS multiplies it.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate import numba_kernels as kernels
from lightning_gnn.ops.aggregate.numba_rows import flat, huge_pages, wide
from lightning_gnn.ops.aggregate_update.reference import Group, Update, apart, register
from lightning_gnn.ops.dropout import drawn, relu_drop_rows
from lightning_gnn.ops.intrinsics import MAX_WIDTHS, WIDTHS
from lightning_gnn.ops.worker_threads import run_all

SMALL = 1 << 19  # numbers read per pass up to which threads would take longer to wake up than one takes to finish
TILE_BYTES = 1 << 19
"""A quarter of a level-2 cache of 2 MB: the tile, what it is multiplied with and what comes out stay in it."""
_NO_DEGREES = np.empty(0, np.int64)
_EDGES_PER_ROW = 16
"""How many edges take as long to aggregate as the products of a row, about: for shares of equal work."""
_thread = threading.local()
_becoming_alone = threading.Lock()


def aggregate_update(call: Update, keep: bool) -> tuple[Tensor, Tensor]:
    """Do what :func:`reference.update` does."""
    # Prepare the edges, and for each group the weights of its relations side by side for one product.
    x, weight, self_weight, bias = _contiguous(call)
    rows, groups = _SortedEdges(call.edges, x.dtype, call.mean), call.groups
    by_group = [group.side_by_side(weight) for group in groups]
    # Large outputs lie in huge pages, which take fewer page faults.
    out = huge_pages(x.new_empty((sum(call.targets), weight.size(1))))
    kept = huge_pages(x.new_empty((rows.count, x.size(1)))) if keep else x.new_empty(0)
    table = x if call.aggregate_first else huge_pages(x.new_empty((x.size(0), weight.size(1))))

    # If the product comes first, all rows are multiplied once, in tiles that stay in the cache.
    def multiply(first: int, last: int) -> None:
        for start, stop in _tiles(first, last, x):
            torch.mm(x[start:stop], weight[0].t(), out=table[start:stop])

    # Each thread sums, multiplies and activates one tile after the other while it is in the cache.
    def update(first: int, last: int) -> None:
        most = max([_tile_rows(x), *(group.num_relations for group in groups)])
        buffer = x.new_empty((0 if keep or not call.aggregate_first else most, x.size(1)))
        for group, weights in zip(groups, by_group, strict=True):
            shift = None if bias is None else bias[group.kind]
            for tile in _tiles_of(group, first, last, x):
                span, result = group.rows(tile), out[tile]
                if call.aggregate_first:
                    sums = kept[span] if keep else buffer[: span.stop - span.start]
                    rows.sums(x, span.start, span.stop, sums)
                    sums = sums.view(tile.stop - tile.start, weights.size(1))
                    if shift is None:
                        torch.mm(sums, weights.t(), out=result)
                    else:
                        torch.addmm(shift, sums, weights.t(), out=result)
                else:
                    rows.sums(table, span.start, span.stop, result)
                    if shift is not None:
                        result.add_(shift)
                # Add the targets' own rows before the activation.
                if self_weight is not None and group.own >= 0:
                    result.addmm_(x[group.own_rows(tile)], self_weight[group.kind].t())
                if call.p == 0.0:
                    result.relu_()
                elif call.p is not None:
                    given = result.numpy()
                    relu_drop_rows(tile.start, *drawn(call.p, call.key), given, given.dtype.type(1.0 / (1.0 - call.p)))

    # Share tiles out to threads by the edges that they read, not by their number of rows.
    if not call.aggregate_first:
        _share_out(multiply, np.arange(x.size(0) + 1), x)
    _share_out(update, rows.work_of(groups), x)
    return out, kept


def aggregate_update_backward(
    call: Update, grad: Tensor, aggregated: Tensor | None, result: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    """Do what :func:`reference.update_backward` does."""
    x, weight, self_weight, _ = _contiguous(call)
    groups, by_first, num_targets = call.groups, call.aggregate_first, grad.size(0)
    by_group = [group.side_by_side(weight) for group in groups]
    wants_x, wants_weight, wants_self, wants_bias = wanted
    received = wants_x or (wants_weight and not by_first)  # whether the gradient goes back along the edges
    degrees = call.edges[0].diff().clamp_(min=1).to(x.dtype).unsqueeze(1) if call.mean else None
    # What goes back along the edges; below it, if x was aggregated, what each target sends to its own row.
    table, num_rows = grad, call.edges[0].numel() - 1
    if received and by_first:
        own_rows = 0 if self_weight is None else num_targets
        table = huge_pages(x.new_empty((num_rows + own_rows, x.size(1))))
    elif received and call.mean:
        table = huge_pages(torch.empty_like(grad))
    # The gradient before ReLU and dropout: tile by tile, whole only where it is read again after.
    whole = torch.empty_like(grad) if result is not None and received and not by_first else None
    parts: dict[int, list[Tensor]] = {}  # gradients of parameters by the first row of a worker

    def send(first: int, last: int) -> None:
        of_weight = [torch.zeros_like(weights) for weights in by_group] if wants_weight and by_first else []
        of_self = torch.zeros_like(self_weight) if wants_self and self_weight is not None else x.new_empty(0)
        of_bias = x.new_zeros((len(call.targets), grad.size(1)) if wants_bias else 0)
        parts[first] = [of_self, of_bias, *of_weight]
        buffer = None if result is None or whole is not None else grad.new_empty((_tile_rows(x), grad.size(1)))
        for number, (group, weights) in enumerate(zip(groups, by_group, strict=True)):
            for tile in _tiles_of(group, first, last, x):
                count, span, given = tile.stop - tile.start, group.rows(tile), grad[tile]
                if result is not None:
                    before = whole[tile] if whole is not None else buffer[:count]  # type: ignore[index]
                    torch.ops.aten.threshold_backward.grad_input(given, result[tile], 0, grad_input=before)
                    given = before.mul_(1.0 / (1.0 - call.p)) if call.p else before
                if received and by_first:
                    torch.mm(given, weights, out=table[span].view(count, weights.size(1)))
                    if self_weight is not None and group.own >= 0:
                        torch.mm(
                            given, self_weight[group.kind], out=table[num_rows + tile.start : num_rows + tile.stop]
                        )
                if received and degrees is not None:
                    torch.div(table[span] if by_first else given, degrees[span], out=table[span])
                if of_weight and aggregated is not None:
                    of_weight[number].addmm_(given.t(), aggregated[span].view(count, weights.size(1)))
                if of_self.numel() and group.own >= 0:
                    of_self[group.kind].addmm_(given.t(), x[group.own_rows(tile)])
                if wants_bias:
                    of_bias[group.kind].add_(given.sum(0))

    _share_out(send, np.arange(num_targets + 1) * _EDGES_PER_ROW, x)
    if whole is not None:
        grad, table = whole, table if call.mean else whole
    grad_x = huge_pages(x.new_empty(x.shape if wants_x else 0))
    by_source: dict[int, list[Tensor]] = {}
    if received:
        edges = torch.ops.lightning_gnn.edges_by_source(call.edges, x.size(0))
        rows = _SortedEdges(edges, x.dtype, False)

        def receive(first: int, last: int) -> None:
            buffer = x.new_empty((0 if by_first else _tile_rows(x), table.size(1)))
            part = x.new_zeros(0 if by_first or not wants_weight else weight.shape[1:])
            by_source[first] = [part]
            for start, stop in _tiles(first, last, x):
                tile = grad_x[start:stop] if by_first else buffer[: stop - start]
                rows.sums(table, start, stop, tile)
                if part.numel():
                    part.addmm_(tile.t(), x[start:stop])
                if not by_first and wants_x:
                    torch.mm(tile, weight[0], out=grad_x[start:stop])
                for group in groups if wants_x and self_weight is not None else ():
                    low, high = max(start, group.own), min(stop, group.own + group.num_targets)
                    if self_weight is None or group.own < 0 or low >= high:
                        continue
                    move = group.first_target - group.own
                    if by_first:
                        grad_x[low:high].add_(table[num_rows + low + move : num_rows + high + move])
                    else:
                        grad_x[low:high].addmm_(grad[low + move : high + move], self_weight[group.kind])

        _share_out(receive, rows.work, x)
    grad_self, grad_bias, *of_groups = _added_up(parts)
    grad_weight = apart(groups, of_groups, weight) if of_groups else x.new_empty(0)
    if wants_weight and not by_first:
        grad_weight = _added_up(by_source)[0].unsqueeze(0)
    return [grad_x, grad_weight, grad_self, grad_bias]


register("CPU", aggregate_update, aggregate_update_backward)


def _contiguous(call: Update) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return features that the loops read, and weights and bias as they are."""
    self_weight = None if call.self_weight is None else call.self_weight.detach()
    return wide(call.x), call.weight.detach(), self_weight, None if call.bias is None else call.bias.detach()


class _SortedEdges:
    """Sorted edges (``edge_order.py``), as the compiled loops read them."""

    def __init__(self, edges: list[Tensor], dtype: torch.dtype, mean: bool) -> None:
        self.indptr, self.indices = edges[0].numpy(), edges[1].numpy()
        self.weight = edges[2].to(dtype).numpy() if len(edges) > 2 else None
        self.count = self.indptr.size - 1
        self.degrees = np.maximum(np.diff(self.indptr), 1) if mean else _NO_DEGREES
        self.work = self.indptr + np.arange(self.count + 1) * _EDGES_PER_ROW

    def work_of(self, groups: list[Group]) -> np.ndarray:
        """Return the work before each target, int64 ``[num_targets + 1]``."""
        if len(groups) == 1 and groups[0].num_relations == 1:
            return self.work
        first_rows = [group.first_row + np.arange(group.num_targets) * group.num_relations for group in groups]
        work: np.ndarray = self.work[np.concatenate([*first_rows, [self.count]])]
        return work

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


def _added_up(parts: dict[int, list[Tensor]]) -> list[Tensor]:
    """Add the workers' gradients of parameters up in the order of the workers' first rows."""
    of_workers = zip(*(part for _, part in sorted(parts.items())), strict=True)
    return [found[0] if len(found) == 1 else torch.stack(found).sum(0) for found in of_workers]


def _tile_rows(x: Tensor) -> int:
    return min(max(TILE_BYTES // (x.size(1) * x.element_size()), 64), 1024)


def _tiles(first: int, last: int, x: Tensor) -> Iterator[tuple[int, int]]:
    size = _tile_rows(x)
    for start in range(first, last, size):
        yield start, min(start + size, last)


def _tiles_of(group: Group, first: int, last: int, x: Tensor) -> Iterator[slice]:
    """Yield the tiles of a group's targets among ``[first, last)``."""
    size = _tile_rows(x) // max(group.num_relations, 1) or 1
    end = min(last, group.targets.stop)
    for start in range(max(first, group.first_target), end, size):
        yield slice(start, min(start + size, end))


def _share_out(share: Callable[[int, int], None], work: np.ndarray, x: Tensor) -> None:
    """Call ``share(first row, one past the last)`` for as many ranges of rows as torch has threads here."""
    num_rows, workers = work.size - 1, torch.get_num_threads()
    if workers == 1 or int(work[-1]) * x.size(1) <= SMALL * _EDGES_PER_ROW:
        share(0, num_rows)
        return
    bounds = np.searchsorted(work, np.linspace(work[0], work[-1], workers + 1))
    bounds[0], bounds[-1] = 0, num_rows
    ranges = [(int(first), int(last)) for first, last in pairwise(bounds) if last > first]
    run_all_alone([partial(share, *rows) for rows in ranges])


def run_all_alone(shares: list[Callable[[], None]]) -> None:
    """Run every share in a worker of its own, whose products take one thread."""
    # The caller only waits: its own products would take all of torch's threads.
    run_all([lambda: None, *(partial(_alone, share) for share in shares)])


def _alone(share: Callable[[], None]) -> None:
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
        share()
