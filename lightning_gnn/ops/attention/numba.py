"""Attention over the edges of a mini-batch on the CPU: a tile's sums are multiplied while they are in the cache.

Gradients of parameters are summed per section of tiles, then in order, independent of the number of threads.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.numba_rows import flatten, use_huge_pages
from lightning_gnn.ops.aggregate_update.numba import multiply_transposed, run_single_threaded
from lightning_gnn.ops.aggregate_update.reference import Group
from lightning_gnn.ops.attention import numba_kernels as kernels
from lightning_gnn.ops.attention.reference import Attend

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TILE_BYTES = 1 << 19  # a tile's sums: half of an L2 cache of 1 MB, so that the weights stay in it too
MAX_SECTIONS = 32  # maximum parallelism; every section accumulates its own gradient of the parameters
SECTION_WORK = 1 << 17  # elements read below which waking a thread takes longer than the work
_NO_SIDES = np.empty(0, np.int32)
T = TypeVar("T")
_EDGES_PER_ROW = 16  # approximate cost of a row's products, in edges, for sections of equal work


def with_self_loops(edges: list[Tensor], num_loops: int) -> list[Tensor]:
    """Replace all self-loops by one, the last edge, for each of the first ``num_loops`` targets."""
    pointers = np.empty(edges[0].numel(), np.int64)
    indices = kernels.add_self_loops(edges[0].numpy(), edges[1].numpy(), num_loops, pointers)
    return [torch.from_numpy(pointers), torch.from_numpy(indices)]


def attend(call: Attend, keep: bool, with_mass: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Return the results of ``reference.attend``, the sums (if ``keep``), and both attentions (see ``kernels``)."""
    plan = _Plan(call)
    weight, values = plan.weight, plan.values
    attention = use_huge_pages(torch.empty((call.edges[1].numel(), plan.heads), dtype=plan.wide))
    signed = use_huge_pages(torch.empty_like(attention))
    mass = torch.empty((plan.num_rows, plan.heads) if with_mass else 0, dtype=plan.wide)
    # Without a weight the sums are the result.
    whole = use_huge_pages(values.new_empty((plan.num_rows, plan.width))) if weight is None or keep else None
    num_targets = sum(call.layout.targets)
    out = whole if weight is None else values.new_empty((num_targets, plan.heads * weight.size(2)))
    assert out is not None
    factors = flatten(attention.new_empty(0) if call.factor is None else call.factor)
    results = tuple(flatten(tensor) for tensor in (mass, attention, signed))

    def run(tiles: list[_Tile], section: int) -> None:
        buffer = None if whole is not None else values.new_empty((max(tile.num_rows for tile in tiles), plan.width))
        for tile in tiles:
            sums = whole[tile.rows] if whole is not None else buffer[: tile.num_rows]  # type: ignore[index]
            outputs = plan.add_rounding(sums, *results)
            kernels.attend_rows(*plan.arguments, *plan.tile_arguments(tile), factors, *outputs)
            if weight is None:
                continue
            result = plan.by_head(out[tile.targets])
            if not tile.group.num_relations:
                result.zero_()
            for number, (product, r) in enumerate(plan.products(tile, sums)):
                if number == 0:
                    torch.bmm(product, weight[r].mT, out=result)
                else:
                    result.baddbmm_(product, weight[r].mT)

    _run(plan.sections(), run)
    return out, mass, whole if keep else None, attention, signed


def attend_backward(
    call: Attend,
    grad: Tensor,  # gradient of the result, contiguous
    grad_mass: Tensor,  # gradient of the sum of attention of each row, contiguous, or empty
    saved: tuple[Tensor | None, Tensor, Tensor],  # the last three results of attend
    wanted: list[bool],
) -> list[Tensor | None]:
    """Return the gradients of values, side, shift, weight and keys, or None if not requested."""
    wants_values, wants_side, wants_shift, wants_weight, wants_keys = wanted
    aggregated, attention, signed = saved
    plan = _Plan(call)
    weight, values, wide = plan.weight, plan.values, plan.wide
    # The gradient of the sums is stored completely if the sources need it, else tile by tile.
    whole = grad if weight is None else None
    if weight is not None and wants_values:
        whole = use_huge_pages(values.new_empty((plan.num_rows, plan.width)))
    grad_scores = use_huge_pages(torch.empty_like(attention))
    grad_shift = torch.empty(call.shift.shape, dtype=wide)
    sections = plan.sections()
    # A side per row belongs to a single section; a side per relation has a gradient in each section.
    sides = torch.zeros((1 if call.layout.across else len(sections), *call.side.shape), dtype=wide)
    # In bfloat16, gradients of the weights are products of many rows, after the pass over the targets.
    shape = weight.shape if weight is not None and wants_weight and not plan.is_narrow else (0,)
    weights = torch.zeros((len(sections), *shape), dtype=wide)
    arrays = tuple(flatten(tensor) for tensor in (grad_mass, attention, signed, grad_scores, grad_shift))

    def run(tiles: list[_Tile], section: int) -> None:
        buffer = None if whole is not None else values.new_empty((max(tile.num_rows for tile in tiles), plan.width))
        grad_side = flatten(sides[0 if call.layout.across else section])
        for tile in tiles:
            sums = whole[tile.rows] if whole is not None else buffer[: tile.num_rows]  # type: ignore[index]
            tile_grad = None if weight is None else plan.by_head(grad[tile.targets])
            if tile_grad is not None and weight is not None:
                for product, r in plan.products(tile, sums):
                    torch.bmm(tile_grad, weight[r], out=product)
            if tile_grad is not None and aggregated is not None and weights.numel():
                for product, r in plan.products(tile, aggregated[tile.rows]):
                    weights[section, r].baddbmm_(tile_grad.mT, product)
            arguments: tuple[Any, ...] = *plan.arguments, *plan.tile_arguments(tile), flatten(sums), *arrays, grad_side
            kernels.scores_backward(*arguments)

    _run(sections, run)
    grad_weight = None
    if wants_weight and aggregated is not None:
        grad_weight = plan.weight_grads(grad, aggregated) if plan.is_narrow else _sum_sections(weights)
    grad_values = grad_keys = None
    if (wants_values or wants_keys) and whole is not None:
        grad_values, grad_keys = plan.values_backward(whole, attention, grad_scores)
    return [
        grad_values if wants_values else None,
        _sum_sections(sides) if wants_side else None,
        grad_shift if wants_shift else None,
        grad_weight,
        grad_keys if wants_keys else None,
    ]


class _Tile(NamedTuple):
    """A range of targets of one node type, and their rows."""

    group: Group
    targets: slice
    rows: slice

    @property
    def num_rows(self) -> int:
        count: int = self.rows.stop - self.rows.start
        return count


class _Plan:
    """The arguments of the compiled loops, and the division of work into tiles and sections."""

    def __init__(self, call: Attend) -> None:
        values = call.values.detach()
        self.call, self.values, self.num_rows = call, values, call.layout.num_rows
        # bfloat16 is read and multiplied; everything else is float32.
        self.wide = torch.promote_types(values.dtype, torch.float32)
        self.is_narrow = values.dtype == torch.bfloat16
        self.weight = None if call.weight is None else call.weight.detach().to(values.dtype)
        _, self.heads, self.channels = call.side.shape
        self.width = self.heads * self.channels
        self.indptr, self.indices = call.edges[0].numpy(), call.edges[1].numpy()
        flat_values = flatten(values)
        side, shift = (flatten(tensor.detach().to(self.wide)) for tensor in (call.side, call.shift))
        # The step between heads is 0 if they share columns.
        self.value_arguments = (
            flat_values,
            flat_values if call.keys is None else flatten(call.keys.detach()),
            values.size(1),
            self.channels if call.weight is None else 0,
            self.heads,
            self.channels,
            side,
            shift,
            call.dynamic,
            side.dtype.type(call.slope),
        )
        self.arguments = *self.value_arguments, self.indptr, self.indices

    def tile_arguments(self, tile: _Tile) -> tuple[int, int, int, int, int]:
        """Return the first and last row of a tile, rows per softmax, first side and number of sides."""
        rows, group = tile.rows, tile.group
        if self.call.layout.across:
            return rows.start, rows.stop, max(group.num_relations, 1), rows.start, max(tile.num_rows, 1)
        return rows.start, rows.stop, 1, group.first_relation, max(group.num_relations, 1)

    def add_rounding(self, out: Tensor, *others: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the array of the sums and others; for bfloat16 that of one row in float32, and the sums' last."""
        if self.is_narrow:
            return np.empty(self.width, np.float32), *others, flatten(out)
        return flatten(out), *others

    def by_head(self, rows: Tensor) -> Tensor:
        """View rows as ``[heads, n, columns per head]``."""
        return rows.view(rows.size(0), self.heads, rows.size(1) // self.heads).transpose(0, 1)

    def products(self, tile: _Tile, sums: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield a tile's sums ``[heads, num_targets, channels]`` for each relation, and its number."""
        group = tile.group
        parts = sums.view(tile.targets.stop - tile.targets.start, group.num_relations, self.heads, self.channels)
        for r in range(group.num_relations):
            yield parts[:, r].transpose(0, 1), group.first_relation + r

    def weight_grads(self, grad: Tensor, aggregated: Tensor) -> Tensor:
        """Return the gradient of the weights in float32."""
        assert self.weight is not None
        grads = torch.zeros(self.weight.shape)
        for group in self.call.layout.groups:
            rows = self.by_head(grad[group.targets])
            whole = _Tile(group, group.targets, group.rows(group.targets))
            for sums, r in self.products(whole, aggregated[whole.rows]):
                for head in range(self.heads):
                    grads[r, head] = multiply_transposed(rows[head], sums[head])
        return grads

    def sections(self) -> list[list[_Tile]]:
        """Divide targets into tiles, and tiles into sections."""
        tiles = []
        for group in self.call.layout.groups:
            # With several relations the rows of a product are strided; larger tiles give fewer and larger products.
            size = _tile_rows(self.width * self.values.element_size() if group.num_relations == 1 else 1)
            for first in range(group.first_target, group.targets.stop, size):
                targets = slice(first, min(first + size, group.targets.stop))
                tiles.append(_Tile(group, targets, group.rows(targets)))
        # Every section adds a gradient of the weights, so it must read several times as many elements.
        least = 0 if self.call.weight is None else 4 * self.call.weight.numel()
        return _cut(tiles, [tile.rows.start for tile in tiles], self.indptr, self.values.size(1), least)

    def values_backward(self, grad: Tensor, attention: Tensor, grad_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of values and keys (the same without keys) from those of the sums and the scores."""
        numbers = torch.arange(self.indices.size, dtype=torch.int32)
        by_source = torch.ops.lightning_gnn.edges_by_source([*self.call.edges, numbers], self.values.size(0))
        indptr, indices = by_source[0].numpy(), by_source[1].numpy()
        weights, scores = (flatten(of_edge.index_select(0, by_source[2])) for of_edge in (attention, grad_scores))
        sides = self.call.layout.sides()[indices] if self.call.side.size(0) > 1 else _NO_SIDES
        out = use_huge_pages(torch.empty_like(self.values, memory_format=torch.contiguous_format))
        key_out = out if self.call.keys is None else use_huge_pages(torch.empty_like(out))
        size = _tile_rows(self.width * self.values.element_size())
        tiles = [slice(first, min(first + size, indptr.size - 1)) for first in range(0, indptr.size - 1, size)]

        def run(tiles: list[slice], section: int) -> None:
            row = np.empty(self.values.size(1), np.float32)
            outputs = (row, row, flatten(out)) if self.is_narrow else (flatten(out), flatten(key_out))
            for tile in tiles:
                kernels.values_backward(
                    *self.value_arguments, indptr, indices, sides, tile.start, tile.stop, flatten(grad), weights,
                    scores, *outputs,
                )  # fmt: skip

        _run(_cut(tiles, [tile.start for tile in tiles], indptr, self.width), run)
        return out, key_out


def _cut(tiles: list[T], first_rows: list[int], indptr: np.ndarray, num_columns: int, least: int = 0) -> list[list[T]]:
    """Divide tiles into sections of about equal work; ``least`` is the minimum of elements that a section reads."""
    starts = np.array(first_rows, np.int64)
    work = indptr[starts] + starts * _EDGES_PER_ROW
    total = int(indptr[-1]) + (indptr.size - 1) * _EDGES_PER_ROW
    count = max(1, min(MAX_SECTIONS, len(tiles), total * num_columns // max(SECTION_WORK, least)))
    bounds = np.searchsorted(work, np.arange(1, count) * total // count)
    return [tiles[a:b] for a, b in pairwise([0, *map(int, bounds), len(tiles)]) if b > a]


def _tile_rows(row_bytes: int) -> int:
    return min(max(TILE_BYTES // row_bytes, 64), 1024)


def _run(sections: list[list[T]], run: Callable[[list[T], int], None]) -> None:
    """Call ``run(tiles, number of the section)`` for each section, on up to ``torch.get_num_threads()`` threads."""
    workers = min(torch.get_num_threads(), len(sections))

    def run_range(first: int, last: int) -> None:
        for section in range(first, last):
            run(sections[section], section)

    if workers <= 1:
        run_range(0, len(sections))
        return
    bounds = [len(sections) * i // workers for i in range(workers + 1)]
    run_single_threaded([partial(run_range, first, last) for first, last in pairwise(bounds)])


def _sum_sections(grads: Tensor) -> Tensor:
    """Sum the gradients of the sections in order."""
    return grads[0] if grads.size(0) == 1 else torch.from_numpy(np.add.reduce(grads.numpy(), axis=0))
