"""Maxima and their gradient by the Ascend C kernels, of a whole graph or of a mini-batch, float32 alone.

Rounded to float16, numbers would tie that do not, and share a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.ascend_ops.tiling import MAX_PANEL, cut_panels, max_tiling, up

Launch = Callable[[str, int, list[Tensor], list[Tensor], Any], None]  # kernel, blocks, inputs, outputs and tiling


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of all vertices of the row side, each vertex once, in the order of the entries."""

    vertices: Tensor  # vertex, first entry, last entry + 1 and 0, int32 [num_rows, 4]
    columns: Tensor  # vertex of each entry's column, int32 [num_edges]
    bounds: Tensor  # first vertex of the share of each vector core of a group, then their end, int32 [G + 1]
    num_groups: int  # groups of cores, which share out the columns


def entries_of_edges(edges: list[Tensor], cores: int) -> Entries:
    """Return edges by row, in ranges of about equal work for the cores; nothing waits for the device."""
    indptr, indices = edges[0], edges[1]
    num_rows, num_edges = indptr.numel() - 1, indices.numel()
    members = max(1, min(2 * cores, num_rows))
    places = torch.arange(num_rows, device=indptr.device)
    wanted = (num_rows + num_edges) * torch.arange(members + 1, device=indptr.device) // members
    bounds = torch.searchsorted(indptr[:-1] + places, wanted).to(torch.int32)
    vertices = torch.stack([places, indptr[:-1], indptr[1:], torch.zeros_like(places)], 1)
    return Entries(vertices.to(torch.int32), indices.to(torch.int32), bounds, 1)


def maxima(launch: Launch, entries: Entries, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the maxima and how many entries attain each, float32 ``[num_rows, H, C]``; 0 and 0 of no entries."""
    table, values, strange = _filled_up(x, weight), _values(x, weight), ~x.isfinite().all()
    if weight is not None:
        strange = strange | ~weight.isfinite().all()
    shape = (entries.vertices.size(0), table.size(1))
    outputs = [table.new_empty(shape), table.new_empty(shape)]
    inputs = [table, entries.vertices, entries.columns, values]
    _run(launch, "aggregate_max", entries, x, weight, inputs, strange, outputs)
    best, ties = (_cut(out, x, weight) for out in outputs)
    return best, ties


def maxima_backward(
    launch: Launch, entries: Entries, shares: Tensor, best: Tensor, x: Tensor, weight: Tensor | None
) -> Tensor:
    """Return the gradient of ``x``, float32 ``[num_rows, H, C]``; ``shares``: of a maximum by each of its edges."""
    pairs = torch.stack([_filled_up(best, weight), _filled_up(shares, weight)], 1)
    table = _filled_up(x, weight)
    outputs = [torch.empty_like(table)]
    inputs = [pairs, table, entries.vertices, entries.columns, _values(x, weight)]
    _run(launch, "aggregate_max_backward", entries, x, weight, inputs, best.isnan().any(), outputs)
    return _cut(outputs[0], x, weight)


def _run(
    launch: Launch,
    kernel: str,
    entries: Entries,
    x: Tensor,
    weight: Tensor | None,
    inputs: list[Tensor],
    strange: Tensor,
    outputs: list[Tensor],
) -> None:
    # The plan gives each core its range of entries and its panels of columns.
    heads, columns = _heads(x, weight)
    first, panels, widest = _panels(columns, entries.num_groups, heads, x.device)
    plan = torch.cat([first, entries.bounds, panels])
    members = entries.bounds.numel() - 1
    tiling = max_tiling(
        range_offset=first.numel(),
        panel_offset=first.numel() + members + 1,
        num_groups=entries.num_groups,
        num_members=members,
        panel_columns=widest,
        stride=heads * up(columns),
        num_edges=entries.columns.numel(),
        weighted=weight is not None,
    )
    # A non-finite input is announced in the kernel's smallest transfer, 32 bytes.
    note = strange.to(torch.int32).repeat(8)
    launch(kernel, entries.num_groups * members, [*inputs, plan, note], outputs, tiling)


@cache
def _panels(columns: int, num_groups: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    first, panels, widest = cut_panels(columns, num_groups, heads, MAX_PANEL)
    return torch.from_numpy(first).to(device), torch.from_numpy(panels).to(device), widest


def _heads(x: Tensor, weight: Tensor | None) -> tuple[int, int]:
    """Return heads and columns of each: without weights nothing tells the heads apart."""
    return (1, x.size(1) * x.size(2)) if weight is None else (x.size(1), x.size(2))


def _filled_up(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return rows whose heads are filled up with zeros to a multiple of 16 columns."""
    heads, columns = _heads(x, weight)
    rows = x.detach().reshape(x.size(0), heads, columns)
    return torch.nn.functional.pad(rows, (0, up(columns) - columns)).flatten(1).contiguous()


def _cut(rows: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    heads, columns = _heads(x, weight)
    return rows.view(rows.size(0), heads, -1)[:, :, :columns].reshape(rows.size(0), *x.shape[1:])


def _values(x: Tensor, weight: Tensor | None) -> Tensor:
    return x.new_zeros(1) if weight is None else weight.detach().t().contiguous()
