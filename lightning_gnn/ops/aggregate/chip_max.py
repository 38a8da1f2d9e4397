"""Max aggregation by the Ascend C kernels, in float32 only: rounding to float16 would create ties."""

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
    """The entries of all vertices on the row side; every vertex occurs once, in the order of the entries."""

    vertices: Tensor  # vertex, first entry, last entry + 1 and 0, int32 [num_rows, 4]
    columns: Tensor  # column (vertex) of each entry, int32 [num_edges]
    bounds: Tensor  # first vertex of each vector core, then the end of the last, int32 [cores + 1]


def entries_of_edges(edges: list[Tensor], cores: int) -> Entries:
    """Return edges by row, in ranges of about equal work per core, without synchronizing the device."""
    indptr, indices = edges[0], edges[1]
    num_rows, num_edges = indptr.numel() - 1, indices.numel()
    members = max(1, min(2 * cores, num_rows))
    rows = torch.arange(num_rows, device=indptr.device)
    work = (num_rows + num_edges) * torch.arange(members + 1, device=indptr.device) // members
    bounds = torch.searchsorted(indptr[:-1] + rows, work).to(torch.int32)
    vertices = torch.stack([rows, indptr[:-1], indptr[1:], torch.zeros_like(rows)], 1)
    return Entries(vertices.to(torch.int32), indices.to(torch.int32), bounds)


def maxima(launch: Launch, entries: Entries, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the maxima and the number of ties, float32 ``[num_rows, H, C]``; both are 0 for a row without entries."""
    table, values, non_finite = _pad_heads(x, weight), _transpose_weight(x, weight), ~x.isfinite().all()
    if weight is not None:
        non_finite = non_finite | ~weight.isfinite().all()
    shape = (entries.vertices.size(0), table.size(1))
    outputs = [table.new_empty(shape), table.new_empty(shape)]
    inputs = [table, entries.vertices, entries.columns, values]
    _launch_kernel(launch, "aggregate_max", entries, x, weight, inputs, non_finite, outputs)
    best, ties = (_remove_padding(out, x, weight) for out in outputs)
    return best, ties


def maxima_backward(
    launch: Launch, entries: Entries, shares: Tensor, best: Tensor, x: Tensor, weight: Tensor | None
) -> Tensor:
    """Return the gradient of ``x``, float32 ``[num_rows, H, C]``; ``shares`` is the gradient of a maximum per tie."""
    pairs = torch.stack([_pad_heads(best, weight), _pad_heads(shares, weight)], 1)
    table = _pad_heads(x, weight)
    outputs = [torch.empty_like(table)]
    inputs = [pairs, table, entries.vertices, entries.columns, _transpose_weight(x, weight)]
    _launch_kernel(launch, "aggregate_max_backward", entries, x, weight, inputs, best.isnan().any(), outputs)
    return _remove_padding(outputs[0], x, weight)


def _launch_kernel(
    launch: Launch,
    kernel: str,
    entries: Entries,
    x: Tensor,
    weight: Tensor | None,
    inputs: list[Tensor],
    non_finite: Tensor,
    outputs: list[Tensor],
) -> None:
    # The plan assigns each core a range of entries, and all panels of columns.
    heads, columns = _head_shape(x, weight)
    first, panels, widest = _panels(columns, heads, x.device)
    plan = torch.cat([first, entries.bounds, panels])
    members = entries.bounds.numel() - 1
    tiling = max_tiling(
        range_offset=first.numel(),
        panel_offset=first.numel() + members + 1,
        num_groups=1,
        num_members=members,
        panel_columns=widest,
        stride=heads * up(columns),
        num_edges=entries.columns.numel(),
        weighted=weight is not None,
    )
    # The flag for non-finite inputs is repeated to fill the kernel's smallest transfer, 32 bytes.
    flag = non_finite.to(torch.int32).repeat(8)
    launch(kernel, members, [*inputs, plan, flag], outputs, tiling)


@cache
def _panels(columns: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    first, panels, widest = cut_panels(columns, 1, heads, MAX_PANEL)
    return torch.from_numpy(first).to(device), torch.from_numpy(panels).to(device), widest


def _head_shape(x: Tensor, weight: Tensor | None) -> tuple[int, int]:
    """Return the number of heads and of columns per head; without weights all columns form a single head."""
    return (1, x.size(1) * x.size(2)) if weight is None else (x.size(1), x.size(2))


def _pad_heads(x: Tensor, weight: Tensor | None) -> Tensor:
    """Pad the heads of each row with zeros to a multiple of 16 columns."""
    heads, columns = _head_shape(x, weight)
    rows = x.detach().reshape(x.size(0), heads, columns)
    return torch.nn.functional.pad(rows, (0, up(columns) - columns)).flatten(1).contiguous()


def _remove_padding(rows: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    heads, columns = _head_shape(x, weight)
    return rows.view(rows.size(0), heads, -1)[:, :, :columns].reshape(rows.size(0), *x.shape[1:])


def _transpose_weight(x: Tensor, weight: Tensor | None) -> Tensor:
    return x.new_zeros(1) if weight is None else weight.detach().t().contiguous()
