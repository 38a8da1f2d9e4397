"""Gathering rows with torch's own operators: the definition, for caches on the CPU, and where there is no kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_torch(
    table: Tensor, index: Tensor, out: Tensor, scales: Tensor | None, slot: Tensor | None, cache: Tensor | None
) -> None:
    """Gather with torch's own operators, for devices without a kernel; the arguments are checked already.

    Args:
        table: ``[num_rows, ...]``, anywhere.
        index: int64 or int32 ``[n]``.
        out: ``[n, ...]``, on the device of the index.
        scales: float32 ``[num_rows]``, anywhere, or None.
        slot: int32 ``[num_rows]``, anywhere, or None.
        cache: ``[cache_rows, ...]`` of the table's dtype, anywhere; given if ``slot`` is.
    """

    def taken(source: Tensor, which: Tensor) -> Tensor:
        return source.index_select(0, which.to(source.device)).to(out.device)

    if slot is None or cache is None:
        values = taken(table, index)
    else:
        place = taken(slot, index)
        hit = place >= 0
        values = torch.empty(out.shape, dtype=table.dtype, device=out.device)
        values[hit] = taken(cache, place[hit])
        values[~hit] = taken(table, index[~hit])
    if scales is not None:
        values = values.to(torch.float32) * taken(scales, index).view(-1, *[1] * (out.dim() - 1))
    out.copy_(values)
