"""Attention over a mini-batch's edges on the CPU: tiles of targets, whose sums are multiplied while in the cache.

Tiles lie in sections, which depend on the batch alone. Gradients of parameters are summed up per section, and then
section by section, so that results are the same for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.numba_rows import flat, huge_pages
from lightning_gnn.ops.aggregate_update.numba import _alone, _nothing
from lightning_gnn.ops.attention import numba_kernels as kernels
from lightning_gnn.ops.worker_threads import run_all

TILE_BYTES = 1 << 19
"""A tile's sums, half of a level-2 cache of 1 MB: what they are multiplied with stays there too."""
MAX_SECTIONS = 32
"""So many threads can take part; each more has a gradient of its own of the parameters, which have to be added up."""
SECTION_WORK = 1 << 17
"""Numbers read below which a thread would take longer to wake up than to finish."""
_EDGES_PER_ROW = 16
"""How many edges take as long as the products of a row, about: for sections of equal work."""


def with_self_loops(edges: list[Tensor], num_loops: int) -> list[Tensor]:
    """Return edges without self-loops but one, the last, of each of the first ``num_loops`` targets."""
    pointers = np.empty(edges[0].numel(), np.int64)
    indices = kernels.add_self_loops(edges[0].numpy(), edges[1].numpy(), num_loops, pointers)
    return [torch.from_numpy(pointers), torch.from_numpy(indices)]


def attend(
    edges: list[Tensor],
    values: Tensor,
    side: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factor: Tensor | None,
    slope: float,
    dynamic: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return what the function of this name in ``definition.py`` does, and what backward needs.

    Args:
        side: ``[heads, channels]``.
        weight: Or None.
        factor: Or None.

    Returns:
        The result, the sums if ``keep``, the attention ``[E, heads]``, and the same before ``factor``, with signs.
    """
    layout = _Layout(edges, values, side, target, weight, slope, dynamic)
    attention = huge_pages(values.new_empty((edges[1].numel(), layout.heads)))
    signed = huge_pages(torch.empty_like(attention))
    width = layout.heads * layout.channels
    # Without a product the sums are the result.
    whole = huge_pages(values.new_empty((layout.num_targets, width))) if weight is None or keep else None
    out = values.new_empty((layout.num_targets, weight.size(0))) if weight is not None else whole
    assert out is not None
    factors = flat(values.new_empty(0) if factor is None else factor)

    def run(tiles: list[tuple[int, int]], section: int) -> None:
        buffer = values.new_empty((layout.tile_rows, width)) if whole is None else None
        for first, last in tiles:
            tile = whole[first:last] if whole is not None else buffer[: last - first]  # type: ignore[index]
            kernels.attend_rows(
                *layout.arguments, layout.indptr, layout.indices, factors, first, last, flat(tile), flat(attention),
                flat(signed),
            )  # fmt: skip
            if weight is not None:
                layout.multiply(tile, layout.by_head, out[first:last])

    _run(layout.sections(layout.indptr, values.size(1)), run)
    return out, whole if keep else None, attention, signed


def attend_backward(
    edges: list[Tensor],
    grad: Tensor,
    values: Tensor,
    side: Tensor,
    target: Tensor,
    weight: Tensor | None,
    kept: tuple[Tensor | None, Tensor, Tensor],
    slope: float,
    dynamic: bool,
    wanted: list[bool],
) -> list[Tensor | None]:
    """Return the gradients of values, side, target and weight, or None where not wanted.

    Args:
        grad: Of its result, contiguous.
        side: ``[heads, channels]``.
        weight: Or None.
    """
    wants_values, wants_side, wants_target, wants_weight = wanted
    aggregated, attention, signed = kept
    layout = _Layout(edges, values, side, target, weight, slope, dynamic)
    width = layout.heads * layout.channels
    # The gradient of the sums: of all of them where it goes on to the sources, else tile by tile.
    whole = grad if weight is None else None
    if weight is not None and wants_values:
        whole = huge_pages(values.new_empty((layout.num_targets, width)))
    grad_scores = huge_pages(torch.empty_like(attention))
    grad_target = values.new_empty(target.shape)
    sections = layout.sections(layout.indptr, values.size(1))
    sides = values.new_zeros((len(sections), *side.shape))
    weights = values.new_zeros((len(sections), *(weight.shape if weight is not None and wants_weight else (0,))))

    def run(tiles: list[tuple[int, int]], section: int) -> None:
        buffer = values.new_empty((layout.tile_rows, width)) if whole is None else None
        for first, last in tiles:
            tile = whole[first:last] if whole is not None else buffer[: last - first]  # type: ignore[index]
            if weight is not None:
                layout.multiply(grad[first:last], layout.by_head.transpose(1, 2), tile)
            if aggregated is not None and wants_weight:
                layout.add_products(grad[first:last], aggregated[first:last], weights[section])
            kernels.scores_backward(
                *layout.arguments, layout.indptr, layout.indices, first, last, flat(tile), flat(attention),
                flat(signed), flat(grad_scores), flat(grad_target), flat(sides[section]),
            )  # fmt: skip

    _run(sections, run)
    grads = [
        layout.values_backward(edges, whole, attention, grad_scores) if wants_values and whole is not None else None,
        _total(sides) if wants_side else None,
        grad_target if wants_target else None,
        _total(weights) if wants_weight else None,
    ]
    return grads


class _Layout:
    """The arguments as the compiled loops take them.

    Args:
        values: ``[num_sources, num_columns]``.
        side: ``[heads, channels]``.
        weight: Or None.
        slope: Of the leaky ReLU.
        dynamic: Whether it comes before the product.
    """

    def __init__(
        self,
        edges: list[Tensor],
        values: Tensor,
        side: Tensor,
        target: Tensor,
        weight: Tensor | None,
        slope: float,
        dynamic: bool,
    ) -> None:
        values = values.detach()
        self.heads, self.channels = side.shape
        self.indptr, self.indices = edges[0].numpy(), edges[1].numpy()
        self.num_targets, self.num_sources = self.indptr.size - 1, values.size(0)
        self.values = values
        self.by_head = values.new_empty(0) if weight is None else weight.detach().reshape(self.heads, -1, self.channels)
        self.tile_rows = _tile_rows(self.heads * self.channels * values.element_size())
        of_values = flat(values)
        # Where the heads share their columns they lie no step apart.
        self.arguments = (
            of_values,
            values.size(1),
            self.channels if weight is None else 0,
            self.heads,
            self.channels,
            flat(side.detach()),
            flat(target.detach()),
            dynamic,
            of_values.dtype.type(slope),
        )

    def sections(self, indptr: np.ndarray, num_columns: int) -> list[list[tuple[int, int]]]:
        """Cut rows into tiles, and tiles into sections of about the same work.

        Args:
            indptr: First entry of each row.
        """
        num_rows = indptr.size - 1
        starts = np.arange(0, num_rows, self.tile_rows)
        work = indptr[starts] + starts * _EDGES_PER_ROW
        total = int(indptr[-1]) + num_rows * _EDGES_PER_ROW
        count = max(1, min(MAX_SECTIONS, starts.size, total * num_columns // SECTION_WORK))
        bounds = np.searchsorted(work, np.arange(1, count) * total // count)
        tiles = [(int(first), min(int(first) + self.tile_rows, num_rows)) for first in starts]
        return [tiles[a:b] for a, b in pairwise([0, *map(int, bounds), len(tiles)]) if b > a]

    def multiply(self, rows: Tensor, by: Tensor, out: Tensor) -> None:
        """Multiply each head's part of the rows with its matrix, transposed.

        Args:
            rows: ``[n, heads * a]``.
            by: ``[heads, b, a]``.
            out: ``[n, heads * b]``.
        """
        given, result = (tensor.view(tensor.size(0), self.heads, -1) for tensor in (rows, out))
        for h in range(self.heads):
            torch.mm(given[:, h], by[h].t(), out=result[:, h])

    def add_products(self, grad: Tensor, rows: Tensor, out: Tensor) -> None:
        """Add each head's ``grad^T rows`` to the gradient of the weight."""
        left, right = (tensor.view(tensor.size(0), self.heads, -1) for tensor in (grad, rows))
        parts = out.view(self.heads, -1, out.size(1))
        for h in range(self.heads):
            parts[h].addmm_(left[:, h].t(), right[:, h])

    def values_backward(self, edges: list[Tensor], grad: Tensor, attention: Tensor, grad_scores: Tensor) -> Tensor:
        """Return the gradient of the values from that of the sums and of the scores."""
        numbers = torch.arange(edges[1].numel(), dtype=torch.int32)
        by_source = torch.ops.lightning_gnn.edges_by_source([*edges, numbers], self.num_sources, False)
        indptr, indices = by_source[0].numpy(), by_source[1].numpy()
        weights, scores = (flat(of_edges.index_select(0, by_source[2])) for of_edges in (attention, grad_scores))
        out = huge_pages(torch.empty_like(self.values, memory_format=torch.contiguous_format))

        def run(tiles: list[tuple[int, int]], section: int) -> None:
            for first, last in tiles:
                kernels.values_backward(
                    *self.arguments, indptr, indices, first, last, flat(grad), weights, scores, flat(out)
                )

        _run(self.sections(indptr, grad.size(1)), run)
        return out


def _tile_rows(row_bytes: int) -> int:
    return min(max(TILE_BYTES // row_bytes, 64), 1024)


def _run(sections: list[list[tuple[int, int]]], run: Callable[[list[tuple[int, int]], int], None]) -> None:
    """Call ``run(tiles, number of the section)`` for each section, on as many threads as torch has here."""
    workers = min(torch.get_num_threads(), len(sections))

    def share(first: int, last: int) -> None:
        for section in range(first, last):
            run(sections[section], section)

    if workers <= 1:
        share(0, len(sections))
        return
    bounds = [len(sections) * i // workers for i in range(workers + 1)]
    # The caller only waits: its own products would take all of torch's threads, those of a worker take one.
    run_all([_nothing, *(partial(_alone, share, first, last) for first, last in pairwise(bounds))])


def _total(parts: Tensor) -> Tensor:
    """Add up the sections' parts in their order."""
    return parts[0] if parts.size(0) == 1 else torch.from_numpy(np.add.reduce(parts.numpy(), axis=0))
