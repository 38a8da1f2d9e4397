"""Aggregate and update on the CPU: tiles of rows stay in the cache between the aggregation and the product.

A worker processes a range of targets (or sources): compiled loops sum the edges of a tile, torch's BLAS multiplies it.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate import numba_kernels as kernels
from lightning_gnn.ops.aggregate.numba_rows import flatten, use_huge_pages, widen
from lightning_gnn.ops.aggregate_update.reference import Group, Update, register, split_relations
from lightning_gnn.ops.dropout import compiled_mask, relu_drop_rows
from lightning_gnn.ops.intrinsics import MAX_WIDTHS, WIDTHS
from lightning_gnn.ops.worker_threads import run_all

MAX_SERIAL_WORK = 1 << 19  # elements read per pass up to which a single thread is faster than waking others
TILE_BYTES = 1 << 19  # a quarter of an L2 cache of 2 MB, which also holds the weights and the output of the tile
_NO_DEGREES = np.empty(0, np.int64)
_EDGES_PER_ROW = 16  # approximate cost of a row's products, in edges, for ranges of equal work
_thread_state = threading.local()
_thread_setup_lock = threading.Lock()


def aggregate_update(call: Update, keep: bool) -> tuple[Tensor, Tensor]:
    """Run :func:`reference.update` on the CPU."""
    # Prepare the edges, and concatenate the weights of each group's relations for one product.
    x, weight, self_weight, bias = _detach_inputs(call)
    rows, groups = _SortedEdges(call.edges, x.dtype, call.mean), call.groups
    by_group = [group.concatenate_weights(weight) for group in groups]
    # Huge pages for large outputs reduce page faults.
    out = use_huge_pages(x.new_empty((sum(call.targets), weight.size(1))))
    aggregated = use_huge_pages(x.new_empty((rows.count, x.size(1)))) if keep else x.new_empty(0)
    table = x if call.aggregate_first else use_huge_pages(x.new_empty((x.size(0), weight.size(1))))

    # If the product comes first, every row is multiplied once, in tiles that stay in the cache.
    def multiply(first: int, last: int) -> None:
        for start, stop in _tiles(first, last, x):
            torch.mm(x[start:stop], weight[0].t(), out=table[start:stop])

    # Each thread aggregates, multiplies and activates one tile at a time, while the tile is in the cache.
    def update(first: int, last: int) -> None:
        max_rows = max([_tile_rows(x), *(group.num_relations for group in groups)])
        buffer = x.new_empty((0 if keep or not call.aggregate_first else max_rows, x.size(1)))
        for group, weights in zip(groups, by_group, strict=True):
            shift = None if bias is None else bias[group.node_type]
            for tile in _tiles_of(group, first, last, x):
                span, result = group.rows(tile), out[tile]
                if call.aggregate_first:
                    sums = aggregated[span] if keep else buffer[: span.stop - span.start]
                    rows.write_sums(x, span.start, span.stop, sums)
                    sums = sums.view(tile.stop - tile.start, weights.size(1))
                    if shift is None:
                        torch.mm(sums, weights.t(), out=result)
                    else:
                        torch.addmm(shift, sums, weights.t(), out=result)
                else:
                    rows.write_sums(table, span.start, span.stop, result)
                    if shift is not None:
                        result.add_(shift)
                # Add the targets' own rows before the activation.
                if self_weight is not None and group.own >= 0:
                    result.addmm_(x[group.own_rows(tile)], self_weight[group.node_type].t())
                if call.p == 0.0:
                    result.relu_()
                elif call.p is not None:
                    array, mask = result.numpy(), compiled_mask(call.p, call.key)
                    relu_drop_rows(tile.start, *mask, array, array.dtype.type(1.0 / (1.0 - call.p)))

    # Balance tiles over threads by the number of edges that they read, instead of their number of rows.
    if not call.aggregate_first:
        _run_ranges(multiply, np.arange(x.size(0) + 1), x)
    _run_ranges(update, rows.work_of(groups), x)
    return out, aggregated


def aggregate_update_backward(
    call: Update, grad: Tensor, aggregated: Tensor | None, result: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    """Run :func:`reference.update_backward` on the CPU."""
    x, weight, self_weight, _ = _detach_inputs(call)
    groups, by_first, num_targets = call.groups, call.aggregate_first, grad.size(0)
    by_group = [group.concatenate_weights(weight) for group in groups]
    wants_x, wants_weight, wants_self, wants_bias = wanted
    to_sources = wants_x or (wants_weight and not by_first)  # whether gradients are propagated along the edges
    degrees = call.edges[0].diff().clamp_(min=1).to(x.dtype).unsqueeze(1) if call.mean else None
    # Gradients to propagate along the edges, followed, if x was aggregated, by those of the targets' own rows.
    table, num_rows = grad, call.edges[0].numel() - 1
    if to_sources and by_first:
        own_rows = 0 if self_weight is None else num_targets
        table = use_huge_pages(x.new_empty((num_rows + own_rows, x.size(1))))
    elif to_sources and call.mean:
        table = use_huge_pages(torch.empty_like(grad))
    # The gradient before ReLU and dropout is computed tile by tile, and stored only if it is read again.
    whole = torch.empty_like(grad) if result is not None and to_sources and not by_first else None
    parameter_grads: dict[int, list[Tensor]] = {}  # by the first row of a worker

    def backward_targets(first: int, last: int) -> None:
        grad_weights = [torch.zeros_like(weights) for weights in by_group] if wants_weight and by_first else []
        grad_self = torch.zeros_like(self_weight) if wants_self and self_weight is not None else x.new_empty(0)
        grad_bias = x.new_zeros((len(call.targets), grad.size(1)) if wants_bias else 0)
        parameter_grads[first] = [grad_self, grad_bias, *grad_weights]
        buffer = None if result is None or whole is not None else grad.new_empty((_tile_rows(x), grad.size(1)))
        for number, (group, weights) in enumerate(zip(groups, by_group, strict=True)):
            for tile in _tiles_of(group, first, last, x):
                count, span, tile_grad = tile.stop - tile.start, group.rows(tile), grad[tile]
                if result is not None:
                    before = whole[tile] if whole is not None else buffer[:count]  # type: ignore[index]
                    torch.ops.aten.threshold_backward.grad_input(tile_grad, result[tile], 0, grad_input=before)
                    tile_grad = before.mul_(1.0 / (1.0 - call.p)) if call.p else before
                if to_sources and by_first:
                    torch.mm(tile_grad, weights, out=table[span].view(count, weights.size(1)))
                    if self_weight is not None and group.own >= 0:
                        own_grad = table[num_rows + tile.start : num_rows + tile.stop]
                        torch.mm(tile_grad, self_weight[group.node_type], out=own_grad)
                if to_sources and degrees is not None:
                    torch.div(table[span] if by_first else tile_grad, degrees[span], out=table[span])
                if grad_weights and aggregated is not None:
                    grad_weights[number].addmm_(tile_grad.t(), aggregated[span].view(count, weights.size(1)))
                if grad_self.numel() and group.own >= 0:
                    grad_self[group.node_type].addmm_(tile_grad.t(), x[group.own_rows(tile)])
                if wants_bias:
                    grad_bias[group.node_type].add_(tile_grad.sum(0))

    _run_ranges(backward_targets, np.arange(num_targets + 1) * _EDGES_PER_ROW, x)
    if whole is not None:
        grad, table = whole, table if call.mean else whole
    grad_x = use_huge_pages(x.new_empty(x.shape if wants_x else 0))
    source_grads: dict[int, list[Tensor]] = {}  # gradients of the weight by the first row of a worker
    if to_sources:
        edges = torch.ops.lightning_gnn.edges_by_source(call.edges, x.size(0))
        rows = _SortedEdges(edges, x.dtype, False)

        def backward_sources(first: int, last: int) -> None:
            buffer = x.new_empty((0 if by_first else _tile_rows(x), table.size(1)))
            grad_weight = x.new_zeros(0 if by_first or not wants_weight else weight.shape[1:])
            source_grads[first] = [grad_weight]
            for start, stop in _tiles(first, last, x):
                tile = grad_x[start:stop] if by_first else buffer[: stop - start]
                rows.write_sums(table, start, stop, tile)
                if grad_weight.numel():
                    grad_weight.addmm_(tile.t(), x[start:stop])
                if not by_first and wants_x:
                    torch.mm(tile, weight[0], out=grad_x[start:stop])
                for group in groups if wants_x and self_weight is not None else ():
                    low, high = max(start, group.own), min(stop, group.own + group.num_targets)
                    if self_weight is None or group.own < 0 or low >= high:
                        continue
                    shift = group.first_target - group.own
                    if by_first:
                        grad_x[low:high].add_(table[num_rows + low + shift : num_rows + high + shift])
                    else:
                        grad_x[low:high].addmm_(grad[low + shift : high + shift], self_weight[group.node_type])

        _run_ranges(backward_sources, rows.work, x)
    grad_self, grad_bias, *group_grads = _sum_workers(parameter_grads)
    grad_weight = split_relations(groups, group_grads, weight) if group_grads else x.new_empty(0)
    if wants_weight and not by_first:
        grad_weight = _sum_workers(source_grads)[0].unsqueeze(0)
    return [grad_x, grad_weight, grad_self, grad_bias]


register("CPU", aggregate_update, aggregate_update_backward)


def _detach_inputs(call: Update) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    self_weight = None if call.self_weight is None else call.self_weight.detach()
    return widen(call.x), call.weight.detach(), self_weight, None if call.bias is None else call.bias.detach()


class _SortedEdges:
    """Sorted edges (``edge_order.py``) in the form that the compiled loops read."""

    def __init__(self, edges: list[Tensor], dtype: torch.dtype, mean: bool) -> None:
        self.indptr, self.indices = edges[0].numpy(), edges[1].numpy()
        self.weight = edges[2].to(dtype).numpy() if len(edges) > 2 else None
        self.count = self.indptr.size - 1
        self.degrees = np.maximum(np.diff(self.indptr), 1) if mean else _NO_DEGREES
        self.work = self.indptr + np.arange(self.count + 1) * _EDGES_PER_ROW

    def work_of(self, groups: list[Group]) -> np.ndarray:
        """Return the cumulative work before each target, int64 ``[num_targets + 1]``."""
        if len(groups) == 1 and groups[0].num_relations == 1:
            return self.work
        first_rows = [group.first_row + np.arange(group.num_targets) * group.num_relations for group in groups]
        work: np.ndarray = self.work[np.concatenate([*first_rows, [self.count]])]
        return work

    def write_sums(self, x: Tensor, start: int, stop: int, out: Tensor) -> None:
        """Write the sums of rows ``[start, stop)``; ``x`` and ``out`` are contiguous."""
        num_columns, blocks = x.size(1), self._blocks(x, WIDTHS)
        indptr, degrees = self.indptr[start : stop + 1], self.degrees[start:stop]
        source, target = flatten(x), out.view(-1).numpy()
        weight, stride = (source, 0) if self.weight is None else (self.weight, 1)
        kernels.sum_rows(
            source, blocks, indptr, self.indices, weight, stride, degrees, 0, stop - start, target, num_columns, 0
        )

    def write_maxima(self, x: Tensor, start: int, stop: int, out: Tensor, ties: Tensor) -> None:
        """Write the maxima of rows ``[start, stop)``, -inf without edges, and the number of ties."""
        source = flatten(x)
        kernels.max_rows(
            source, self._blocks(x, MAX_WIDTHS), self.indptr[start : stop + 1], self.indices, source, 0, 0,
            stop - start, out.view(-1).numpy(), ties.view(-1).numpy(), x.size(1),
        )  # fmt: skip

    def route_gradients(self, grad: Tensor, best: Tensor, x: Tensor, start: int, stop: int, out: Tensor) -> None:
        """Write the sums of the gradients of the maxima that rows ``[start, stop)`` of ``x`` attain."""
        own = x[start:stop].view(-1).numpy()
        kernels.route_rows(
            grad.view(-1).numpy(), best.view(-1).numpy(), self._blocks(x, MAX_WIDTHS), self.indptr[start : stop + 1],
            self.indices, own, 0, 0, stop - start, own, out.view(-1).numpy(), x.size(1),
        )  # fmt: skip

    def _blocks(self, x: Tensor, widths: tuple[int, ...]) -> np.ndarray:
        heads = 0 if self.weight is None else 1
        return kernels.blocks_of(x.size(1), x.size(1), heads, widths, True, 0)[0]


def _sum_workers(grads: dict[int, list[Tensor]]) -> list[Tensor]:
    """Sum the workers' gradients of parameters in the order of the workers' first rows."""
    by_parameter = zip(*(worker for _, worker in sorted(grads.items())), strict=True)
    return [workers[0] if len(workers) == 1 else torch.stack(workers).sum(0) for workers in by_parameter]


def _tile_rows(x: Tensor) -> int:
    return min(max(TILE_BYTES // (x.size(1) * x.element_size()), 64), 1024)


def _tiles(first: int, last: int, x: Tensor) -> Iterator[tuple[int, int]]:
    size = _tile_rows(x)
    for start in range(first, last, size):
        yield start, min(start + size, last)


def _tiles_of(group: Group, first: int, last: int, x: Tensor) -> Iterator[slice]:
    """Yield the tiles of a group's targets in ``[first, last)``."""
    size = _tile_rows(x) // max(group.num_relations, 1) or 1
    end = min(last, group.targets.stop)
    for start in range(max(first, group.first_target), end, size):
        yield slice(start, min(start + size, end))


def _run_ranges(function: Callable[[int, int], None], work: np.ndarray, x: Tensor) -> None:
    """Call ``function(first row, one past the last)`` for one range of rows per torch thread, in parallel."""
    num_rows, workers = work.size - 1, torch.get_num_threads()
    if workers == 1 or int(work[-1]) * x.size(1) <= MAX_SERIAL_WORK * _EDGES_PER_ROW:
        function(0, num_rows)
        return
    bounds = np.searchsorted(work, np.linspace(work[0], work[-1], workers + 1))
    bounds[0], bounds[-1] = 0, num_rows
    ranges = [(int(first), int(last)) for first, last in pairwise(bounds) if last > first]
    run_single_threaded([partial(function, *rows) for rows in ranges])


def run_single_threaded(tasks: list[Callable[[], None]]) -> None:
    """Run every task in its own worker thread, whose matrix products use a single thread."""
    # The calling thread only waits, because its products would use all of torch's threads.
    run_all([lambda: None, *(partial(_run_single_threaded, task) for task in tasks)])


def _run_single_threaded(task: Callable[[], None]) -> None:
    if not getattr(_thread_state, "is_single_threaded", False):
        # The lock keeps the next worker from reading the temporary 1 as the default to restore.
        with _thread_setup_lock:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            # This also sets the default of future threads; only a thread that exits at once can restore it.
            other = threading.Thread(target=torch.set_num_threads, args=(threads,))
            other.start()
            other.join()
        _thread_state.is_single_threaded = True
    with torch.inference_mode():  # the mode is thread-local, and outputs may be inference tensors of the caller
        task()
