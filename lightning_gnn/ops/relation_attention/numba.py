"""Attention over the edges of all relations on the CPU: compiled loops over sections of targets, and products.

Sections depend on the batch alone, and gradients of parameters are summed up section by section.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.numba_rows import flat, huge_pages
from lightning_gnn.ops.attention.numba import _EDGES_PER_ROW, MAX_SECTIONS, SECTION_WORK, _run, _total
from lightning_gnn.ops.relation_attention import numba_kernels as kernels
from lightning_gnn.ops.relation_attention.reference import Layout


def attend(
    edges: list[Tensor],
    values: Tensor,
    side: Tensor,
    shift: Tensor,
    weight: Tensor,
    factor: Tensor | None,
    layout: Layout,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what ``attend_relations`` in ``definition.py`` does, and what backward needs: sums and weights.

    The last two are the attention ``[E, heads]``, and the same before ``factor``, with signs.
    """
    values, indptr, starts = values.detach(), edges[0].numpy(), layout.softmaxes()
    _, heads, channels = side.shape
    attention = huge_pages(values.new_empty(edges[1].numel(), heads))
    signed = huge_pages(torch.empty_like(attention))
    sums = huge_pages(values.new_empty(layout.num_rows, heads * channels))
    mass = values.new_empty(layout.num_rows, heads)
    before = (flat(values), heads, channels, flat(side.detach()), layout.sides(), flat(shift.detach()))
    after = (starts, flat(values.new_empty(0) if factor is None else factor))
    results = tuple(flat(tensor) for tensor in (sums, mass, attention, signed))

    def attend_section(first: int, last: int, section: int) -> None:
        kernels.attend_rows(
            *before, values.numpy().dtype.type(slope), indptr, edges[1].numpy(), *after, first, last, *results
        )

    _run_sections(_sections(indptr[starts], channels), attend_section)
    out = values.new_zeros(sum(layout.targets), heads * weight.size(2))
    for rows, relation, h in _products(layout, heads):
        _head(out, rows.targets, heads, h).addmm_(rows.of(sums, heads, h), weight[relation, h].t())
    return out, mass, sums, attention, signed


def attend_backward(
    edges: list[Tensor],
    grad: Tensor,
    grad_mass: Tensor,
    values: Tensor,
    side: Tensor,
    weight: Tensor,
    kept: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    slope: float,
    wanted: list[bool],
) -> list[Tensor | None]:
    """Return the gradients of values, side, shift and weight, or None where not wanted.

    Args:
        grad: Of its result, contiguous.
    """
    wants_values, wants_side, wants_shift, wants_weight = wanted
    sums, attention, signed = kept
    values, side, weight = values.detach(), side.detach(), weight.detach()
    _, heads, channels = side.shape
    indptr, starts, sides = edges[0].numpy(), layout.softmaxes(), layout.sides()
    grad_sums = huge_pages(torch.empty_like(sums))
    grad_weight = torch.zeros_like(weight) if wants_weight else None
    through = wants_values or wants_side or wants_shift
    for rows, relation, h in _products(layout, heads):
        part = _head(grad, rows.targets, heads, h)
        if through:
            torch.mm(part, weight[relation, h], out=rows.of(grad_sums, heads, h))
        if grad_weight is not None:
            torch.mm(part.t(), rows.of(sums, heads, h), out=grad_weight[relation, h])
    if not through:
        return [None, None, None, grad_weight]
    grad_scores, grad_shift = huge_pages(torch.empty_like(attention)), values.new_empty(layout.num_rows, heads)
    sections = _sections(indptr[starts], channels)
    # A side per row is that of one section; one per relation has a gradient in each, to be added up.
    parts = side.new_zeros((1 if layout.across else len(sections), *side.shape))
    before = (
        flat(values),
        heads,
        channels,
        sides,
        values.numpy().dtype.type(slope),
        indptr,
        edges[1].numpy(),
        starts,
    )
    after = (
        flat(grad_sums), flat(grad_mass), flat(attention), flat(signed), flat(grad_scores), flat(grad_shift)
    )  # fmt: skip

    def score_section(first: int, last: int, section: int) -> None:
        kernels.scores_backward(*before, first, last, *after, flat(parts[0 if layout.across else section]))

    _run_sections(sections, score_section)
    grad_values = None
    if wants_values:
        numbers = torch.arange(edges[1].numel(), dtype=torch.int32)
        by_source = torch.ops.lightning_gnn.edges_by_source([*edges, numbers], values.size(0), False)
        pointers, readers = by_source[0].numpy(), by_source[1].numpy()
        entries = flat(attention.index_select(0, by_source[2])), flat(grad_scores.index_select(0, by_source[2]))
        grad_values = huge_pages(torch.empty_like(values, memory_format=torch.contiguous_format))
        given = (heads, channels, flat(side), sides[readers], pointers, readers)
        result = flat(grad_values)

        def value_section(first: int, last: int, section: int) -> None:
            kernels.values_backward(*given, first, last, flat(grad_sums), *entries, result)

        _run_sections(_sections(pointers, heads * channels), value_section)
    return [grad_values, _total(parts) if wants_side else None, grad_shift if wants_shift else None, grad_weight]


class _Rows:
    """The rows of one relation, of targets of one type.

    Args:
        targets: The targets' rows of the result.
        first: The relation's first row of edges.
        last: One past the last row of edges of the type.
        step: Rows from one target to the next.
    """

    def __init__(self, targets: slice, first: int, last: int, step: int) -> None:
        self.targets, self.first, self.last, self.step = targets, first, last, step

    def of(self, table: Tensor, heads: int, head: int) -> Tensor:
        """Return a head's columns of the rows of a table, ``[n, channels]``, as a view."""
        rows = table[self.first : self.last : self.step]
        return rows.view(rows.size(0), heads, -1)[:, head]


def _products(layout: Layout, heads: int) -> list[tuple[_Rows, int, int]]:
    """Return the products that the sums take part in: rows, relation and head."""
    found = []
    for group in layout.groups():
        last = group.first_row + group.num_targets * group.num_relations
        for j in range(group.num_relations):
            targets = slice(group.first_target, group.first_target + group.num_targets)
            rows = _Rows(targets, group.first_row + j, last, group.num_relations)
            found += [(rows, group.first_relation + j, h) for h in range(heads)]
    return found


def _head(table: Tensor, rows: slice, heads: int, head: int) -> Tensor:
    part = table[rows]
    return part.view(part.size(0), heads, -1)[:, head]


def _sections(indptr: np.ndarray, num_columns: int) -> list[tuple[int, int]]:
    """Cut rows into sections of about the same work.

    Args:
        indptr: First entry of each row.
    """
    work = indptr + np.arange(indptr.size) * _EDGES_PER_ROW
    total, num_rows = int(work[-1]), indptr.size - 1
    count = max(1, min(MAX_SECTIONS, num_rows, total * num_columns // SECTION_WORK))
    bounds = np.searchsorted(work, np.arange(1, count) * total // count)
    return [(a, b) for a, b in pairwise([0, *map(int, bounds), num_rows]) if b > a]


def _run_sections(sections: list[tuple[int, int]], run: Callable[[int, int, int], None]) -> None:
    """Call ``run(first, last, number of the section)`` for each section, on as many threads as torch has here."""

    def each(tiles: list[tuple[int, int]], section: int) -> None:
        for first, last in tiles:
            run(first, last, section)

    _run([[section] for section in sections], each)
