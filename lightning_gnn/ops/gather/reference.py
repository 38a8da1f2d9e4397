"""Gathering rows with torch's own operators: the definition, also used for CPU caches and devices without a kernel."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn.ops.library import library


class Gather(NamedTuple):
    """Inputs of the operator, in the order of its schema."""

    table: Tensor  # [num_rows, ...], on any device
    indices: Tensor  # int64 or int32 [n]
    out: Tensor  # [n, ...], on the device of the index
    scales: Tensor | None = None  # float32 [num_rows], on any device, or None
    slot: Tensor | None = None  # int32 [num_rows], on any device, or None
    cache: Tensor | None = None  # [cache_rows, ...] in the table's dtype, on any device; required with slot


def register(device: str, function: Callable[[Gather, bool], None]) -> None:
    """Register a device's function, which takes the inputs and whether to check the values of the index."""
    library.impl("gather_rows", lambda *given: function(Gather(*given[:-1]), given[-1]), device)  # type: ignore[no-untyped-call]


def gather_torch(call: Gather) -> None:
    """Gather with torch's own operators, for devices without a kernel; arguments must be checked already."""
    table, index, out, scales, slot, cache = call

    def take(source: Tensor, rows: Tensor) -> Tensor:
        return source.index_select(0, rows.to(source.device)).to(out.device)

    if slot is None or cache is None:
        values = take(table, index)
    else:
        cache_rows = take(slot, index)
        hit = cache_rows >= 0
        values = torch.empty(out.shape, dtype=table.dtype, device=out.device)
        values[hit] = take(cache, cache_rows[hit])
        values[~hit] = take(table, index[~hit])
    if scales is not None:
        values = values.to(torch.float32) * take(scales, index).view(-1, *[1] * (out.dim() - 1))
    out.copy_(values)
