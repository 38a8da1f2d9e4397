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

from lightning_gnn.features.memory_pool import pool
from lightning_gnn.ops.aggregate import numba_kernels as kernels
from lightning_gnn.ops.aggregate.numba_rows import flatten, to_loadable, use_huge_pages
from lightning_gnn.ops.aggregate_update.reference import Group, Update, register, split_relations
from lightning_gnn.ops.dropout import relu_drop_backward, relu_drop_rows
from lightning_gnn.ops.intrinsics import MAX_WIDTHS, WIDTHS
from lightning_gnn.ops.worker_threads import run_all

MAX_SERIAL_WORK = 1 << 19  # elements read per pass up to which a single thread is faster than waking others
TILE_BYTES = 1 << 19  # a quarter of an L2 cache of 2 MB, which also holds the weights and the output of the tile
_NO_DEGREES = np.empty(0, np.int64)
_BLOCK_ROWS = 8192  # most rows of a bfloat16 product; with 1,024 rows, the rate is 8 % lower
_EDGES_PER_ROW = 16  # approximate cost of a row's products, in edges, for ranges of equal work
_thread_state = threading.local()
_thread_setup_lock = threading.Lock()


def sum_beside(x: Tensor, edges: list[Tensor], mean: bool, beside: bool) -> Tensor:
    """Return the aggregated rows of x that :func:`aggregate_update` takes, with the targets' own rows if ``beside``."""
    rows, width = _SortedEdges(edges, x.dtype, mean), x.size(1)
    out = pool.empty((rows.count, width * (1 + beside)), x.dtype)
    rows.write_sums(x, 0, rows.count, out[:, :width])
    if beside:
        out[:, width:].copy_(x[: rows.count])
    return out


def aggregate_update(call: Update, keep: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run :func:`reference.update` on the CPU; ``given`` are the aggregated rows if they are known."""
    # Prepare the edges, and concatenate the weights of each group's relations for one product.
    x, weight, self_weight, bias = _detach_inputs(call)
    rows, groups = _SortedEdges(call.edges, x.dtype, call.mean), call.groups
    by_group = [group.concatenate_weights(weight) for group in groups]
    # In bfloat16, a product without a bias is faster, and the activation adds the bias before it rounds.
    is_later = bias is not None and call.p is not None and x.dtype == torch.bfloat16
    width, is_beside = x.size(1), puts_own_rows_beside(call)
    if is_beside and self_weight is not None:
        by_group, self_weight, width = [torch.cat([weight[0], self_weight[0]], 1)], None, 2 * width
    # Huge pages for large outputs reduce page faults.
    out = use_huge_pages(x.new_empty((sum(call.targets), weight.size(1))))
    aggregated = x.new_empty(0) if given is None else given
    if keep and given is None:
        aggregated = use_huge_pages(x.new_empty((rows.count, width)))
    table = x if call.aggregate_first else use_huge_pages(x.new_empty((x.size(0), weight.size(1))))

    # If the product comes first, every row is multiplied once, in tiles that stay in the cache.
    def multiply(first: int, last: int) -> None:
        for start, stop in _tiles(first, last, x):
            torch.mm(x[start:stop], weight[0].t(), out=table[start:stop])

    # Each thread aggregates, multiplies and activates one tile at a time, while the tile is in the cache.
    def update(first: int, last: int) -> None:
        max_rows = max([_tile_rows(x), *(group.num_relations for group in groups)])
        buffer = x.new_empty((0 if aggregated.numel() or not call.aggregate_first else max_rows, width))
        for group, weights in zip(groups, by_group, strict=True):
            shift = None if bias is None else bias[group.node_type]
            for tile in _tiles_of(group, first, last, x):
                span, result = group.rows(tile), out[tile]
                if call.aggregate_first:
                    sums = aggregated[span] if aggregated.numel() else buffer[: span.stop - span.start]
                    if given is None:
                        rows.write_sums(x, span.start, span.stop, sums[:, : x.size(1)])
                        if is_beside:
                            sums[:, x.size(1) :].copy_(x[group.own_rows(tile)])
                    sums = sums.view(tile.stop - tile.start, weights.size(1))
                    if shift is None or is_later:
                        torch.mm(sums, weights.t(), out=result)
                    else:
                        torch.addmm(shift, sums, weights.t(), out=result)
                else:
                    rows.write_sums(table, span.start, span.stop, result)
                    if shift is not None and not is_later:
                        result.add_(shift)
                # Add the targets' own rows before the activation.
                if self_weight is not None and group.own >= 0:
                    result.addmm_(x[group.own_rows(tile)], self_weight[group.node_type].t())
                if is_later or call.p:
                    relu_drop_rows(tile.start, result, call.p or 0.0, call.key, shift if is_later else None)
                elif call.p is not None:
                    result.relu_()

    # Balance tiles over threads by the number of edges that they read, instead of their number of rows.
    if not call.aggregate_first:
        _run_ranges(multiply, np.arange(x.size(0) + 1), x)
    _run_ranges(update, rows.work_of(groups), x)
    return out, aggregated if keep else x.new_empty(0)


def aggregate_update_backward(
    call: Update, grad: Tensor, aggregated: Tensor | None, result: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    """Run :func:`reference.update_backward` on the CPU."""
    return _Backward(call, grad, aggregated, result, wanted).run()


register("CPU", aggregate_update, aggregate_update_backward)


def _detach_inputs(call: Update) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    self_weight = None if call.self_weight is None else call.self_weight.detach()
    return to_loadable(call.x), call.weight.detach(), self_weight, None if call.bias is None else call.bias.detach()


def puts_own_rows_beside(call: Update) -> bool:
    """Return whether ``[sums | own rows]`` takes one product with ``[W | S]``, which is faster in bfloat16 only."""
    return call.x.dtype == torch.bfloat16 and call.aggregate_first and call.has_own


class _SortedEdges:
    """Sorted edges (``edge_order.py``) in the form that the compiled loops read."""

    def __init__(self, edges: list[Tensor], dtype: torch.dtype, mean: bool) -> None:
        self.indptr, self.indices = edges[0].numpy(), edges[1].numpy()
        self.weight = edges[2].to(torch.promote_types(dtype, torch.float32)).numpy() if len(edges) > 2 else None
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
        """Write the sums of rows ``[start, stop)``; ``x`` is contiguous, and the rows of ``out`` have its dtype."""
        num_columns, blocks = out.stride(0), self._blocks(x, WIDTHS)
        indptr, degrees = self.indptr[start : stop + 1], self.degrees[start:stop]
        source, target = flatten(x), flatten(out.as_strided((out.size(0) * num_columns,), (1,)))
        weight, stride = (source, 0) if self.weight is None else (self.weight, 1)
        # bfloat16 is summed in a float32 block, and rounded once.
        sums = (target, num_columns, 0) if x.dtype != torch.bfloat16 else (_new_block(), num_columns, 0, target)
        kernels.sum_rows(source, blocks, indptr, self.indices, weight, stride, degrees, 0, stop - start, *sums)

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


class _Backward:
    """A backward pass in tiles: first over the targets, then over the sources, to which the edges lead ``table``.

    The table holds products of gradients with the weights, followed by those with the targets' own weights. If the
    forward product came first, it holds the gradients, and those of the weight and x follow from its sums.
    """

    def __init__(
        self, call: Update, grad: Tensor, aggregated: Tensor | None, result: Tensor | None, wanted: list[bool]
    ) -> None:
        self.call, self.groups, self.grad, self.aggregated, self.result = call, call.groups, grad, aggregated, result
        self.x, self.weight, self.self_weight, _ = _detach_inputs(call)
        self.by_group = [group.concatenate_weights(self.weight) for group in self.groups]
        self.wants_x, self.wants_weight, self.wants_self, self.wants_bias = wanted
        self.num_rows = call.edges[0].numel() - 1
        wide = torch.promote_types(self.x.dtype, torch.float32)
        self.degrees = call.edges[0].diff().clamp_(min=1).to(wide).unsqueeze(1) if call.mean else None
        self.table: Tensor | None = None  # None if no gradient is propagated along the edges
        # In bfloat16, gradients of parameters are products of many rows, after the pass over the targets.
        self.is_narrow = self.x.dtype == torch.bfloat16
        self.is_beside = puts_own_rows_beside(call)
        reads_again = self.is_narrow or (not call.aggregate_first and (self.wants_x or self.wants_weight))
        self.whole = result is not None and reads_again
        self.before = (
            use_huge_pages(torch.empty_like(grad)) if self.whole else grad
        )  # before ReLU and dropout, if it is read again
        if call.aggregate_first and self.wants_x:
            num_own = 0 if self.self_weight is None else grad.size(0)
            self.table = use_huge_pages(self.x.new_empty((self.num_rows + num_own, self.x.size(1))))
        elif not call.aggregate_first and (self.wants_x or self.wants_weight):
            self.table = use_huge_pages(torch.empty_like(grad)) if call.mean else self.before
        self.sums: Tensor | None = None  # the table's rows summed by source, if they are read again
        self.target_grads: dict[int, list[Tensor]] = {}  # gradients of parameters, by the first row of a worker
        self.source_grads: dict[int, list[Tensor]] = {}  # gradients of the weight, the same

    def run(self) -> list[Tensor]:
        """Return the gradients of x, weight, self_weight and bias, empty if not wanted."""
        _run_ranges(self._run_targets, np.arange(self.grad.size(0) + 1) * _EDGES_PER_ROW, self.x)
        self.grad_x = use_huge_pages(self.x.new_empty(self.x.shape if self.wants_x else 0))
        if self.table is not None:
            by_source = torch.ops.lightning_gnn.edges_by_source(self.call.edges, self.x.size(0))
            self.rows = _SortedEdges(by_source, self.x.dtype, False)
            if self.is_narrow and not self.call.aggregate_first:
                self.sums = use_huge_pages(self.x.new_empty((self.x.size(0), self.table.size(1))))
            _run_ranges(partial(self._run_sources, self.table), self.rows.work, self.x)
        if self.is_narrow:
            return self._finish_narrow()
        grad_self, grad_bias, *group_grads = _sum_workers(self.target_grads)
        grad_weight = split_relations(self.groups, group_grads, self.weight) if group_grads else self.x.new_empty(0)
        if self.source_grads:
            grad_weight = _sum_workers(self.source_grads)[0].unsqueeze(0)
        return [self.grad_x, grad_weight, grad_self, grad_bias]

    def _finish_narrow(self) -> list[Tensor]:
        """Return the gradients; those of parameters are float32, summed over blocks of rows."""
        x, grad, empty = self.x, self.before, self.x.new_empty(0)
        grad_weight, group_grads = empty, []
        if self.wants_self and self.self_weight is not None:
            grad_self = torch.zeros_like(self.self_weight, dtype=torch.float32)
        else:
            grad_self = empty
        for group in self.groups:
            rows = grad[group.targets]
            if self.wants_weight and self.call.aggregate_first:
                assert self.aggregated is not None
                sides = self.aggregated[group.rows(group.targets)]
                sides = sides.view(group.num_targets, group.num_relations * sides.size(1))
                product = multiply_transposed(rows, sides)
                group_grads.append(product[:, : x.size(1)] if self.is_beside else product)
                if self.is_beside and grad_self.numel():
                    grad_self[0] = product[:, x.size(1) :]
            if grad_self.numel() and group.own >= 0 and not (self.is_beside and self.wants_weight):
                grad_self[group.node_type] = multiply_transposed(rows, x[group.own_rows(group.targets)])
        if group_grads:
            grad_weight = split_relations(self.groups, group_grads, self.weight)
        elif self.sums is not None and self.wants_weight:
            grad_weight = multiply_transposed(self.sums, x).unsqueeze(0)
        grad_bias = _sum_workers(self.target_grads)[1] if self.wants_bias else empty
        return [self.grad_x, grad_weight, grad_self, grad_bias]

    def _run_targets(self, first: int, last: int) -> None:
        x, grad, aggregates = self.x, self.grad, self.call.aggregate_first
        self_weight = None if self.is_narrow else self.self_weight
        wants_weight = self.wants_weight and not self.is_narrow
        grad_self = torch.zeros_like(self_weight) if self.wants_self and self_weight is not None else x.new_empty(0)
        totals = torch.zeros(len(self.call.targets), grad.size(1), dtype=torch.promote_types(x.dtype, torch.float32))
        grad_bias = totals if self.wants_bias else x.new_empty(0)
        grad_weights = [torch.zeros_like(weights) for weights in self.by_group if aggregates and wants_weight]
        self.target_grads[first] = [grad_self, grad_bias, *grad_weights]
        buffer = grad.new_empty((0 if self.result is None or self.whole else _tile_rows(x), grad.size(1)))
        for number, group in enumerate(self.groups):
            for tile in _tiles_of(group, first, last, x):
                tile_grad, span = grad[tile], group.rows(tile)
                if self.result is not None and self.is_narrow:
                    given, tile_grad, total = tile_grad, self.before[tile], totals[group.node_type]
                    relu_drop_backward(given, self.result[tile], self.call.p or 0.0, tile_grad, total)
                elif self.result is not None:
                    before = self.before[tile] if self.whole else buffer[: tile.stop - tile.start]
                    torch.ops.aten.threshold_backward.grad_input(tile_grad, self.result[tile], 0, grad_input=before)
                    tile_grad = before.mul_(1.0 / (1.0 - self.call.p)) if self.call.p else before
                if aggregates and self.table is not None:
                    self._multiply(self.table, number, tile, tile_grad)
                elif self.table is not None and self.degrees is not None:
                    torch.div(tile_grad, self.degrees[span], out=self.table[span])
                if grad_weights:
                    assert self.aggregated is not None
                    sides = self.aggregated[span].view(tile.stop - tile.start, grad_weights[number].size(1))
                    grad_weights[number].addmm_(tile_grad.t(), sides)
                if grad_self.numel() and group.own >= 0:
                    grad_self[group.node_type].addmm_(tile_grad.t(), x[group.own_rows(tile)])
                if self.wants_bias and not (self.is_narrow and self.result is not None):
                    grad_bias[group.node_type].add_(tile_grad.sum(0, dtype=grad_bias.dtype))

    def _multiply(self, table: Tensor, number: int, tile: slice, tile_grad: Tensor) -> None:
        """Fill the table with products for some targets of group ``number``."""
        group, weights = self.groups[number], self.by_group[number]
        span = group.rows(tile)
        torch.mm(tile_grad, weights, out=table[span].view(tile.stop - tile.start, weights.size(1)))
        if self.degrees is not None:
            table[span].div_(self.degrees[span])
        if self.self_weight is not None and group.own >= 0:
            own_grad = table[self.num_rows + tile.start : self.num_rows + tile.stop]
            torch.mm(tile_grad, self.self_weight[group.node_type], out=own_grad)

    def _run_sources(self, table: Tensor, first: int, last: int) -> None:
        """Sum the table's rows along the edges for a worker's rows of x."""
        x, grad_x, weight, aggregates = self.x, self.grad_x, self.weight[0], self.call.aggregate_first
        buffer = x.new_empty((0 if aggregates or self.is_narrow else _tile_rows(x), table.size(1)))
        if not aggregates and self.wants_weight and not self.is_narrow:
            self.source_grads[first] = [torch.zeros_like(weight)]
        for start, stop in _tiles(first, last, x):
            sums = grad_x[start:stop] if aggregates else buffer[: stop - start]
            sums = sums if self.sums is None else self.sums[start:stop]
            self.rows.write_sums(table, start, stop, sums)
            if not aggregates and self.wants_weight and self.sums is None:
                self.source_grads[first][0].addmm_(sums.t(), x[start:stop])
            if not aggregates and self.wants_x:
                torch.mm(sums, weight, out=grad_x[start:stop])
            # Add the gradients of those rows of x that are targets' own.
            for group in self.groups if self.wants_x and self.self_weight is not None else ():
                low, high = max(start, group.own), min(stop, group.own + group.num_targets)
                if group.own < 0 or low >= high:
                    continue
                targets = slice(low + group.first_target - group.own, high + group.first_target - group.own)
                if aggregates:
                    grad_x[low:high].add_(table[self.num_rows :][targets])
                elif self.self_weight is not None:
                    grad_x[low:high].addmm_(self.before[targets], self.self_weight[group.node_type])


def multiply_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left^T right``; blocks of rows are summed in float32, in an order that does not depend on threads."""
    size = min(max(left.size(0) // 8, 1024), _BLOCK_ROWS)
    starts = range(0, left.size(0), size)
    parts = [left.new_empty(0)] * len(starts)

    def multiply(worker: int, workers: int) -> None:
        for number in range(worker, len(starts), workers):
            rows = slice(starts[number], starts[number] + size)
            parts[number] = torch.mm(left[rows].t(), right[rows])

    workers = min(torch.get_num_threads(), len(starts))
    if workers <= 1:
        multiply(0, 1)
    else:
        run_single_threaded([partial(multiply, worker, workers) for worker in range(workers)])
    total = left.new_zeros((left.size(1), right.size(1)), dtype=torch.float32)
    for part in parts:
        total.add_(part)
    return total


def _new_block() -> np.ndarray:
    """Return room for the float32 sums of one block of columns."""
    return np.empty(2 * WIDTHS[0], np.float32)


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
