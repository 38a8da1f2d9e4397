"""Aggregation by relation and products on the CPU, tile by tile while rows are in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.numba_rows import huge_pages, loadable, wide
from lightning_gnn.ops.aggregate_update.numba import (
    _EDGES_PER_ROW,
    _activate,
    _deactivate,
    _new,
    _product,
    _share_out,
    _SortedEdges,
    _tile_rows,
    _tiles,
)
from lightning_gnn.ops.aggregate_update.products import Products
from lightning_gnn.ops.library import library
from lightning_gnn.ops.relation_update.reference import Group, groups


@torch.library.impl(library, "relation_update", "CPU")
def relation_update(
    edges: list[Tensor],
    x: Tensor,
    weight: Tensor,
    self_weight: Tensor | None,
    bias: Tensor | None,
    targets: list[int],
    relations: list[int],
    own: list[int],
    mean: bool,
    keep: bool,
    p: float | None = None,
    key: int = 0,
) -> tuple[Tensor, Tensor]:
    """Do what the function of this name in ``reference.py`` does."""
    dtype, multiply = x.dtype, Products(x.dtype)
    x, weight = loadable(x), wide(weight)
    by_self = None if self_weight is None else wide(self_weight)
    plus = None if bias is None else wide(bias)
    rows, kinds = _SortedEdges(edges, weight.dtype, mean), list(groups(targets, relations, own))
    by_relation = [group.of(weight) for group in kinds]
    out = huge_pages(weight.new_empty((sum(targets), weight.size(2))))
    kept = huge_pages(weight.new_empty((rows.count, x.size(1)))) if keep else weight.new_empty(0)

    def share(first: int, last: int) -> None:
        buffer = weight.new_empty((0 if keep else _most_rows(kinds, x), x.size(1)))
        for group, weights in zip(kinds, by_relation, strict=True):
            shift = None if plus is None else plus[group.kind]
            for start, stop in _part(group, first, last, x):
                span = group.rows(start, stop)
                tile = kept[span] if keep else buffer[: span.stop - span.start]
                rows.sums(x, span.start, span.stop, tile)
                _product(multiply, tile.view(stop - start, weights.size(0)), weights.t(), shift, out[start:stop])
                if by_self is not None and group.own >= 0:
                    multiply.add(x[group.own_rows(start, stop)], by_self[group.kind], out[start:stop])
                _activate(out[start:stop], start, p, key)

    _share_out(share, _work(rows, kinds), x)
    return out.to(dtype), kept


@torch.library.impl(library, "relation_update_backward", "CPU")
def relation_update_backward(
    edges: list[Tensor],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    self_weight: Tensor | None,
    aggregated: Tensor | None,
    targets: list[int],
    relations: list[int],
    own: list[int],
    mean: bool,
    wanted: list[bool],
    activated: Tensor | None = None,
    p: float = 0.0,
) -> list[Tensor]:
    """Do what the function of this name in ``reference.py`` does."""
    dtype, multiply = x.dtype, Products(x.dtype)
    wants_x, wants_weight, wants_self, wants_bias = wanted
    grad, x, weight = wide(grad), loadable(x), wide(weight)
    by_self = None if self_weight is None else wide(self_weight)
    activated = None if activated is None else wide(activated)
    kinds = list(groups(targets, relations, own))
    by_relation = [group.of(weight) for group in kinds]
    num_rows = edges[0].numel() - 1
    degrees = edges[0].diff().clamp_(min=1).to(weight.dtype).unsqueeze(1) if mean else None
    # What goes back along the edges, and the gradient before ReLU and dropout where it is read again after.
    table = huge_pages(_new(multiply, x, weight).new_empty((num_rows if wants_x else 0, x.size(1))))
    again = wants_x and by_self is not None
    whole = torch.empty_like(grad) if activated is not None and again else None
    parts: dict[int, list[Tensor]] = {}

    def send(first: int, last: int) -> None:
        of_weight, of_self, of_bias = parts[first] = [
            weight.new_zeros(weight.shape if wants_weight else 0),
            weight.new_zeros(by_self.shape if wants_self and by_self is not None else 0),
            weight.new_zeros((len(targets), weight.size(2)) if wants_bias else 0),
        ]
        buffer = None if activated is None or whole is not None else grad.new_empty((_tile_rows(x), grad.size(1)))
        for group, weights in zip(kinds, by_relation, strict=True):
            part = group.of(of_weight) if wants_weight else None  # a view: relations of a type lie side by side
            for start, stop in _part(group, first, last, x):
                tile, span = grad[start:stop], group.rows(start, stop)
                if activated is not None:
                    before = whole[start:stop] if whole is not None else buffer[: stop - start]  # type: ignore[index]
                    tile = _deactivate(tile, activated[start:stop], p, before)
                if wants_x:
                    multiply.write(tile, weights.t(), table[span].view(stop - start, weights.size(0)))
                    if degrees is not None:
                        table[span].div_(degrees[span])
                if part is not None and aggregated is not None:
                    multiply.add(aggregated[span].view(stop - start, weights.size(0)).t(), tile, part)
                if wants_self and group.own >= 0:
                    multiply.add(x[group.own_rows(start, stop)].t(), tile, of_self[group.kind])
                if wants_bias:
                    of_bias[group.kind].add_(tile.sum(0))

    _share_out(send, _rows_of_work(kinds), x)
    grad_x = huge_pages(weight.new_empty((x.size(0) if wants_x else 0, x.size(1))))
    if wants_x:
        grad = grad if whole is None else whole
        by_source = torch.ops.lightning_gnn.edges_by_source(edges, x.size(0), False)
        rows = _SortedEdges(by_source, weight.dtype, False)

        def receive(first: int, last: int) -> None:
            for start, stop in _tiles(first, last, x):
                rows.sums(table, start, stop, grad_x[start:stop])
                if by_self is None:
                    continue
                for group in kinds:
                    low, high = max(start, group.own), min(stop, group.own + group.num_targets)
                    if group.own >= 0 and low < high:
                        move = group.first_target - group.own
                        multiply.add(grad[low + move : high + move], by_self[group.kind].t(), grad_x[low:high])

        _share_out(receive, rows.work, x)
    added = [_sum(found) for found in zip(*(part for _, part in sorted(parts.items())), strict=True)]
    return [gradient.to(dtype) for gradient in (grad_x, *added)]


def _sum(found: tuple[Tensor, ...]) -> Tensor:
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def _part(group: Group, first: int, last: int, x: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the tiles of a group's targets among ``[first, last)``."""
    size = _tile_rows(x) // max(group.num_relations, 1) or 1
    end = min(last, group.first_target + group.num_targets)
    for start in range(max(first, group.first_target), end, size):
        yield start, min(start + size, end)


def _most_rows(kinds: list[Group], x: Tensor) -> int:
    """Return how many rows of edges a tile has at most."""
    return max([_tile_rows(x), *(group.num_relations for group in kinds)])


def _work(rows: _SortedEdges, kinds: list[Group]) -> np.ndarray:
    """Return the work before each target, in edges, int64 ``[num_targets + 1]``."""
    ends = [group.first_row + np.arange(group.num_targets) * group.num_relations for group in kinds]
    work: np.ndarray = rows.work[np.concatenate([*ends, [rows.count]])] + _rows_of_work(kinds)
    return work


def _rows_of_work(kinds: list[Group]) -> np.ndarray:
    return np.arange(sum(group.num_targets for group in kinds) + 1) * _EDGES_PER_ROW
